"""What a step does to weights."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hmt_deepspeed.kernels.low_rank_factors import ScaledRows

__all__ = ["Change"]


class Change(NamedTuple):
    """What a step does to the weights of a stack: ``W <- (1 - lr wd) W - lr ((update o scale) projection^T + beside)``.

    Attributes:
        update: B x rows x width, fp32 or a gradient's dtype; of width 0 where there is no projection.
        scale: B x 2 fp32: factor on the first r columns and on the others; zeros where no step is taken, not even decay.
        beside: rows of whole gradients or updates, or None.
    """

    update: Tensor
    scale: Tensor
    beside: ScaledRows | None = None

    def part(self, begin: int, end: int) -> Change:
        """Of some of the weights."""
        beside = None if self.beside is None else self.beside.part(slice(begin, end))
        return Change(self.update[begin:end], self.scale[begin:end], beside)

    def multiplied(self, rank: int, dtype: torch.dtype) -> Change:
        """With the scale in the update, for weights that are updated one by one: of it only 1 or 0 is left.

        Args:
            rank: columns of the first scale. dtype: of the update then, unless there are rows beside it.
        """
        update = self.update.float()
        update[..., :rank].mul_(self.scale[:, 0].view(-1, 1, 1))
        update[..., rank:].mul_(self.scale[:, 1].view(-1, 1, 1))
        update = update if self.beside is not None else update.to(dtype)
        return self._replace(update=update, scale=(self.scale != 0).float())

    def whole(self, member: int, projection: Tensor | None) -> Tensor:
        """All that is subtracted from one weight without the learning rate, rows x n fp32.

        Args:
            projection: n x width; None where the update has no columns.
        """
        assert self.beside is not None
        found = self.beside.whole(member)
        if projection is not None and projection.shape[1]:
            update = self.update[member].float() * self.scale[member, 0]
            found.addmm_(update, projection.float().t())
        return found
