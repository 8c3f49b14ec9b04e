"""Apply whole updates to weights; low-rank ones are :mod:`hmt_deepspeed.kernels.low_rank_update`'s."""

from __future__ import annotations

from torch import Tensor

from hmt_deepspeed.kernels.stochastic_rounding import stochastic_round
from hmt_deepspeed.optim.rules import adamw_

__all__ = [
    "apply_adamw_rounded_",
    "apply_whole_",
    "apply_whole_rounded_",
]

# fp32 elements alive at once while a bf16 weight is updated: 16 MiB.
CHUNK_ELEMENTS = 1 << 22


def apply_whole_(weight_fp32: Tensor, update: Tensor, lr: float, weight_decay: float) -> None:
    """``W <- (1 - lr wd) W - lr update`` on fp32 weights of the update's shape, in place."""
    weight_fp32.mul_(1 - lr * weight_decay).add_(update, alpha=-lr)


def apply_whole_rounded_(
    weight_bf16: Tensor, update: Tensor, lr: float, weight_decay: float, key: int, offset: int = 0
) -> None:
    """The same on contiguous bf16 weights, a few rows at a time, rounded stochastically.

    Args:
        update: fp32 of the weight's shape. key, offset: as in :func:`hmt_deepspeed.kernels.low_rank_update.low_rank_update_`.
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
