"""Files for tensors in a folder, used again instead of growing, and verified."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from contextlib import suppress

from torch import Tensor

from .checksum import checksum
from .errors import StoreError
from .file_io import FileIO
from .pool import whole_pages

__all__ = ["Slot", "SlotFolder"]


class Slot:
    """One file of a fixed size.

    Attributes:
        path: of the file, which exists from the first write on.
        capacity: its bytes.
    """

    def __init__(self, path: str, capacity: int) -> None:
        self.path, self.capacity = path, capacity
        self._made = False


class SlotFolder:
    """Files of fixed sizes in a folder, made when first written.

    A file given back is used again for the next tensor of its size class (at most 1/8 larger than the tensor,
    plus a page); when the disk is full, files of other classes that are not in use are removed.

    Built on by whoever needs commits: a slot keeps its content until it is given back and written again,
    may be hard-linked elsewhere and given up with :meth:`discard`, and is on the disk after :meth:`sync`.
    Safe to use from several threads, each slot by one at a time.

    Args:
        path: the folder, which exists and holds no slots.
        io: how bytes are moved.

    Attributes:
        file_bytes: bytes of all its files, in use or not. io: as given.
    """

    def __init__(self, path: str, io: FileIO) -> None:
        self.path, self.io = path, io
        self._lock = threading.Lock()
        self._free: dict[int, list[Slot]] = {}
        self._num_slots = 0
        self.file_bytes = 0

    def take(self, nbytes: int) -> Slot:
        """A slot for ``nbytes``, free until now. Touches no file."""
        capacity = size_class(nbytes)
        with self._lock:
            if free := self._free.get(capacity):
                return free.pop()
            self._num_slots += 1
            return Slot(os.path.join(self.path, f"{self._num_slots:06d}-{capacity}.bin"), capacity)

    def give_back(self, slot: Slot) -> None:
        """The slot's content is not needed any more."""
        with self._lock:
            self._free.setdefault(slot.capacity, []).append(slot)

    def discard(self, slot: Slot) -> None:
        """Removes the slot's file from the folder; a hard link to it elsewhere stays as it is."""
        if slot._made:
            slot._made = False
            with self._lock:
                self.file_bytes -= slot.capacity
            with suppress(FileNotFoundError):
                os.unlink(slot.path)

    def write(self, slot: Slot, memory: Tensor, nbytes: int) -> str:
        """Writes a buffer; returns the checksum of its first ``nbytes``, which :meth:`read` asks for.

        Args:
            memory: uint8, page-aligned; whole pages of it are written.

        Raises:
            StoreError: naming the file; the slot's old content is then lost.
        """
        digest = checksum(memory[:nbytes])
        pages = memory[: whole_pages(nbytes)]
        try:
            self._make(slot)
            self.io.write(slot.path, pages)
        except OSError as error:
            with suppress(OSError):
                self.discard(slot)
            raise StoreError(self._message("write", slot, pages.numel(), error)) from error
        return digest

    def read(self, slot: Slot, memory: Tensor, nbytes: int, digest: str) -> None:
        """Reads what was written into a buffer of the same size.

        Raises:
            StoreError: the file is missing, has another size, cannot be read, or holds something else; the
                message names the file, what was expected and what was found.
        """
        pages = memory[: whole_pages(nbytes)]
        try:
            self._check_size(slot)
            self.io.read(slot.path, pages)
        except OSError as error:
            raise StoreError(self._message("read", slot, pages.numel(), error)) from error
        found = checksum(memory[:nbytes])
        if found != digest:
            raise StoreError(
                f"{slot.path}: the content is not what was written: expected checksum {digest}, found "
                f"{found} over {nbytes} bytes"
            )

    def sync(self, slot: Slot) -> None:
        """Returns when the slot's content and name would survive a power cut. Raises StoreError."""
        try:
            for path in (slot.path, self.path):
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)
        except OSError as error:
            raise StoreError(f"{slot.path}: cannot sync: {error}") from error

    def _make(self, slot: Slot) -> None:
        """The slot's file with its space reserved, so that a full disk shows here."""
        if slot._made:
            self._check_size(slot)
            return
        try:
            _reserve(slot)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not self._trim():
                raise
            _reserve(slot)
        slot._made = True
        with self._lock:
            self.file_bytes += slot.capacity

    def _trim(self) -> bool:
        """Removes files not in use; whether there were any."""
        with self._lock:
            unused = [slot for slots in self._free.values() for slot in slots if slot._made]
            self._free.clear()
        for slot in unused:
            self.discard(slot)
        return bool(unused)

    def _check_size(self, slot: Slot) -> None:
        found = os.stat(slot.path).st_size
        if found != slot.capacity:
            raise OSError(errno.EIO, f"expected a file of {slot.capacity} bytes, found {found}")

    def _message(self, verb: str, slot: Slot, nbytes: int, error: OSError) -> str:
        text = f"{slot.path}: cannot {verb} {nbytes} bytes: {error}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            with suppress(OSError):
                text += f" ({shutil.disk_usage(self.path).free} bytes are free on the disk)"
        return text


def size_class(nbytes: int) -> int:
    """Bytes of the file for a tensor: eight classes per power of two, whole pages."""
    step = 1 << max(nbytes.bit_length() - 4, 0)
    return whole_pages(-(-nbytes // step) * step)


def _reserve(slot: Slot) -> None:
    descriptor = os.open(slot.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, slot.capacity)
    except OSError:
        os.unlink(slot.path)
        raise
    finally:
        os.close(descriptor)
