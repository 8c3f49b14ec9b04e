"""Apply whole updates to weights; low-rank ones are :mod:`hmt_deepspeed.kernels.low_rank_update`'s."""

from __future__ import annotations

from torch import Tensor

from hmt_deepspeed.kernels.noise import Key
from hmt_deepspeed.kernels.stochastic_rounding import stochastic_round

__all__ = ["apply_whole_", "apply_whole_rounded_"]

# fp32 elements alive at once while a bf16 weight is updated: 16 MiB.
CHUNK_ELEMENTS = 1 << 22


def apply_whole_(
    weight_fp32: Tensor,
    update: Tensor,
    lr: float | Tensor,
    weight_decay: float,
    scale: Tensor | None = None,
) -> None:
    """``W <- (1 - lr wd) W - lr scale update`` on fp32 weights of the update's shape, in place.

    Args:
        lr: 0-dim on the device, or a number. scale: 0-dim fp32; where it is zero the weights stay as they are, without decay. None for 1.
    """
    if scale is None:
        assert not isinstance(lr, Tensor)
        weight_fp32.mul_(1 - lr * weight_decay).add_(update, alpha=-lr)
        return
    if weight_decay:
        weight_fp32.mul_(1 - (lr * weight_decay) * (scale != 0))
    weight_fp32.addcmul_(update, scale * lr, value=-1)


def apply_whole_rounded_(
    weight_bf16: Tensor,
    update: Tensor,
    lr: float | Tensor,
    weight_decay: float,
    key: Key,
    offset: int = 0,
    scale: Tensor | None = None,
) -> None:
    """The same on contiguous bf16 weights, a few rows at a time, rounded stochastically.

    Args:
        update: fp32 of the weight's shape. key, offset: as of :func:`stochastic_round`.
    """
    per_row = weight_bf16[:1].numel()
    rows_per_chunk = max(1, CHUNK_ELEMENTS // max(per_row, 1))
    for begin in range(0, len(weight_bf16), rows_per_chunk):
        block = weight_bf16[begin : begin + rows_per_chunk]
        value = block.float()
        apply_whole_(value, update[begin : begin + rows_per_chunk], lr, weight_decay, scale)
        stochastic_round(value, block, key, offset + begin * per_row)
