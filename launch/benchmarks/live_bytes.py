"""Bytes of the storages that computation makes, alive at once: what an allocator would have had to hold."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["LiveBytes"]


class LiveBytes(TorchDispatchMode):
    """Counts storages made inside the ``with`` block, each once however many views it has.

    A storage that an operator got from outside is not its own: parameters, and the pools of ``memory/``
    once they exist, do not count, so run what is measured once before.

    Attributes:
        now, peak: bytes.
    """

    def __init__(self) -> None:
        super().__init__()
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.now = self.peak = 0

    def reset_peak(self) -> None:
        self._sweep()
        self.peak = self.now

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        given = {storage._cdata for storage in _storages((args, kwargs))}
        result = func(*args, **kwargs)
        self._sweep()
        for storage in _storages(result):
            if storage._cdata not in given and storage._cdata not in self._alive:
                self._alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
                self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        return result

    def _sweep(self) -> None:
        for key in [key for key, (ref, _) in self._alive.items() if ref.expired()]:
            self.now -= self._alive.pop(key)[1]


def _storages(tree: Any) -> list[torch.UntypedStorage]:
    """Of the tensors that have memory."""
    tensors = [t for t in tree_leaves(tree) if isinstance(t, Tensor) and not t.is_meta]
    return [tensor.untyped_storage() for tensor in tensors]
