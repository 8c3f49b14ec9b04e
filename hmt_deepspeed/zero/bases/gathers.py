"""Gathers rows that ranks hold parts of: those used next in one collective, launched while the ones before are in use.

Every rank takes the same keys in the same order, and what is launched follows from that order alone: never from
memory, time or anything else that ranks may have of their own. So all ranks launch the same collectives in the same
order, also where they take other keys than expected.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from hmt_deepspeed.zero.sharding.collectives import Collectives, Work

__all__ = ["BLOCK_BYTES", "NUM_BLOCKS", "GatherAhead"]

BLOCK_BYTES = 2**26  # whole rows of one collective, unless those of a single key are more
NUM_BLOCKS = 2  # collectives whose results wait or are on their way: the one in use and the next

Key = TypeVar("Key")


@dataclass
class _Coming(Generic[Key]):
    """A key whose whole rows are in a block.

    Attributes:
        passed: keys before it that were not gathered when it was launched.
        place: of its whole rows in the block. stale: its rows have changed since.
    """

    key: Key
    passed: list[Key]
    place: int
    stale: bool = False


class _Block(Generic[Key]):
    """One collective: the rows of ``coming``, those of one shape side by side, of each rank."""

    def __init__(
        self, coming: Iterable[_Coming[Key]], parts: list[Tensor], collectives: Collectives
    ) -> None:
        self.coming, self._world = deque(coming), collectives.world
        alike: dict[torch.Size, list[int]] = {}
        for place, part in enumerate(parts):
            alike.setdefault(part.shape, []).append(place)
        self._alike = alike
        flat = [parts[place].reshape(-1) for places in alike.values() for place in places]
        self._part = flat[0] if len(flat) == 1 else torch.cat(flat)  # kept until it is sent
        self._packed: Tensor | None = self._part.new_empty(self._world * self._part.numel())
        self._wholes: dict[int, Tensor] = {}
        self._work: Work | None = collectives.all_gather(self._packed, self._part)

    def wait(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None

    def whole(self, coming: _Coming[Key]) -> Tensor:
        """Whole rows of a key, contiguous."""
        self.wait()
        if self._packed is not None:
            self._unpack(self._packed.view(self._world, -1))
            self._packed = None
        return self._wholes.pop(coming.place)

    def _unpack(self, of_ranks: Tensor) -> None:
        """The rows of a key one below the other, in one copy for all keys of a shape."""
        begin = 0
        for (rows, width), places in self._alike.items():
            end = begin + len(places) * rows * width
            parts = of_ranks[:, begin:end].view(self._world, len(places), rows, width)
            wholes = parts.transpose(0, 1).reshape(len(places), self._world * rows, width)
            # as data, for each to count its own versions
            self._wholes |= {p: one.data for p, one in zip(places, wholes.unbind(), strict=True)}
            begin = end


class GatherAhead(Generic[Key]):
    """Whole rows of keys, gathered ahead in the order in which they are expected.

    A key that is not among those launched is gathered alone, by every rank, since all take the same.

    Args:
        collectives: of the ranks that hold parts.
        rows: this rank's rows x width of a key, of one shape and dtype on all ranks; None of one that is not
            gathered at present.
    """

    def __init__(self, collectives: Collectives, rows: Callable[[Key], Tensor | None]) -> None:
        self._collectives, self._rows = collectives, rows
        self._blocks: deque[_Block[Key]] = deque()
        self._order: list[Key] = []
        self._place = 0  # in it: of what is launched next
        self._passed: list[Key] = []  # before that place, behind what was launched last
        self._brought: Tensor | None = (
            None  # rows of the key at that place, where a block had no room
        )
        self._taken: list[Key] = []

    def expect(self, order: Iterable[Key]) -> None:
        """Say what is taken next, in order, instead of what was expected."""
        self.forget()
        self._order, self._taken, self._place = list(order), [], 0

    def repeat(self, exists: Callable[[Key], bool] = lambda _: True) -> None:
        """Expect what was taken since the last call, or else what was expected then.

        Args:
            exists: whether a key may be taken again.
        """
        self.forget()
        self.expect(filter(exists, self._taken or self._order))

    def forget(self) -> None:
        """Expect nothing more until the next :meth:`expect` or :meth:`repeat`; frees what was gathered in vain."""
        while self._blocks:
            self._blocks.popleft().wait()
        if self._taken:
            self._taken += self._passed
        self._place, self._passed, self._brought = len(self._order), [], None

    def close(self) -> None:
        """Drop everything, and wait for nothing: other ranks may be gone."""
        self._blocks.clear()
        self._order, self._taken, self._passed = [], [], []

    def changed(self, key: Key) -> None:
        """The rows of a key have changed: what was gathered of them before is not to be used."""
        for block in self._blocks:
            for coming in block.coming:
                coming.stale |= coming.key is key

    def take(self, key: Key) -> Tensor:
        """Whole rows of a key: (world * rows) x width in order of ranks, contiguous and nobody else's.

        A collective: every rank takes the same keys in the same order.
        """
        self._launch()
        whole = self._launched(key)
        if whole is None:
            rows = self._rows(key)
            assert rows is not None, "taken, but not held by rows"
            alone = _Coming(key, [], 0)
            whole = _Block([alone], [rows], self._collectives).whole(alone)
        self._taken.append(key)
        self._launch()
        return whole

    def _launched(self, key: Key) -> Tensor | None:
        """What was gathered ahead of a key; what was expected before it is given up. None of one not launched."""
        if not any(coming.key is key for block in self._blocks for coming in block.coming):
            return None
        while True:
            block = self._blocks[0]
            block.wait()
            while block.coming:
                coming = block.coming.popleft()
                self._taken += coming.passed
                if coming.key is key:
                    whole = None if coming.stale else block.whole(coming)
                    if not block.coming:
                        self._blocks.popleft()
                    return whole
            self._blocks.popleft()

    def _launch(self) -> None:
        while len(self._blocks) < NUM_BLOCKS and self._place < len(self._order):
            coming, parts = self._next()
            if parts:
                self._blocks.append(_Block(coming, parts, self._collectives))

    def _next(self) -> tuple[list[_Coming[Key]], list[Tensor]]:
        """The next expected keys that fit one collective, and their rows."""
        coming: list[_Coming[Key]] = []
        parts: list[Tensor] = []
        numel = 0
        while self._place < len(self._order):
            key = self._order[self._place]
            rows = self._rows(key) if self._brought is None else self._brought
            self._brought = None
            if rows is None:
                self._passed.append(key)
            else:
                size = (numel + rows.numel()) * rows.element_size() * self._collectives.world
                if parts and (size > BLOCK_BYTES or rows.dtype != parts[0].dtype):
                    self._brought = rows
                    break
                coming.append(_Coming(key, self._passed, len(parts)))
                parts.append(rows)
                numel, self._passed = numel + rows.numel(), []
            self._place += 1
        return coming, parts
