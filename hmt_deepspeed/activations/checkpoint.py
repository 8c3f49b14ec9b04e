"""One call of a checkpointed function: torch's checkpoint, our two modes in it, our hooks around it."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from hmt_deepspeed.activations.codecs import Codec, SavedTensor
from hmt_deepspeed.activations.record import RecordMode
from hmt_deepspeed.activations.recording import Recording, storage_of
from hmt_deepspeed.activations.replay import ReplayMode

__all__ = ["SavedInputs", "activations_among", "run_checkpointed", "with_positional_activations"]


class SavedInputs:
    """Inputs that are saved now; one that several calls read is saved once.

    The key says which bytes: a storage whose identity the recordings keep from being given away, how often
    it was written to, and the view of it.
    """

    def __init__(self) -> None:
        self._held: WeakValueDictionary[tuple[Any, ...], Any] = WeakValueDictionary()

    def hold(self, tensor: Tensor, codec: Codec, key: int, name: str) -> tuple[SavedTensor, bool]:
        """The held form of batch x tokens x width, and whether it is new."""
        view = (tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
        identity = (storage_of(tensor), tensor._version, view, id(codec))
        held: SavedTensor | None = self._held.get(identity)
        if held is not None:
            return held, False
        held = codec.encode(tensor, tuple(range(tensor.dim() - 1)), key, name)
        self._held[identity] = held
        return held, True


def run_checkpointed(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    options: dict[str, Any],
    modes: tuple[RecordMode, ReplayMode],
    holders: Sequence[Callable[[Tensor], SavedTensor] | None],
) -> Any:
    """``fn(*args, **options)``, of which only what the modes and the holders hold is there until backward.

    Args:
        options: keyword arguments of ``fn`` and of ``torch.utils.checkpoint.checkpoint``.
        holders: of the activations among ``args``, in order; None: held as it is.
    """
    chosen = dict(zip(activations_among(args), holders, strict=False))
    held = any(chosen.values())
    with _around(modes[0].recording, chosen) if held else nullcontext():
        return torch_checkpoint(fn, *args, use_reentrant=False, context_fn=lambda: modes, **options)


def activations_among(args: Sequence[Any]) -> list[int]:
    """Positions, among the tensors of ``args``, of the hidden states and what else requires grad.

    The hidden states are the first floating-point tensor that is no parameter.
    """
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    found: list[int] = []
    for position, tensor in enumerate(tensors):
        is_weight = isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)
        if tensor.is_floating_point() and not is_weight and (not found or tensor.requires_grad):
            found.append(position)
    return found


def with_positional_activations(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """The same call with keyword arguments that require grad made positional, if no activation is.

    Of arguments in a closure, torch's checkpoint keeps the tensors themselves, out of reach of any holder.
    """
    given = {**fn.keywords, **kwargs} if isinstance(fn, functools.partial) else kwargs
    names = [k for k, v in given.items() if isinstance(v, Tensor) and v.requires_grad]
    if activations_among(args) or not names:
        return fn, args, kwargs
    inner = functools.partial(fn.func, *fn.args) if isinstance(fn, functools.partial) else fn
    rest = {name: value for name, value in given.items() if name not in names}
    split = len(args)

    def call(*values: Any) -> Any:
        return inner(*values[:split], **dict(zip(names, values[split:], strict=True)), **rest)

    return call, (*args, *(given[name] for name in names)), {}


def _around(
    recording: Recording, holders: dict[int, Callable[[Tensor], SavedTensor] | None]
) -> saved_tensors_hooks:
    """Hooks through which the checkpoint saves its tensor arguments, one after the other."""
    positions = itertools.count()

    def pack(tensor: Tensor) -> Tensor | SavedTensor:
        hold = holders.get(next(positions))
        if hold is None:
            return tensor
        recording.input_storages.append(StorageWeakRef(tensor.untyped_storage()))
        held = hold(tensor)
        recording.inputs.append(held)
        return held

    def unpack(packed: Tensor | SavedTensor) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        recording.bring_back()
        with torch.no_grad():
            return packed.decode()

    return saved_tensors_hooks(pack, unpack)
