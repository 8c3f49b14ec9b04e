"""Several stores as one: each tensor goes to the first that has room."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from .errors import PoolFull

__all__ = ["Store", "TieredStore"]


class Store(Protocol):
    """Interface of all stores; see ``HostStore`` for what each verb promises."""

    def put(self, name: str, tensor: Tensor) -> None: ...

    def prefetch(self, name: str) -> None: ...

    def get(self, name: str) -> Tensor: ...

    def drop(self, name: str) -> None: ...

    def close(self) -> None: ...


class TieredStore:
    """Host first, SSD for what the host cannot hold. Several threads may use it, each name by one at a time.

    Args:
        tiers: fastest first. The last one's error is raised when none has room.
    """

    def __init__(self, tiers: Sequence[Store]) -> None:
        if not tiers:
            raise ValueError("a tiered store needs at least one tier, got none")
        self.tiers = tuple(tiers)
        self._home: dict[str, Store] = {}

    def put(self, name: str, tensor: Tensor) -> None:
        """As the tier's; ValueError if any tier has the name."""
        if name in self._home:
            raise ValueError(f"{name!r} is already stored: drop it first")
        for tier in self.tiers:
            try:
                tier.put(name, tensor)
            except PoolFull:
                if tier is self.tiers[-1]:
                    raise
                continue
            self._home[name] = tier
            return

    def prefetch(self, name: str) -> None:
        """As the tier's."""
        self._store(name).prefetch(name)

    def get(self, name: str) -> Tensor:
        """As the tier's."""
        return self._store(name).get(name)

    def drop(self, name: str) -> None:
        """As the tier's."""
        self._store(name).drop(name)
        del self._home[name]

    def close(self) -> None:
        """Closes every tier."""
        self._home.clear()
        for tier in self.tiers:
            tier.close()

    def _store(self, name: str) -> Store:
        if name not in self._home:
            raise KeyError(f"{name!r} is not in any tier")
        return self._home[name]
