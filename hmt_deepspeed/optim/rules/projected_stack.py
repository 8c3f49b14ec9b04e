"""The part of a step that all rules of projected gradients share, see :mod:`hmt_deepspeed.optim.rules.projected`."""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_

import torch
from torch import Tensor

from hmt_deepspeed.kernels.launching import device_table
from hmt_deepspeed.kernels.low_rank_projection import project_together
from hmt_deepspeed.kernels.noise import Stream, step_keys
from hmt_deepspeed.kernels.row_squares import row_squares
from hmt_deepspeed.optim.bases.basis import random_bases
from hmt_deepspeed.optim.rules.formulas import estimated_square_norm, square_norms
from hmt_deepspeed.optim.rules.matrix import MatrixRule
from hmt_deepspeed.optim.rules.projected import ProjectedMatrix, with_probes
from hmt_deepspeed.optim.rules.side_by_side import joined, stacked
from hmt_deepspeed.optim.rules.stack import Gradients, Stack

__all__ = ["ProjectedStack"]


class ProjectedStack(Stack):
    """The part of a step that all rules of projected gradients share: ``[A | S]`` arrives, or ``G``."""

    first: ProjectedMatrix

    def __init__(self, members: Sequence[MatrixRule]) -> None:
        super().__init__(members)
        self._directions: tuple[list[Tensor], Tensor] = [], torch.empty(0)

    @property
    def takes_whole(self) -> bool:
        return self.first.takes_whole

    @property
    def shares(self) -> bool:
        """Whether a member's experts have one basis."""
        return self.first.count > 1 and not self.first.own_bases

    def drawn_bases(self, n: int, stream: Stream) -> Tensor:
        """Of members that redraw, B x n x r in the basis dtype, or one of each whose experts share it: each its own
        number."""
        return random_bases(n, self.rank, self._basis_keys(self.draws(), stream), self.first.dtype)

    def draws(self) -> Tensor:
        if not self.shares:
            return super().draws()
        return device_table(tuple(member.draw for member in self.members), self.device)

    def _basis_keys(self, step: Tensor | int, stream: Stream) -> Tensor:
        """Keys of bases and probes: of members, or of each of their experts."""
        return step_keys(self.member_keys if self.shares else self.base_keys, step, stream)

    def projections(self) -> list[Tensor]:
        first = self.first
        if first.redraws:
            bases = self.drawn_bases(self.shape[1], Stream.BASIS)
            if first.num_probes:
                keys = self._basis_keys(first.window, Stream.PROBES)
                bases = with_probes(bases, first.num_probes, keys)
            given = list(bases.unbind()) if self.shares else self.by_member(bases)
        else:
            given = self._members_own()
            if first.num_held < first.count and not self.shares:
                return [columns[first.held] for columns in given]
        return [c.expand(first.num_held, -1, -1) for c in given] if self.shares else given

    def all_projections(self) -> list[Tensor]:
        given = self._members_own()
        return [c.expand(self.first.count, -1, -1) for c in given] if self.shares else given

    def _members_own(self) -> list[Tensor]:
        """What each member projects on, or the basis of one that takes whole rows."""
        found = [m.basis if self.takes_whole else m.projection for m in self._projected()]
        return [columns for columns in found if columns is not None]

    def grams(self, projections: Sequence[Tensor]) -> Tensor:
        """``Q^T Q`` of the columns of :meth:`projections`, B x r x r fp32."""
        bases = stacked([one[0] for one in projections] if self.shares else projections)
        bases = bases.flatten(0, -3).float()
        grams = bases.mT @ bases
        return grams.repeat_interleave(self.first.num_held, dim=0) if self.shares else grams

    def _projected(self) -> list[ProjectedMatrix]:
        return [matrix for matrix in self.members if isinstance(matrix, ProjectedMatrix)]

    def measure(
        self, parts: Sequence[Stack], gradients: Sequence[Gradients], counted: slice
    ) -> Tensor:
        """Squared norms of ``A`` and ``S``; of ``A`` and the rest of ``G`` with whole gradient rows."""
        inside, outside = self.seen(parts, gradients, counted)
        return torch.stack((inside.sum(dim=1), outside), dim=1)

    def seen(
        self, parts: Sequence[Stack], gradients: Sequence[Gradients], counted: slice
    ) -> tuple[Tensor, Tensor]:
        """Squared norms of the counted rows of ``A``, B x rows, and of what is known outside the basis, (B,)."""
        if self.reads_whole_rows:
            found = [
                self._images(g, part, counted) for part, g in zip(parts, gradients, strict=True)
            ]
            inside = [torch.linalg.vector_norm(images, dim=2).square_() for images, _ in found]
            return joined(inside), joined([outside for _, outside in found])
        own = [gradient[:, counted] for gradient in gradients if isinstance(gradient, Tensor)]
        inside_rows, outside_rows = row_squares(
            own, self.first.width if self.takes_whole else self.rank
        )
        return inside_rows, outside_rows.sum(dim=1)

    def _images(self, gradient: Gradients, part: Stack, counted: slice) -> tuple[Tensor, Tensor]:
        """Of whole rows ``A`` of the counted ones, and the squared norms of the rest, (B,)."""
        assert isinstance(gradient, list)
        rows = [one[..., counted, :] for one in gradient]
        images, squares = project_together(rows, part.projections())
        return images, (squares.sum(dim=1) - square_norms(images)).clamp_min(0)

    def square_norms(self, sums: Tensor) -> Tensor:
        if self.takes_whole:
            return sums[:, 0] + sums[:, 1]
        n, rank = self.shape[1], self.directions(of_all=len(sums) != self.size)
        return estimated_square_norm(sums[:, 0], sums[:, 1], n, rank, self.first.num_probes)

    def directions(self, of_all: bool = False) -> Tensor | int:
        """Columns of each basis that are not zero: r, or (B,) fp32 of experts with bases of their own.

        Args:
            of_all: also of experts that are held elsewhere.
        """
        known = [m.columns.directions for m in self._projected()]
        found = [own for own in known if own is not None]
        if not found:
            return self.rank
        before, whole = self._directions
        if len(before) != len(found) or not all(map(is_, before, found)):
            whole = joined(found)
            self._directions = found, whole
        return whole if of_all else self.of_held(whole)

    def observe(
        self, sums: Tensor, scale: Tensor | float = 1.0, taken: Tensor | None = None
    ) -> None:
        self.follow(sums[:, 0], self.square_norms(sums), scale, taken)
