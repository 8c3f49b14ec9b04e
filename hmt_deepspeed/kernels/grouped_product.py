"""What a backward leaves of the gradients of E experts' weights: ``D_e^T F_e`` for the tokens of each expert.

The tokens are sorted by expert; ``offsets`` say where each expert's end, on the device, so that nobody waits for them.

Shapes: ``delta`` S x m, ``features`` S x w, ``offsets`` E int32, result E x m x w fp32. Rows from the last offset on
are nobody's.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["add_grouped_product"]


def add_grouped_product(
    total: Tensor | None,
    delta: Tensor,
    features: Tensor,
    offsets: Tensor,
    room: Tensor | None = None,
) -> Tensor:
    """``total[e] + D_e^T F_e`` of each expert; zeros of one without tokens.

    Args:
        total: E x m x w fp32 of earlier backwards, which is added to in place, or None.
        delta: S x m. features: S x w, of the same dtype: fp32, bf16 or fp16.
        offsets: E int32 or int64 on the same device, ascending: the row after the last of each expert.
        room: E x m x w fp32, where the first product is to be; None for new memory.

    Returns:
        E x m x w fp32. A CPU rounds each product to the dtype of its operands.
    """
    experts, m, w = len(offsets), delta.shape[1], features.shape[1]
    if total is None:
        dtype = torch.promote_types(delta.dtype, torch.float32)
        total = delta.new_empty(experts, m, w, dtype=dtype) if room is None else room
        total.zero_()
    begin = 0
    for own, end in zip(total, offsets.tolist(), strict=True):
        if end > begin:
            own += delta[begin:end].t() @ features[begin:end]
        begin = end
    return total
