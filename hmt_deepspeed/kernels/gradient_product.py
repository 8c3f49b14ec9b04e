"""The product that a backward leaves of a weight's gradient, ``D^T F``, a sum over all tokens.

On CUDA a product of 16-bit matrices is written in fp32: split over tokens its partial sums would be rounded to 16
bits before they are added, and so would be what accumulates. A CPU rounds once, at the end.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["add_gradient_product"]


def add_gradient_product(
    total: Tensor | None, delta: Tensor, features: Tensor, room: Tensor | None = None
) -> Tensor:
    """``total + D^T F``; several are summed in fp32 or wider, in the memory of ``total`` where that is wide.

    Args:
        total: m x w of earlier backwards, or None.
        delta: T x m. features: T x w, of the same dtype.
        room: m x w, where the first product is to be if it has that dtype; None for new memory.

    Returns:
        m x w: fp32 on CUDA of 16-bit operands, and of several; else in their dtype.
    """
    widens = delta.is_cuda and delta.dtype in (torch.bfloat16, torch.float16)
    if total is None:
        how = {"out_dtype": torch.float32} if widens else {}
        fits = room is not None and room.dtype == how.get("out_dtype", delta.dtype)
        first: Tensor = torch.mm(delta.t(), features, out=room if fits else None, **how)
        return first
    if widens:
        out: Tensor = torch.addmm(total, delta.t(), features, out_dtype=torch.float32, out=total)
        return out
    product = delta.t() @ features
    return total.to(torch.promote_types(product.dtype, torch.float32)).add_(product)
