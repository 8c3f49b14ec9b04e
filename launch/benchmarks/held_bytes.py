"""Bytes that a forward leaves for its backward: storages counted as they are, not estimated."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class FreshStorages(TorchDispatchMode):
    """Refers weakly to the storages that operations allocate while the mode is on.

    What an operation returns of its arguments' memory is no allocation: parameters, gradients and views
    of them are never counted. Below backend modes, so that it sees what those allocate too.
    """

    def __init__(self) -> None:
        super().__init__()
        self._found: dict[str, dict[int, tuple[StorageWeakRef, int]]] = {"device": {}, "host": {}}
        self._place = "device"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = {_identity(t) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        out = func(*args, **kwargs)
        for tensor in tree_leaves(out):
            if not isinstance(tensor, Tensor) or tensor.is_meta:  # which has no memory
                continue
            if _identity(tensor) not in given:
                storage = tensor.untyped_storage()
                entry = (StorageWeakRef(storage), storage.nbytes())
                self._found[self._place][_identity(tensor)] = entry
        return out

    @contextmanager
    def on_host(self) -> Iterator[None]:
        """What is allocated within is host memory, also where the device is a CPU."""
        before, self._place = self._place, "host"
        try:
            yield
        finally:
            self._place = before

    def forget(self, *tensors: Tensor) -> None:
        """Leave out the storages of these."""
        for tensor in tensors:
            for found in self._found.values():
                found.pop(_identity(tensor), None)

    def alive(self, place: str = "device") -> int:
        """Bytes of those that still exist."""
        return sum(size for ref, size in self._found[place].values() if not ref.expired())


def _identity(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


class CountedSaveOnCpu(save_on_cpu):
    """torch's ``save_on_cpu``, whose copies count as host memory."""

    def __init__(self, storages: FreshStorages) -> None:
        super().__init__(pin_memory=True)  # on a CPU the only kind that copies
        pack = self.pack_hook

        def pack_to_host(tensor: Tensor) -> Any:
            with storages.on_host():
                return pack(tensor)

        self.pack_hook = pack_to_host


def held_for_backward(
    model: nn.Module,
    forward: Callable[[], Tensor],
    around: Callable[[FreshStorages], Any],
    finish_copies: Callable[[], None],
) -> dict[str, int]:
    """Bytes alive after ``forward`` that the model allocated up to its logits; those are left out, and so
    is the loss.

    Args:
        model: with an ``lm_head``. forward: returns the loss. around: a context for it.
        finish_copies: called after it, ends the copies that are still on their way to the host.
    """
    storages = FreshStorages()

    def after_head(module: nn.Module, args: Any, output: Tensor) -> None:
        storages.forget(output)
        storages.__exit__(None, None, None)

    hook = model.lm_head.register_forward_hook(after_head)  # type: ignore[union-attr]
    try:
        storages.__enter__()
        with around(storages):
            loss = forward()
        finish_copies()
        found = {place: storages.alive(place) for place in ("device", "host")}
        loss.backward()
    finally:
        hook.remove()
    return found
