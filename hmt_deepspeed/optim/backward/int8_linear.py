"""Linear layers and experts whose weights are stored in INT8 and decoded for each product (HMT paper, Algorithm 1).

A weight is stored as codes and scales (:mod:`hmt_deepspeed.kernels.int8_weight`), about half
of bf16's bytes. Forward decodes the matrix for its product and drops it; backward decodes again for the
input's gradient. Updates go from codes to codes, a few rows or a tile at a time, rounded
stochastically: no fp32 or bf16 copy outlives one linear's product. A 3-D weight of experts is decoded whole.

The Parameter stays what hooks, gradients and optimizers hang on, with its shape and dtype; its data is
one NaN seen m x n times, so that whoever reads the weight past the module notices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.nn import functional as F

from hmt_deepspeed import ownership
from hmt_deepspeed.kernels.backward import is_transformed
from hmt_deepspeed.kernels.chunks import row_chunks
from hmt_deepspeed.kernels.int8_low_rank_update import int8_low_rank_updates_
from hmt_deepspeed.kernels.int8_weight import BLOCK, check_encoded, decode_weight, encode_weight
from hmt_deepspeed.optim.settings.assign import tied_weights

__all__ = [
    "Int8Weight",
    "check_encodable",
    "decoded",
    "dequantize",
    "encoded_linear",
    "encoded_weight",
    "encoded_weights",
    "quantize",
    "release",
    "stands_for",
]

_ATTRIBUTE = "_hmt_int8_weights"


class Int8Weight:
    """Codes and scales of one m x n weight, or E x m x n.

    Args:
        value: the weight, fp32 or bf16; rounded to the nearest codes.

    Attributes:
        codes: of the weight's shape, int8. scales: (E x) m x ceil(n / 256) fp32. dtype: what :meth:`decode` gives.
    """

    def __init__(self, value: Tensor) -> None:
        *rows, n = value.shape
        self.dtype = value.dtype
        self.codes = torch.empty(value.shape, dtype=torch.int8, device=value.device)
        self.scales = torch.empty(*rows, -(-n // BLOCK), device=value.device)
        self.hooks: list[Any] = []
        self.write_(value)

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes

    def decode(self) -> Tensor:
        """The weight in the model's dtype and its shape, fresh memory."""
        return decode_weight(self.codes, self.scales, self.dtype)

    def decode_rows(self, begin: int, end: int) -> Tensor:
        """fp32 values of a range of rows, of experts one below the other."""
        codes, scales = self.codes.flatten(0, -2), self.scales.flatten(0, -2)
        return decode_weight(codes[begin:end], scales[begin:end], torch.float32)

    def reader(self) -> Callable[[], Tensor]:
        """:meth:`decode` for a later backward, which refuses a weight updated in between as autograd
        does for one that it saved."""
        version = self.codes._version

        def decode() -> Tensor:
            if self.codes._version != version:
                raise RuntimeError(
                    "an INT8 weight needed for gradient computation was updated between forward and "
                    "backward; step the optimizer after the backward"
                )
            return self.decode()

        return decode

    def matrices(self) -> list[Int8Weight]:
        """The weights of one matrix each that it holds, in the same memory."""
        if self.codes.dim() == 2:
            return [self]
        found = []
        for codes, scales in zip(self.codes, self.scales, strict=True):
            one = copy(self)
            one.codes, one.scales = codes, scales
            found.append(one)
        return found

    def move(self, place: Callable[[Tensor], Tensor]) -> None:
        """Take what ``place`` gives for codes and scales: the same elsewhere."""
        self.codes, self.scales = place(self.codes), place(self.scales)

    # -- writing --------------------------------------------------------------------------------

    def write_(self, value: Tensor) -> None:
        """Take values of the weight's shape and any float dtype, rounded to the nearest codes."""
        codes, scales, rows = (t.flatten(0, -2) for t in (self.codes, self.scales, value))
        for chunk in row_chunks(*codes.shape):
            part = rows[chunk].to(codes.device, torch.float32).contiguous()
            codes[chunk], scales[chunk] = encode_weight(part)

    def load_(self, codes: Tensor, scales: Tensor) -> None:
        """Take codes and scales as they are.

        Raises:
            ValueError: of another shape or dtype.
        """
        check_encoded(codes, scales)
        if codes.shape != self.codes.shape:
            raise ValueError(
                f"the saved codes are {tuple(codes.shape)}, the weight is {tuple(self.codes.shape)}"
            )
        self.codes.copy_(codes)
        self.scales.copy_(scales)

    def _written(self) -> None:
        """Let autograd's version count know of a kernel that wrote past it."""
        if self.codes.is_cuda:
            torch.autograd.graph.increment_version(self.codes)


