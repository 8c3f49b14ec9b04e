"""Products known to be symmetric: of a large one only blocks on and below the diagonal are computed.

What is above these blocks is copied from below. ``p`` blocks of rows take ``(p + 1) / 2p`` of the FLOPs, in ``2p - 1``
launches for one.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

__all__ = ["symmetric_product", "symmetric_share"]

# Rows of a block, at least: a GPU multiplies smaller ones in about the time of a launch, a CPU in that of a call.
_ROWS_OF_BLOCK = {"cpu": 128, "cuda": 512}
_MOST_BLOCKS = 8


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
    blocks = _blocks(size, left.device.type)
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


def symmetric_share(size: int, device_type: str) -> float:
    """FLOPs of a symmetric product of ``size`` rows, as a share of what any takes."""
    blocks = _blocks(size, device_type)
    return (blocks + 1) / (2 * blocks)


def _blocks(size: int, device_type: str) -> int:
    rows = _ROWS_OF_BLOCK.get(device_type, _ROWS_OF_BLOCK["cuda"])
    return min(_MOST_BLOCKS, max(1, size // rows))


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
