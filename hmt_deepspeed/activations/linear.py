"""A linear that saves its input in 8 bits for its weight's gradient.

Ordinary backward saves the input ``X`` (T x n) for ``dW = D^T X``. Here its codes and scales are saved, and
the product is formed from them without decoding (:mod:`hmt_deepspeed.kernels.dequant_matmul`). For linears
whose backward is not projected: the language-model head, which is patched, and within checkpoints those
whose input the policy holds, for one call at a time. The gradient of the input does not depend on X and is
exact.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from hmt_deepspeed.activations.codecs import Fp8, Int8, SavedBlocks
from hmt_deepspeed.kernels.backward import asked_of, is_transformed
from hmt_deepspeed.kernels.dequant_matmul import dequant_matmul

__all__ = ["EncodedInputs", "SavingCodes", "patch_linear", "unpatch_linear"]


class _Seen:
    """Remembers which contents of which memory were encoded, without keeping them or the codes alive."""

    def __init__(self, x: Tensor, codes: Tensor, scales: Tensor) -> None:
        self._storage = StorageWeakRef(x.untyped_storage())  # its address is not used again
        self._view = self._view_of(x)
        self._codes, self._scales = weakref.ref(codes), weakref.ref(scales)

    def match(self, x: Tensor) -> tuple[Tensor, Tensor] | None:
        """The codes and scales of ``x``, if these are of it and some graph holds them."""
        codes, scales = self._codes(), self._scales()
        same = self._storage == StorageWeakRef(x.untyped_storage()) and self._view == self._view_of(
            x
        )
        return (codes, scales) if same and codes is not None and scales is not None else None

    @staticmethod
    def _view_of(x: Tensor) -> tuple[object, ...]:
        return x.dtype, x._version, x.storage_offset(), tuple(x.shape), x.stride()


class EncodedInputs:
    """Encodes the inputs of linears; what consecutive calls read is encoded once.

    Args:
        codec: of the inputs.
        next_key: seed of the stochastic rounding of the next input.
        count: told of each input that is encoded, and of what it is held as.

    Attributes:
        num_encoded: inputs encoded so far.
    """

    def __init__(
        self,
        codec: Int8 | Fp8,
        next_key: Callable[[], int],
        count: Callable[[Tensor, SavedBlocks], None] = lambda *_: None,
    ) -> None:
        self.codec, self.next_key, self._count = codec, next_key, count
        self.num_encoded = 0
        self._last: _Seen | None = None

    def encode(self, x: Tensor, name: str) -> tuple[Tensor, Tensor]:
        """Codes and scales of the input of one call, ... x n, as tokens x n.

        Raises:
            ValueError: neither fp32 nor bf16 nor fp16.
        """
        found = None if self._last is None else self._last.match(x)
        if found is not None:
            return found
        held = self.codec.encode(x, tuple(range(x.dim() - 1)), self.next_key(), name)
        self.num_encoded += 1
        self._last = _Seen(x, held.codes, held.scales)
        self._count(x, held)
        return held.codes, held.scales


_REFUSAL = (
    "create_graph=True asks for a weight's gradient that can be differentiated again, but hmt.activations holds the "
    'input of its linear in 8 bits. Hold it as it is: "keep" for lm_head or attention_output. For gradients of '
    "inputs alone call torch.autograd.grad(loss, inputs, create_graph=True)."
)


class _EncodedInputLinear(torch.autograd.Function):
    """``Y = X W^T + b`` that saves the codes of ``X``."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        codes: Tensor,
        scales: Tensor,
        block_size: int,
    ) -> Tensor:
        # The Parameter itself is saved: under ZeRO-3 its data is gathered again before backward.
        ctx.save_for_backward(weight, codes, scales)
        ctx.block_size, ctx.input_dtype = block_size, x.dtype  # type: ignore[attr-defined]
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight, codes, scales = ctx.saved_tensors  # type: ignore[attr-defined]
        needs = ctx.needs_input_grad  # type: ignore[attr-defined]
        flat = grad.reshape(-1, grad.shape[-1])
        asked = asked_of(ctx.next_functions[1][0])  # type: ignore[attr-defined]  # of the weight
        if asked is not None and torch.is_grad_enabled():
            raise ValueError(_REFUSAL)
        dx = dw = db = None
        with torch.autocast(grad.device.type, enabled=False):  # every cast is written here
            if needs[0]:
                dx = (grad @ weight.to(grad.dtype)).to(ctx.input_dtype)  # type: ignore[attr-defined]
            if asked is not None:
                block_size = ctx.block_size  # type: ignore[attr-defined]
                dw = dequant_matmul(flat, codes, scales, block_size, weight.dtype)
            if needs[2]:
                db = flat.sum(0)
        return dx, dw, db, None, None, None


class SavingCodes(TorchFunctionMode):
    """Within it, an ordinary linear of ``x`` saves the codes of x in place of x.

    Whatever forward the module has that calls it, be it an optimizer's: what is projected is computed below
    autograd and goes by unseen, as does a linear with a frozen weight.

    Args:
        x: ... x n, the tensor itself. held: the same as tokens x n.
    """

    def __init__(self, x: Tensor, held: SavedBlocks) -> None:
        super().__init__()
        self._x, self._held = x, held

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_ours = func is torch._C._nn.linear and args and args[0] is self._x
        if is_ours and torch.is_grad_enabled():
            return self._linear(*args, **kwargs)
        return func(*args, **kwargs)

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if not weight.requires_grad:
            return F.linear(x, weight, bias)
        held = self._held
        y: Tensor = _EncodedInputLinear.apply(
            x, weight, bias, held.codes, held.scales, held.block_size
        )
        return y


# Weak: a model that is dropped takes its inputs along; a deep copy of a patched module is not in it and
# computes an ordinary linear.
_PATCHED: WeakKeyDictionary[nn.Module, tuple[EncodedInputs, str]] = WeakKeyDictionary()


def patch_linear(module: nn.Linear, inputs: EncodedInputs, name: str) -> None:
    """Let a linear hold its input encoded. Without grad mode or with a frozen weight it computes what it
    always did and encodes nothing.

    Args:
        name: of the module, for messages.

    Raises:
        ValueError: its forward is not exactly ``F.linear(x, weight, bias)``.
    """
    if type(module).forward is not nn.Linear.forward or "forward" in vars(module):
        raise ValueError(
            f"{name} ({type(module).__name__}) has a forward of its own, so its input cannot be held in "
            f"{inputs.codec.choice}; legal: an nn.Linear, not patched by others. Use keep for it"
        )
    _PATCHED[module] = (inputs, name)
    module.forward = MethodType(_encoded_forward, module)  # type: ignore[method-assign]


def unpatch_linear(module: nn.Linear) -> None:
    """Undo :func:`patch_linear`. A no-op for a module that is not patched."""
    if _PATCHED.pop(module, None) is not None:
        vars(module).pop("forward", None)


def _encoded_forward(self: nn.Linear, x: Tensor) -> Tensor:
    patched = _PATCHED.get(self)
    wants_grad = torch.is_grad_enabled() and self.weight.requires_grad
    if patched is None or not wants_grad or is_transformed():
        return F.linear(x, self.weight, self.bias)
    inputs, name = patched
    codes, scales = inputs.encode(x, f"input of {name}")
    y: Tensor = _EncodedInputLinear.apply(
        x, self.weight, self.bias, codes, scales, inputs.codec.block_size
    )
    return y
