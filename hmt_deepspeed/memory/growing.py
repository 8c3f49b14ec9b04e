"""Host memory that is taken as it is needed, up to a limit."""

from __future__ import annotations

import warnings

from torch import Tensor

from .errors import PoolFull
from .host import HostStore
from .pool import whole_pages
from .tiered import TieredStore
from .transfer import Arrival, TransferEngine

__all__ = ["GrowingHostStore"]

SLAB_BYTES = 2**28


class GrowingHostStore(TieredStore):
    """A :class:`HostStore` whose size nobody has to know: further ones join it until ``max_bytes``.

    What has once been taken is kept, so that a workload that repeats page-locks memory only at first.

    Args:
        engine: what moves tensors.
        max_bytes: of all host stores together.
        limit_name: what sets ``max_bytes``, for messages.
        slab_bytes: of each, except for larger tensors and what is left of ``max_bytes``.
        first_bytes: of the first, which is taken at once; by default ``slab_bytes``.
        remedy: what to do where they are too few, for messages.

    Attributes:
        pinned_bytes: taken so far. peak_bytes: occupied by tensors at most, summed over the host stores.
    """

    def __init__(
        self,
        engine: TransferEngine,
        max_bytes: int,
        limit_name: str,
        slab_bytes: int = SLAB_BYTES,
        first_bytes: int | None = None,
        remedy: str = "",
    ) -> None:
        self.engine, self.max_bytes = engine, max_bytes
        self._remedy = f". {remedy}" if remedy else ""
        self._limit_name, self._slab_bytes = limit_name, slab_bytes
        first = HostStore(engine, min(first_bytes or slab_bytes, max_bytes))
        super().__init__([first])
        self._hosts = [first]

    @property
    def pinned_bytes(self) -> int:
        return sum(host.pool.nbytes for host in self._hosts)

    @property
    def peak_bytes(self) -> int:
        return sum(host.pool.peak_bytes for host in self._hosts)

    def put(self, name: str, tensor: Tensor) -> None:
        """As :meth:`HostStore.put`; PoolFull when ``max_bytes`` leave no room, or no more can be page-locked."""
        try:
            super().put(name, tensor)
        except PoolFull:
            self._grow(name, tensor.nbytes)
            super().put(name, tensor)

    def reserve(self, name: str, nbytes: int) -> None:
        """As :meth:`HostStore.reserve`; PoolFull as of :meth:`put`."""
        for host in self._hosts:
            try:
                host.reserve(name, nbytes)
            except PoolFull:
                continue
            break
        else:
            self._grow(name, nbytes)
            host = self._hosts[-1]
            host.reserve(name, nbytes)
        self._home[name] = host

    def write(self, name: str, begin: int, flat: Tensor) -> None:
        """As :meth:`HostStore.write`."""
        self._host(name).write(name, begin, flat)

    def fetch(self, name: str, part: slice) -> Arrival:
        """As :meth:`HostStore.fetch`."""
        return self._host(name).fetch(name, part)

    def host_bytes(self, name: str) -> Tensor:
        """As :meth:`HostStore.host_bytes`."""
        return self._host(name).host_bytes(name)

    def _host(self, name: str) -> HostStore:
        store = self._store(name)
        assert isinstance(store, HostStore)
        return store

    def _grow(self, name: str, nbytes: int) -> None:
        left = self.max_bytes - self.pinned_bytes
        if left < whole_pages(nbytes):
            raise PoolFull(
                f"{name!r} needs {nbytes} bytes of host memory, but {self._limit_name} is "
                f"{self.max_bytes} bytes, of which {left} are not taken yet{self._remedy}"
            )
        try:
            host = HostStore(self.engine, min(max(self._slab_bytes, whole_pages(nbytes)), left))
        except RuntimeError as error:
            self.max_bytes = self.pinned_bytes  # nor is it tried again
            warnings.warn(
                f"{self._limit_name} comes to {self.max_bytes} bytes only: {error}", stacklevel=2
            )
            self._limit_name = "all that could be page-locked"
            message = f"{name!r} needs {nbytes} bytes of host memory: {error}{self._remedy}"
            raise PoolFull(message) from error
        self._hosts.append(host)
        self.tiers = (*self.tiers, host)
