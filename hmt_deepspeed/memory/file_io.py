"""Blocking reads and writes of whole buffers; the threads that call them are the stores'."""

from __future__ import annotations

import errno
import os
import threading
import weakref
from typing import Any, Protocol

from torch import Tensor

from .checksum import as_memoryview
from .pool import GRANULE

__all__ = ["AsyncIO", "FileIO", "PositionalIO"]


class FileIO(Protocol):
    """Moves ``memory`` (uint8, page-aligned, a multiple of 4096 bytes) to or from the start of a file.

    The file exists and is at least as large. OSError for whatever did not work; called by several threads.
    """

    def write(self, path: str, memory: Tensor) -> None: ...

    def read(self, path: str, memory: Tensor) -> None: ...


class PositionalIO:
    """``pwrite`` and ``preadv`` through the page cache, repeated until all is moved."""

    def write(self, path: str, memory: Tensor) -> None:
        data = as_memoryview(memory)
        descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            done = 0
            while done < len(data):
                moved = os.pwrite(descriptor, data[done:], done)
                if moved <= 0:
                    raise OSError(errno.EIO, f"wrote {done} of {len(data)} bytes, then no more")
                done += moved
        finally:
            os.close(descriptor)

    def read(self, path: str, memory: Tensor) -> None:
        data = as_memoryview(memory)
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            done = 0
            while done < len(data):
                moved = os.preadv(descriptor, [data[done:]], done)
                if moved <= 0:
                    raise OSError(errno.EIO, f"read {done} of {len(data)} bytes, then no more")
                done += moved
        finally:
            os.close(descriptor)


_first_write = threading.Lock()  # of the process
_written = threading.Event()


class AsyncIO:
    """DeepSpeed's ``aio_handle``, past the page cache.

    It counts completions without looking at their results, so an error or a short transfer on its side
    shows only in the checksum. A handle does one transfer at a time, spread over its threads; reads and
    writes overlap when each has a handle of its own.

    Args:
        reader, writer: ``aio_handle`` objects of ``deepspeed.ops.op_builder.AsyncIOBuilder().load()``.

    Raises:
        ValueError: a handle's alignment (512 bytes times its threads) does not divide 4096.
    """

    def __init__(self, reader: Any, writer: Any) -> None:
        for handle in (reader, writer):
            if GRANULE % handle.get_alignment():
                raise ValueError(
                    f"async_io aligns transfers to {handle.get_alignment()} bytes, which must divide "
                    f"{GRANULE}: set aio.intra_op_parallelism to 1, 2, 4 or 8"
                )
        self._handles = {"read": reader, "write": writer}
        # A handle's threads release the last tensor with the GIL, which they would not get once Python
        # goes down (the process would abort), so they are joined before.
        weakref.finalize(self, self._handles.clear)

    def write(self, path: str, memory: Tensor) -> None:
        _size(path, os.O_WRONLY)  # a missing file the handle would create
        # Its first write logs a warning inside std::call_once; a second thread that enters meanwhile waits
        # for that with the GIL held, and the process hangs (DeepSpeed 0.19.8).
        if not _written.is_set():
            with _first_write:
                _expect_one(self._handles["write"].sync_pwrite(memory, path, 0))
                _written.set()
        else:
            _expect_one(self._handles["write"].sync_pwrite(memory, path, 0))

    def read(self, path: str, memory: Tensor) -> None:
        found = _size(path, os.O_RDONLY)
        if found < memory.numel():  # the handle would abort the process
            raise OSError(errno.EIO, f"the file has {found} bytes, expected {memory.numel()}")
        _expect_one(self._handles["read"].sync_pread(memory, path, 0))


def _size(path: str, flags: int) -> int:
    """Bytes of a file that can be opened; OSError says why it cannot, the handle would not."""
    descriptor = os.open(path, flags | os.O_CLOEXEC)
    try:
        return os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)


def _expect_one(completed: int) -> None:
    if completed != 1:
        raise OSError(errno.EIO, f"async_io returned {completed}, expected 1 completed transfer")
