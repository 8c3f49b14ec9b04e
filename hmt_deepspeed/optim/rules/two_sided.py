"""The HMT paper's r x r core: ``A^ = P^T G Q``, moments in R^{r x r}, ``Delta W = P U Q^T``.

Backward and reduction are the one-sided ones: ``[A | S] = G [Q | Omega]`` of the rows held here
arrives, and the core is a sum over rows, ``P^T A``. A holder of rows keeps only its rows of ``P``.
The part of ``A`` outside the core is known exactly, so the residual is ``A - P P^T A`` inside the span of Q
and the probes ``S`` outside it, both without states.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hmt_deepspeed.kernels.noise import Stream
from hmt_deepspeed.optim.bases.basis import orthonormal, random_basis
from hmt_deepspeed.optim.bases.range_finder import Subspace
from hmt_deepspeed.optim.rules.formulas import TINY
from hmt_deepspeed.optim.rules.low_rank import LowRankMatrix
from hmt_deepspeed.optim.rules.moments import Moments, Recalled

__all__ = ["TwoSidedMatrix"]


class TwoSidedMatrix(LowRankMatrix):
    """States and step of a matrix with bases on both sides; a basis travels as ``[Q; P]``, (n + m) x r.

    Attributes:
        left_basis: the rows held here of ``P`` (m x r), in the basis dtype; made anew by a rule that redraws.
    """

    SHARES = False  # the left basis is a matrix's own

    _held_left_basis: Tensor | None

    def _new_states(self) -> Moments:
        shape = (self.rank, self.rank)
        return Moments(shape, self.state_dtype, self.device, self.name, self.settings.seed, True)

    def state_bytes(self) -> int:
        held = self._held_left_basis
        return super().state_bytes() + (0 if held is None else held.nbytes)

    def move_states(self, place: Callable[[Tensor], Tensor]) -> None:
        """As of every rule; the left basis goes with them, for only a step reads it."""
        super().move_states(place)
        if self._held_left_basis is not None:
            self._held_left_basis = place(self._held_left_basis)

    # -- basis ----------------------------------------------------------------------------------

    @property
    def left_basis(self) -> Tensor:
        if self._held_left_basis is not None:
            return self._held_left_basis
        return self._own_rows(self._seeded_left(self.rank, self.draw))

    def _own_rows(self, left: Tensor) -> Tensor:
        return left[self.rows[0] : self.rows[1]].to(self.dtype, copy=True)

    def seeded_basis(self, rank: int, number: int) -> Tensor:
        return torch.cat((self._seeded_right(rank, number), self._seeded_left(rank, number)))

    def _seeded_left(self, rank: int, number: int) -> Tensor:
        keys = self._keys(self.name, number, Stream.LEFT_BASIS)
        return random_basis(self.shape[0], rank, keys)[0]

    @property
    def basis_rows(self) -> int:
        return sum(self.shape)

    def basis_of(self, found: Subspace, rank: int, gradient: Tensor) -> Tensor:
        """``[Q; P]`` with ``P`` an orthonormal basis of ``G Q``, turned at random within its span.

        Left at the singular vectors, the core of this very gradient would be diagonal, and Adam's first
        step would blow the rounding noise off the diagonal up to full size.
        """
        right = found.basis[:, :rank]
        turn = random_basis(rank, rank, self._keys(self.name, self.steps, Stream.TURN))[0]
        left = orthonormal(gradient.float() @ right) @ turn
        return torch.cat((right, left)).to(self.dtype)

    def overlap_sum(self, basis: Tensor | None, counted: slice) -> Tensor | None:
        assert basis is not None
        if not self.steps:
            return None
        new = basis[self.shape[1] :][self.rows[0] : self.rows[1]]
        return self.left_basis[counted].float().t() @ new[counted].float()

    def _transfer_moments(
        self, basis: Tensor | None, overlap_sum: Tensor | None, recalled: Sequence[Recalled]
    ) -> None:
        assert basis is not None
        assert not recalled
        self.moments.rotate(self._overlap(basis[: self.shape[1]]), overlap_sum)

    def _install(self, basis: Tensor | None) -> None:
        assert basis is not None  # full rank is a one-sided matrix
        n = self.shape[1]
        super()._install(basis[:n])
        self._held_left_basis = None if self.redraws else self._own_rows(basis[n:])

    # -- step -----------------------------------------------------------------------------------

    def measure(self, gradient: Tensor, counted: slice) -> Tensor:
        """Squared norms of ``A`` and ``S``, then the core ``P^T A``."""
        image = gradient[counted, : self.rank].float()
        core = self.left_basis[counted].float().t() @ image
        return torch.cat((super().measure(gradient, counted), core.flatten()))

    def observe(self, sums: Tensor, scale: Tensor | float = 1.0) -> Tensor:
        by_name = self.named(sums, early=True)
        self._core = by_name["core"].view(self.rank, self.rank)
        core_square = self._core.square().sum()
        total = self.square_norm(sums)
        self._seen = torch.maximum(core_square, by_name["outside"].squeeze()).sqrt()
        self.follow(core_square, total, scale)
        return total

    def advance(
        self,
        gradient: Tensor,
        factor: Tensor | float,
        *,
        betas: tuple[float, float],
        eps: float,
        counted: slice = slice(None),
    ) -> tuple[Tensor, Tensor]:
        """``[P U | 0]`` plus the residual ``phi [A - P P^T A | c S]``, joined by :meth:`finish`.

        ``phi = ||U|| / ||P^T A||`` of the whole core; ``||S||`` takes the core's place where it is
        larger, as in :func:`hmt_deepspeed.optim.rules.formulas.probe_residual`.
        """
        gradient = gradient.float().mul_(factor)
        core, left = self._core * factor, self.left_basis.float()
        direction = self.moments.advance(core, betas=betas, eps=eps)
        self._direction = direction
        if self.settings.residual == "none" or not self._knows_residual:
            return torch.zeros_like(gradient), gradient.new_zeros(1)
        phi = direction.norm() / (self._seen * factor).clamp_min(TINY)
        gradient[:, : self.rank] -= left @ core
        if self.num_probes:
            gradient[:, self.rank :] *= self.residual_scale
        residual = gradient.mul_(phi)
        return residual, self._square(residual, counted)

    @property
    def limits(self) -> bool:
        return self.settings.residual == "probe"

    def finish(self, update: Tensor, sums: Tensor) -> Tensor:
        self._limit(update, sums)
        assert self._direction is not None
        update[:, : self.rank] += self.left_basis.float() @ self._direction
        self._direction = None
        del self._core, self._seen
        return update.mul_(self.scale)

    # -- checkpoint -----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        return state if self.redraws else {**state, "left_basis": self.left_basis}

    def _basis_in(self, state: Mapping[str, Any]) -> Tensor:
        """``[Q; P]`` of a checkpoint, whose ``left_basis`` holds the rows of this object."""
        right = torch.as_tensor(state["basis"])
        left = right.new_zeros(self.shape[0], right.shape[1])
        left[self.rows[0] : self.rows[1]] = torch.as_tensor(state["left_basis"])
        return torch.cat((right, left))
