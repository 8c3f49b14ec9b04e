"""A folder that lives as long as its process, however that ends."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from .errors import StoreError

__all__ = ["OwnFolder"]

PREFIX = "hmt-swap-"
GATE, LOCK = ".hmt-swap.lock", "lock"


class OwnFolder:
    """A new folder ``hmt-swap-<pid>-*`` below ``base``.

    It is removed by :meth:`close`, at exit, and by the next process that makes one below ``base`` if this
    one was killed: it holds a lock that the kernel releases then.

    Args:
        base: a folder, made if it does not exist.

    Attributes:
        path: the folder.

    Raises:
        StoreError: the folder cannot be made.
    """

    def __init__(self, base: str) -> None:
        try:
            os.makedirs(base, exist_ok=True)
            with _locked(os.path.join(base, GATE)):
                _remove_stale(base)
                self.path = tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=base)
                lock = _lock_file(os.path.join(self.path, LOCK))
        except OSError as error:
            raise StoreError(f"cannot make a folder for swap files in {base}: {error}") from error
        self._finalizer = weakref.finalize(self, _remove, self.path, lock, os.getpid())

    def close(self) -> None:
        """Removes the folder with everything in it. Idempotent."""
        self._finalizer()


def _lock_file(path: str, wait: bool = True) -> int:
    """Descriptor of a file locked for as long as it is open. BlockingIOError: taken, and not to wait."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


@contextmanager
def _locked(path: str) -> Iterator[None]:
    descriptor = _lock_file(path)
    try:
        yield
    finally:
        os.close(descriptor)


def _remove_stale(base: str) -> None:
    """Removes folders whose process is gone."""
    for name in os.listdir(base):
        folder = os.path.join(base, name)
        if not name.startswith(PREFIX) or not os.path.isdir(folder):
            continue
        with suppress(BlockingIOError, PermissionError):  # alive, or another user's
            os.close(_lock_file(os.path.join(folder, LOCK), wait=False))
            shutil.rmtree(folder, ignore_errors=True)


def _remove(path: str, lock: int, pid: int) -> None:
    if os.getpid() == pid:  # not in a forked child
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)
