"""Adam's moments, direction and residual of a stack of projected gradients in one pass.

A gradient ``[A | S]`` (r columns in the basis, k probe columns outside it) becomes the update ``[U | c phi S]``.
Adam (Kingma and Ba, algorithm 1) with the bias corrections carried as evidence, per direction for the
second moment, and Fira's norm-based scaling of each row's residual (2410.01623, section 4.1)::

    m <- m + (1 - beta1) (A - m)
    v <- beta2 v + (1 - beta2) A^2
    U  = (m / e1) / (sqrt(v_j / e2_j) + eps)
    phi = ||U_i|| / max(||A_i||, ||S_i||)      of row i

Where the basis sees less of a row than the probes do, ``||S_i||`` takes the place of ``||A_i||``, so a row
that the basis misses moves by ``c ||U_i||`` at most instead of without bound.

Shapes: B matrices alike, gradient B x rows x (r + k), moments B x rows x r, evidence B x r. Moments that are stored
in 16 or 8 bits are read, and rounded by keys of their own, in the same pass: fp32 of them is in registers only.
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
    "moment_update_",
    "moment_update_reference_",
    "moment_update_triton_",
]


def moment_update_reference_(
    gradient: Tensor,
    exp_avg: Tensor | StoredState,
    exp_avg_sq: Tensor | StoredState,
    evidence: Tensor,
    first_evidence: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    *,
    factor: Tensor,
    residual_scale: Tensor,
) -> Tensor:
    """Torch twin of the kernel; see :func:`moment_update_`."""
    exp_avg, exp_avg_sq = stored(exp_avg), stored(exp_avg_sq, signed=False)
    (_, rows, width), rank = gradient.shape, evidence.shape[1]
    squares = gradient.new_zeros(gradient.shape[:2])
    whole = max(state.whole_rows(rank) for state in (exp_avg, exp_avg_sq))
    for members, part in stack_pieces(factor, rows, width, CACHED, whole):
        piece = gradient[members, part].mul_(factor[members, None, None])
        inside, outside = piece[..., :rank], piece[..., rank:]
        mean, square = (state.read(members, part, rank) for state in (exp_avg, exp_avg_sq))
        mean.lerp_(inside, 1 - beta1)
        square.mul_(beta2).addcmul_(inside, inside, value=1 - beta2)
        exp_avg.write(members, part, mean)
        exp_avg_sq.write(members, part, square)
        seen = torch.linalg.vector_norm(inside, dim=-1) if width > rank else None
        direction = scratch_like(square, square.dtype)
        torch.div(square, evidence[members, None], out=direction).sqrt_().add_(eps)
        torch.div(mean, direction, out=direction)
        torch.div(direction, first_evidence[members, None, None], out=inside)
        if seen is not None:
            scale = residual_scale[members, None]
            squares[members, part] = scale_residual_(outside, inside, seen, scale)
    drop_(gradient, squares, rank, factor, residual_scale)
    return squares


if triton is not None:
    from hmt_deepspeed.kernels.int8_moment_update import int8_moments_triton_
    from hmt_deepspeed.kernels.moment_rows import (
        adam_direction_jit,
        adam_mean_jit,
        adam_root_jit,
        scale_residual_jit,
        tile,
    )
    from hmt_deepspeed.kernels.stored_state import load_state_jit, store_state_jit

    @triton.jit
    def _moment_update_kernel(  # type: ignore[no-untyped-def]
        gradient_ptr, exp_avg_ptr, exp_avg_sq_ptr, first_keys_ptr, second_keys_ptr,
        evidence_ptr, first_evidence_ptr, factor_ptr, residual_scale_ptr, squares_ptr,
        rows, rank, width, share1, beta1, share2, beta2, eps,
        BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, RESIDUAL: tl.constexpr,
        FIRST_BF16: tl.constexpr, SECOND_BF16: tl.constexpr,
    ):  # fmt: skip
        # Without a residual no row has to be one program's: a two-sided core is one long row.
        tiles = 1 if RESIDUAL else tl.cdiv(rank, BLOCK_COLUMNS)
        row_blocks = tl.cdiv(rows, BLOCK_ROWS)
        block = tl.program_id(0) // tiles
        member = (block // row_blocks).to(tl.int64)
        row = (block % row_blocks).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        in_rows, row = row < rows, member * rows + row
        first_evidence = tl.load(first_evidence_ptr + member)
        factor = tl.zeros((BLOCK_ROWS,), dtype=tl.float32) + tl.load(factor_ptr + member)
        moves = in_rows & (factor != 0)

        first = 0 if RESIDUAL else (tl.program_id(0) % tiles) * BLOCK_COLUMNS
        last = width if RESIDUAL else first + BLOCK_COLUMNS
        seen = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), dtype=tl.float32)
        moved, probed = seen, seen
        for start in range(first, last, BLOCK_COLUMNS):
            column = (start + tl.arange(0, BLOCK_COLUMNS))[None, :]
            mask = moves[:, None] & (column < width)
            source = gradient_ptr + row[:, None] * width + column
            gradient = factor[:, None] * tl.load(source, mask=mask, other=0.0)
            inside = in_rows[:, None] & (column < rank)
            known, position = inside & moves[:, None], row[:, None] * rank + column
            mean = load_state_jit(exp_avg_ptr + position, known, FIRST_BF16)
            square = load_state_jit(exp_avg_sq_ptr + position, known, SECOND_BF16)
            evidence = tl.load(evidence_ptr + member * rank + column, mask=column < rank, other=1.0)
            mean = adam_mean_jit(gradient, mean, share1, beta1)
            square = beta2 * square + share2 * gradient * gradient
            index = position - member * rows * rank
            store_state_jit(
                exp_avg_ptr + position, mean, known, first_keys_ptr, member, index, FIRST_BF16
            )
            store_state_jit(
                exp_avg_sq_ptr + position,
                square,
                known,
                second_keys_ptr,
                member,
                index,
                SECOND_BF16,
            )
            root = adam_root_jit(square, evidence)
            direction = adam_direction_jit(mean, root, first_evidence, eps)
            direction = tl.where(known, direction, 0.0)
            tl.store(source, direction, mask=inside)
            if RESIDUAL:
                energy = gradient * gradient
                seen += tl.where(inside, energy, 0.0)
                probed += tl.where(inside, 0.0, energy)
                moved += direction * direction
        if RESIDUAL:
            scale = tl.where(moves, tl.load(residual_scale_ptr + member), 0.0)
            scale_residual_jit(
                gradient_ptr, squares_ptr, row, in_rows,
                tl.sum(seen, axis=1), tl.sum(moved, axis=1), tl.sum(probed, axis=1), factor, scale, rank, width,
                BLOCK_COLUMNS,
            )  # fmt: skip

    @on_its_device
    def moment_update_triton_(
        gradient: Tensor,
        exp_avg: Tensor | StoredState,
        exp_avg_sq: Tensor | StoredState,
        evidence: Tensor,
        first_evidence: Tensor,
        beta1: float,
        beta2: float,
        eps: float,
        *,
        factor: Tensor,
        residual_scale: Tensor,
    ) -> Tensor:
        """Triton launcher; see :func:`moment_update_`."""
        exp_avg, exp_avg_sq = stored(exp_avg), stored(exp_avg_sq, signed=False)
        (members, rows, width), rank = gradient.shape, evidence.shape[1]
        residual = width > rank
        made = torch.empty if residual else torch.zeros
        squares = made(members, rows, dtype=torch.float32, device=gradient.device)
        if gradient.numel() == 0:
            return squares
        constants = 1 - beta1, beta1, 1 - beta2, beta2, eps
        if exp_avg.scales is not None:
            second = exp_avg_sq, evidence
            scales = factor, residual_scale, squares
            int8_moments_triton_(gradient, exp_avg, second, first_evidence, *scales, constants)
            return squares
        block_rows, block_columns = tile(rows, width)
        tiles = 1 if residual else triton.cdiv(rank, block_columns)
        _moment_update_kernel[(members * triton.cdiv(rows, block_rows) * tiles,)](
            gradient,
            exp_avg.patterns,
            exp_avg_sq.patterns,
            exp_avg.keys,
            exp_avg_sq.keys,
            evidence,
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
            SECOND_BF16=exp_avg_sq.data.dtype == torch.bfloat16,
        )
        return squares


def moment_update_(
    gradient: Tensor,
    exp_avg: Tensor | StoredState,
    exp_avg_sq: Tensor | StoredState,
    evidence: Tensor,
    first_evidence: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    *,
    factor: Tensor,
    residual_scale: Tensor,
) -> Tensor:
    """Update both moments and turn the gradient into the update, in place; formulas at the top of the file.

    A matrix whose factor is 0 takes no step: its moments stay bit for bit and its update is zero, whatever its
    gradient holds. All tensors are contiguous and on one device, and fp32 where nothing else is said.

    Args:
        gradient: B x rows x (r + k), ``[A | S]``; becomes ``[U | c phi S]``. k may be 0.
        exp_avg, exp_avg_sq: B x rows x r, uncorrected running means, or as they are stored, both in 8 bits or none;
            updated.
        evidence: B x r, weight of evidence in ``exp_avg_sq`` after this step.
        first_evidence: (B,), weight of evidence in ``exp_avg`` after this step.
        beta1, beta2, eps: Adam's.
        factor: (B,), what the gradient is multiplied by first.
        residual_scale: (B,), c; 0 where the residual is dropped.

    Returns:
        B x rows, squared norm of each row of ``c phi S``.

    Raises:
        ValueError: for other dtypes or shapes, or tensors that are not contiguous.
    """
    exp_avg, exp_avg_sq = stored(exp_avg), stored(exp_avg_sq, signed=False)
    members, rows, rank = sizes_of(gradient, evidence)
    if (exp_avg.scales is None) != (exp_avg_sq.scales is None):
        raise ValueError("exp_avg and exp_avg_sq must be stored in 8 bits both, or none of them")
    check_moments(
        gradient=(gradient, gradient.shape),
        exp_avg=(exp_avg, (members, rows, rank)),
        exp_avg_sq=(exp_avg_sq, (members, rows, rank)),
        evidence=(evidence, (members, rank)),
        first_evidence=(first_evidence, (members,)),
        factor=(factor, (members,)),
        residual_scale=(residual_scale, (members,)),
    )
    update = (
        moment_update_triton_
        if gradient.is_cuda and triton is not None
        else moment_update_reference_
    )
    return update(
        gradient,
        exp_avg,
        exp_avg_sq,
        evidence,
        first_evidence,
        beta1,
        beta2,
        eps,
        factor=factor,
        residual_scale=residual_scale,
    )
