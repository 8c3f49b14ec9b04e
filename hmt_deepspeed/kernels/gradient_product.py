"""The product that a backward leaves of a weight's gradient, ``D^T F``, a sum over all tokens.

On CUDA a product of 16-bit matrices is written in fp32: split over tokens its partial sums would be rounded to 16
bits before they are added, and so would be what accumulates. A CPU rounds once, at the end.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["add_gradient_product"]


def add_gradient_product(total: Tensor | None, delta: Tensor, features: Tensor) -> Tensor:
    """``total + D^T F``; several are summed in fp32 or wider, in the memory of ``total`` where that is wide.

    Args:
        total: m x w of earlier backwards, or None.
        delta: T x m. features: T x w, of the same dtype.

    Returns:
        m x w: fp32 on CUDA of 16-bit operands; on a CPU in their dtype where there was no total.
    """
    if delta.is_cuda and delta.dtype in (torch.bfloat16, torch.float16):
        if total is None:
            return torch.mm(delta.t(), features, out_dtype=torch.float32)
        out: Tensor = torch.addmm(total, delta.t(), features, out_dtype=torch.float32, out=total)
        return out
    product = delta.t() @ features
    if total is None:
        return product
    return total.to(torch.promote_types(product.dtype, torch.float32)).add_(product)
