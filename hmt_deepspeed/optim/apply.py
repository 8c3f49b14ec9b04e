"""Apply an update to a weight; low rank: ``W <- (1 - lr wd) W - lr (update projection^T)``.

Shapes: ``weight`` is rows x n, ``update`` rows x (r + k), ``projection`` n x (r + k). ``scale`` is
already in the update, see :meth:`hmt_deepspeed.optim.matrix.LowRankMatrix.finish`.
"""

from __future__ import annotations

from torch import Tensor

from hmt_deepspeed.kernels.stochastic_rounding import stochastic_round
from hmt_deepspeed.optim.rules import adamw_

__all__ = [
    "apply_adamw_rounded_",
    "apply_low_rank_",
    "apply_low_rank_rounded_",
    "apply_whole_",
    "apply_whole_rounded_",
]

# fp32 elements alive at once while a bf16 weight is updated: 16 MiB.
CHUNK_ELEMENTS = 1 << 22


def apply_low_rank_(
    weight_fp32: Tensor, update: Tensor, projection: Tensor, lr: float, weight_decay: float
) -> None:
    """Apply to fp32 rows in place. Decoupled weight decay, as in AdamW (Loshchilov and Hutter)."""
    columns = projection.to(weight_fp32.dtype)
    weight_fp32.addmm_(update, columns.t(), beta=1 - lr * weight_decay, alpha=-lr)


def apply_low_rank_rounded_(
    weight_bf16: Tensor,
    update: Tensor,
    projection: Tensor,
    lr: float,
    weight_decay: float,
    key: int,
    offset: int,
) -> None:
    """Apply to bf16 rows in place: computed in fp32, a few rows at a time, rounded stochastically.

    Args:
        weight_bf16: a contiguous block of whole rows.
        key: seed of the rounding, :meth:`LowRankMatrix.rounding_key` of the step.
        offset: index of the block's first element within the whole weight, so that the rounding
            does not depend on which rows are held here.
    """
    rows, n = weight_bf16.shape
    columns = projection.float().t()
    rows_per_chunk = max(1, CHUNK_ELEMENTS // max(n, 1))
    for begin in range(0, rows, rows_per_chunk):
        block = weight_bf16[begin : begin + rows_per_chunk]
        value = block.float()
        part = update[begin : begin + rows_per_chunk].float()
        value.addmm_(part, columns, beta=1 - lr * weight_decay, alpha=-lr)
        stochastic_round(value, block, key, offset + begin * n)


def apply_whole_(weight_fp32: Tensor, update: Tensor, lr: float, weight_decay: float) -> None:
    """``W <- (1 - lr wd) W - lr update`` on fp32 weights of the update's shape, in place."""
    weight_fp32.mul_(1 - lr * weight_decay).add_(update, alpha=-lr)


def apply_whole_rounded_(
    weight_bf16: Tensor, update: Tensor, lr: float, weight_decay: float, key: int, offset: int = 0
) -> None:
    """The same on contiguous bf16 weights, a few rows at a time, rounded stochastically.

    Args:
        update: fp32 of the weight's shape. key, offset: as in :func:`apply_low_rank_rounded_`.
    """
    per_row = weight_bf16[:1].numel()
    rows_per_chunk = max(1, CHUNK_ELEMENTS // max(per_row, 1))
    for begin in range(0, len(weight_bf16), rows_per_chunk):
        block = weight_bf16[begin : begin + rows_per_chunk]
        value = block.float()
        apply_whole_(value, update[begin : begin + rows_per_chunk], lr, weight_decay)
        stochastic_round(value, block, key, offset + begin * per_row)


def apply_adamw_rounded_(
    weight_bf16: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: Tensor,
    key: int,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """One AdamW step of a contiguous bf16 weight without a master: fp32 chunks, rounded stochastically.

    Args:
        gradient: any float dtype; exp_avg, exp_avg_sq: fp32; all of the weight's shape.
        step: 0-dim fp32 tensor, number of steps taken; incremented.
        key: seed of the rounding.
    """
    # view, not reshape, of what is written: a copy would lose the result
    flat = [weight_bf16.view(-1), gradient.reshape(-1), exp_avg.view(-1), exp_avg_sq.view(-1)]
    taken = step.clone()
    for begin in range(0, flat[0].numel(), CHUNK_ELEMENTS):
        weight, grad, mean, second = (t[begin : begin + CHUNK_ELEMENTS] for t in flat)
        value = weight.float()
        step.copy_(taken)  # every chunk takes the same step
        adamw_(
            value,
            grad.float(),
            mean,
            second,
            step,
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
        )
        stochastic_round(value, weight, key, begin)
