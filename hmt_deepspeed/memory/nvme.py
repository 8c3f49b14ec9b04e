"""Tensors kept in files on an SSD under names, written and read beside the caller's work."""

from __future__ import annotations

import functools
import threading
from concurrent.futures import CancelledError, Future, wait
from contextlib import suppress
from typing import Any

from torch import Tensor

from .counters import Counters
from .errors import StoreError, TransferError
from .file_io import FileIO, PositionalIO
from .layout import Layout, flatten
from .own_folder import OwnFolder
from .pool import GRANULE, whole_pages
from .slots import Slot, SlotFolder
from .threads import background_threads
from .transfer import Arrival, Transfer, TransferEngine

__all__ = ["FileStore"]


class _Piece:
    """Bytes of a stored tensor that have a file of their own.

    Attributes:
        part: which bytes of the tensor.
        transfer: those bytes in pinned memory, until ``on_file``.
        write: ends with the checksum of what the file holds.
        read: the last job that sent them from the file, if any.
    """

    def __init__(self, part: slice, transfer: Transfer, slot: Slot) -> None:
        self.part, self.transfer, self.slot = part, transfer, slot
        self.nbytes = transfer.layout.nbytes
        self.on_file = False
        self.write: Future[str]
        self.read: Future[None] | None = None


class _Entry:
    """A stored tensor.

    Attributes:
        pieces: that it is of, in order.
        arrival: the tensor on its way to the device.
        num_busy: once dropped, pieces with a job that is not done.
    """

    def __init__(self, name: str, layout: Layout) -> None:
        self.name, self.layout = name, layout
        self.lock = threading.Lock()
        self.pieces: list[_Piece] = []
        self.arrival: Arrival | None = None
        self.num_busy = 0

    def reads(self) -> list[Future[None]]:
        """Reads of the pieces that have been read from their files."""
        return [piece.read for piece in self.pieces if piece.read is not None]


