"""AdamW in a low-rank space: one basis, moments of the projected gradient, a residual outside it.

GaLore's projection with Fira's treatment of what the basis misses (the HMT paper's mode A). The
residual is estimated from random probe columns (``probe``), exact (``full``, Fira) or dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hmt_deepspeed.optim.rules.formulas import full_residual, growth_factor, probe_residual
from hmt_deepspeed.optim.rules.matrix import MatrixRule
from hmt_deepspeed.optim.rules.moments import Moments, Recalled
from hmt_deepspeed.optim.rules.projected import Columns, ProjectedMatrix
from hmt_deepspeed.optim.rules.state import stored_bytes
from hmt_deepspeed.optim.settings.matrix import LR_RATIO, PUBLISHED_SCALE

__all__ = ["LowRankMatrix", "adopt_together", "overlap_of", "site_projection"]

MAX_RESIDUAL_SCALE = 8.0


class LowRankMatrix(ProjectedMatrix):
    """``A = G Q``; ``W <- (1 - lr wd) W - lr scale (U Q^T + residual)``."""

    NUM_SUMS = 1

    def _start(self) -> None:
        super()._start()
        self._direction: Tensor | None = None  # kept until the residual of its update is limited
        self.moments = self._new_moments()

    def _new_moments(self) -> Moments:
        shape = (self.num_rows, self.rank)
        return Moments(shape, self.state_dtype, self.device, self.name, self.settings.seed)

    # -- states ---------------------------------------------------------------------------------

    def state_bytes(self) -> int:
        parked, basis = self.columns.parked, self.columns.basis
        if self.columns.owner != self.name or basis is None:
            return self.moments.nbytes
        held = basis if parked is None else parked[:, : self.rank]
        return self.moments.nbytes + held.nbytes

    def moment_bytes_at(self, rank: int) -> int:
        """Bytes of the moments of all rows at a rank, evidence not counted."""
        return 2 * stored_bytes(self.shape[0] * rank, self.state_dtype)

    # -- from one basis to the next --------------------------------------------------------------

    @property
    def recalls_moments(self) -> bool:
        """Whether the moments of a basis that was left can be carried into a later one."""
        return not self.redraws

    def overlap_sum(self, basis: Tensor | None, counted: slice) -> Tensor | None:
        """What is to be summed over all rows before :meth:`adopt`; None when nothing is."""
        return None

    def adopt(self, basis: Tensor | None, overlap_sum: Tensor | None = None) -> None:
        """Replace the basis by ``basis`` (n x r'), None for full rank, and carry the moments over."""
        adopt_together([self], basis, [overlap_sum])

    def share(self, leader: LowRankMatrix) -> None:
        """Take over the leader's basis, now and from now on."""
        if self.columns.owner != leader.name:
            self.adopt(leader.basis)  # else a checkpoint gave it a copy of the leader's
        self.measured, self.columns = leader.measured, leader.columns
        self.candidates = leader.candidates

    def unshare(self) -> None:
        """Have the basis as its own, which no other matrix replaces."""
        if self.columns.owner != self.name:
            basis, self.columns = self.basis, Columns(self.name)
            self.candidates = self.settings.ranks(*self.shape)
            self._install(basis)

    def _transfer_moments(
        self, basis: Tensor | None, overlap_sum: Tensor | None, recalled: Sequence[Recalled]
    ) -> None:
        self.moments.rotate(self._overlap(basis), recalled=recalled)

    def _overlap(self, basis: Tensor | None) -> Tensor:
        """``Q_old^T Q_new``; the basis of a full-rank matrix, which is not left for another such, is the
        identity."""
        old = self.basis
        if old is None:
            assert basis is not None
            return basis.float()
        return overlap_of(old, basis)

    # -- step -----------------------------------------------------------------------------------

    def advance(
        self, gradient: Tensor, factor: Tensor | float, *, betas: tuple[float, float], eps: float
    ) -> tuple[Tensor, Tensor]:
        """``[U | c phi S]`` for ``[A | S]``; ``U Q^T + phi (G - A Q^T)`` for whole rows."""
        gradient = gradient.float().mul_(factor)
        if self.takes_whole:
            return self._advance_whole(gradient, betas, eps)
        part, probes = gradient[:, : self.rank], gradient[:, self.rank :]
        direction = self.moments.advance(part, betas=betas, eps=eps)
        if self.settings.residual == "probe" and self.num_probes and self._knows_residual:
            residual = probe_residual(direction, part, probes, self.residual_scale)
        else:
            residual = torch.zeros_like(probes)
        update = torch.cat((direction, residual), dim=1)
        return update, residual.square().sum(dim=1, keepdim=True)

    def _advance_whole(
        self, gradient: Tensor, betas: tuple[float, float], eps: float
    ) -> tuple[Tensor, Tensor]:
        basis = None if self.full_rank else self.basis
        if basis is None:
            direction = self.moments.advance(gradient, betas=betas, eps=eps)
            return direction, gradient.new_zeros(gradient.shape[0], 1)
        basis = basis.float()
        part = gradient @ basis
        direction = self.moments.advance(part, betas=betas, eps=eps)
        residual = full_residual(direction, part, gradient, basis)
        if not self._knows_residual:
            residual.zero_()
        squares = residual.square().sum(dim=1, keepdim=True)
        self._direction = direction
        return residual, squares

    @property
    def _knows_residual(self) -> bool:
        """Whether what is outside the basis is a residual. Before the first refresh most of the gradient
        is outside: a basis that nobody measured would leave it to plain SGD, and the limiter would
        start from there."""
        return self.measured or self.redraws

    @property
    def residual_scale(self) -> float:
        """c of the probe residual: the unbiased (n-r)/k, at most MAX_RESIDUAL_SCALE, for its noise grows with it."""
        return min((self.shape[1] - self.rank) / self.num_probes, MAX_RESIDUAL_SCALE)

    @property
    def limits(self) -> bool:
        """Whether the growth of the residual's norm is limited."""
        kind = self.settings.residual
        return (kind == "full" and not self.full_rank) or (kind == "probe" and self.num_probes > 0)

    def finish(self, update: Tensor, sums: Tensor) -> Tensor:
        """Limit the residual's growth, given its squared norm over all rows, and apply ``scale``."""
        self._limit(update if self.takes_whole else update[:, self.rank :], sums)
        if self._direction is not None:
            assert self.basis is not None
            update.addmm_(self._direction, self.basis.float().t())
            self._direction = None
        return update.mul_(self.scale)

    def _limit(self, residual: Tensor, sums: Tensor) -> None:
        if self.limits:
            norm = sums[0].sqrt()
            factor = growth_factor(norm, self.limited_norm)
            residual *= factor
            self.limited_norm.copy_(norm * factor)

    @property
    def scale(self) -> float:
        """Factor on the update; without one given GaLore's, and AdamW's own step where all columns are spanned."""
        if self.settings.scale is not None:
            return self.settings.scale
        return 1 / LR_RATIO if self.is_full_at(self.rank) else PUBLISHED_SCALE


def overlap_of(old: Tensor, new: Tensor | None) -> Tensor:
    """``Q_old^T Q_new`` in fp32; None is the identity, the basis of a full-rank matrix."""
    return old.float().t() if new is None else old.float().t() @ new.float()


def adopt_together(
    members: Sequence[LowRankMatrix],
    basis: Tensor | None,
    overlap_sums: Sequence[Tensor | None],
    recalled: Sequence[Sequence[Recalled]] | None = None,
) -> None:
    """:meth:`LowRankMatrix.adopt` of matrices that share a basis: all leave the old one at once.

    ``recalled``: what each of them remembers of bases before, see :meth:`Moments.rotate`.
    """
    known = [()] * len(members) if recalled is None else recalled
    for matrix, overlap_sum, older in zip(members, overlap_sums, known, strict=True):
        stays_full = matrix.full_rank and basis is None
        if matrix.steps and not stays_full:
            matrix._transfer_moments(basis, overlap_sum, older)
    members[0]._install(basis)  # the columns are everyone's
    for matrix in members:
        matrix._resize(basis)
        if not matrix.steps:
            matrix.moments = matrix._new_moments()
        matrix.measured = True
        matrix.forget_energy()


def site_projection(matrix: MatrixRule) -> Tensor | Callable[[], Tensor] | None:
    """What the site of a matrix projects on: its columns (this process's rows of them while they are parked), or
    how to make them; None where it takes whole gradients."""
    if not isinstance(matrix, LowRankMatrix) or matrix.takes_whole:
        return None
    if matrix.redraws:
        return matrix.make_projection
    columns = matrix.columns
    return columns.whole if columns.parked is None else columns.parked