# -- modules --------------------------------------------------------------------------------------


def update_together_(
    encoded: Sequence[Int8Weight],
    update: Tensor,
    projections: Sequence[Tensor],
    lr: float | Tensor,
    weight_decay: float,
    **how: Any,
) -> None:
    """Updates of weights of one shape, B matrices in all, rounded stochastically.

    Args:
        how: rank, column_scale, keys, transposed and beside of :func:`int8_low_rank_updates_`, which says what the rest is.
    """
    codes, scales = [one.codes for one in encoded], [one.scales for one in encoded]
    int8_low_rank_updates_(codes, scales, update, projections, lr, weight_decay, **how)
    for one in encoded:
        one._written()


def encoded_weights(module: nn.Module) -> Mapping[str, Int8Weight]:
    """The INT8 weights of a module by the names of their Parameters in it."""
    found: Mapping[str, Int8Weight] = vars(module).get(_ATTRIBUTE, {})
    return found


def encoded_weight(module: nn.Module) -> Int8Weight | None:
    """The INT8 weight of a linear, or None."""
    return encoded_weights(module).get("weight")


def quantize(module: nn.Module, name: str = "weight") -> Int8Weight:
    """Replace a weight of a module by its codes; the memory of the weight is freed.

    State dicts go on holding the decoded weight (on the host: a save must not need the memory that
    INT8 spares) and load into the codes. A deep copy of the module has codes of its own.
    """
    weight = module.get_parameter(name)
    encoded = Int8Weight(weight.data)
    encoded.hooks = [
        module.register_state_dict_post_hook(partial(_decode_into_state_dict, name)),
        module.register_load_state_dict_pre_hook(partial(_open_for_loading, name)),
        module.register_load_state_dict_post_hook(partial(_encode_loaded, name)),
    ]
    vars(module).setdefault(_ATTRIBUTE, {})[name] = encoded
    weight.data = _placeholder(weight)
    return encoded


def dequantize(module: nn.Module, device: torch.device | None = None) -> None:
    """Undo :func:`quantize`: weights are the decoded ones, on ``device`` or where the codes are.

    A no-op for any other module.
    """
    for name, encoded in vars(module).pop(_ATTRIBUTE, {}).items():
        module.get_parameter(name).data = encoded.decode().to(device=device)
        for hook in encoded.hooks:
            hook.remove()


def release(model: nn.Module, device: torch.device | None = None) -> None:
    """:func:`dequantize` what nobody owns: modules of an engine that could not be built, and deep copies."""
    for module in model.modules():
        names = encoded_weights(module)
        if names and not any(ownership.is_owned(module.get_parameter(name)) for name in names):
            dequantize(module, device)


def check_encodable(
    model: nn.Module, weights: Mapping[str, Tensor], dtype: torch.dtype | None = None
) -> None:
    """Refuse weights that INT8 cannot store.

    Args:
        weights: what would be converted, by name.
        dtype: what the weights are cast to before, None for none.

    Raises:
        ValueError: no weight at all, fp16, or a weight that another module reads too.
    """
    given = "hmt.optimizer.weight_dtype is 'int8', but"
    if not weights:
        raise ValueError(
            f"{given} no weight has a projected backward, so there is no matrix to convert; legal: a "
            "model with an nn.Linear that target_modules and module_rules leave on lowrank_adamw. "
            'Change them, or use "auto".'
        )
    tied = tied_weights(model)
    for name, weight in weights.items():
        if (dtype or weight.dtype) not in (torch.float32, torch.bfloat16):
            raise ValueError(
                f"{given} {name} is {dtype or weight.dtype}; legal: float32 or bfloat16 models. Use bf16, or "
                '"auto".'
            )
        if name in tied:
            raise ValueError(
                f"{given} {name} is also {tied[name]} (tied), which would read no weight there; legal: "
                "weights of one module. Leave it to adamw in module_rules, or untie them."
            )


