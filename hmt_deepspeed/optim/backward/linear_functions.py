"""Autograd functions of a projected linear: the usual forward, and a backward that projects the weight's gradient.

Both can be differentiated again. Neither can give the whole gradient of a weight whose input was not saved.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.nn import functional as F

from hmt_deepspeed.kernels.backward import Asked, asked_of
from hmt_deepspeed.optim.backward.int8_linear import Int8Weight, decoded
from hmt_deepspeed.optim.backward.projected_linear import ProjectedLinear

__all__ = [
    "LeftProjectedLinearFunction",
    "ProjectedLinearFunction",
    "check_is_there",
    "refusal",
]


class ProjectedLinearFunction(torch.autograd.Function):
    """``Y = X W^T + b`` that saves ``X B`` for the weight instead of ``X``."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        product: Tensor,
        linear: ProjectedLinear,
        encoded: Int8Weight | None,
        is_inner: bool,
    ) -> Tensor:
        # The Parameter itself is saved: under ZeRO-3 its data is gathered again before backward.
        ctx.save_for_backward(weight, product)
        ctx.linear, ctx.input_dtype, ctx.is_inner = linear, x.dtype, is_inner  # type: ignore[attr-defined]
        ctx.reader = None if encoded is None else encoded.reader()  # type: ignore[attr-defined]
        return F.linear(x, weight if encoded is None else encoded.decode(), bias)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight, product = ctx.saved_tensors  # type: ignore[attr-defined]
        linear: ProjectedLinear = ctx.linear  # type: ignore[attr-defined]
        flat, asked = grad.reshape(-1, grad.shape[-1]), _asked_of_weight(ctx)
        if asked is not None:
            if asked == "returned" or torch.is_grad_enabled():
                raise ValueError(refusal(linear.name, asked))
            linear.add(flat.to(product.dtype), product)
        db = flat.sum(0) if ctx.needs_input_grad[2] else None  # type: ignore[attr-defined]
        return _input_gradient(ctx, grad, weight), None, db, None, None, None, None


class LeftProjectedLinearFunction(torch.autograd.Function):
    """``Y = X W^T + b`` whose weight gradient is projected from the left: ``X^T (D B)``, n x width.

    The input is there, and so is the whole gradient where somebody asks for it.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        linear: ProjectedLinear,
        encoded: Int8Weight | None,
        is_inner: bool,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.linear, ctx.input_dtype, ctx.is_inner = linear, x.dtype, is_inner  # type: ignore[attr-defined]
        ctx.reader = None if encoded is None else encoded.reader()  # type: ignore[attr-defined]
        return F.linear(x, weight if encoded is None else encoded.decode(), bias)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors  # type: ignore[attr-defined]
        linear: ProjectedLinear = ctx.linear  # type: ignore[attr-defined]
        flat, asked = grad.reshape(-1, grad.shape[-1]), _asked_of_weight(ctx)
        dw = None
        if asked == "returned" or (asked is not None and torch.is_grad_enabled()):
            dw = (flat.t() @ x.reshape(-1, x.shape[-1]).to(grad.dtype)).to(weight.dtype)
        elif asked is not None:
            columns = linear.columns()  # constant until the accumulation window ends
            image = flat.to(columns.dtype) @ columns
            linear.add(x.reshape(-1, x.shape[-1]).to(image.dtype), image)
        db = flat.sum(0) if ctx.needs_input_grad[2] else None  # type: ignore[attr-defined]
        return _input_gradient(ctx, grad, weight), dw, db, None, None, None


def _asked_of_weight(ctx: FunctionCtx) -> Asked | None:
    """What this backward asks of the weight; None for inputs only (``autograd.grad(loss, x)``)."""
    edges = ctx.next_functions  # type: ignore[attr-defined]  # of the inputs that are tensors: x, weight, ...
    asked = asked_of(edges[1][0])
    # of a part computed again, the function around it has asked `autograd.grad` for what goes on
    return "goes_on" if asked and ctx.is_inner else asked  # type: ignore[attr-defined]


def _input_gradient(ctx: FunctionCtx, grad: Tensor, weight: Tensor) -> Tensor | None:
    """``D W``, if wanted, of the Parameter or its INT8 weight decoded once more. With ``create_graph`` it can be
    differentiated again, and gives the weight its share ``D^T V`` whole."""
    if not ctx.needs_input_grad[0]:  # type: ignore[attr-defined]
        return None
    reader: Callable[[], Tensor] | None = ctx.reader  # type: ignore[attr-defined]
    value = weight if reader is None else decoded(weight, reader)
    dx: Tensor = grad @ value.to(grad.dtype)
    if dx.requires_grad and reader is None:
        name: str = ctx.linear.name  # type: ignore[attr-defined]
        dx.register_hook(lambda _: check_is_there(weight, name))
    return dx.to(ctx.input_dtype)  # type: ignore[attr-defined]


def check_is_there(weight: Tensor, name: str) -> None:
    """Refuse to read a weight that ZeRO-3 has released."""
    if weight.dim() < 2:
        raise ValueError(
            f"the gradient of a gradient reads {name}, but zero_optimization.stage is 3, which has released the "
            "weight after the first backward. Legal for gradients of gradients: stages 0, 1 and 2."
        )


def refusal(name: str, asked: Asked) -> str:
    """Why a weight of which only ``X [Q | P]`` was saved has no whole gradient."""
    if asked == "returned":
        what = f"torch.autograd.grad was asked for the gradient of {name}"
        but = ", or accumulate gradients with loss.backward()"
    else:
        what = f"backward(create_graph=True) was asked for a gradient of {name} that can be differentiated again"
        but = ". For gradients of inputs alone call torch.autograd.grad(loss, inputs, create_graph=True)"
    return (
        f"{what}, but the backward of its linear is projected: of the linear's input only X [Q | P] was saved, which "
        "does not give the whole gradient. Leave it to adamw in hmt.optimizer.module_rules, or set "
        f"hmt.optimizer.projected_backward to false{but}."
    )
