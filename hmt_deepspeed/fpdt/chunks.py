"""Stores chunks between their uses, on the host or on the device, under the same verbs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hmt_deepspeed.fpdt.schedule import Unit
from hmt_deepspeed.memory.host import HostStore
from hmt_deepspeed.memory.pool import whole_pages
from hmt_deepspeed.memory.tiered import Store
from hmt_deepspeed.memory.transfer import TransferEngine

__all__ = ["AttentionShape", "ChunkMemory", "Chunks", "DeviceStore", "host_bytes"]


@dataclass(frozen=True)
class AttentionShape:
    """Sizes of one attention, as far as its chunks are concerned.

    Attributes:
        itemsize: bytes of an element of Q, K and V.
    """

    batch: int
    length: int
    query_heads: int
    key_heads: int
    head_size: int
    itemsize: int


def host_bytes(shape: AttentionShape, chunk_size: int, backward: bool) -> tuple[int, int]:
    """Host bytes that one layer's chunks take at most, and those of its largest unit.

    Forward holds K and V; backward also Q, O, dO, the log-sum-exp and dQ (both fp32).
    """
    chunks, tokens = -(-shape.length // chunk_size), min(chunk_size, shape.length)
    rows = shape.batch * tokens
    keys = whole_pages(rows * shape.key_heads * shape.head_size * shape.itemsize)
    queries = whole_pages(rows * shape.query_heads * shape.head_size * shape.itemsize)
    sums = whole_pages(rows * shape.query_heads * shape.head_size * 4)
    each = 2 * keys
    largest = each
    if backward:
        query_unit = 3 * queries + whole_pages(rows * shape.query_heads * 4) + sums
        each, largest = each + query_unit, max(largest, query_unit)
    return chunks * each, largest


class DeviceStore:
    """Keeps tensors where they are. The verbs of :class:`hmt_deepspeed.memory.tiered.Store`."""

    def __init__(self) -> None:
        self._tensors: dict[str, Tensor] = {}

    def put(self, name: str, tensor: Tensor) -> None:
        """Remembers a tensor. ValueError: the name is taken."""
        if name in self._tensors:
            raise ValueError(f"{name!r} is already stored: drop it first")
        self._tensors[name] = tensor

    def prefetch(self, name: str) -> None:
        """Nothing to do. KeyError for an unknown name."""
        self._tensors[name]

    def get(self, name: str) -> Tensor:
        """The tensor itself. KeyError for an unknown name."""
        return self._tensors[name]

    def drop(self, name: str) -> None:
        """Forgets a tensor. KeyError for an unknown name."""
        del self._tensors[name]

    def close(self) -> None:
        """Forgets everything."""
        self._tensors.clear()


class ChunkMemory:
    """The store that the layers of one model share, one layer at a time.

    Host memory is allocated at first use for the layer at hand, and again only when a longer sequence
    comes.

    Args:
        offload: keep chunks in pinned host memory; else they stay on the device.

    Attributes:
        engine: what moves the chunks, with its byte and wait counters; None before first use, and
            without offload.
    """

    def __init__(self, offload: bool) -> None:
        self.offload = offload
        self.engine: TransferEngine | None = None
        self._host: HostStore | None = None

    def open(
        self, device: torch.device, shape: AttentionShape, chunk_size: int, backward: bool
    ) -> Chunks:
        """An empty store for one layer; close it with ``with``."""
        if not self.offload:
            return Chunks(DeviceStore())
        nbytes, largest = host_bytes(shape, chunk_size, backward)
        # Buffers whose copies are still running are not free yet, and a short last chunk leaves gaps.
        nbytes += 3 * largest
        if self._host is None or self._host.pool.nbytes < nbytes or self._moves_other(device):
            self.close()
            self.engine = TransferEngine(device, 1, outgoing_bytes=largest)
            self._host = HostStore(self.engine, nbytes)
        return Chunks(self._host)

    def close(self) -> None:
        """Frees the host memory. Idempotent."""
        if self._host is not None and self.engine is not None:
            self._host.close()
            self.engine.close()
        self._host = self.engine = None

    def _moves_other(self, device: torch.device) -> bool:
        return self.engine is not None and self.engine.device != device


class Chunks:
    """Tensors of numbered chunks in a store; leaving the ``with`` block drops what is left."""

    TENSORS: ClassVar = {"kv": ("k", "v"), "query": ("q", "o", "g", "l", "d")}

    def __init__(self, store: Store) -> None:
        self._store = store
        self._names: set[str] = set()

    def put(self, kind: str, chunk: int, tensor: Tensor) -> None:
        """Stores a tensor under one of the letters of ``TENSORS``; it may be freed, not written to."""
        name = f"{kind}{chunk}"
        self._store.put(name, tensor)
        self._names.add(name)

    def prefetch(self, unit: Unit) -> None:
        """Starts the copies of a unit's tensors to the device."""
        for kind in self.TENSORS[unit.kind]:
            if (kind, unit.chunk) in self:
                self._store.prefetch(f"{kind}{unit.chunk}")

    def get(self, kind: str, chunk: int) -> Tensor:
        """The tensor on the device. KeyError when it was not put."""
        return self._store.get(f"{kind}{chunk}")

    def drop(self, kind: str, chunk: int) -> None:
        """Forgets a tensor. KeyError when it was not put."""
        name = f"{kind}{chunk}"
        self._store.drop(name)
        self._names.remove(name)

    def __contains__(self, key: tuple[str, int]) -> bool:
        return f"{key[0]}{key[1]}" in self._names

    def __enter__(self) -> Chunks:
        return self

    def __exit__(self, *error: object) -> None:
        for name in sorted(self._names):
            self._store.drop(name)
        self._names.clear()
