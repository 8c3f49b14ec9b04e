"""Adam's first moment and direction on a projected gradient in one pass, with a factored second moment.

Adafactor's product (1804.04235, section 3) with the columns' part given, since that is a sum over all rows::

    m   <- m + (1 - beta1) (A - m)
    R_i <- beta2 R_i + (1 - beta2) mean_j A_ij^2
    U   = (m / e1) / (sqrt(R_i) c_j + eps)

Shapes: ``projected``, ``exp_avg`` and the direction rows x r, ``row_means`` (rows,), ``column_roots`` (r,).
"""

from __future__ import annotations

import torch
from torch import Tensor

from hmt_deepspeed.kernels.launching import on_its_device

try:
    import triton
    import triton.language as tl
except ImportError:  # platforms without Triton have no CUDA device to run it on
    triton = None

__all__ = [
    "factored_moment_update_",
    "factored_moment_update_reference_",
    "factored_moment_update_triton_",
]

_BLOCK, _BLOCK_RANK = 2048, 256


def factored_moment_update_reference_(
    projected: Tensor,
    exp_avg: Tensor,
    row_means: Tensor,
    column_roots: Tensor,
    first_evidence: float,
    beta1: float,
    beta2: float,
    eps: float,
) -> Tensor:
    """Torch twin of the kernel; see :func:`factored_moment_update_`."""
    exp_avg.lerp_(projected, 1 - beta1)
    row_means.mul_(beta2).add_(projected.square().mean(dim=1), alpha=1 - beta2)
    denominator = torch.outer(row_means.sqrt(), column_roots).add_(eps)
    return torch.div(exp_avg, denominator, out=denominator).div_(first_evidence)


if triton is not None:

    @triton.jit
    def _factored_moment_update_kernel(  # type: ignore[no-untyped-def]
        projected_ptr, exp_avg_ptr, row_means_ptr, column_roots_ptr, direction_ptr,
        rows, rank, projected_row, projected_column,
        first_evidence, share1, beta1, share2, beta2, eps,
        BLOCK_ROWS: tl.constexpr, BLOCK_RANK: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        in_rows, row_column = row < rows, row[:, None]
        squares = tl.zeros((BLOCK_ROWS, BLOCK_RANK), dtype=tl.float32)
        for start in range(0, rank, BLOCK_RANK):
            column = (start + tl.arange(0, BLOCK_RANK)).to(tl.int64)[None, :]
            mask = in_rows[:, None] & (column < rank)
            source = projected_ptr + row_column * projected_row + column * projected_column
            projected = tl.load(source, mask=mask, other=0.0)
            squares += projected * projected
        mean_square = tl.div_rn(tl.sum(squares, axis=1), tl.zeros_like(row.to(tl.float32)) + rank)
        row_mean = tl.load(row_means_ptr + row, mask=in_rows, other=0.0)
        tl.debug_barrier()  # a row may be held by several warps: all read its mean before one writes it
        row_mean = beta2 * row_mean + share2 * mean_square
        tl.store(row_means_ptr + row, row_mean, mask=in_rows)
        row_root = tl.sqrt_rn(row_mean)[:, None]
        for start in range(0, rank, BLOCK_RANK):
            column = (start + tl.arange(0, BLOCK_RANK)).to(tl.int64)[None, :]
            mask = in_rows[:, None] & (column < rank)
            source = projected_ptr + row_column * projected_row + column * projected_column
            projected = tl.load(source, mask=mask, other=0.0)
            position = row_column * rank + column
            mean = tl.load(exp_avg_ptr + position, mask=mask, other=0.0)
            # torch.lerp's two forms: each is exact at its own end
            gap = projected - mean
            mean = tl.where(share1 < 0.5, mean + share1 * gap, projected - beta1 * gap)
            root = tl.load(column_roots_ptr + column, mask=column < rank, other=0.0)
            direction = tl.div_rn(mean, row_root * root + eps)
            direction = tl.div_rn(direction, tl.zeros_like(direction) + first_evidence)
            tl.store(exp_avg_ptr + position, mean, mask=mask)
            tl.store(direction_ptr + position, direction, mask=mask)

    @on_its_device
    def factored_moment_update_triton_(
        projected: Tensor,
        exp_avg: Tensor,
        row_means: Tensor,
        column_roots: Tensor,
        first_evidence: float,
        beta1: float,
        beta2: float,
        eps: float,
    ) -> Tensor:
        """Triton launcher; see :func:`factored_moment_update_`."""
        direction = torch.empty_like(exp_avg)
        if direction.numel() == 0:
            return direction
        rows, rank = exp_avg.shape
        block_rank = min(_BLOCK_RANK, triton.next_power_of_2(rank))
        block_rows = _BLOCK // block_rank
        _factored_moment_update_kernel[(triton.cdiv(rows, block_rows),)](
            projected,
            exp_avg,
            row_means,
            column_roots,
            direction,
            rows,
            rank,
            *projected.stride(),
            first_evidence,
            1 - beta1,
            beta1,
            1 - beta2,
            beta2,
            eps,
            BLOCK_ROWS=block_rows,
            BLOCK_RANK=block_rank,
        )
        return direction


def factored_moment_update_(
    projected: Tensor,
    exp_avg: Tensor,
    row_means: Tensor,
    column_roots: Tensor,
    first_evidence: float,
    beta1: float,
    beta2: float,
    eps: float,
) -> Tensor:
    """Update the first moment and the row means in place and return Adam's direction; formulas at the top.

    Args:
        projected: rows x r, fp32, any strides (a column slice of a wider matrix).
        exp_avg: rows x r, row_means: (rows,); fp32, contiguous, uncorrected running means; updated.
        column_roots: (r,), fp32, contiguous: root of a column's bias-corrected mean over the mean of all rows'.
        first_evidence: weight of evidence in ``exp_avg`` after this step.
        beta1, beta2, eps: Adam's.

    Returns:
        rows x r, fp32, contiguous.

    Raises:
        ValueError: for other dtypes, shapes, or states that are not contiguous.
    """
    tensors = (projected, exp_avg, row_means, column_roots)
    if any(tensor.dtype != torch.float32 for tensor in tensors):
        raise ValueError(
            f"projected, exp_avg, row_means and column_roots must be fp32, got {[t.dtype for t in tensors]}"
        )
    shape = projected.shape
    shapes = [tuple(tensor.shape) for tensor in tensors]
    if len(shape) != 2 or shapes[1:] != [tuple(shape), (shape[0],), (shape[1],)]:
        raise ValueError(
            "projected and exp_avg must be rows x r, row_means (rows,) and column_roots (r,), got "
            f"{shapes}"
        )
    if not all(tensor.is_contiguous() for tensor in tensors[1:]):
        raise ValueError("exp_avg, row_means and column_roots must be contiguous")
    update = (
        factored_moment_update_triton_
        if projected.is_cuda and triton is not None
        else factored_moment_update_reference_
    )
    return update(projected, exp_avg, row_means, column_roots, first_evidence, beta1, beta2, eps)
