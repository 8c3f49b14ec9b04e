"""Tensors kept in files on an SSD under names, written and read beside the caller's work."""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import suppress

from torch import Tensor

from .counters import Counters, run_in_background
from .errors import StoreError, TransferError
from .file_io import FileIO, PositionalIO
from .own_folder import OwnFolder
from .pool import whole_pages
from .slots import Slot, SlotFolder
from .transfer import Arrival, Transfer, TransferEngine

__all__ = ["FileStore"]


class _Entry:
    """A stored tensor.

    Attributes:
        transfer: its bytes in pinned memory, until ``on_file``.
        write: ends with the checksum of what the file holds.
        arrival: the tensor on its way to the device.
        read: the last job that sent it from the file, if any.
    """

    def __init__(self, name: str, transfer: Transfer, slot: Slot) -> None:
        self.name, self.transfer, self.slot = name, transfer, slot
        self.lock = threading.Lock()
        self.on_file = False
        self.write: Future[str]
        self.arrival: Arrival | None = None
        self.read: Future[None] | None = None


class FileStore:
    """Keeps tensors in files of a folder of its own, see :class:`SlotFolder` and :class:`OwnFolder`.

    A name's life: put, then any number of prefetch and get, then drop; the same promises as
    :class:`HostStore`. On the way each tensor stays in the engine's ``pool``: a put waits while that is full
    of tensors not yet written. What is fetched before it is written comes from there, and what is dropped
    before its write has begun is never written. Lengths and checksums are verified on every read, so a get
    gives what was put or raises. Safe to use from several threads.

    Args:
        engine: what moves tensors between the device and pinned memory.
        folder: on the SSD; made if it does not exist.
        io: by default positional reads and writes through the page cache; ``AsyncIO`` for DeepSpeed's.
        num_threads: of writers, and as many of readers.

    Attributes:
        counters: bytes (whole pages) and files written (out) and read (in), and seconds callers waited.
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
        self._entries: dict[str, _Entry] = {}
        self._lock = threading.Lock()
        self._closed = False
        self._writers = _threads(num_threads, "hmt-ssd-write")
        self._readers = _threads(num_threads, "hmt-ssd-read")

    def put(self, name: str, tensor: Tensor) -> None:
        """Starts the way of a tensor to the SSD; it may be freed at once, not written to.

        Raises:
            ValueError: the name is taken, or see :meth:`TransferEngine.put`.
            PoolFull: the tensor is larger than the engine's pool, or handles put there directly fill it.
        """
        with self._lock:
            if self._closed:
                raise RuntimeError(f"{name!r} is put into a closed SSD store")
            if name in self._entries:
                raise ValueError(f"{name!r} is already in the SSD store: drop it first")
        transfer = self.engine.put(tensor, name, lent=True)
        entry = _Entry(name, transfer, self.slots.take(transfer.layout.nbytes))
        with self._lock:
            if self._closed or name in self._entries:
                self.engine.drop(transfer)
                self.slots.give_back(entry.slot)
                raise ValueError(f"{name!r} was put twice at the same time, or while closing")
            entry.write = self._writers.submit(self._write, entry)
            self._entries[name] = entry

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
            arrival, read = self._start(entry)
            entry.arrival = None
        if read is not None:
            with self.counters.waiting():
                read.result()
        return self.engine.receive(arrival)

    def drop(self, name: str) -> None:
        """Forgets a tensor; its file is used again. KeyError for an unknown name."""
        with self._lock:
            entry = self._entries.pop(name, None)
        if entry is None:
            raise KeyError(f"{name!r} is not in the SSD store")
        if entry.write.cancel():
            self.engine.drop(entry.transfer)
        last = entry.read or entry.write  # a read starts after the write has ended
        last.add_done_callback(lambda _: self._retire(entry))

    def flush(self) -> None:
        """Returns when all that was put is written. Raises what get would, for the first that is not."""
        with self.counters.waiting():
            for entry in list(self._entries.values()):
                with suppress(CancelledError):  # dropped meanwhile
                    entry.write.result()

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

    def _start(self, entry: _Entry) -> tuple[Arrival, Future[None] | None]:
        """The fetch under way, or a new one: from pinned memory while the tensor is there."""
        if entry.arrival is None and entry.on_file:
            entry.arrival = self.engine.expect(entry.transfer.layout, entry.name)
            entry.read = self._readers.submit(self._read, entry, entry.arrival)
        elif entry.arrival is None:
            entry.arrival = self.engine.fetch(entry.transfer)
        return entry.arrival, entry.read

    def _write(self, entry: _Entry) -> str:
        """Writer thread: from pinned memory to the file, then pinned memory is released."""
        nbytes = entry.transfer.layout.nbytes
        try:
            self.engine.host_bytes(entry.transfer)
            memory = entry.transfer.buffer.memory
            digest = self.slots.write(entry.slot, memory, nbytes)
            self.counters.count_out(whole_pages(nbytes))
            return digest
        except StoreError as error:
            raise StoreError(f"{entry.name!r}: {error}") from error
        finally:
            with entry.lock:
                entry.on_file = True
            self.engine.drop(entry.transfer)

    def _read(self, entry: _Entry, arrival: Arrival) -> None:
        """Reader thread: from the file to pinned memory, and on to the device."""
        digest = entry.write.result()
        nbytes = entry.transfer.layout.nbytes
        pool = self.engine.pool
        buffer = pool.take(nbytes, entry.name, lent=True)
        try:
            self.slots.read(entry.slot, buffer.memory, nbytes, digest)
        except BaseException as error:
            pool.release(buffer)
            if isinstance(error, StoreError):
                raise StoreError(f"{entry.name!r}: {error}") from error
            raise
        self.counters.count_in(whole_pages(nbytes))
        self.engine.deliver(arrival, pool, buffer)

    def _retire(self, entry: _Entry) -> None:
        """The last job of a dropped tensor is done."""
        arrival, entry.arrival = entry.arrival, None  # the entry is part of a cycle: free it now
        if arrival is not None:
            self.engine.abandon(arrival)
        self.slots.give_back(entry.slot)


def _threads(num_threads: int, name: str) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(num_threads, name, initializer=run_in_background)
