"""AdamW in a low-rank space: one basis, moments of the projected gradient, a residual outside it.

GaLore's projection with Fira's treatment of what the basis misses (the HMT paper's mode A)::

    U_j  = Adam(A_j)                                      each row j of A = G Q
    W   <- (1 - lr wd) W - lr scale (U Q^T + R P^T)       R of :mod:`hmt_deepspeed.optim.rules.residual`
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from hmt_deepspeed.kernels.low_rank_factors import ScaledRows
from hmt_deepspeed.kernels.low_rank_projection import project_together
from hmt_deepspeed.optim.rules.adam import count_, direct_, rounding_keys
from hmt_deepspeed.optim.rules.formulas import clipped_images, full_residual
from hmt_deepspeed.optim.rules.moments import Moments, Recalled
from hmt_deepspeed.optim.rules.residual import ResidualMatrix, ResidualStack
from hmt_deepspeed.optim.rules.stack import Gradients, Stack

__all__ = ["LowRankMatrix", "LowRankStack"]


class LowRankStack(ResidualStack):
    """Steps of matrices alike under :class:`LowRankMatrix`."""

    first: LowRankMatrix

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


class LowRankMatrix(ResidualMatrix):
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
