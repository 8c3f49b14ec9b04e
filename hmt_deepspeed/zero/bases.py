"""Bases at stage 3: dealt over ranks by rows, gathered when a step or a forward needs one.

Replicated in fp32 the bases of a 7B model at r = 1024 would weigh 4.7 GB on every rank. A linear's
forward gathers the columns of its group and drops them after the product; backward needs only ``X B``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from hmt_deepspeed.optim.low_rank import LowRankMatrix
from hmt_deepspeed.zero.collectives import Collectives
from hmt_deepspeed.zero.entries import Entry

__all__ = ["ShardedBases"]


class ShardedBases:
    """Parks the projections of matrices with a projected backward; a no-op below stage 3.

    Every method that gathers is a collective: all ranks call it for the same entries in the same order.
    Matrices that project ``param.grad`` keep theirs, since gradient hooks must not communicate; so do
    those projected from the left, whose projection backward itself needs.
    """

    def __init__(self, collectives: Collectives, stage: int) -> None:
        self.collectives = collectives
        self.active = stage == 3 and collectives.world > 1
        self._kept: dict[int, tuple[Tensor, Tensor]] | None = None

    @contextmanager
    def gathered_once(self) -> Iterator[None]:
        """What is gathered inside is kept until the end: a linear that is called for one chunk after the
        other communicates once, however many chunks this rank has and the others have."""
        self._kept = {}
        try:
            yield
        finally:
            self._kept = None

    def gather(self, local: Tensor) -> Tensor:
        """Rows of all ranks, (world rows) x width; the last ones are padding."""
        if self._kept is None:
            return self._gather(local)
        if id(local) not in self._kept:
            self._kept[id(local)] = local, self._gather(local)
        return self._kept[id(local)][1]

    def _gather(self, local: Tensor) -> Tensor:
        packed = torch.empty(
            self.collectives.world * local.shape[0],
            local.shape[1],
            dtype=local.dtype,
            device=local.device,
        )
        self.collectives.all_gather(packed, local.contiguous()).wait()
        return packed

    def park(self, entry: Entry) -> None:
        """Keep this rank's rows of the entry's projection and drop the others."""
        matrix = entry.matrix
        if not self.active or not isinstance(matrix, LowRankMatrix) or matrix.transposed:
            return
        columns = matrix.columns
        if entry.gradient.site is None or columns.whole is None or columns.parked is not None:
            return
        n, width = columns.whole.shape
        rows = -(-n // self.collectives.world)
        begin = min(self.collectives.rank * rows, n)
        own = columns.whole[begin : begin + rows]
        columns.parked = own.new_zeros(rows, width)
        columns.parked[: own.shape[0]].copy_(own)
        columns.whole = columns.basis = own.new_empty(0, width)

    def restore(self, entry: Entry) -> None:
        """Make the entry's projection whole again."""
        matrix = entry.matrix
        if isinstance(matrix, LowRankMatrix) and matrix.columns.parked is not None:
            whole = self.gather(matrix.columns.parked)
            columns = matrix.columns
            columns.whole, columns.parked = whole[: matrix.shape[1]], None
            columns.basis = columns.whole[:, : matrix.rank]

    @staticmethod
    def forget(entry: Entry) -> None:
        """Drop what is parked: the whole projection is about to be loaded."""
        if isinstance(entry.matrix, LowRankMatrix):
            entry.matrix.columns.parked = None

    @contextmanager
    def whole(self, entry: Entry) -> Iterator[None]:
        """The entry's projection whole for the duration of a block."""
        self.restore(entry)
        try:
            yield
        finally:
            self.park(entry)
