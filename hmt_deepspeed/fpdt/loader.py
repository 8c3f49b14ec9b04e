"""Batches for ranks that share sequences, from a loader that gives every rank rows of its own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from itertools import islice
from typing import Any

from hmt_deepspeed.fpdt.sequence import SequenceParallel

__all__ = ["SharedBatches"]


class SharedBatches:
    """Gives each rank's batches to all ranks that share a sequence with it, one after the other.

    An ordinary loader, whose sampler knows nothing of sequence parallelism, then does: every row is still
    trained on once, by the ranks of a group together, so that each rank sees as many times more batches as a
    group has ranks. Iterating ends with the first loader of a group that ends.

    Args:
        loader: batches of this rank, on the host; anything that can be pickled.
        sequence: of the installation, ``engine.hmt_fpdt.sequence``.
    """

    def __init__(self, loader: Iterable[Any], sequence: SequenceParallel) -> None:
        self.loader, self.sequence = loader, sequence

    def __len__(self) -> int:
        if not isinstance(self.loader, Sized):
            raise TypeError(f"{type(self.loader).__name__} has no length")
        return len(self.loader) * self.sequence.size

    def __iter__(self) -> Iterator[Any]:
        own = iter(self.loader)
        while True:
            mine = list(islice(own, 1))  # empty at the end
            every = self.sequence.group.gather(mine)
            if not all(every):
                return
            for (batch,) in every:
                yield batch
