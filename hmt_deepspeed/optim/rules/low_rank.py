"""AdamW in a low-rank space: one basis, moments of the projected gradient, a residual outside it.

GaLore's projection with Fira's treatment of what the basis misses (the HMT paper's mode A). The
residual is estimated from random probe columns (``probe``), exact (``full``, Fira) or dropped::

    U_j  = Adam(A_j)                                      each row j of A = G Q
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
from hmt_deepspeed.kernels.low_rank_projection import project_together
from hmt_deepspeed.optim.rules.adam import count_, direct_, rounding_keys
from hmt_deepspeed.optim.rules.change import Change
from hmt_deepspeed.optim.rules.formulas import clipped_images, full_residual
from hmt_deepspeed.optim.rules.moments import Moments, Recalled
from hmt_deepspeed.optim.rules.projected import ProjectedMatrix
from hmt_deepspeed.optim.rules.projected_stack import ProjectedStack
from hmt_deepspeed.optim.rules.stack import Gradients, Stack

__all__ = ["LowRankMatrix", "LowRankStack"]

MAX_RESIDUAL_SCALE = 8.0


class LowRankStack(ProjectedStack):
    """Steps of matrices alike under :class:`LowRankMatrix`."""

    first: LowRankMatrix

    def __init__(self, members: Sequence[LowRankMatrix]) -> None:
        super().__init__(members)
        # rows of gradients times the residual's factor, and A: kept until the full residual is limited
        self._kept: tuple[ScaledRows, Tensor] | None = None
        self._known: tuple[tuple[float, ...], Tensor] | None = None

    def advance_part(self, gradient: Gradients, counted: slice) -> tuple[Tensor, Tensor]:
        """``[U | R]`` for ``[A | S]``, ``U`` for whole rows; and squared norms of rows of the residual, which
        :meth:`advance` sums."""
        if isinstance(gradient, list):
            return self._advance_whole(gradient, counted)
        gradient = gradient.float().contiguous()
        squares = self.direct(gradient, self.factor)
        return gradient, squares[:, counted]

    def once(self, step: Tensor) -> dict[str, Tensor]:
        """Evidence; keys of rounding, the residual's c and the rule's scale of steps that are taken for the parts."""
        taken = count_(self)
        found = {"residual_scale": self.residual_scale(), "taken": taken}
        found["scale"] = taken if self.first.scale == 1 else taken * self.first.scale
        return {**rounding_keys(self, step), **found}

    def advance(
        self,
        parts: Sequence[Stack],
        gradients: Sequence[Gradients],
        counted: slice = slice(None),
    ) -> tuple[list[Tensor], Tensor]:
        updates, squares = super().advance(parts, gradients, counted)
        return updates, squares.sum(dim=1, keepdim=True)

    def direct(self, gradient: Tensor, factor: Tensor) -> Tensor:
        """``[U | R]`` in the place of ``[A | S]``, of a part.

        Args:
            gradient: B x rows x width fp32; overwritten. factor: (B,) fp32, what it is multiplied by.

        Returns:
            Squared norm of each row's residual, B x rows fp32.
        """
        return direct_(self, gradient, factor, self.shared("residual_scale"))

    def _advance_whole(self, gradient: list[Tensor], counted: slice) -> tuple[Tensor, Tensor]:
        projections, factor = self.projections(), self.factor
        images, squares = project_together(gradient, projections)
        images, squares = clipped_images(images, squares, factor)
        directions = images.clone()
        self.direct(directions, self.shared("taken"))
        ratio, squares = full_residual(directions, images, squares, self.grams(projections))
        known = self.shared("residual_scale").unsqueeze(1)
        images *= (ratio * known).unsqueeze(2)
        self._kept = ScaledRows(gradient, ratio * known).times(factor), images
        return directions, (squares * known.square())[:, counted]

    @property
    def reads_whole_rows(self) -> bool:
        return self.takes_whole and not self.first.full_rank

    def residual_scale(self) -> Tensor:
        """c of each matrix, (B,) fp32 on the device; 0 where it takes no residual. Of experts with bases of their own by the
        columns that these have."""
        scales = tuple(m.residual_scale for m in self.members if isinstance(m, LowRankMatrix))
        if self._known is None or self._known[0] != scales:
            self._known = scales, upload(self.of_each(scales), torch.float32, self.device)
        directions, probes = self.directions(), self.first.num_probes
        if isinstance(directions, int) or not probes or self.settings.residual != "probe":
            return self._known[1]
        own = ((self.shape[1] - directions) / probes).clamp(max=MAX_RESIDUAL_SCALE)
        return torch.where(self._known[1] > 0, own, 0.0)

    @property
    def limits(self) -> bool:
        """Whether the growth of the residual's norm is limited."""
        kind = self.settings.residual
        return (kind == "full" and not self.first.full_rank) or (
            kind == "probe" and self.first.num_probes > 0
        )

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
            if isinstance(part, LowRankStack)
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
        scale = self.shared("scale")
        if self.limits:
            known = sums[:, 0].contiguous(), self["limited_norm"], scale
            return limit_growth_(*known, limited=(False, self.limits_second))
        return torch.ones_like(scale), torch.stack((scale, scale), dim=1)


class LowRankMatrix(ProjectedMatrix):
    """States of one matrix: ``W <- (1 - lr wd) W - lr scale (U Q^T + residual)``."""

    STACK = LowRankStack
    moments: Moments

    def _new_states(self) -> Moments:
        shape = (self.num_rows, self.rank)
        names, seed = self.held_names, self.settings.seed
        return Moments(shape, self.state_dtype, self.device, names, seed, several=self.several)

    def _transfer_moments(
        self, basis: Tensor | None, overlap_sum: Tensor | None, recalled: Sequence[Recalled]
    ) -> None:
        self.moments.rotate(self._overlap(basis), recalled=recalled)

    def column_energies(self, counted: slice) -> Tensor:
        return self.moments.column_energies(counted)

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
        """Factor on the update; without one given the rule's, and AdamW's own step where all columns are spanned."""
        if self.settings.scale is not None:
            return self.settings.scale
        return 1.0 if self.is_full_at(self.rank) else self.settings.rule.scale
