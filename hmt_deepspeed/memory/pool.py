"""A pool of pinned host memory of constant size."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from contextlib import suppress

import torch
from torch import Tensor

from .counters import Counters
from .errors import PoolFull
from .streams import Event, Streams

__all__ = ["GRANULE", "Buffer", "PinnedPool", "whole_pages"]

GRANULE = 4096  # bytes: a page, and the block of direct I/O


def whole_pages(nbytes: int) -> int:
    """Bytes of the pages that hold ``nbytes``, at least one."""
    return max(-(-nbytes // GRANULE), 1) * GRANULE


class Buffer:
    """A piece of a pool.

    Attributes:
        memory: its bytes (uint8), page-aligned, a multiple of ``GRANULE`` of them.
        owner: whose it is, for messages.
    """

    def __init__(self, offset: int, memory: Tensor, owner: str, lent: bool) -> None:
        self.offset, self.memory, self.owner, self.lent = offset, memory, owner, lent
        self.released = False
        self.uses: tuple[Event, ...] = ()


class PinnedPool:
    """First-fit pieces of one page-locked allocation; it never grows.

    A released buffer is taken again only when the transfers that use it are done. When there is no room,
    :meth:`take` waits for the oldest of those. Safe to use from several threads.

    Args:
        nbytes: size, rounded up to ``GRANULE``.
        purpose: what it is for, for messages.

    Attributes:
        used_bytes, peak_bytes: occupied now (buffers still in use by a transfer included), and at most.
    """

    def __init__(self, nbytes: int, purpose: str, streams: Streams, counters: Counters) -> None:
        if nbytes <= 0:
            raise ValueError(f"the {purpose} needs at least 1 byte, got {nbytes}")
        self.nbytes, self.purpose = whole_pages(nbytes), purpose
        self._streams, self._counters = streams, counters
        whole = torch.empty(self.nbytes + GRANULE, dtype=torch.uint8)
        start = -whole.data_ptr() % GRANULE
        self._memory = whole[start : start + self.nbytes]
        streams.pin(self._memory)
        # A pool that nobody closes: memory that is freed while page-locked would stay so for its next owner.
        self._unpin = weakref.finalize(self, streams.unpin, self._memory)
        self._unpin.atexit = False
        self._num_touched = (
            0  # bytes that were ever taken; the rest may not even be backed by pages
        )
        self._closed = False
        self._free: list[tuple[int, int]] = [(0, self.nbytes)]  # (offset, bytes), by offset
        self._retiring: deque[Buffer] = deque()  # released, oldest first
        self._num_lent = 0
        self._changed = threading.Condition(threading.Lock())
        self.used_bytes = self.peak_bytes = 0

    def take(self, nbytes: int, owner: str, lent: bool = False) -> Buffer:
        """A buffer of at least ``nbytes``; its contents are undefined.

        Args:
            lent: it will be released by another thread without the caller's help, so that a call that
                finds no room may wait for that.

        Raises:
            PoolFull: larger than the pool, or no room while all buffers are held.
        """
        need = whole_pages(nbytes)
        if need > self.nbytes:
            raise PoolFull(
                f"{owner!r} needs {nbytes} bytes, the whole {self.purpose} has {self.nbytes}: make it "
                "larger, or move smaller tensors"
            )
        while True:
            with self._changed:
                if self._closed:
                    raise RuntimeError(f"the {self.purpose} is closed")
                self._reclaim()
                buffer = self._allocate(need, owner, lent)
                if buffer is not None:
                    return buffer
                if self._retiring:
                    uses = self._retiring[0].uses
                elif self._num_lent:
                    with self._counters.waiting():
                        self._changed.wait()
                    continue
                else:
                    largest = max((size for _, size in self._free), default=0)
                    raise PoolFull(
                        f"{owner!r} needs {need} bytes, the {self.purpose} of {self.nbytes} bytes holds "
                        f"{self.used_bytes} and its largest free piece has {largest}"
                    )
            with self._counters.waiting():
                _finish(uses)

    def release(self, buffer: Buffer, *uses: Event) -> None:
        """Gives a buffer back; it is taken again when ``uses`` are done."""
        with self._changed:
            if buffer.released:
                raise RuntimeError(f"the buffer of {buffer.owner!r} was released twice")
            buffer.released, buffer.uses = True, uses
            self._num_lent -= buffer.lent
            self._retiring.append(buffer)
            self._reclaim()
            self._changed.notify_all()

    def close(self) -> None:
        """Waits for transfers of released buffers and gives the memory back. Idempotent."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
            for buffer in self._retiring:
                _finish(buffer.uses)
            self._reclaim()
            self._unpin()
            self._memory = self._memory.new_empty(0)

    def _allocate(self, need: int, owner: str, lent: bool) -> Buffer | None:
        for index, (offset, size) in enumerate(self._free):
            if size >= need:
                end = offset + need
                self._free[index : index + 1] = [(end, size - need)] if size > need else []
                if end > self._num_touched:
                    self._streams.scrub(self._memory[self._num_touched : end])
                    self._num_touched = end
                self._num_lent += lent
                self.used_bytes += need
                self.peak_bytes = max(self.peak_bytes, self.used_bytes)
                return Buffer(offset, self._memory[offset:end], owner, lent)
        return None

    def _reclaim(self) -> None:
        """Frees what is released and no longer used by any transfer."""
        busy: deque[Buffer] = deque()
        for buffer in self._retiring:
            if all(use.done() for use in buffer.uses):
                self._streams.scrub(buffer.memory)
                self.used_bytes -= buffer.memory.numel()
                self._free.append((buffer.offset, buffer.memory.numel()))
            else:
                busy.append(buffer)
        self._retiring = busy
        self._free = _merged(self._free)


def _finish(uses: tuple[Event, ...]) -> None:
    """Waits; an error belongs to whoever uses the transfer's result."""
    for use in uses:
        with suppress(Exception):
            use.wait()


def _merged(pieces: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Neighbouring free pieces as one, by offset."""
    merged: list[tuple[int, int]] = []
    for offset, size in sorted(pieces):
        if merged and sum(merged[-1]) == offset:
            merged[-1] = (merged[-1][0], merged[-1][1] + size)
        else:
            merged.append((offset, size))
    return merged