class FileStore:
    """Keeps tensors in files of a folder of its own, see :class:`SlotFolder` and :class:`OwnFolder`.

    A name's life: put, then any number of prefetch and get, then drop; the same promises as
    :class:`HostStore`. On the way a tensor's bytes stay in the engine's ``pool``: a put waits while that is full
    of bytes not yet written. What is fetched before it is written comes from there, and what is dropped
    before its write has begun is never written. A tensor of more than a quarter of the pool moves in pieces
    of that size, each with a file of its own, both ways: the pool may be smaller than the tensor. Lengths
    and checksums are verified on every read, so a get gives what was put or raises. Safe to use from several
    threads.

    Args:
        engine: what moves tensors between the device and pinned memory.
        folder: on the SSD; made if it does not exist.
        io: by default positional reads and writes through the page cache; ``AsyncIO`` for DeepSpeed's.
        num_threads: of writers, and as many of readers.

    Attributes:
        counters: bytes (whole pages) and files written (out) and read (in), seconds of either with their
            checksums, and seconds callers waited.
        piece_bytes: of a file at most, whole pages.
        slots: the files, with ``path`` and ``file_bytes``.

    Raises:
        StoreError: the folder cannot be made.
    """

    def __init__(
        self,
        engine: TransferEngine,
        folder: str,
        io: FileIO | None = None,
        num_threads: int = 2,
    ) -> None:
        if num_threads < 1:
            raise ValueError(f"num_threads is at least 1, got {num_threads}")
        self.engine = engine
        self._own_folder = OwnFolder(folder)
        self.slots = SlotFolder(self._own_folder.path, io or PositionalIO())
        self.counters = Counters()
        self.piece_bytes = max(engine.pool.nbytes // 4 // GRANULE, 1) * GRANULE
        self._entries: dict[str, _Entry] = {}
        self._lock = threading.Lock()
        self._closed = False
        self._writers = background_threads(num_threads, "hmt-ssd-write")
        self._readers = background_threads(num_threads, "hmt-ssd-read")

    def put(self, name: str, tensor: Tensor) -> None:
        """Starts the way of a tensor to the SSD; it may be freed at once, not written to.

        Raises:
            ValueError: the name is taken, or see :meth:`TransferEngine.put`.
            PoolFull: handles put there directly fill the engine's pool.
        """
        with self._lock:
            if self._closed:
                raise RuntimeError(f"{name!r} is put into a closed SSD store")
            if name in self._entries:
                raise ValueError(f"{name!r} is already in the SSD store: drop it first")
        layout, flat = flatten(tensor)
        entry = _Entry(name, layout)
        try:
            for begin in range(0, max(layout.nbytes, 1), self.piece_bytes):
                self._send_out(entry, flat, slice(begin, begin + self.piece_bytes))
            with self._lock:
                if self._closed or self._entries.setdefault(name, entry) is not entry:
                    raise ValueError(f"{name!r} was put twice at the same time, or while closing")
        except BaseException:
            self._forget(entry)
            raise

    def prefetch(self, name: str) -> None:
        """Starts the way back to the device. KeyError for an unknown name; others are raised by get."""
        entry = self._entry(name)
        with entry.lock, suppress(TransferError):
            self._start(entry)

    def get(self, name: str) -> Tensor:
        """The tensor on the device, ready for the caller's current stream. The file keeps it.

        Raises:
            KeyError: unknown name.
            StoreError: the file could not be written or read, or does not hold what was put.
            TransferError: the copy between device and host failed.
        """
        entry = self._entry(name)
        with entry.lock:
            arrival, reads = self._start(entry)
            entry.arrival = None
        if reads:
            with self.counters.waiting():
                self._finish(arrival, reads)
        return self.engine.receive(arrival)

    def drop(self, name: str) -> None:
        """Forgets a tensor; its file is used again. KeyError for an unknown name."""
        with self._lock:
            entry = self._entries.pop(name, None)
        if entry is None:
            raise KeyError(f"{name!r} is not in the SSD store")
        self._forget(entry)

    def flush(self) -> None:
        """Returns when all that was put is written. Raises what get would, for the first that is not."""
        with self.counters.waiting():
            for entry in list(self._entries.values()):
                for piece in entry.pieces:
                    with suppress(CancelledError):  # dropped meanwhile
                        piece.write.result()

    def close(self) -> None:
        """Forgets everything, waits for the threads and removes the folder. Idempotent."""
        with self._lock:
            self._closed = True
        for name in list(self._entries):
            with suppress(KeyError):
                self.drop(name)
        self._writers.shutdown()
        self._readers.shutdown()
        self._own_folder.close()

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    # -- steps --------------------------------------------------------------------------------------

    def _entry(self, name: str) -> _Entry:
        entry = self._entries.get(name)
        if entry is None:
            raise KeyError(f"{name!r} is not in the SSD store")
        return entry

    def _send_out(self, entry: _Entry, flat: Tensor, part: slice) -> None:
        """Starts the way of a piece to its file."""
        transfer = self.engine.put(flat[part], entry.name, lent=True)
        piece = _Piece(part, transfer, self.slots.take(transfer.layout.nbytes))
        with self._lock:
            if not self._closed:
                piece.write = self._writers.submit(self._write, entry, piece)
                entry.pieces.append(piece)
                return
        self.engine.drop(transfer)
        self.slots.give_back(piece.slot)
        raise RuntimeError(f"{entry.name!r} is put into an SSD store that is being closed")

    def _start(self, entry: _Entry) -> tuple[Arrival, list[Future[None]]]:
        """The fetch under way, or a new one, and the reads it waits for: what is still in pinned memory
        comes from there."""
        if entry.arrival is None:
            arrival = self.engine.expect(entry.layout, entry.name)
            try:
                for piece in entry.pieces:
                    if piece.on_file:
                        piece.read = self._readers.submit(self._read, entry, piece, arrival)
                    else:
                        self.engine.send(piece.transfer, arrival, piece.part)
            except BaseException:
                wait(entry.reads())
                self.engine.abandon(arrival)
                raise
            entry.arrival = arrival
        return entry.arrival, entry.reads()

    def _finish(self, arrival: Arrival, reads: list[Future[None]]) -> None:
        """Waits for all reads of an arrival. Raises what the first that failed raised, and gives it up."""
        wait(reads)
        for error in [read.exception() for read in reads]:
            if error is not None:
                self.engine.abandon(arrival)
                raise error

    def _write(self, entry: _Entry, piece: _Piece) -> str:
        """Writer thread: from pinned memory to the file, then pinned memory is released."""
        try:
            self.engine.host_bytes(piece.transfer)
            with self.counters.moving("out"):
                digest = self.slots.write(piece.slot, piece.transfer.buffer.memory, piece.nbytes)
            self.counters.count_out(whole_pages(piece.nbytes))
            return digest
        except StoreError as error:
            raise StoreError(f"{entry.name!r}: {error}") from error
        finally:
            with entry.lock:
                piece.on_file = True
            self.engine.drop(piece.transfer)

    def _read(self, entry: _Entry, piece: _Piece, arrival: Arrival) -> None:
        """Reader thread: from the file to pinned memory, and on to the device."""
        digest = piece.write.result()
        pool = self.engine.pool
        buffer = pool.take(piece.nbytes, entry.name, lent=True)
        try:
            with self.counters.moving("in"):
                self.slots.read(piece.slot, buffer.memory, piece.nbytes, digest)
        except BaseException as error:
            pool.release(buffer)
            if isinstance(error, StoreError):
                raise StoreError(f"{entry.name!r}: {error}") from error
            raise
        self.counters.count_in(whole_pages(piece.nbytes))
        self.engine.deliver(arrival, pool, buffer, piece.part)

    def _forget(self, entry: _Entry) -> None:
        """Writes that have not begun never do; the rest ends with the jobs of each piece."""
        entry.num_busy = len(entry.pieces)
        for piece in entry.pieces:
            if piece.write.cancel():
                self.engine.drop(piece.transfer)
            last = piece.read or piece.write  # a read starts after the write has ended
            last.add_done_callback(functools.partial(self._retire, entry, piece))

    def _retire(self, entry: _Entry, piece: _Piece, _: Future[Any]) -> None:
        """The last job of a forgotten tensor's piece is done."""
        self.slots.give_back(piece.slot)
        with entry.lock:
            entry.num_busy -= 1
            if entry.num_busy:
                return
            arrival, entry.arrival = entry.arrival, None  # part of a cycle: free it now
        if arrival is not None:
            self.engine.abandon(arrival)
