"""Saves the input of the language-model head, which is in no checkpoint: the linear encodes it, or hooks around it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from hmt_deepspeed.activations.codecs import Codec, Fp8, Int8, Keep, SavedTensor
from hmt_deepspeed.activations.linear import EncodedInputs, patch_linear, unpatch_linear
from hmt_deepspeed.kernels.backward import is_transformed

__all__ = ["Count", "hold_head_input"]


# Told of each input that is held: the input, its held form, and what lives as long as that.
Count = Callable[[Tensor, SavedTensor, object], None]


def hold_head_input(
    head: nn.Module, name: str, codec: Codec, next_key: Callable[[], int], count: Count
) -> Callable[[], None]:
    """Let a codec hold what the head reads; returns what undoes it.

    Args:
        name: of the head, for messages.
        next_key: seed of the stochastic rounding of the next input.
        count: is told of each input that is held, see :data:`Count`; of one that is kept only if the head
            is a linear and no hooks of others hold what it saves.

    Raises:
        ValueError: a codec of 8 bits for a head that is no plain linear.
    """
    if isinstance(codec, Keep) and not isinstance(head, nn.Linear):
        return lambda: None
    if isinstance(codec, (Int8, Fp8)):
        if not isinstance(head, nn.Linear):
            raise ValueError(
                f"hmt.activations holds the input of {name} as {codec.choice!r}, but it is a "
                f'{type(head).__name__}; legal for that is "keep" or a swap. Change "lm_head".'
            )
        inputs = EncodedInputs(codec, next_key, lambda x, held: count(x, held, held.codes))
        patch_linear(head, inputs, name)
        return lambda: unpatch_linear(head)
    around = _Around(head, name, codec, count)
    # Plain functions: a deep copy of the head copies no backend.
    hooks = (
        head.register_forward_pre_hook(lambda *given: around.enter(*given)),
        head.register_forward_hook(lambda *given: around.leave(*given), always_call=True),
    )

    def undo() -> None:
        for hook in hooks:
            hook.remove()

    return undo


class _Around:
    """Saved-tensor hooks for the duration of a forward, which take the module's first argument only.

    A deep copy of the module, which has the same hooks, computes what it always did.
    """

    def __init__(self, module: nn.Module, name: str, codec: Codec, count: Count) -> None:
        self._module = weakref.ref(module)
        self._name, self._codec, self._count = name, codec, count
        self._entered: list[saved_tensors_hooks | None] = []

    @torch._disable_dynamo
    def enter(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if module is not self._module():
            return
        is_needed = torch.is_grad_enabled() and args and isinstance(args[0], Tensor)
        is_needed = is_needed and not is_transformed()
        if not is_needed or (isinstance(self._codec, Keep) and _others_hold()):
            self._entered.append(None)
            return
        storage = int(args[0].untyped_storage()._cdata)

        def pack(tensor: Tensor) -> SavedTensor | _Saved:
            if int(tensor.untyped_storage()._cdata) != storage:
                return _Saved(tensor, self._name)
            held = self._codec.encode(tensor, tuple(range(tensor.dim() - 1)), name=self._name)
            self._count(tensor, held, held)
            return held

        hooks = saved_tensors_hooks(pack, _unpack)
        hooks.__enter__()
        self._entered.append(hooks)

    @torch._disable_dynamo
    def leave(self, module: nn.Module, *_: Any) -> None:
        hooks = self._entered.pop() if module is self._module() else None
        if hooks is not None:
            hooks.__exit__()


def _others_hold() -> bool:
    """Whether what is saved now goes to somebody's hooks: a checkpoint's, or a user's."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


class _Saved:
    """The saved weight: the tensor itself, with autograd's check, which hooks turn off."""

    def __init__(self, tensor: Tensor, name: str) -> None:
        self._tensor, self._version, self._name = tensor, tensor._version, name

    def decode(self) -> Tensor:
        if self._tensor._version != self._version:
            raise RuntimeError(
                f"what {self._name} saved for backward has been modified by an inplace operation: its weight "
                f"is at version {self._tensor._version}, expected {self._version}. Step after backward."
            )
        return self._tensor


def _unpack(packed: SavedTensor | _Saved) -> Tensor:
    return packed.decode()
