"""Files of pieces of bytes that change all together or not at all."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from .checksum import as_memoryview, checksum
from .errors import StoreError
from .slots import Slot, SlotFolder

__all__ = ["AlternateSlots", "Held", "Piece", "Record", "read_kept"]

# What says that a file cannot be linked there, though it could be copied.
_NO_LINK = {errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS}


class Record(NamedTuple):
    """A kept file's size, its bytes of content, and their checksum."""

    file_bytes: int
    nbytes: int
    digest: str


class _Version:
    """One content of a piece, in a file that is written again once the content is retired and nobody holds it."""

    def __init__(self, slot: Slot, digest: str) -> None:
        self.slot, self.digest = slot, digest
        self.num_holders = 0
        self.retired = False  # another version counts
        self.kept = False  # the file is somebody else's too, and never written again


class Piece:
    """A fixed number of bytes under a name; zeros until they are first written."""

    def __init__(self, name: str, nbytes: int) -> None:
        self.name, self.nbytes = name, nbytes
        self._committed: _Version | None = None
        self._written: _Version | None = None  # since the last commit


class Held:
    """A reference to a piece's content when :meth:`AlternateSlots.hold` was called, whatever is committed after it.

    For any thread, by one at a time.
    """

    def __init__(self, slots: AlternateSlots, piece: Piece, version: _Version) -> None:
        self._slots, self._piece, self._version = slots, piece, version

    def keep(self, path: str) -> Record:
        """Gives the file a second name, which no later write touches; or copies it there.

        Its content survives a power cut when this returns; the name does once its folder is synced.

        Raises:
            StoreError: neither works.
        """
        slot = self._version.slot
        self._slots.folder.sync(slot)
        try:
            os.link(slot.path, path)
            self._version.kept = True
        except OSError as error:
            if error.errno not in _NO_LINK:
                raise StoreError(f"{self._piece.name}: cannot link {path}: {error}") from error
            _copy(slot.path, path)
        return Record(slot.capacity, self._piece.nbytes, self._version.digest)

    def release(self) -> None:
        """The file may be written again, as far as this holder is concerned; to be called once.

        Raises:
            StoreError: it was kept, and cannot be given up in the folder of the slots.
        """
        self._slots._release(self._version)


class AlternateSlots:
    """Writes go to other files than those that hold what was committed, until :meth:`commit`.

    The manifest, which file of a piece is the one that counts and the checksum of its content, is in memory:
    it changes in one place, without I/O, and a process that dies leaves nothing half done behind. What shall
    outlive the process is kept elsewhere by :meth:`keep`, with its line of the manifest.

    Reads and writes of different pieces may run in several threads, ``commit`` and ``roll_back`` when none of
    the pieces concerned is being written.

    Args:
        folder: the files; twice the bytes of the pieces, once all were written twice, and as much again as is
            held or kept of older contents.
    """

    def __init__(self, folder: SlotFolder) -> None:
        self.folder = folder
        self._lock = threading.Lock()
        self._open: set[Piece] = set()

    def read(self, piece: Piece, memory: Tensor) -> int:
        """The piece as last written, committed or not, into a buffer (see :class:`SlotFolder`).

        Returns:
            bytes read: none for zeros.

        Raises:
            StoreError: naming the piece and its file.
        """
        version = piece._written or piece._committed
        if version is None:
            memory[: piece.nbytes].zero_()
            return 0
        try:
            self.folder.read(version.slot, memory, piece.nbytes, version.digest)
        except StoreError as error:
            raise StoreError(f"{piece.name}: {error}") from error
        return piece.nbytes

    def write(self, piece: Piece, memory: Tensor) -> None:
        """Writes the piece; counts once it is committed.

        Raises:
            StoreError: naming the piece and its file; what was committed is as it was.
        """
        with self._lock:
            self._open.add(piece)
        slot = piece._written.slot if piece._written else self.folder.take(piece.nbytes)
        piece._written = None
        try:
            digest = self.folder.write(slot, memory, piece.nbytes)
        except StoreError as error:
            self.folder.give_back(slot)
            raise StoreError(f"{piece.name}: {error}") from error
        piece._written = _Version(slot, digest)

    def commit(self) -> None:
        """Everything written counts. The files that counted before are written to next.

        Raises:
            StoreError: a file that is kept elsewhere could not be given up here.
        """
        retired = []
        for piece in self._open:
            if piece._written is not None:
                retired.append(piece._committed)
                piece._committed, piece._written = piece._written, None
        self._open.clear()
        for version in retired:
            if version is not None:
                self._retire(version)

    def roll_back(self, pieces: Iterable[Piece]) -> None:
        """Undo writes to these pieces since the last commit."""
        for piece in pieces:
            version, piece._written = piece._written, None
            self._open.discard(piece)
            if version is not None:
                self.folder.give_back(version.slot)

    def hold(self, piece: Piece) -> Held:
        """The committed file, which is not written until it is released; for the thread that commits.

        Raises:
            StoreError: nothing was ever committed.
        """
        version = piece._committed
        if version is None:
            raise StoreError(f"{piece.name} cannot be kept: it was never written")
        with self._lock:
            version.num_holders += 1
        return Held(self, piece, version)

    def keep(self, piece: Piece, path: str) -> Record:
        """Holds the committed file, gives it a second name (see :meth:`Held.keep`), and releases it."""
        held = self.hold(piece)
        try:
            return held.keep(path)
        finally:
            held.release()

    def _release(self, version: _Version) -> None:
        with self._lock:
            version.num_holders -= 1
            unused = version.retired and not version.num_holders
        if unused:
            self._give_up(version)

    def _retire(self, version: _Version) -> None:
        with self._lock:
            version.retired = True
            unused = not version.num_holders
        if unused:
            self._give_up(version)

    def _give_up(self, version: _Version) -> None:
        if not version.kept:
            self.folder.give_back(version.slot)
            return
        try:
            self.folder.discard(version.slot)
        except OSError as error:
            raise StoreError(f"{version.slot.path}: cannot be removed: {error}") from error


def _copy(source: str, path: str) -> None:
    try:
        with open(source, "rb") as original, open(path, "xb") as copy:
            shutil.copyfileobj(original, copy, 1 << 20)
            copy.flush()
            os.fsync(copy.fileno())
    except OSError as error:
        raise StoreError(f"cannot copy {source} to {path}: {error}") from error


def read_kept(path: str, record: Record) -> Tensor:
    """The content (uint8) of a file that :meth:`AlternateSlots.keep` has made.

    Raises:
        StoreError: it is missing, has another size, cannot be read, or holds something else.
    """
    memory = torch.empty(record.nbytes, dtype=torch.uint8)
    try:
        with open(path, "rb", buffering=0) as file:
            found = os.fstat(file.fileno()).st_size
            if found != record.file_bytes:
                raise StoreError(f"{path} has {found} bytes instead of {record.file_bytes}")
            done = file.readinto(as_memoryview(memory)) if record.nbytes else 0
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error}") from error
    if done != record.nbytes:
        raise StoreError(f"{path}: read {done} of {record.nbytes} bytes")
    digest = checksum(memory, record.digest)
    if digest != record.digest:
        raise StoreError(f"{path} does not match its checksum: {digest}, expected {record.digest}")
    return memory
