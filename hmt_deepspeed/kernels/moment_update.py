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

Shapes: B matrices alike, gradient B x rows x (r + k), moments B x rows x r, evidence B x r.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hmt_deepspeed.kernels.chunks import scratch_like, stack_pieces
from hmt_deepspeed.kernels.launching import on_its_device

try:
    import triton
    import triton.language as tl
except ImportError:  # platforms without Triton have no CUDA device to run it on
    triton = None

__all__ = [
    "CACHED",
    "check_stacks",
    "drop_",
    "moment_direction_",
    "moment_update_",
    "moment_update_reference_",
    "moment_update_triton_",
    "scale_residual_",
    "stack_sizes",
]

TINY = 1e-30  # a norm below it is none; what is divided by it stays finite
_BLOCK, _BLOCK_COLUMNS = 1024, 128
CACHED = 1 << 18  # elements of a gradient that the torch twin works on at once


def scale_residual_(residual: Tensor, direction: Tensor, seen: Tensor, scale: Tensor) -> Tensor:
    """``S <- c phi S`` in place; the squared norm of each row of the result.

    Args:
        residual: B x rows x k, S. direction: B x rows x r, U. seen: B x rows, ``||A_i||``. scale: B x 1, c.
    """
    probed = torch.linalg.vector_norm(residual, dim=-1)
    phi = torch.linalg.vector_norm(direction, dim=-1)
    phi.div_(torch.maximum(seen, probed).clamp_min_(TINY)).mul_(scale)
    residual.mul_(phi.unsqueeze(-1))
    return phi.mul_(probed).square_()


def drop_(gradient: Tensor, squares: Tensor, rank: int, factor: Tensor, scale: Tensor) -> None:
    """Zero the updates of members that take no step, and residuals that are dropped: they may be NaN."""
    for member, (moves, scales) in enumerate(zip(factor.tolist(), scale.tolist(), strict=True)):
        if moves == 0 or scales == 0:
            gradient[member, :, rank if moves else 0 :] = 0.0
            squares[member] = 0.0


