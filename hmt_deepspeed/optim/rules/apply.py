"""Apply whole updates to weights; low-rank ones are :mod:`hmt_deepspeed.kernels.low_rank_update`'s."""

from __future__ import annotations

from torch import Tensor

__all__ = ["apply_whole_"]


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
