"""Products known to be symmetric: of a large one only blocks on and below the diagonal are computed.

What is above these blocks is copied from below, in ``2p - 1`` launches for ``p`` blocks.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from hmt_deepspeed.rules import symmetric_blocks

__all__ = ["symmetric_product"]


def symmetric_product(
    left: Tensor, right: Tensor, added: Tensor | None = None, beta: float = 1.0, alpha: float = 1.0
) -> Tensor:
    """``beta C + alpha A B`` where ``C`` and ``A B`` are symmetric.

    Args:
        left, right, added: A, B x r x n, B, B x n x r, and C, B x r x r, of one dtype.

    Returns:
        B x r x r.
    """
    size = left.shape[1]
    blocks = symmetric_blocks(size, left.device.type)
    if blocks == 1:
        return _product(left, right, added, beta, alpha)
    out = left.new_empty(left.shape[0], size, size)
    bounds = [size * number // blocks for number in range(blocks + 1)]
    for begin, end in pairwise(bounds):
        part = None if added is None else added[:, begin:end, :end]
        place = out[:, begin:end, :end]
        _product(left[:, begin:end], right[:, :, :end], part, beta, alpha, place)
        if begin:
            out[:, :begin, begin:end] = out[:, begin:end, :begin].mT
    return out


def _product(
    left: Tensor,
    right: Tensor,
    added: Tensor | None,
    beta: float,
    alpha: float,
    out: Tensor | None = None,
) -> Tensor:
    if added is None:
        return torch.bmm(left, right, out=out)
    return torch.baddbmm(added, left, right, beta=beta, alpha=alpha, out=out)
