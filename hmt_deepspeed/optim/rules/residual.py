"""The residual: what becomes of the part of a gradient that is outside its basis.

A rule gives each row ``A_j`` of a projected gradient a direction ``U_j``. Fira's residual moves what the basis misses at
the same rate (2410.01623, section 4.1). It is estimated from random probe columns (``probe``), exact (``full``) or
dropped::

    R_j  = c phi_j S_j,  phi_j = ||U_j|| / ||A_j||        c = (n - r)/k makes E[R P^T] = phi (G - A Q^T)
    W   <- (1 - lr wd) W - lr scale (U Q^T + R P^T)       the growth of ||R|| limited
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hmt_deepspeed.kernels.growth_limit import limit_growth_
from hmt_deepspeed.kernels.launching import upload
from hmt_deepspeed.kernels.low_rank_factors import ScaledRows
from hmt_deepspeed.optim.rules.change import Change
from hmt_deepspeed.optim.rules.matrix import MatrixRule
from hmt_deepspeed.optim.rules.projected import ProjectedMatrix
from hmt_deepspeed.optim.rules.projected_stack import ProjectedStack
from hmt_deepspeed.optim.rules.stack import Stack

__all__ = ["ResidualMatrix", "ResidualStack"]

MAX_RESIDUAL_SCALE = 8.0


class ResidualStack(ProjectedStack):
    """The part of a step that rules with a residual share: they give ``[U | R]``, or ``U`` for whole rows."""

    first: ResidualMatrix

    def __init__(self, members: Sequence[MatrixRule]) -> None:
        super().__init__(members)
        # rows of gradients times the residual's factor, and A: kept until the full residual is limited
        self._kept: tuple[ScaledRows, Tensor] | None = None
        self._known: tuple[tuple[float, ...], Tensor] | None = None

    @property
    def reads_whole_rows(self) -> bool:
        return self.takes_whole and not self.first.full_rank

    def residual_scale(self) -> Tensor:
        """c of each matrix, (B,) fp32 on the device; 0 where it takes no residual. Of experts with bases of their own by the
        columns that these have."""
        scales = tuple(m.residual_scale for m in self.members if isinstance(m, ResidualMatrix))
        if self._known is None or self._known[0] != scales:
            self._known = scales, upload(self.of_each(scales), torch.float32, self.device)
        directions, probes = self.directions(), self.first.num_probes
        if isinstance(directions, int) or not probes or self.settings.residual != "probe":
            return self._known[1]
        own = ((self.shape[1] - directions) / probes).clamp(max=MAX_RESIDUAL_SCALE)
        return torch.where(self._known[1] > 0, own, 0.0)

    @property
    def limits_residual(self) -> bool:
        """Whether the growth of the residual's norm is limited."""
        kind = self.settings.residual
        return (kind == "full" and not self.first.full_rank) or (
            kind == "probe" and self.first.num_probes > 0
        )

    @property
    def sums_states(self) -> bool:
        return self.limits_residual

    def finish(
        self, parts: Sequence[Stack], updates: Sequence[Tensor], sums: Tensor
    ) -> list[Change]:
        """Limit the residual's growth, given its squared norm over all rows, and apply ``scale``."""
        limit, scale = self._limited(sums)
        sizes = [part.size for part in parts]
        of_parts = zip(updates, scale.split(sizes), limit.split(sizes), strict=True)
        return [
            part.changed(*found)
            for part, found in zip(parts, of_parts, strict=True)
            if isinstance(part, ResidualStack)
        ]

    @property
    def limits_second(self) -> bool:
        """Whether the limit is a factor on a change's second columns, the residual; else :meth:`changed` applies it."""
        return not self.takes_whole

    def changed(self, update: Tensor, scale: Tensor, limit: Tensor) -> Change:
        """The change of a part."""
        if self._kept is not None:
            (rows, images), self._kept = self._kept, None
            update.addcmul_(images, limit.view(-1, 1, 1), value=-1)
            return Change(update, scale, rows.times(limit * scale[:, 0]))
        if not self.takes_whole:
            return Change(update, scale)
        rows = ScaledRows([update], torch.ones_like(update[..., 0]))
        return Change(update[..., :0], scale, rows.times(scale[:, 0]))

    def _limited(self, sums: Tensor) -> tuple[Tensor, Tensor]:
        """Factor on each matrix's residual that keeps its norm from growing too fast, (B,), and the scales of a change."""
        return self.limited(sums[:, 0], self.shared("scale"))

    def limited(self, squares: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        """The same by the squared norm of each residual, (B,), and the scale of each update, (B,)."""
        if self.limits_residual:
            known = squares.contiguous(), self["limited_norm"], scale
            return limit_growth_(*known, limited=(False, self.limits_second))
        return torch.ones_like(scale), torch.stack((scale, scale), dim=1)


class ResidualMatrix(ProjectedMatrix):
    """A matrix whose steps have a residual."""

    @property
    def residual_scale(self) -> float:
        """c of the residual, 1 of the full one: the unbiased (n-r)/k, at most MAX_RESIDUAL_SCALE, for its noise grows
        with it. 0 where there is none: before the first refresh most of the gradient is outside, and a basis that
        nobody measured would leave it to plain SGD, and the limiter would start from there."""
        kind = self.settings.residual
        if kind == "none" or not (self.measured or self.redraws):
            return 0.0
        if kind == "full":
            return 1.0
        if not self.num_probes:
            return 0.0
        return min((self.shape[1] - self.rank) / self.num_probes, MAX_RESIDUAL_SCALE)

    @property
    def scale(self) -> float:
        """Factor on the update; without one given the rule's, of r of n columns at most n / r times that of all."""
        if self.settings.scale is not None:
            return self.settings.scale
        rule = self.settings.rule
        return min(rule.scale, rule.full_scale * self.shape[1] / self.rank)
