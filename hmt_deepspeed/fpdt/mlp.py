"""Runs modules that work token by token (MLPs, norms) in chunks: one chunk's internals at a time.

Forward keeps the input and nothing else; backward computes each chunk again with grad.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from hmt_deepspeed.fpdt.gradients import (
    ParameterGradients,
    autocast_of,
    only_first_order,
    refuse_transforms,
    trained_parameters,
)
from hmt_deepspeed.fpdt.visibility import spans_of

__all__ = ["chunked_tokenwise"]


class _ChunkedTokenwise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        x: Tensor,
        function: Callable[[Tensor], Tensor],
        chunk_size: int,
        *parameters: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.function, ctx.parameters = function, parameters  # type: ignore[attr-defined]
        ctx.chunk_size = chunk_size  # type: ignore[attr-defined]
        ctx.autocast = autocast_of(x.device)  # type: ignore[attr-defined]
        tokens = x.reshape(-1, x.shape[-1])
        whole: Tensor | None = None
        with autocast_of(x.device):
            for begin, end in spans_of(tokens.shape[0], chunk_size):
                part = function(tokens[begin:end])
                if whole is None:
                    whole = part.new_empty(tokens.shape[0], part.shape[-1])
                whole[begin:end] = part
        assert whole is not None
        return whole.view(*x.shape[:-1], whole.shape[-1])

    @staticmethod
    @only_first_order
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors  # type: ignore[attr-defined]
        wants_x = ctx.needs_input_grad[0]  # type: ignore[attr-defined]
        sums = ParameterGradients(ctx)
        tokens = x.reshape(-1, x.shape[-1])
        grads = grad.reshape(-1, grad.shape[-1])
        dx = torch.empty_like(tokens) if wants_x else None
        for begin, end in spans_of(tokens.shape[0], ctx.chunk_size):  # type: ignore[attr-defined]
            part = tokens[begin:end].detach().requires_grad_(wants_x)
            with sums.computing(), ctx.autocast:  # type: ignore[attr-defined]
                out = ctx.function(part)  # type: ignore[attr-defined]
            (d_part,) = sums.differentiate([out], [grads[begin:end]], [part])
            if dx is not None and d_part is not None:
                dx[begin:end] = d_part
        return None if dx is None else dx.view(x.shape), None, None, *sums.take()


def chunked_tokenwise(
    module: nn.Module, function: Callable[[Tensor], Tensor], x: Tensor, chunk_size: int
) -> Tensor:
    """``function(x)`` of a function of each token alone, ``chunk_size`` tokens at a time.

    Args:
        module: whose parameters ``function`` uses.
        function: [T, n] -> [T, m].
        x: [..., n].

    Returns:
        [..., m].
    """
    refuse_transforms()
    return _ChunkedTokenwise.apply(x, function, chunk_size, *trained_parameters(module))
