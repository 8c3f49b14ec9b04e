"""Tensors kept in pinned host memory under names."""

from __future__ import annotations

import threading

from torch import Tensor

from .transfer import Arrival, Transfer, TransferEngine

__all__ = ["HostStore"]


class HostStore:
    """Keeps tensors in ``max_bytes`` of pinned host memory, allocated at once and never more.

    A name's life: put, then any number of prefetch and get, then drop. Safe to use from several threads.

    Args:
        engine: what moves them, and the device they come from and go to.
        max_bytes: of host memory; each tensor occupies whole pages of 4096 bytes.

    Attributes:
        pool: its memory, with ``used_bytes`` and ``peak_bytes``.
    """

    def __init__(self, engine: TransferEngine, max_bytes: int) -> None:
        self.engine = engine
        self.pool = engine.new_pool(max_bytes, "host store")
        self._transfers: dict[str, Transfer] = {}
        self._lock = threading.Lock()

    def put(self, name: str, tensor: Tensor) -> None:
        """Starts the copy of a tensor to the host; it may be freed at once, not written to.

        Raises:
            ValueError: the name is taken, or see :meth:`TransferEngine.put`.
            PoolFull: no room within ``max_bytes``.
        """
        if name in self:
            raise ValueError(f"{name!r} is already in the host store: drop it first")
        self._keep(name, self.engine.put(tensor, name, self.pool))

    def _keep(self, name: str, transfer: Transfer) -> None:
        with self._lock:
            if self._transfers.setdefault(name, transfer) is transfer:
                return
        self.engine.drop(transfer)
        raise ValueError(f"{name!r} was put into the host store twice at the same time")

    def prefetch(self, name: str) -> None:
        """Starts the copy back to the device. KeyError for an unknown name; others are raised by get."""
        self.engine.prefetch(self._transfer(name))

    def get(self, name: str) -> Tensor:
        """The tensor, as put; see :meth:`TransferEngine.get`. KeyError for an unknown name."""
        return self.engine.get(self._transfer(name))

    def reserve(self, name: str, nbytes: int) -> None:
        """Takes room for bytes that :meth:`write` brings. ValueError and PoolFull as :meth:`put`."""
        self._keep(name, self.engine.reserve(nbytes, name, self.pool))

    def write(self, name: str, begin: int, flat: Tensor) -> None:
        """As :meth:`TransferEngine.write`. KeyError for an unknown name."""
        self.engine.write(self._transfer(name), begin, flat)

    def fetch(self, name: str, part: slice) -> Arrival:
        """As :meth:`TransferEngine.fetch`. KeyError for an unknown name."""
        return self.engine.fetch(self._transfer(name), part)

    def host_bytes(self, name: str) -> Tensor:
        """Its bytes (uint8), once they are here; see :meth:`TransferEngine.host_bytes`. KeyError: unknown."""
        return self.engine.host_bytes(self._transfer(name))

    def drop(self, name: str) -> None:
        """Forgets a tensor. KeyError for an unknown name."""
        with self._lock:
            transfer = self._transfers.pop(name, None)
        if transfer is None:
            raise KeyError(f"{name!r} is not in the host store")
        self.engine.drop(transfer)

    def close(self) -> None:
        """Forgets everything and frees the memory. Idempotent."""
        for name in list(self._transfers):
            self.drop(name)
        self.pool.close()

    def __contains__(self, name: str) -> bool:
        return name in self._transfers

    def _transfer(self, name: str) -> Transfer:
        transfer = self._transfers.get(name)
        if transfer is None:
            raise KeyError(f"{name!r} is not in the host store")
        return transfer