def moment_update_reference_(
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
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
    (_, rows, rank), width = exp_avg.shape, gradient.shape[2]
    squares = gradient.new_zeros(gradient.shape[:2])
    for members, part in stack_pieces(factor, rows, width, CACHED):
        piece = gradient[members, part].mul_(factor[members, None, None])
        inside, outside = piece[..., :rank], piece[..., rank:]
        mean, square = exp_avg[members, part], exp_avg_sq[members, part]
        mean.lerp_(inside, 1 - beta1)
        square.mul_(beta2).addcmul_(inside, inside, value=1 - beta2)
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

    @triton.jit
    def scale_residual_jit(  # type: ignore[no-untyped-def]
        gradient_ptr, squares_ptr, row, in_rows, seen_square, moved_square, probed_square, factor, scale, rank, width,
        BLOCK_COLUMNS: tl.constexpr,
    ):  # fmt: skip
        """Twin of :func:`scale_residual_` for one block of rows, from its sums of squares;
        ``factor`` and ``scale`` are the rows'."""
        seen = tl.sqrt_rn(tl.maximum(seen_square, probed_square))
        phi = tl.div_rn(tl.sqrt_rn(moved_square), tl.maximum(seen, 1e-30))
        phi, kept = scale * phi, scale != 0  # what is dropped may be NaN
        tl.debug_barrier()  # every warp has read its columns before another one writes them
        for start in range(rank, width, BLOCK_COLUMNS):
            column = (start + tl.arange(0, BLOCK_COLUMNS))[None, :]
            mask = in_rows[:, None] & (column < width)
            position = gradient_ptr + row[:, None] * width + column
            residual = phi[:, None] * (factor[:, None] * tl.load(position, mask=mask, other=0.0))
            tl.store(position, tl.where(kept[:, None], residual, 0.0), mask=mask)
        norm = tl.where(kept, phi * tl.sqrt_rn(probed_square), 0.0)
        tl.store(squares_ptr + row, norm * norm, mask=in_rows)

    @triton.jit
    def _moment_update_kernel(  # type: ignore[no-untyped-def]
        gradient_ptr, exp_avg_ptr, exp_avg_sq_ptr, evidence_ptr, first_evidence_ptr,
        factor_ptr, residual_scale_ptr, squares_ptr,
        rows, rank, width, share1, beta1, share2, beta2, eps,
        BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, RESIDUAL: tl.constexpr,
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
            mean = tl.load(exp_avg_ptr + position, mask=known, other=0.0)
            square = tl.load(exp_avg_sq_ptr + position, mask=known, other=0.0)
            evidence = tl.load(evidence_ptr + member * rank + column, mask=column < rank, other=1.0)
            # torch.lerp's two forms: each is exact at its own end
            gap = gradient - mean
            mean = tl.where(share1 < 0.5, mean + share1 * gap, gradient - beta1 * gap)
            square = beta2 * square + share2 * gradient * gradient
            tl.store(exp_avg_ptr + position, mean, mask=known)
            tl.store(exp_avg_sq_ptr + position, square, mask=known)
            corrected = tl.div_rn(square, tl.broadcast_to(evidence, (BLOCK_ROWS, BLOCK_COLUMNS)))
            direction = tl.div_rn(mean, tl.sqrt_rn(corrected) + eps)
            direction = tl.div_rn(direction, tl.zeros_like(direction) + first_evidence)
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
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
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
        (members, rows, rank), width = exp_avg.shape, gradient.shape[2]
        residual = width > rank
        made = torch.empty if residual else torch.zeros
        squares = made(members, rows, dtype=torch.float32, device=gradient.device)
        if gradient.numel() == 0:
            return squares
        block_rows, block_columns = tile(rows, width)
        tiles = 1 if residual else triton.cdiv(rank, block_columns)
        _moment_update_kernel[(members * triton.cdiv(rows, block_rows) * tiles,)](
            gradient,
            exp_avg,
            exp_avg_sq,
            evidence,
            first_evidence,
            factor,
            residual_scale,
            squares,
            rows,
            rank,
            width,
            1 - beta1,
            beta1,
            1 - beta2,
            beta2,
            eps,
            BLOCK_ROWS=block_rows,
            BLOCK_COLUMNS=block_columns,
            RESIDUAL=residual,
        )
        return squares

    def tile(rows: int, width: int) -> tuple[int, int]:
        """Rows and columns of a program's tile: always ``_BLOCK`` elements, so that no two threads hold one."""
        columns = min(_BLOCK_COLUMNS, triton.next_power_of_2(width))
        block_rows = min(_BLOCK // columns, triton.next_power_of_2(rows))
        return block_rows, _BLOCK // block_rows


def stack_sizes(gradient: Tensor, exp_avg: Tensor) -> tuple[int, int, int]:
    """B, rows and r."""
    if gradient.dim() != 3 or exp_avg.dim() != 3 or exp_avg.shape[2] > gradient.shape[2]:
        raise ValueError(
            "gradient and exp_avg must be B x rows x (r + k) and B x rows x r, got "
            f"{tuple(gradient.shape)} and {tuple(exp_avg.shape)}"
        )
    return (*gradient.shape[:2], exp_avg.shape[2])


def check_stacks(**stacks: tuple[Tensor, tuple[int, ...]]) -> None:
    """Refuse tensors that are not contiguous fp32 of the given shapes."""
    for name, (tensor, shape) in stacks.items():
        if tensor.dtype != torch.float32:
            raise ValueError(f"{name} must be fp32, got {tensor.dtype}")
        if tensor.shape != shape:
            raise ValueError(f"{name} must be {shape}, got {tuple(tensor.shape)}")
        if not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous")


def moment_update_(
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
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
    gradient holds. All tensors are fp32, contiguous and on one device.

    Args:
        gradient: B x rows x (r + k), ``[A | S]``; becomes ``[U | c phi S]``. k may be 0.
        exp_avg, exp_avg_sq: B x rows x r, uncorrected running means; updated.
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
    members, rows, rank = stack_sizes(gradient, exp_avg)
    check_stacks(
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


def moment_direction_(
    projected: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    evidence: Tensor,
    first_evidence: float,
    beta1: float,
    beta2: float,
    eps: float,
) -> Tensor:
    """:func:`moment_update_` of one matrix without a residual, for a gradient that is kept.

    Args:
        projected: rows x r, fp32, any strides. exp_avg, exp_avg_sq: rows x r. evidence: (r,).

    Returns:
        The direction, rows x r, fp32, contiguous.
    """
    direction = projected.clone(memory_format=torch.contiguous_format)[None]
    one = direction.new_ones(1)
    moment_update_(
        direction,
        exp_avg[None],
        exp_avg_sq[None],
        evidence[None],
        one * first_evidence,
        beta1,
        beta2,
        eps,
        factor=one,
        residual_scale=one,
    )
    return direction[0]
