"""Squared norms of the rows of many matrices in one pass, of their first columns and of the others.

On CUDA all matrices are one launch, which finds them by a table of addresses.

Shapes: matrices rows x n, results B x rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hmt_deepspeed.kernels.launching import addresses_of, device_table, on_its_device

try:
    import triton
    import triton.language as tl
except ImportError:  # platforms without Triton have no CUDA device to run it on
    triton = None

__all__ = ["row_squares", "row_squares_reference", "row_squares_triton"]

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
# Rows and columns of a program's tile, by whether neighbours in memory are of one row or of one column.
_TILES = {False: (8, 128), True: (64, 16)}
_LARGEST_STRIDE = 1 << 24  # the elements of a tile are then less than 2^31 apart


def row_squares_reference(matrices: Sequence[Tensor], split: int) -> tuple[Tensor, Tensor]:
    """Torch twin of the kernel; see :func:`row_squares`."""
    found = []
    for own in (slice(None, split), slice(split, None)):
        norms = [
            torch.linalg.vector_norm(one[..., own], dim=-1, dtype=torch.float32) for one in matrices
        ]
        found.append(torch.cat([one if one.dim() == 2 else one[None] for one in norms]).square_())
    return found[0], found[1]


if triton is not None:
    from hmt_deepspeed.kernels.low_rank_factors import TRITON_DTYPES, pointer_jit

    @triton.jit
    def _row_squares_kernel(  # type: ignore[no-untyped-def]
        table_ptr, inside_ptr, outside_ptr, rows, n, split, row_stride, column_stride,
        TYPE: tl.constexpr, ALIGNED: tl.constexpr, SPLIT: tl.constexpr,
        BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
    ):  # fmt: skip
        blocks = tl.cdiv(rows, BLOCK_ROWS)
        member = (tl.program_id(0) // blocks).to(tl.int64)
        first_row = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK_ROWS
        row, k = tl.arange(0, BLOCK_ROWS), tl.arange(0, BLOCK_COLUMNS)
        in_rows = row < rows - first_row
        source = pointer_jit(table_ptr, member, TYPE, ALIGNED) + first_row * row_stride
        source += (row * row_stride)[:, None] + (k * column_stride)[None, :]
        inside = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), dtype=tl.float32)
        outside = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), dtype=tl.float32)
        for begin in range(0, n, BLOCK_COLUMNS):
            mask = in_rows[:, None] & (k < n - begin)[None, :]
            value = tl.load(source, mask=mask, other=0.0).to(tl.float32)
            energy = value * value
            if SPLIT:
                known = (k < split - begin)[None, :]
                inside += tl.where(known, energy, 0.0)
                outside += tl.where(known, 0.0, energy)
            else:
                inside += energy
            source += BLOCK_COLUMNS * column_stride
        place = member * rows + first_row + row
        tl.store(inside_ptr + place, tl.sum(inside, axis=1), mask=in_rows)
        tl.store(outside_ptr + place, tl.sum(outside, axis=1), mask=in_rows)

    @on_its_device
    def row_squares_triton(matrices: Sequence[Tensor], split: int) -> tuple[Tensor, Tensor]:
        """Triton launcher; see :func:`row_squares`."""
        first = matrices[0]
        rows, n = first.shape[-2:]
        addresses = addresses_of(matrices)
        found = torch.empty(2, len(addresses), rows, dtype=torch.float32, device=first.device)
        if not found.numel():
            return found[0], found[1]
        strides = first.stride()[-2:]
        block_rows, block_columns = _TILES[strides[0] < strides[1]]
        _row_squares_kernel[(len(addresses) * triton.cdiv(rows, block_rows),)](
            device_table(tuple(addresses), first.device),
            *found,
            rows,
            n,
            split,
            *strides,
            TYPE=TRITON_DTYPES[first.dtype],
            ALIGNED=not any(address % 16 for address in addresses),
            SPLIT=split < n,
            BLOCK_ROWS=block_rows,
            BLOCK_COLUMNS=block_columns,
        )
        return found[0], found[1]


def row_squares(matrices: Sequence[Tensor], split: int) -> tuple[Tensor, Tensor]:
    """Squared norms of the rows of B matrices, summed in fp32.

    Args:
        matrices: each rows x n, or several of them, B_i x rows x n; fp32, bf16 or fp16, of equal strides of rows and
            of columns, any.
        split: number of the first columns, 0..n.

    Returns:
        Over the first ``split`` columns and over the others, B x rows fp32 each.

    Raises:
        ValueError: for other dtypes, shapes or strides.
    """
    kinds = {(one.shape[-2:], one.stride()[-2:], one.dtype) for one in matrices}
    first = matrices[0]
    if (
        len(kinds) != 1
        or first.dtype not in _FLOATS
        or any(m.dim() not in (2, 3) for m in matrices)
    ):
        raise ValueError(
            f"matrices must be rows x n of one shape, dtype (fp32, bf16 or fp16) and strides, got {kinds}"
        )
    if not 0 <= split <= first.shape[-1]:
        raise ValueError(f"split is {split}; legal is 0..{first.shape[-1]}, the number of columns")
    if max(first.stride()[-2:]) > _LARGEST_STRIDE:
        raise ValueError(
            f"rows and columns are at most 2^24 elements apart, got strides {first.stride()[-2:]}"
        )
    if first.is_cuda and triton is not None:
        return row_squares_triton(matrices, split)
    return row_squares_reference(matrices, split)
