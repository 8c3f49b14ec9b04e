"""Stores a nested state with its tensors as raw bytes in a file of their own, written outside the interpreter's lock.

``torch.save`` copies and checksums under the interpreter's lock; a file written beside training must not. So
the tensors' bytes go to ``NAME.bin`` by plain writes, and ``NAME.pt`` holds the state with a record in each
tensor's place. A record with a ``base`` holds the difference to bytes of an earlier file, see :func:`encode`.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from hmt_deepspeed.memory.checksum import as_memoryview

__all__ = ["RECORD", "ByteFile", "decode", "encode", "map_file", "map_tensors", "read_state"]

RECORD = "hmt.tensor"  # the key that tells a record from a dict of the state
_CHUNK = 2**24  # bytes that are encoded at once
_SAMPLE = 2**16  # bytes that show whether a plane is worth compressing
_WORTH = 0.9
_ALIGNMENT = 64


class ByteFile:
    """A file written from front to back, with its checksum; on disk after :meth:`close`.

    Attributes:
        size: bytes so far. sha256: of them, after :meth:`close`.
    """

    def __init__(self, path: str) -> None:
        self._descriptor = os.open(
            path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644
        )
        self._digest = hashlib.sha256()
        self.size = 0
        self.sha256 = ""

    def append(self, data: memoryview | bytes) -> int:
        """Append all of ``data``.

        Returns:
            Byte offset where it begins, aligned so that any dtype may be read there.
        """
        self._write(bytes(-self.size % _ALIGNMENT))
        begin = self.size
        self._write(data)
        return begin

    def _write(self, data: memoryview | bytes) -> None:
        view = memoryview(data)
        self._digest.update(view)
        while view:
            written = os.write(self._descriptor, view)
            view = view[written:]
        self.size += len(data)

    def close(self) -> None:
        """Makes it durable."""
        os.fsync(self._descriptor)
        os.close(self._descriptor)
        self.sha256 = self._digest.hexdigest()

    def abandon(self) -> None:
        """Closes it as it is, after an error."""
        os.close(self._descriptor)


def map_tensors(state: Any, change: Callable[[Any], Any]) -> Any:
    """A copy of nested dicts, lists and tuples with ``change`` applied to every leaf."""
    if isinstance(state, dict):
        return {key: map_tensors(value, change) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)(map_tensors(value, change) for value in state)
    return change(state)


def read_state(path: str) -> dict[str, Any]:
    """A state with its tensors memory-mapped; in place of a difference a function that makes the tensor.

    Args:
        path: of a file that ``torch.save`` or a snapshot wrote.
    """
    state: dict[str, Any] = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    return _filled(state, os.path.dirname(path), {})


def _filled(state: Any, folder: str, files: dict[str, Tensor]) -> Any:
    if isinstance(state, dict) and RECORD in state:
        made = partial(_tensor, state[RECORD], folder, files)
        return made if "base" in state[RECORD] else made()
    if isinstance(state, dict):
        return {key: _filled(value, folder, files) for key, value in state.items()}
    if isinstance(state, list):
        return [_filled(value, folder, files) for value in state]
    return state


def _tensor(record: dict[str, Any], folder: str, files: dict[str, Tensor]) -> Tensor:
    dtype = getattr(torch, record["dtype"])
    shape, nbytes = record["shape"], prod(record["shape"]) * dtype.itemsize
    if not nbytes:
        return torch.empty(shape, dtype=dtype)
    data = _mapped(os.path.join(folder, record["file"]), files)
    if "base" not in record:
        flat = data[record["offset"] : record["offset"] + nbytes]
    else:
        path = os.path.join(folder, os.pardir, record["base"]["tag"], record["base"]["file"])
        begin = record["base"]["offset"]
        base = _mapped(path, files)[begin : begin + nbytes]
        flat = decode(data, record["planes"], base, dtype.itemsize)
    return flat.view(dtype).view(shape)


def _mapped(path: str, files: dict[str, Tensor]) -> Tensor:
    if path not in files:
        files[path] = map_file(path)
    return files[path]


def map_file(path: str) -> Tensor:
    """The bytes of a file as a flat uint8 tensor, memory-mapped and private to the reader."""
    return torch.from_file(path, size=os.path.getsize(path), dtype=torch.uint8)


# -- differences ------------------------------------------------------------------------------------


def encode(new: Tensor, base: Tensor, itemsize: int, file: ByteFile) -> list[list[int]]:
    """Append the lossless difference between two tensors to a file.

    The exclusive or of neighbouring numbers has zeros where sign, exponent and leading bits agree. Byte by
    byte of an element, each plane is deflated where that saves a tenth.

    Args:
        new, base: flat uint8, equally long. itemsize: bytes of an element.

    Returns:
        ``[offset, stored bytes, deflated]`` for each plane of each chunk, in one list.
    """
    planes = []
    for begin in range(0, new.numel(), _CHUNK):
        changed = new[begin : begin + _CHUNK] ^ base[begin : begin + _CHUNK]
        for plane in changed.view(-1, itemsize).t().contiguous():
            data: memoryview | bytes = as_memoryview(plane)
            sample = zlib.compress(data[:_SAMPLE], 1)
            deflates = len(sample) < _WORTH * min(len(data), _SAMPLE)
            data = zlib.compress(data, 1) if deflates else data
            planes.append([file.append(data), len(data), int(deflates)])
    return planes


def decode(data: Tensor, planes: list[list[int]], base: Tensor, itemsize: int) -> Tensor:
    """Undo :func:`encode`.

    Args:
        data: the file's bytes, flat uint8. planes: what :func:`encode` returned.
        base: flat uint8. itemsize: bytes of an element.

    Returns:
        Flat uint8, as long as ``base``.
    """
    out = torch.empty_like(base)
    stored = iter(planes)
    for begin in range(0, base.numel(), _CHUNK):
        part = base[begin : begin + _CHUNK]
        changed = torch.stack(list(_planes(data, stored, itemsize)))
        out[begin : begin + _CHUNK] = changed.t().reshape(-1) ^ part
    return out


def _planes(data: Tensor, stored: Iterator[list[int]], itemsize: int) -> Iterator[Tensor]:
    for _ in range(itemsize):
        offset, size, deflated = next(stored)
        plane = data[offset : offset + size]
        if deflated:
            raw = bytearray(zlib.decompress(as_memoryview(plane)))
            plane = torch.frombuffer(raw, dtype=torch.uint8)
        yield plane