def _placeholder(weight: Tensor) -> Tensor:
    """One NaN in the shape of the weight; most in-place writes to it raise."""
    nan = torch.full((1,), torch.nan, dtype=weight.dtype, device=weight.device)
    return nan.expand(weight.shape)


def _decode_into_state_dict(
    name: str, module: nn.Module, state_dict: dict[str, Any], prefix: str, _: object
) -> None:
    encoded = encoded_weights(module).get(name)
    if encoded is not None and f"{prefix}{name}" in state_dict:
        state_dict[f"{prefix}{name}"] = encoded.decode().cpu()


def _open_for_loading(
    name: str, module: nn.Module, state_dict: Mapping[str, Any], prefix: str, *_: object
) -> None:
    """A real weight for as long as this module loads."""
    encoded = encoded_weights(module).get(name)
    if encoded is not None and f"{prefix}{name}" in state_dict:
        module.get_parameter(name).data = encoded.decode()


def _encode_loaded(name: str, module: nn.Module, _: object) -> None:
    encoded = encoded_weights(module).get(name)
    if encoded is not None:
        weight = module.get_parameter(name)
        if any(weight.stride()):
            encoded.write_(weight.data)
            weight.data = _placeholder(weight)


# -- forward and backward ---------------------------------------------------------------------------


class _Decoded(torch.autograd.Function):
    """The values of an INT8 weight, whose gradient goes to its Parameter."""

    generate_vmap_rule = True

    @staticmethod
    def forward(weight: Tensor, read: Callable[[], Tensor]) -> Tensor:
        return read()

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None

    @staticmethod
    def jvp(ctx: FunctionCtx, tangent: Tensor, _: None) -> Tensor:
        return tangent.clone()  # a view of an input must be one in forward too


def decoded(weight: Tensor, read: Callable[[], Tensor]) -> Tensor:
    """What ``read`` gives, as a function of the Parameter ``weight`` that can be differentiated by it any number of
    times. Whoever saves it for backward holds the decoded weight."""
    if not (torch.is_grad_enabled() or is_transformed()):
        return read()
    value: Tensor = _Decoded.apply(weight, read)
    return value


class _EncodedLinear(torch.autograd.Function):
    """``Y = X W^T + b`` of an INT8 weight with the whole gradient for its Parameter."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, x: Tensor, weight: Tensor, bias: Tensor | None, encoded: Int8Weight
    ) -> Tensor:
        ctx.save_for_backward(weight, *((x,) if weight.requires_grad else ()))
        ctx.reader, ctx.input_dtype = encoded.reader(), x.dtype  # type: ignore[attr-defined]
        return F.linear(x, encoded.decode(), bias)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        needs = ctx.needs_input_grad  # type: ignore[attr-defined]
        weight, *saved = ctx.saved_tensors  # type: ignore[attr-defined]
        flat = grad.reshape(-1, grad.shape[-1])
        dx = dw = None
        if needs[0]:
            value = decoded(weight, ctx.reader).to(grad.dtype)  # type: ignore[attr-defined]
            dx = (grad @ value).to(ctx.input_dtype)  # type: ignore[attr-defined]
        if needs[1]:
            (x,) = saved
            dw = flat.t() @ x.reshape(-1, x.shape[-1]).to(grad.dtype)
            dw = dw.to(weight.dtype)
        return dx, dw, flat.sum(0) if needs[2] else None, None


def encoded_linear(x: Tensor, weight: Tensor, bias: Tensor | None, encoded: Int8Weight) -> Tensor:
    """``F.linear`` with the decoded weight; ``weight`` is the Parameter that gets the gradient."""
    if is_transformed():
        return F.linear(x, decoded(weight, encoded.decode), bias)
    if not torch.is_grad_enabled():
        return F.linear(x, encoded.decode(), bias)
    y: Tensor = _EncodedLinear.apply(x, weight, bias, encoded)
    return y


def stands_for(given: Tensor, weight: Tensor | None) -> bool:
    """Whether ``given`` is what ``functional_call`` was handed for the Parameter of an INT8 weight: the same
    stand-in, detached or wrapped by a transform of ``torch.func``."""
    while torch._C._functorch.is_functorch_wrapped_tensor(given):
        given = torch._C._functorch.get_unwrapped(given)
    return weight is not None and given.untyped_storage()._cdata == weight.untyped_storage()._cdata
