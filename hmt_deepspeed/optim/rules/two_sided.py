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
from hmt_deepspeed.optim.rules.adam import direct_
from hmt_deepspeed.optim.rules.change import Change
from hmt_deepspeed.optim.rules.formulas import TINY, square_norms
from hmt_deepspeed.optim.rules.low_rank import LowRankMatrix, LowRankStack
from hmt_deepspeed.optim.rules.moments import Moments, Recalled
from hmt_deepspeed.optim.rules.side_by_side import joined
from hmt_deepspeed.optim.rules.stack import Gradients, Stack

__all__ = ["TwoSidedMatrix", "TwoSidedStack"]


class TwoSidedStack(LowRankStack):
    """Steps of matrices alike under :class:`TwoSidedMatrix`."""

    def left_bases(self) -> Tensor:
        """B x rows x r, fp32."""
        if self.first.redraws:
            whole = self.drawn_bases(self.shape[0], Stream.LEFT_BASIS)
            return whole[:, slice(*self.first.rows)].float()
        return self["left_basis"].float()

    def measure(
        self, parts: Sequence[Stack], gradients: Sequence[Gradients], counted: slice
    ) -> Tensor:
        """Squared norms of ``A`` and ``S``, then the core ``P^T A``."""
        cores = []
        for part, gradient in zip(parts, gradients, strict=True):
            assert isinstance(part, TwoSidedStack)
            assert isinstance(gradient, Tensor)
            image = gradient[:, counted, : self.rank].float()
            cores.append(part.left_bases()[:, counted].transpose(1, 2) @ image)
        norms = super().measure(parts, gradients, counted)
        return torch.cat((norms, joined(cores).flatten(1)), dim=1)

    def observe(
        self, sums: Tensor, scale: Tensor | float = 1.0, taken: Tensor | None = None
    ) -> None:
        by_name = self.named(sums, "gradient")
        self._core = by_name["core"].unflatten(1, (self.rank, self.rank))
        inside = square_norms(self._core)
        self._seen_norm = torch.maximum(inside, by_name["outside"][:, 0]).sqrt()
        self.follow(inside, self.square_norms(sums), scale, taken)

    def once(self, step: Tensor) -> dict[str, Tensor]:
        """The core's moments and direction; factors on the residual for the parts."""
        self._begun.shared |= super().once(step)  # which the core's step reads
        factor = self.factor
        each = factor.view(-1, 1, 1)
        core = torch.where(each != 0, self._core * each, 0.0)
        directions = core.clone()  # one long row: evidence is of entries
        row = directions.view(len(core), 1, -1)
        direct_(self, row, self.shared("taken"))
        shared = {"core": core, "directions": directions}
        if self.limits_residual:
            seen = torch.where(factor != 0, self._seen_norm * factor, 1.0).clamp_min(TINY)
            phi = square_norms(directions).sqrt() / seen
            known = self.residual_scale()
            shared |= {"inside": phi * (known != 0), "outside": phi * known}
        del self._core, self._seen_norm
        return shared

    def advance_part(self, gradient: Gradients, counted: slice) -> tuple[Tensor, Tensor]:
        """The residual ``phi [A - P P^T A | c S]``; :meth:`finish` adds ``[P U | 0]``.

        ``phi = ||U|| / ||P^T A||`` of the whole core; ``||S||`` takes the core's place where it is
        larger, as the rows' does in :mod:`hmt_deepspeed.optim.rules.low_rank`.
        """
        assert isinstance(gradient, Tensor)
        gradient, each, rank = gradient.float(), self.factor.view(-1, 1, 1), self.rank
        gradient.mul_(each).masked_fill_(each == 0, 0.0)
        if not self.limits_residual:
            return gradient.zero_(), gradient.new_zeros(gradient[:, counted].shape[:2])
        gradient[..., :rank].baddbmm_(self.left_bases(), self.shared("core"), alpha=-1)
        gradient[..., :rank].mul_(self.shared("inside").view(-1, 1, 1))
        gradient[..., rank:].mul_(self.shared("outside").view(-1, 1, 1))
        return gradient, torch.linalg.vector_norm(gradient[:, counted], dim=2).square_()

    @property
    def limits_residual(self) -> bool:
        return self.settings.residual == "probe"

    @property
    def limits_second(self) -> bool:
        return False  # the residual is in both

    def changed(self, update: Tensor, scale: Tensor, limit: Tensor) -> Change:
        update *= limit.view(-1, 1, 1)
        update[..., : self.rank].baddbmm_(self.left_bases(), self.shared("directions"))
        return Change(update, scale)


class TwoSidedMatrix(LowRankMatrix):
    """States and step of a matrix with bases on both sides; a basis travels as ``[Q; P]``, (n + m) x r.

    Attributes:
        left_basis: the rows held here of ``P`` (m x r), in the basis dtype; made anew by a rule that redraws.
    """

    STACK = TwoSidedStack
    SHARES = False  # the left basis is a matrix's own

    _held_left_basis: Tensor | None

    def _new_states(self) -> Moments:
        shape = (self.rank, self.rank)
        return Moments(shape, self.state_dtype, self.device, self.names, self.settings.seed, True)

    def paths(self) -> dict[str, str]:
        held = {} if self.redraws else {"left_basis": "_held_left_basis"}
        return {**super().paths(), **held}

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
        keys = self._keys([self.name], number, Stream.LEFT_BASIS)
        return random_basis(self.shape[0], rank, keys)[0]

    @property
    def basis_rows(self) -> tuple[int, ...]:
        return (sum(self.shape),)

    def basis_of(self, found: Subspace, rank: int, gradient: Tensor) -> Tensor:
        """``[Q; P]`` with ``P`` an orthonormal basis of ``G Q``, turned at random within its span.

        Left at the singular vectors, the core of this very gradient would be diagonal, and Adam's first
        step would blow the rounding noise off the diagonal up to full size.
        """
        right = found.basis[:, :rank]
        turn = random_basis(rank, rank, self._keys([self.name], self.steps, Stream.TURN))[0]
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
