"""Reads pieces from files into a few buffers in host memory and writes them back, beside the work on them."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from types import TracebackType
from typing import NamedTuple
from weakref import WeakSet

from torch import Tensor

from .alternate import AlternateSlots, Piece
from .counters import Counters
from .pool import Buffer, PinnedPool, whole_pages
from .threads import background_threads

__all__ = ["Event", "Lease", "SlotPipeline"]


class Event(NamedTuple):
    """An action on a piece and its times (``time.perf_counter``)."""

    verb: str  # "read", "update", "write"
    name: str
    begin: float
    end: float


class Lease:
    """A piece in a buffer while a ``with`` block works on it; what the block leaves there is written back.

    Made by :meth:`SlotPipeline.lease`. A block that raises writes nothing.
    """

    def __init__(
        self, pipeline: SlotPipeline, piece: Piece, before: Lease | None, writes: bool
    ) -> None:
        self.piece = piece
        self._pipeline, self._before, self._writes = pipeline, before, writes
        self._finished = False  # the block is over, or will never begin
        self._over = threading.Event()  # and so is what follows it
        self._arriving: Future[Buffer] | None = None
        self._buffer: Buffer
        self._begin = 0.0

    def __enter__(self) -> Tensor:
        """The bytes (uint8, ``piece.nbytes``). Raises StoreError when they cannot be read."""
        try:
            arriving = self._arriving
            self._buffer = self._pipeline._read(self) if arriving is None else arriving.result()
        except BaseException:
            self.cancel()
            raise
        self._begin = time.perf_counter()
        return self._buffer.memory[: self.piece.nbytes]

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._finished = True
        if kind is None and self._writes:
            self._pipeline._log("update", self.piece, self._begin)
            self._pipeline._return(self)
        else:
            self._pipeline.pool.release(self._buffer)
            self._over.set()

    def cancel(self) -> None:
        """The block will not begin. Without effect when it has."""
        if self._finished:
            return
        self._finished = True
        if self._arriving is None or self._arriving.cancel():
            self._over.set()
        else:
            self._arriving.add_done_callback(self._drop)

    def _drop(self, arriving: Future[Buffer]) -> None:
        if arriving.exception() is None:
            self._pipeline.pool.release(arriving.result())
        self._over.set()


class SlotPipeline:
    """Reads of coming pieces and writes of past ones beside the work on the present one.

    Leases are made in the order in which their blocks run, by one thread; the blocks run in one thread,
    another or the same. Reads wait while the buffers are full, so nothing grows. Two leases of a piece see
    each other's writes.

    Args:
        slots: the files.
        pool: the buffers; at least the largest piece, and three of them for all that may overlap.
        read_ahead: read in a thread of its own, as soon as there is room; else when the block begins.
        write_behind: write in a thread of its own; else before the block's end returns.
        failed: told the name of a piece that could not be written behind, and why.

    Attributes:
        counters: bytes (whole pages) and pieces written (out) and read (in), and seconds of either with their
            checksums, since construction.
        events: what was done when, in order of its end, where somebody has put a list there.
    """

    def __init__(
        self,
        slots: AlternateSlots,
        pool: PinnedPool,
        read_ahead: bool,
        write_behind: bool,
        failed: Callable[[str, Exception], None],
    ) -> None:
        self.slots, self.counters = slots, Counters()
        self.events: list[Event] | None = None
        self.pool, self._failed = pool, failed
        self._reader = background_threads(1, "hmt-states-read") if read_ahead else None
        self._writer = background_threads(1, "hmt-states-write") if write_behind else None
        self._last: dict[Piece, Lease] = {}  # of each piece, unless it is known to be over
        self._expected: deque[Lease] = deque()
        _pipelines.add(self)

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the buffers."""
        return self.pool.nbytes

    def expect(self, pieces: Iterable[Piece]) -> None:
        """These will be leased next, in this order, if all goes as usual: their reads may begin now.

        When another is leased, whatever is still expected is forgotten.
        """
        if self._reader is not None:
            self._expected.extend(self._begin(piece, writes=True) for piece in pieces)

    def lease(self, piece: Piece, writes: bool = True) -> Lease:
        """The piece for one block of work, whose read may begin now.

        Args:
            writes: False for a block that only reads.
        """
        if self._expected and self._expected[0].piece is piece:
            lease = self._expected.popleft()
            lease._writes = writes
        else:
            self._forget()
            lease = self._begin(piece, writes)
        self._last[piece] = lease
        return lease

    def drain(self) -> None:
        """Returns when every block is over and what it left is written, or ``failed`` knows why not."""
        self._wait(list(self._last))

    def commit(self) -> None:
        """Everything written counts; see :class:`AlternateSlots`. The caller has looked for failures."""
        self.slots.commit()

    def roll_back(self, pieces: Iterable[Piece]) -> None:
        """Waits for these pieces' blocks and forgets what was written of them since the commit."""
        pieces = list(pieces)
        self._forget()
        self._wait(pieces)
        self.slots.roll_back(pieces)

    def close(self) -> None:
        """Waits for the threads. Idempotent."""
        self._forget()
        for thread in (self._reader, self._writer):
            if thread is not None:
                thread.shutdown()

    # -- steps --------------------------------------------------------------------------------------

    def _begin(self, piece: Piece, writes: bool) -> Lease:
        lease = Lease(self, piece, self._last.get(piece), writes)
        if self._reader is not None:
            lease._arriving = self._reader.submit(self._read, lease)
        return lease

    def _forget(self) -> None:
        """Gives back what was read for leases that did not come."""
        while self._expected:
            self._expected.popleft().cancel()

    def _wait(self, pieces: Iterable[Piece]) -> None:
        for piece in pieces:
            lease = self._last.pop(piece, None)
            if lease is not None:
                lease._over.wait()

    def _read(self, lease: Lease) -> Buffer:
        if lease._before is not None:
            lease._before._over.wait()
            lease._before = None
        piece = lease.piece
        buffer = self.pool.take(piece.nbytes, piece.name, lent=True)
        begin = time.perf_counter()
        try:
            with self.counters.moving("in"):
                nbytes = self.slots.read(piece, buffer.memory)
        except BaseException:
            self.pool.release(buffer)
            raise
        if nbytes:
            self.counters.count_in(whole_pages(nbytes))
        self._log("read", piece, begin)
        return buffer

    def _return(self, lease: Lease) -> None:
        if self._writer is None:
            self._write(lease)
        else:
            self._writer.submit(self._write_behind, lease)

    def _write_behind(self, lease: Lease) -> None:
        try:
            self._write(lease)
        except Exception as error:
            self._failed(lease.piece.name, error)

    def _write(self, lease: Lease) -> None:
        piece, begin = lease.piece, time.perf_counter()
        try:
            with self.counters.moving("out"):
                self.slots.write(piece, lease._buffer.memory)
            self.counters.count_out(whole_pages(piece.nbytes))
            self._log("write", piece, begin)
        finally:
            self.pool.release(lease._buffer)
            lease._over.set()

    def _log(self, verb: str, piece: Piece, begin: float) -> None:
        if self.events is not None:
            self.events.append(Event(verb, piece.name, begin, time.perf_counter()))


# -- the interpreter's exit -----------------------------------------------------------------------------

_pipelines: WeakSet[SlotPipeline] = WeakSet()


def _forget_what_is_expected() -> None:
    for pipeline in list(_pipelines):
        pipeline._forget()


# The interpreter joins the threads of executors before it calls what `atexit` holds. A read that waits for a buffer
# would never end: those before it hold all of them, for a backward that does not come.
threading._register_atexit(_forget_what_is_expected)  # type: ignore[attr-defined]
