"""Bytes per second of an SSD, all the way to the device: reads, writes and both at once."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from torch import Tensor

from hmt_deepspeed.memory.file_io import FileIO
from hmt_deepspeed.memory.own_folder import OwnFolder
from hmt_deepspeed.memory.transfer import TransferEngine
from hmt_deepspeed.zero.planning.timing import rate

__all__ = ["disk_fields"]


def disk_fields(
    engine: TransferEngine, file_io: FileIO, folder: str, nbytes: int, seconds: float
) -> dict[str, Any]:
    """The fields of a :class:`~hmt_deepspeed.planner.hardware.Machine` whose one SSD (or array) the folder is on.

    Args:
        engine: gives two page-locked buffers. nbytes: of a file. seconds: for each of three measurements.

    Raises:
        ValueError: the folder has no room for two files.
    """
    own = OwnFolder(folder)
    try:
        free = shutil.disk_usage(own.path).free
        if free < 2 * nbytes:
            raise ValueError(
                f"{folder} has {free} bytes free; legal: at least {2 * nbytes}, for two files to measure "
                "with. Free some, or name another folder."
            )
        buffers = [engine.pool.take(nbytes, "profile, file") for _ in range(2)]
        paths = [os.path.join(own.path, name) for name in ("read", "written")]
        for path, buffer in zip(paths, buffers, strict=True):
            buffer.memory.zero_()
            Path(path).touch()
            os.truncate(path, buffer.memory.numel())
            _write(file_io, path, buffer.memory)
        read, write, mixed = _disk_rates(file_io, paths, [b.memory for b in buffers], seconds)
        for buffer in buffers:
            engine.pool.release(buffer)
    finally:
        own.close()
    rates = {"ssd_read": read, "ssd_write": write, "ssd_mixed": min(mixed, read + write)}
    return {"num_ssds": 1, "ssd_capacity": free, **rates}


def _write(file_io: FileIO, path: str, memory: Tensor) -> int:
    """All the way to the device, whatever caches the file I/O goes through."""
    file_io.write(path, memory)
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(
            descriptor, 0, 0, os.POSIX_FADV_DONTNEED
        )  # so that a read finds none of it
    finally:
        os.close(descriptor)
    return memory.numel()


def _read(file_io: FileIO, path: str, memory: Tensor) -> int:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
    file_io.read(path, memory)
    return memory.numel()


def _disk_rates(
    file_io: FileIO, paths: Sequence[str], memories: Sequence[Tensor], seconds: float
) -> tuple[float, float, float]:
    """Bytes/s of reads alone, of writes alone and of both together."""
    (source, target), (incoming, outgoing) = paths, memories
    with ThreadPoolExecutor(1, "hmt profile") as other:

        def mixed() -> int:
            written = other.submit(_write, file_io, target, outgoing)
            return _read(file_io, source, incoming) + written.result()

        return (
            rate(lambda: _read(file_io, source, incoming), seconds),
            rate(lambda: _write(file_io, target, outgoing), seconds),
            rate(mixed, seconds),
        )
