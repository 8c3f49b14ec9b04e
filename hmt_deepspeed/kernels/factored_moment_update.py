"""As :mod:`hmt_deepspeed.kernels.moment_update`, with a factored second moment.

Adafactor's product (1804.04235, section 3) with the columns' part given, since that is a sum over all rows::

    m   <- m + (1 - beta1) (A - m)
    R_i <- beta2 R_i + (1 - beta2) mean_j A_ij^2
    U   = (m / e1) / (sqrt(R_i) c_j + eps)

Shapes: B matrices alike, gradient ``[A | S]`` B x rows x (r + k), ``exp_avg`` B x rows x r, ``row_means``
B x rows, ``column_roots`` B x r. ``exp_avg`` may be stored in 16 or 8 bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hmt_deepspeed.kernels.chunks import scratch_like, stack_pieces
from hmt_deepspeed.kernels.launching import on_its_device
from hmt_deepspeed.kernels.moment_rows import (
    CACHED,
    check_moments,
    drop_,
    scale_residual_,
    sizes_of,
)
from hmt_deepspeed.kernels.stored_state import StoredState, stored

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


def factored_moment_update_reference_(
    gradient: Tensor,
    exp_avg: Tensor | StoredState,
    row_means: Tensor,
    column_roots: Tensor,
    first_evidence: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    *,
    factor: Tensor,
    residual_scale: Tensor,
) -> Tensor:
    """Torch twin of the kernel; see :func:`factored_moment_update_`."""
    exp_avg = stored(exp_avg)
    (_, rows, width), rank = gradient.shape, column_roots.shape[1]
    squares = gradient.new_zeros(gradient.shape[:2])
    for members, part in stack_pieces(factor, rows, width, CACHED, exp_avg.whole_rows(rank)):
        piece = gradient[members, part].mul_(factor[members, None, None])
        inside, outside = piece[..., :rank], piece[..., rank:]
        mean, row_mean = exp_avg.read(members, part, rank), row_means[members, part]
        mean.lerp_(inside, 1 - beta1)
        exp_avg.write(members, part, mean)
        seen = torch.linalg.vector_norm(inside, dim=-1)
        row_mean.mul_(beta2).add_(seen.square().div_(rank), alpha=1 - beta2)
        direction = scratch_like(mean, mean.dtype)
        root = row_mean.sqrt().unsqueeze(-1)
        torch.mul(root, column_roots[members, None], out=direction).add_(eps)
        torch.div(mean, direction, out=direction)
        torch.div(direction, first_evidence[members, None, None], out=inside)
        if width > rank:
            scale = residual_scale[members, None]
            squares[members, part] = scale_residual_(outside, inside, seen, scale)
    drop_(gradient, squares, rank, factor, residual_scale)
    return squares


if triton is not None:
    from hmt_deepspeed.kernels.int8_moment_update import int8_moments_triton_
    from hmt_deepspeed.kernels.moment_rows import (
        adam_direction_jit,
        adam_mean_jit,
        scale_residual_jit,
        tile,
    )
    from hmt_deepspeed.kernels.stored_state import load_state_jit, store_state_jit

    @triton.jit
    def _factored_moment_update_kernel(  # type: ignore[no-untyped-def]
        gradient_ptr, exp_avg_ptr, first_keys_ptr, row_means_ptr, column_roots_ptr, first_evidence_ptr,
        factor_ptr, residual_scale_ptr, squares_ptr,
        rows, rank, width, share1, beta1, share2, beta2, eps,
        BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, RESIDUAL: tl.constexpr,
        FIRST_BF16: tl.constexpr,
    ):  # fmt: skip
        row_blocks = tl.cdiv(rows, BLOCK_ROWS)
        member = (tl.program_id(0) // row_blocks).to(tl.int64)
        row = (tl.program_id(0) % row_blocks).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        in_rows, row = row < rows, member * rows + row
        first_evidence = tl.load(first_evidence_ptr + member)
        factor = tl.zeros((BLOCK_ROWS,), dtype=tl.float32) + tl.load(factor_ptr + member)
        moves = in_rows & (factor != 0)

        seen = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), dtype=tl.float32)
        probed, moved = seen, seen
        for start in range(0, width, BLOCK_COLUMNS):
            column = (start + tl.arange(0, BLOCK_COLUMNS))[None, :]
            mask = moves[:, None] & (column < width)
            source = gradient_ptr + row[:, None] * width + column
            gradient = factor[:, None] * tl.load(source, mask=mask, other=0.0)
            energy = gradient * gradient
            seen += tl.where(column < rank, energy, 0.0)
            probed += tl.where(column < rank, 0.0, energy)
        seen_square = tl.sum(seen, axis=1)
        mean_square = tl.div_rn(seen_square, tl.zeros_like(seen_square) + rank)
        row_mean = tl.load(row_means_ptr + row, mask=in_rows, other=0.0)
        # A row may be held by several warps: all read it and its mean before one writes them.
        tl.debug_barrier()
        row_mean = beta2 * row_mean + share2 * mean_square
        tl.store(row_means_ptr + row, row_mean, mask=moves)
        row_root = tl.sqrt_rn(row_mean)[:, None]
        for start in range(0, rank, BLOCK_COLUMNS):
            column = (start + tl.arange(0, BLOCK_COLUMNS))[None, :]
            inside = in_rows[:, None] & (column < rank)
            source = gradient_ptr + row[:, None] * width + column
            known, position = inside & moves[:, None], row[:, None] * rank + column
            gradient = factor[:, None] * tl.load(source, mask=known, other=0.0)
            mean = load_state_jit(exp_avg_ptr + position, known, FIRST_BF16)
            mean = adam_mean_jit(gradient, mean, share1, beta1)
            index = position - member * rows * rank
            store_state_jit(
                exp_avg_ptr + position, mean, known, first_keys_ptr, member, index, FIRST_BF16
            )
            root = tl.load(column_roots_ptr + member * rank + column, mask=column < rank, other=0.0)
            direction = adam_direction_jit(mean, row_root * root, first_evidence, eps)
            direction = tl.where(known, direction, 0.0)
            tl.store(source, direction, mask=inside)
            moved += direction * direction
        if RESIDUAL:
            scale = tl.where(moves, tl.load(residual_scale_ptr + member), 0.0)
            scale_residual_jit(
                gradient_ptr, squares_ptr, row, in_rows,
                seen_square, tl.sum(moved, axis=1), tl.sum(probed, axis=1), factor, scale, rank, width,
                BLOCK_COLUMNS,
            )  # fmt: skip

    @on_its_device
    def factored_moment_update_triton_(
        gradient: Tensor,
        exp_avg: Tensor | StoredState,
        row_means: Tensor,
        column_roots: Tensor,
        first_evidence: Tensor,
        beta1: float,
        beta2: float,
        eps: float,
        *,
        factor: Tensor,
        residual_scale: Tensor,
    ) -> Tensor:
        """Triton launcher; see :func:`factored_moment_update_`."""
        exp_avg = stored(exp_avg)
        (members, rows, width), rank = gradient.shape, column_roots.shape[1]
        residual = width > rank
        made = torch.empty if residual else torch.zeros
        squares = made(members, rows, dtype=torch.float32, device=gradient.device)
        if gradient.numel() == 0:
            return squares
        constants = 1 - beta1, beta1, 1 - beta2, beta2, eps
        if exp_avg.scales is not None:
            second = row_means, column_roots
            scales = factor, residual_scale, squares
            int8_moments_triton_(gradient, exp_avg, second, first_evidence, *scales, constants)
            return squares
        block_rows, block_columns = tile(rows, width)
        _factored_moment_update_kernel[(members * triton.cdiv(rows, block_rows),)](
            gradient,
            exp_avg.patterns,
            exp_avg.keys,
            row_means,
            column_roots,
            first_evidence,
            factor,
            residual_scale,
            squares,
            rows,
            rank,
            width,
            *constants,
            BLOCK_ROWS=block_rows,
            BLOCK_COLUMNS=block_columns,
            RESIDUAL=residual,
            FIRST_BF16=exp_avg.data.dtype == torch.bfloat16,
        )
        return squares


def factored_moment_update_(
    gradient: Tensor,
    exp_avg: Tensor | StoredState,
    row_means: Tensor,
    column_roots: Tensor,
    first_evidence: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    *,
    factor: Tensor,
    residual_scale: Tensor,
) -> Tensor:
    """Update the first moment and the row means and turn the gradient into the update, in place.

    As :func:`hmt_deepspeed.kernels.moment_update.moment_update_`, which says what is not said here.

    Args:
        gradient: B x rows x (r + k), ``[A | S]``; becomes ``[U | c phi S]``.
        exp_avg: B x rows x r, or as it is stored, row_means: B x rows; uncorrected running means; updated.
        column_roots: B x r: root of a column's bias-corrected mean over the mean of all rows'.
        first_evidence: (B,), weight of evidence in ``exp_avg`` after this step.
        beta1, beta2, eps: Adam's.
        factor, residual_scale: (B,).

    Returns:
        B x rows, squared norm of each row of ``c phi S``.

    Raises:
        ValueError: for other dtypes or shapes, or tensors that are not contiguous.
    """
    exp_avg = stored(exp_avg)
    members, rows, rank = sizes_of(gradient, column_roots)
    check_moments(
        gradient=(gradient, gradient.shape),
        exp_avg=(exp_avg, (members, rows, rank)),
        row_means=(row_means, (members, rows)),
        column_roots=(column_roots, (members, rank)),
        first_evidence=(first_evidence, (members,)),
        factor=(factor, (members,)),
        residual_scale=(residual_scale, (members,)),
    )
    update = (
        factored_moment_update_triton_
        if gradient.is_cuda and triton is not None
        else factored_moment_update_reference_
    )
    return update(
        gradient,
        exp_avg,
        row_means,
        column_roots,
        first_evidence,
        beta1,
        beta2,
        eps,
        factor=factor,
        residual_scale=residual_scale,
    )
