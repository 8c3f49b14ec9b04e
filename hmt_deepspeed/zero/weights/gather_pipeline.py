"""Gathers of new weights, and of updates that travel, in buckets."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hmt_deepspeed.zero.sharding.collectives import Collectives, Work
from hmt_deepspeed.zero.sharding.shards import padded

__all__ = ["GatherPipeline"]


class GatherPipeline:
    """All-gathers parts of many parameters in buckets while later parts are still computed.

    Args:
        collectives: of the group.
        bucket_elements: size of a bucket in elements over all ranks.
    """

    MAX_IN_FLIGHT = 2

    def __init__(self, collectives: Collectives, bucket_elements: int) -> None:
        self.collectives, self.bucket_elements = collectives, bucket_elements
        self._open: dict[torch.dtype, list[tuple[Tensor, Callable[[Tensor], None]]]] = {}
        self._in_flight: list[tuple[Work, Tensor, list[tuple[int, Callable[[Tensor], None]]]]] = []

    def add(self, part: Tensor, length: int, deliver: Callable[[Tensor], None]) -> None:
        """Queue a flat part.

        Args:
            part: 1-d, of at most ``length`` elements. length: padded length, equal on all ranks.
            deliver: called with the gathered world x length tensor, a view of the bucket.
        """
        members = self._open.setdefault(part.dtype, [])
        members.append((padded(part, length), deliver))
        if sum(p.numel() for p, _ in members) * self.collectives.world >= self.bucket_elements:
            self._launch(part.dtype)

    def finish(self) -> None:
        """Gather what is queued and deliver everything."""
        for dtype in list(self._open):
            self._launch(dtype)
        while self._in_flight or self._open:  # a delivery may have added more
            if not self._in_flight:
                self._launch(next(iter(self._open)))
            self._land()

    def _launch(self, dtype: torch.dtype) -> None:
        members = self._open.pop(dtype)
        part = torch.cat([p for p, _ in members])
        packed = torch.empty(
            (self.collectives.world, part.numel()), dtype=dtype, device=part.device
        )
        work = self.collectives.all_gather(packed, part)
        if len(self._in_flight) >= self.MAX_IN_FLIGHT:
            self._land()
        self._in_flight.append((work, packed, [(p.numel(), d) for p, d in members]))

    def _land(self) -> None:
        work, packed, members = self._in_flight.pop(0)
        work.wait()
        offset = 0
        for length, deliver in members:
            deliver(packed[:, offset : offset + length])
            offset += length
