"""AdamW in a low-rank space: one basis, moments of the projected gradient, a residual outside it.

GaLore's projection with Fira's treatment of what the basis misses (the HMT paper's mode A). The
residual is estimated from random probe columns (``probe``), exact (``full``, Fira) or dropped.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hmt_deepspeed.optim.rules.formulas import full_residual, growth_factor, probe_residual
from hmt_deepspeed.optim.rules.moments import Moments, Recalled
from hmt_deepspeed.optim.rules.projected import ProjectedMatrix

__all__ = ["LowRankMatrix"]

MAX_RESIDUAL_SCALE = 8.0


class LowRankMatrix(ProjectedMatrix):
    """``A = G Q``; ``W <- (1 - lr wd) W - lr scale (U Q^T + residual)``."""

    moments: Moments

    def _start(self) -> None:
        super()._start()
        self._direction: Tensor | None = None  # kept until the residual of its update is limited

    def _new_states(self) -> Moments:
        shape = (self.num_rows, self.rank)
        return Moments(shape, self.state_dtype, self.device, self.name, self.settings.seed)

    def _transfer_moments(
        self, basis: Tensor | None, overlap_sum: Tensor | None, recalled: Sequence[Recalled]
    ) -> None:
        self.moments.rotate(self._overlap(basis), recalled=recalled)

    def column_energies(self, counted: slice) -> Tensor:
        return self.moments.column_energies(counted)

    # -- step -----------------------------------------------------------------------------------

    def advance(
        self,
        gradient: Tensor,
        factor: Tensor | float,
        *,
        betas: tuple[float, float],
        eps: float,
        counted: slice = slice(None),
    ) -> tuple[Tensor, Tensor]:
        """``[U | c phi S]`` for ``[A | S]``; ``U Q^T + phi (G - A Q^T)`` for whole rows."""
        gradient = gradient.float().mul_(factor)
        if self.takes_whole:
            return self._advance_whole(gradient, betas, eps, counted)
        part, probes = gradient[:, : self.rank], gradient[:, self.rank :]
        direction = self.moments.advance(part, betas=betas, eps=eps)
        if self.settings.residual == "probe" and self.num_probes and self._knows_residual:
            residual = probe_residual(direction, part, probes, self.residual_scale)
        else:
            residual = torch.zeros_like(probes)
        update = torch.cat((direction, residual), dim=1)
        return update, self._square(residual, counted)

    def _square(self, residual: Tensor, counted: slice) -> Tensor:
        """Squared norm of the counted rows, (1,)."""
        return residual.square().sum(dim=1, keepdim=True)[counted].sum(dim=0)

    def _advance_whole(
        self, gradient: Tensor, betas: tuple[float, float], eps: float, counted: slice
    ) -> tuple[Tensor, Tensor]:
        basis = None if self.full_rank else self.basis
        if basis is None:
            direction = self.moments.advance(gradient, betas=betas, eps=eps)
            return direction, gradient.new_zeros(1)
        basis = basis.float()
        part = gradient @ basis
        direction = self.moments.advance(part, betas=betas, eps=eps)
        residual = full_residual(direction, part, gradient, basis)
        if not self._knows_residual:
            residual.zero_()
        self._direction = direction
        return residual, self._square(residual, counted)

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
        """Factor on the update; without one given the rule's, and AdamW's own step where all columns are spanned."""
        if self.settings.scale is not None:
            return self.settings.scale
        rule = self.settings.rule
        return 1 / rule.lr_ratio if self.is_full_at(self.rank) else rule.scale
