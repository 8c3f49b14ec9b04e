"""Adam's moments of a stack take a step."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from hmt_deepspeed.kernels.moment_update import moment_update_
from hmt_deepspeed.kernels.noise import Stream
from hmt_deepspeed.optim.rules.stack import Stack

__all__ = ["count_", "direct_", "rounding_keys"]

STREAMS = {"exp_avg": Stream.FIRST_STATE, "exp_avg_sq": Stream.SECOND_STATE}


def count_(stack: Stack) -> Tensor:
    """Count the step's gradient as evidence, of the matrices that take it: 1 for those, 0 for others, (B,) fp32."""
    taken = (stack.factor != 0).float()
    for name, beta in zip(("first_evidence", "evidence"), stack.betas, strict=True):
        evidence = stack[name]
        share = (taken * (1 - beta)).view(-1, *(1 for _ in evidence.shape[1:]))
        evidence.lerp_(torch.ones_like(evidence), share)
    return taken


def rounding_keys(stack: Stack, step: Tensor) -> dict[str, Tensor]:
    """Keys of the rounding of moments at a step, by their names; none of those in fp32 or of others' shape."""
    if stack.first.state_dtype == "fp32":
        return {}
    kept = {name: stream for name, stream in STREAMS.items() if f"{name}.data" in stack.tensors}
    return {name: stack.keys(step, stream) for name, stream in kept.items()}


def direct_(
    stack: Stack, gradient: Tensor, factor: Tensor, residual_scale: Tensor | None = None
) -> Tensor:
    """Adam's direction and a residual in the place of a gradient that :func:`count_` has counted, see
    :func:`moment_update_`. The keys of :func:`rounding_keys` are among what the stack shares.

    Args:
        gradient: B x rows x (r + k) fp32, contiguous; overwritten. factor: (B,) fp32, what it is multiplied by; 0 where
            a matrix takes no step. residual_scale: (B,) fp32; None for no residual.

    Returns:
        Squared norm of each row's residual, B x rows fp32.
    """
    size, rows = gradient.shape[:2]
    first, second = (
        stack.state(name).stored(rows, partial(stack.shared, name)) for name in STREAMS
    )
    return moment_update_(
        gradient,
        first,
        second,
        stack["evidence"].view(size, -1),
        stack["first_evidence"],
        *stack.betas,
        stack.eps,
        factor=factor,
        residual_scale=factor if residual_scale is None else residual_scale,
    )
