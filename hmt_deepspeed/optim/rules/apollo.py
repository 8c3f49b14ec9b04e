"""APOLLO (2412.05270): Adam's moments of a random projection give the scale of whole gradient rows.

    R = G P,  P_ij ~ N(0, 1/r) from a seed      auxiliary space, nothing of P stored
    R~ = Adam(R)
    s_j = ||R~_j|| / ||R_j||  per row (channel), or one for the tensor (Mini, where r = 1)
    W <- (1 - lr wd) W - lr sqrt(scale) s o G   with the norm-growth limiter

The smaller side is projected: a weight with more columns than rows arrives as its transpose.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from hmt_deepspeed.kernels.growth_limit import limit_growth_
from hmt_deepspeed.kernels.low_rank_factors import ScaledRows
from hmt_deepspeed.kernels.low_rank_projection import project_together
from hmt_deepspeed.kernels.noise import Stream, normals
from hmt_deepspeed.kernels.row_squares import row_squares
from hmt_deepspeed.optim.rules.adam import count_, direct_, rounding_keys
from hmt_deepspeed.optim.rules.change import Change
from hmt_deepspeed.optim.rules.matrix import MatrixRule
from hmt_deepspeed.optim.rules.moments import Moments
from hmt_deepspeed.optim.rules.side_by_side import joined
from hmt_deepspeed.optim.rules.stack import Gradients, Stack

__all__ = ["ApolloMatrix", "ApolloMiniMatrix", "ApolloStack"]

_EPS = 1e-8  # beside ||R_j||, as published


class ApolloStack(Stack):
    """Steps of matrices alike under :class:`ApolloMatrix`."""

    first: ApolloMatrix
    _rows: ScaledRows | None = None  # of the gradients, kept until the scale is known

    @property
    def reads_whole_rows(self) -> bool:
        return True

    def _each(self, most: int) -> int:
        """Draws and images are all that is alive, where other rules have three tensors like an update at once."""
        size = (self.largest_rows + self.first.count * self.shape[1]) * self.rank
        return max(1, 3 * most // max(1, size))

    def pieces(self, most: int) -> list[tuple[int, int]]:
        """All: a change is of rows of gradients, and has no columns."""
        return [(0, len(self.members))]

    def held_width(self, in_place: bool) -> int:
        """Gradients stay where they are, and of the auxiliary space nothing is left."""
        return 0

    def projections(self) -> list[Tensor]:
        """Of the auxiliary space in a step, fp32: entries N(0, 1/rank)."""
        scale = self.rank**-0.5
        return self.by_member(normals(self.shared("space"), self.shape[1], self.rank, scale=scale))

    def measure(
        self, parts: Sequence[Stack], gradients: Sequence[Gradients], counted: slice
    ) -> Tensor:
        """``||G||^2``."""
        rows = [one[..., counted, :] for gradient in gradients for one in gradient]
        squares, _ = row_squares(rows, self.shape[1])
        return squares.sum(dim=1, keepdim=True)

    def square_norms(self, sums: Tensor) -> Tensor:
        return sums[:, 0]

    def observe(
        self, sums: Tensor, scale: Tensor | float = 1.0, taken: Tensor | None = None
    ) -> None:
        """Nothing is smoothed."""

    def once(self, step: Tensor) -> dict[str, Tensor]:
        """Evidence; keys of rounding and of the auxiliary space for the parts."""
        taken = count_(self)
        keys = self.keys(self.draws(), Stream.AUXILIARY_SPACE)
        return {**rounding_keys(self, step), "taken": taken, "space": keys}

    def advance_part(self, gradient: Gradients, counted: slice) -> tuple[Tensor, Tensor]:
        """An update without columns, and of each row ``||R~_j||, ||R_j||`` without the factor and ``||G_j||^2``."""
        assert isinstance(gradient, list)
        directions, squares = project_together(gradient, self.projections())
        seen = directions.norm(dim=2)
        direct_(self, directions, self.factor)
        terms = torch.stack((directions.norm(dim=2), seen, squares), dim=2)
        return directions.new_empty((*terms.shape[:2], 0)), terms

    def advance(
        self,
        parts: Sequence[Stack],
        gradients: Sequence[Gradients],
        counted: slice = slice(None),
    ) -> tuple[list[Tensor], Tensor]:
        """Sums over rows: ``||R~_j||^2, ||R_j||^2, ||s_j G_j||^2``."""
        updates, terms = super().advance(parts, gradients, counted)
        each = self.factor.abs().unsqueeze(1)
        moved, seen, squares = terms.unbind(dim=2)
        seen = torch.where(each != 0, seen * each, 0.0)
        squares = torch.where(each != 0, squares * each.square(), 0.0)
        ratio = torch.ones_like(seen) if self.first.per_tensor else moved / (seen + _EPS)
        rows = [one for gradient in gradients for one in gradient]
        self._rows = ScaledRows(rows, ratio).times(self.factor)
        sums = torch.stack((moved.square(), seen.square(), squares * ratio.square()), dim=2)
        return updates, sums[:, counted].sum(dim=1)

    def finish(
        self, parts: Sequence[Stack], updates: Sequence[Tensor], sums: Tensor
    ) -> list[Change]:
        """The scale of a tensor, the norm-growth limiter on the whole update, and ``sqrt(scale)``."""
        moved, seen, square = sums.unbind(dim=1)
        scale = self.shared("taken") * self.first.scale**0.5
        if self.first.per_tensor:
            ratio = moved.sqrt() / (seen.sqrt() + _EPS)
            scale, square = scale * ratio, square * ratio.square()
        # As published, the norm is that of the step before Adam's bias correction.
        uncorrected = square * self["first_evidence"].square() / self["evidence"][:, 0]
        known = uncorrected, self["limited_norm"], scale
        _, scales = limit_growth_(*known, limited=(True, True))
        rows, self._rows = self._rows, None
        assert rows is not None
        return [Change(joined(updates), scales, rows.times(scales[:, 0]))]


class ApolloMatrix(MatrixRule):
    """States of one matrix under APOLLO.

    Attributes:
        draw: number of the projection in force; a new one is drawn every ``update_interval`` steps.
    """

    STACK = ApolloStack
    per_tensor: ClassVar[bool] = False  # whether the scale is one of the tensor

    moments: Moments

    def _start(self) -> None:
        settings = self.settings
        self.candidates = settings.ranks(*self.shape)
        (self.rank,) = self.candidates
        self.draw = 0
        moments = (self.num_rows, self.rank)
        names, seed = self.held_names, settings.seed
        self.moments = Moments(
            moments, self.state_dtype, self.device, names, seed, several=self.several
        )

    @property
    def takes_whole(self) -> bool:
        return True

    @property
    def projection(self) -> None:
        return None

    @property
    def redraws(self) -> bool:
        return True

    def state_bytes(self) -> int:
        return self.moments.nbytes

    def prepare(self, step: Tensor | int, refreshed: bool = False) -> None:
        """Nothing is drawn per step."""

    @property
    def scale(self) -> float:
        """As published, unless one is given."""
        return self.settings.rule.scale if self.settings.scale is None else self.settings.scale

    # -- checkpoint -----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "draw": self.draw}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.draw = int(state["draw"])


class ApolloMiniMatrix(ApolloMatrix):
    """States and step of one matrix under APOLLO-Mini: rank 1, one scale."""

    per_tensor = True
