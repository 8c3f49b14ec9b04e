"""Copies a snapshot's tensors to host memory, from where a thread writes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from hmt_deepspeed.memory.errors import PoolFull
from hmt_deepspeed.memory.growing import GrowingHostStore
from hmt_deepspeed.memory.pool import whole_pages
from hmt_deepspeed.memory.transfer import TransferEngine
from hmt_deepspeed.zero.saving.snapshot_writer import Staged

__all__ = ["Staging"]

# Bytes of the device that decoded states and the like may take on their way.
MOST_TEMPORARY = 64 * 2**20


class Staging:
    """Page-locked copies of one snapshot's tensors, one snapshot after another.

    :meth:`begin` and :meth:`stage` are for the training thread, the others for the one that writes.

    Args:
        transfers: to host memory.
    """

    def __init__(self, transfers: TransferEngine) -> None:
        self._transfers = transfers
        self._names: list[str] = []
        self._put: Callable[[str, Tensor], None]
        self._wait: Callable[[str], object] = lambda _: None  # until a tensor's copy is done
        self._store: GrowingHostStore | None = None
        self._living: set[int] = set()  # storages that are not made for a snapshot
        self._temporary_bytes = 0  # of tensors that were, and may be on their way

    @property
    def store(self) -> GrowingHostStore:
        assert self._store is not None, "opened first"
        return self._store

    def measure(self, stage_all: Callable[[], object]) -> int:
        """Bytes of host memory that it takes to stage everything that ``stage_all`` stages; nothing is copied."""
        sizes: list[int] = []
        self._put = lambda _, tensor: sizes.append(whole_pages(tensor.nbytes))
        stage_all()
        self._names.clear()
        return sum(sizes)

    def open(self, most: int, first: int) -> None:
        """Take host memory.

        Args:
            most: bytes that may be taken. first: bytes to take now.
        """
        self._store = GrowingHostStore(self._transfers, most, "free host memory", first_bytes=first)
        self._put, self._wait = self._store.put, self._store.host_bytes

    def begin(self, living: set[int]) -> None:
        """Before a snapshot's tensors are staged.

        Args:
            living: addresses of storages that live on after the snapshot, whatever is copied of them.
        """
        self._living, self._temporary_bytes = living, 0

    def stage(self, value: Any, weight: str | None = None) -> Any:
        """Start the copy of a tensor to the host; other values are taken as they are.

        Args:
            weight: name of the weight that the tensor is, the same in every snapshot.

        Returns:
            A :class:`Staged` in the place of a tensor.

        Raises:
            RuntimeError: there is no host memory for it.
        """
        if not isinstance(value, Tensor):
            return value
        name = f"tensor {len(self._names)}" if weight is None else weight
        value = value.detach().to(self._transfers.device).contiguous()
        if not value.dim():  # counts of updates in host memory go on during backward
            value = value.clone()
        try:
            self._put(name, value)
        except PoolFull as full:
            raise RuntimeError(
                f"hmt.snapshot stages everything that it writes in host memory, which is too small: {full}. "
                "Save checkpoints instead, or spread the states over more ranks."
            ) from full
        self._names.append(name)
        if value.untyped_storage().data_ptr() not in self._living:
            self._temporary_bytes += value.nbytes
            if self._temporary_bytes > MOST_TEMPORARY:
                self._wait(name)  # with it all before it have left the device
                self._temporary_bytes = 0
        return Staged(name, value.dtype, tuple(value.shape), weight is not None)

    def wait(self) -> None:
        """Returns when all copies are in host memory."""
        for name in self._names:
            self.store.host_bytes(name)

    def host_bytes(self, name: str) -> Tensor:
        """The bytes (uint8) of a staged tensor, once they are there."""
        return self.store.host_bytes(name)

    def forget(self) -> None:
        """The snapshot is written, or will not be: give its memory to the next."""
        for name in self._names:
            self.store.drop(name)
        self._names.clear()
