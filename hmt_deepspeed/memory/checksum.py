"""Checksums of bytes in memory, as text that says how it was made."""

from __future__ import annotations

import ctypes
import zlib
from importlib import import_module
from typing import Any

from torch import Tensor

from .errors import StoreError

try:  # 9 GB/s on one core where crc32 makes 1.7
    _xxhash: Any = import_module("xxhash")
except ImportError:
    _xxhash = None

__all__ = ["as_memoryview", "checksum"]


def as_memoryview(memory: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, not copied; valid as long as the tensor."""
    return memoryview((ctypes.c_char * memory.nbytes).from_address(memory.data_ptr())).cast("B")


def checksum(memory: Tensor, like: str | None = None) -> str:
    """``"xxh3:<16 digits>"`` where the package ``xxhash`` is installed, else ``"crc32:<8 digits>"``.

    Args:
        like: a checksum of the kind that is wanted.

    Raises:
        StoreError: that kind needs ``xxhash``.
    """
    if memory.numel() == 0:
        return "empty"
    data = as_memoryview(memory)
    if like is not None and like.startswith("xxh3:") and _xxhash is None:
        raise StoreError(
            f"{like} was made with the package xxhash, which is not installed here: pip install xxhash"
        )
    if _xxhash is None or (like is not None and like.startswith("crc32:")):
        return f"crc32:{zlib.crc32(data):08x}"
    return f"xxh3:{_xxhash.xxh3_64_hexdigest(data)}"
