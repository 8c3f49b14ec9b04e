"""The moment update of 8-bit moments, whose blocks of 256 elements do not end where rows do.

Three launches where rows have a residual: norms of the rows of ``[A | S]``; moments and direction, block by
block; norms of the rows of ``U``, and the residual. No fp32 copy of a moment exists.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hmt_deepspeed.kernels.int8_state import BLOCK, CODE_RANGE, levels
from hmt_deepspeed.kernels.launching import on_its_device
from hmt_deepspeed.kernels.stored_state import StoredState

try:
    import triton
    import triton.language as tl
except ImportError:  # platforms without Triton have no CUDA device to run it on
    triton = None

__all__ = ["int8_moments_triton_"]

_BLOCKS_PER_PROGRAM = 4

if triton is not None:
    from hmt_deepspeed.kernels.int8_state import encode_blocks_jit
    from hmt_deepspeed.kernels.moment_rows import (
        adam_direction_jit,
        adam_mean_jit,
        adam_root_jit,
        scale_residual_jit,
        tile,
    )
    from hmt_deepspeed.kernels.noise import uniform_jit

    @triton.jit
    def _row_squares_kernel(  # type: ignore[no-untyped-def]
        gradient_ptr, factor_ptr, row_means_ptr, seen_ptr, probed_ptr, rows, rank, width, share2, beta2,
        BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
    ):  # fmt: skip
        """``||A_i||^2`` and ``||S_i||^2``; updates means of rows where there are some."""
        row_blocks = tl.cdiv(rows, BLOCK_ROWS)
        member = (tl.program_id(0) // row_blocks).to(tl.int64)
        row = (tl.program_id(0) % row_blocks).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        in_rows, row = row < rows, member * rows + row
        factor = tl.zeros((BLOCK_ROWS,), dtype=tl.float32) + tl.load(factor_ptr + member)
        moves = in_rows & (factor != 0)
        seen = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), dtype=tl.float32)
        probed = seen
        for start in range(0, width, BLOCK_COLUMNS):
            column = (start + tl.arange(0, BLOCK_COLUMNS))[None, :]
            mask = moves[:, None] & (column < width)
            source = gradient_ptr + row[:, None] * width + column
            gradient = factor[:, None] * tl.load(source, mask=mask, other=0.0)
            energy = gradient * gradient
            seen += tl.where(column < rank, energy, 0.0)
            probed += tl.where(column < rank, 0.0, energy)
        seen_square = tl.sum(seen, axis=1)
        tl.store(seen_ptr + row, seen_square, mask=in_rows)
        tl.store(probed_ptr + row, tl.sum(probed, axis=1), mask=in_rows)
        if row_means_ptr is not None:
            mean_square = tl.div_rn(seen_square, tl.zeros_like(seen_square) + rank)
            row_mean = tl.load(row_means_ptr + row, mask=in_rows, other=0.0)
            tl.debug_barrier()  # a row may be held by several warps
            tl.store(row_means_ptr + row, beta2 * row_mean + share2 * mean_square, mask=moves)

    @triton.jit
    def _int8_moments_kernel(  # type: ignore[no-untyped-def]
        gradient_ptr, first_ptr, first_scales_ptr, first_levels_ptr, first_keys_ptr,
        second_ptr, second_scales_ptr, second_levels_ptr, second_keys_ptr,
        row_means_ptr, columns_ptr, first_evidence_ptr, factor_ptr,
        rows, rank, width, share1, beta1, share2, beta2, eps,
        FIRST_PER_OCTAVE: tl.constexpr, SECOND_PER_OCTAVE: tl.constexpr,
        FIRST_TOP: tl.constexpr, SECOND_TOP: tl.constexpr,
        BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        """Moments and direction; ``columns`` are evidence, or roots beside means of rows in place of a second moment."""
        numel = rows * rank
        blocks = tl.cdiv(numel, BLOCK)
        programs = tl.cdiv(blocks, BLOCKS)
        member = (tl.program_id(0) // programs).to(tl.int64)
        block = (tl.program_id(0) % programs) * BLOCKS + tl.arange(0, BLOCKS)
        index = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
        factor, first_evidence = tl.load(factor_ptr + member), tl.load(first_evidence_ptr + member)
        limit = tl.where(factor != 0, numel, 0)
        known, in_blocks = index < limit, block < tl.cdiv(limit, BLOCK)
        row, column = member * rows + index // rank, index % rank
        source = gradient_ptr + row * width + column
        gradient = factor * tl.load(source, mask=known, other=0.0)
        place, scale_place = member * numel + index, member * blocks + block

        code = tl.load(first_ptr + place, mask=known, other=0).to(tl.int32)
        scale = tl.load(first_scales_ptr + scale_place, mask=in_blocks, other=0.0)
        mean = tl.load(first_levels_ptr + code) * scale[:, None]
        mean = tl.where(known, adam_mean_jit(gradient, mean, share1, beta1), 0.0)
        low, high = tl.load(first_keys_ptr + 2 * member), tl.load(first_keys_ptr + 2 * member + 1)
        threshold = uniform_jit(index.to(tl.int64), low, high)
        code, scale = encode_blocks_jit(
            mean.to(tl.int32, bitcast=True), threshold, first_levels_ptr, FIRST_PER_OCTAVE,
            FIRST_TOP, True, BLOCKS, BLOCK,
        )  # fmt: skip
        tl.store(first_ptr + place, code, mask=known)
        tl.store(first_scales_ptr + scale_place, scale, mask=in_blocks)

        of_column = tl.load(columns_ptr + member * rank + column, mask=known, other=1.0)
        if row_means_ptr is not None:
            row_mean = tl.load(row_means_ptr + row, mask=known, other=0.0)
            root = tl.sqrt_rn(row_mean) * of_column
        else:
            code = tl.load(second_ptr + place, mask=known, other=0).to(tl.int32)
            scale = tl.load(second_scales_ptr + scale_place, mask=in_blocks, other=0.0)
            square = tl.load(second_levels_ptr + code) * scale[:, None]
            square = beta2 * square + share2 * gradient * gradient
            low, high = (
                tl.load(second_keys_ptr + 2 * member),
                tl.load(second_keys_ptr + 2 * member + 1),
            )
            threshold = uniform_jit(index.to(tl.int64), low, high)
            code, scale = encode_blocks_jit(
                square.to(tl.int32, bitcast=True), threshold, second_levels_ptr, SECOND_PER_OCTAVE,
                SECOND_TOP, False, BLOCKS, BLOCK,
            )  # fmt: skip
            tl.store(second_ptr + place, code, mask=known)
            tl.store(second_scales_ptr + scale_place, scale, mask=in_blocks)
            root = adam_root_jit(square, of_column)
        direction = adam_direction_jit(mean, root, first_evidence, eps)
        tl.store(source, tl.where(known, direction, 0.0), mask=index < numel)

    @triton.jit
    def _row_residual_kernel(  # type: ignore[no-untyped-def]
        gradient_ptr, seen_ptr, probed_ptr, factor_ptr, residual_scale_ptr, squares_ptr, rows, rank, width,
        BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
    ):  # fmt: skip
        row_blocks = tl.cdiv(rows, BLOCK_ROWS)
        member = (tl.program_id(0) // row_blocks).to(tl.int64)
        row = (tl.program_id(0) % row_blocks).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        in_rows, row = row < rows, member * rows + row
        factor = tl.zeros((BLOCK_ROWS,), dtype=tl.float32) + tl.load(factor_ptr + member)
        scale = tl.where(factor != 0, tl.load(residual_scale_ptr + member), 0.0)
        moved = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), dtype=tl.float32)
        for start in range(0, rank, BLOCK_COLUMNS):
            column = (start + tl.arange(0, BLOCK_COLUMNS))[None, :]
            mask = in_rows[:, None] & (column < rank)
            direction = tl.load(gradient_ptr + row[:, None] * width + column, mask=mask, other=0.0)
            moved += direction * direction
        seen = tl.load(seen_ptr + row, mask=in_rows, other=0.0)
        probed = tl.load(probed_ptr + row, mask=in_rows, other=0.0)
        scale_residual_jit(
            gradient_ptr, squares_ptr, row, in_rows,
            seen, tl.sum(moved, axis=1), probed, factor, scale, rank, width, BLOCK_COLUMNS,
        )  # fmt: skip

    @on_its_device
    def int8_moments_triton_(
        gradient: Tensor,
        exp_avg: StoredState,
        second: tuple[StoredState | Tensor, Tensor],
        first_evidence: Tensor,
        factor: Tensor,
        residual_scale: Tensor,
        squares: Tensor,
        constants: tuple[float, float, float, float, float],
    ) -> None:
        """Launcher for both rules.

        Args:
            second: a second moment in 8 bits and its evidence, or means of rows and roots of columns.
            squares: B x rows, of the residual; written. constants: 1 - beta1, beta1, 1 - beta2, beta2, eps.
        """
        square, columns = second
        (members, rows, width), rank = gradient.shape, columns.shape[1]
        row_means = square if isinstance(square, Tensor) else None
        square = exp_avg if isinstance(square, Tensor) else square
        block_rows, block_columns = tile(rows, width)
        by_rows = (members * triton.cdiv(rows, block_rows),)
        block = {"BLOCK_ROWS": block_rows, "BLOCK_COLUMNS": block_columns}
        sizes, share2, beta2 = (rows, rank, width), *constants[2:4]
        seen, probed = torch.empty(2, members, rows, device=gradient.device)
        if width > rank or row_means is not None:
            sums = seen, probed, *sizes, share2, beta2
            _row_squares_kernel[by_rows](gradient, factor, row_means, *sums, **block)
        (first_top, first_per_octave), (second_top, second_per_octave) = (
            CODE_RANGE[True],
            CODE_RANGE[False],
        )
        assert rows * rank < 1 << 31  # places in a matrix are int32
        programs = triton.cdiv(triton.cdiv(rows * rank, BLOCK), _BLOCKS_PER_PROGRAM)
        _int8_moments_kernel[(members * programs,)](
            gradient,
            exp_avg.data,
            exp_avg.scales,
            levels(True, gradient.device),
            exp_avg.keys,
            square.data,
            square.scales,
            levels(False, gradient.device),
            square.keys,
            row_means,
            columns,
            first_evidence,
            factor,
            *sizes,
            *constants,
            FIRST_PER_OCTAVE=first_per_octave,
            SECOND_PER_OCTAVE=second_per_octave,
            FIRST_TOP=first_top,
            SECOND_TOP=second_top,
            BLOCKS=_BLOCKS_PER_PROGRAM,
            BLOCK=BLOCK,
        )
        if width > rank:
            scales = factor, residual_scale, squares
            _row_residual_kernel[by_rows](gradient, seen, probed, *scales, *sizes, **block)
