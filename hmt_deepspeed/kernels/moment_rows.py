"""What the kernels of moments share: residuals of rows, members that take no step, checks, tiles."""

from __future__ import annotations

import torch
from torch import Tensor

from hmt_deepspeed.kernels.stored_state import StoredState

try:
    import triton
    import triton.language as tl
except ImportError:  # platforms without Triton have no CUDA device to run it on
    triton = None

__all__ = ["CACHED", "check_moments", "drop_", "scale_residual_", "sizes_of"]

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


def sizes_of(gradient: Tensor, evidence: Tensor) -> tuple[int, int, int]:
    """B, rows and r."""
    if gradient.dim() != 3 or evidence.dim() != 2 or evidence.shape[1] > gradient.shape[2]:
        raise ValueError(
            "gradient must be B x rows x (r + k) and what there is of a column B x r, got "
            f"{tuple(gradient.shape)} and {tuple(evidence.shape)}"
        )
    return (*gradient.shape[:2], evidence.shape[1])


def check_moments(**tensors: tuple[Tensor | StoredState, tuple[int, ...]]) -> None:
    """Refuse tensors that are not contiguous fp32 of the given shapes, and states stored otherwise."""
    for name, (tensor, shape) in tensors.items():
        if isinstance(tensor, StoredState):
            tensor.check(name, *shape)
        elif tensor.dtype != torch.float32:
            raise ValueError(f"{name} must be fp32, got {tensor.dtype}")
        elif tensor.shape != shape:
            raise ValueError(f"{name} must be {shape}, got {tuple(tensor.shape)}")
        elif not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous")


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
    def adam_mean_jit(gradient, mean, share1, beta1):  # type: ignore[no-untyped-def]
        """torch.lerp's two forms: each is exact at its own end."""
        gap = gradient - mean
        return tl.where(share1 < 0.5, mean + share1 * gap, gradient - beta1 * gap)

    @triton.jit
    def adam_direction_jit(mean, root, first_evidence, eps):  # type: ignore[no-untyped-def]
        """Direction of a mean, given the root of the corrected second moment."""
        direction = tl.div_rn(mean, root + eps)
        return tl.div_rn(direction, tl.zeros_like(direction) + first_evidence)

    @triton.jit
    def adam_root_jit(square, evidence):  # type: ignore[no-untyped-def]
        return tl.sqrt_rn(tl.div_rn(square, tl.broadcast_to(evidence, square.shape)))

    def tile(rows: int, width: int) -> tuple[int, int]:
        """Rows and columns of a program's tile: always ``_BLOCK`` elements, so that no two threads hold one."""
        columns = min(_BLOCK_COLUMNS, triton.next_power_of_2(width))
        block_rows = min(_BLOCK // columns, triton.next_power_of_2(rows))
        return block_rows, _BLOCK // block_rows
