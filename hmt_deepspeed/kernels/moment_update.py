"""Adam's moments and direction on a projected gradient in one pass.

Adam (Kingma and Ba, algorithm 1) with the bias corrections carried as evidence, per direction for
the second moment::

    m <- m + (1 - beta1) (A - m)
    v <- beta2 v + (1 - beta2) A^2
    U  = (m / e1) / (sqrt(v_j / e2_j) + eps)

Shapes: ``projected``, ``exp_avg``, ``exp_avg_sq`` and the direction rows x r, ``evidence`` (r,).
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

__all__ = ["moment_update_", "moment_update_reference_", "moment_update_triton_"]

_BLOCK, _BLOCK_RANK = 4096, 128


def moment_update_reference_(
    projected: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    evidence: Tensor,
    first_evidence: float,
    beta1: float,
    beta2: float,
    eps: float,
) -> Tensor:
    """Torch twin of the kernel; see :func:`moment_update_`."""
    exp_avg.lerp_(projected, 1 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(projected, projected, value=1 - beta2)
    denominator = (exp_avg_sq / evidence).sqrt_().add_(eps)
    return exp_avg.div(denominator).div_(first_evidence)


if triton is not None:

    @triton.jit
    def _moment_update_kernel(  # type: ignore[no-untyped-def]
        projected_ptr, exp_avg_ptr, exp_avg_sq_ptr, evidence_ptr, direction_ptr,
        rows, rank, projected_row, projected_column,
        first_evidence, share1, beta1, share2, beta2, eps,
        BLOCK_ROWS: tl.constexpr, BLOCK_RANK: tl.constexpr,
    ):  # fmt: skip
        tiles = tl.cdiv(rank, BLOCK_RANK)
        program = tl.program_id(0)
        row = (program // tiles).to(tl.int64)[None, None] * BLOCK_ROWS
        row += tl.arange(0, BLOCK_ROWS)[:, None]
        column = (program % tiles).to(tl.int64) * BLOCK_RANK + tl.arange(0, BLOCK_RANK)[None, :]
        mask = (row < rows) & (column < rank)
        position = row * rank + column
        source = projected_ptr + row * projected_row + column * projected_column
        projected = tl.load(source, mask=mask, other=0.0)
        mean = tl.load(exp_avg_ptr + position, mask=mask, other=0.0)
        square = tl.load(exp_avg_sq_ptr + position, mask=mask, other=0.0)
        evidence = tl.load(evidence_ptr + column, mask=column < rank, other=1.0)
        # torch.lerp's two forms: each is exact at its own end
        gap = projected - mean
        mean = tl.where(share1 < 0.5, mean + share1 * gap, projected - beta1 * gap)
        square = beta2 * square + share2 * projected * projected
        corrected = tl.div_rn(square, tl.broadcast_to(evidence, (BLOCK_ROWS, BLOCK_RANK)))
        direction = tl.div_rn(mean, tl.sqrt_rn(corrected) + eps)
        direction = tl.div_rn(direction, tl.zeros_like(direction) + first_evidence)
        tl.store(exp_avg_ptr + position, mean, mask=mask)
        tl.store(exp_avg_sq_ptr + position, square, mask=mask)
        tl.store(direction_ptr + position, direction, mask=mask)

    @on_its_device
    def moment_update_triton_(
        projected: Tensor,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        evidence: Tensor,
        first_evidence: float,
        beta1: float,
        beta2: float,
        eps: float,
    ) -> Tensor:
        """Triton launcher; see :func:`moment_update_`."""
        direction = torch.empty_like(exp_avg)
        if direction.numel() == 0:
            return direction
        rows, rank = exp_avg.shape
        widest = triton.next_power_of_2(rank)
        # A two-sided core is one long row.
        block_rows = min(_BLOCK // min(_BLOCK_RANK, widest), triton.next_power_of_2(rows))
        block_rank = min(_BLOCK // block_rows, widest)
        grid = (triton.cdiv(rows, block_rows) * triton.cdiv(rank, block_rank),)
        _moment_update_kernel[grid](
            projected,
            exp_avg,
            exp_avg_sq,
            evidence,
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


def moment_update_(
    projected: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    evidence: Tensor,
    first_evidence: float,
    beta1: float,
    beta2: float,
    eps: float,
) -> Tensor:
    """Update both moments in place and return Adam's direction; formulas at the top of the file.

    Args:
        projected: rows x r, fp32, any strides (a column slice of a wider matrix).
        exp_avg, exp_avg_sq: rows x r, fp32, contiguous, uncorrected running means; updated.
        evidence: (r,), fp32, contiguous: weight of evidence in ``exp_avg_sq`` after this step.
        first_evidence: weight of evidence in ``exp_avg`` after this step.
        beta1, beta2, eps: Adam's.

    Returns:
        rows x r, fp32, contiguous.

    Raises:
        ValueError: for other dtypes, shapes, moments or evidence that are not contiguous.
    """
    tensors = (projected, exp_avg, exp_avg_sq, evidence)
    if any(tensor.dtype != torch.float32 for tensor in tensors):
        raise ValueError(
            f"projected, exp_avg, exp_avg_sq and evidence must be fp32, got {[t.dtype for t in tensors]}"
        )
    shape = projected.shape
    if len(shape) != 2 or exp_avg.shape != shape or exp_avg_sq.shape != shape:
        raise ValueError(
            "projected, exp_avg and exp_avg_sq must be rows x r alike, got "
            f"{[tuple(tensor.shape) for tensor in tensors[:3]]}"
        )
    if evidence.shape != shape[1:]:
        raise ValueError(f"evidence must be ({shape[1]},), got {tuple(evidence.shape)}")
    if not all(tensor.is_contiguous() for tensor in tensors[1:]):
        raise ValueError("exp_avg, exp_avg_sq and evidence must be contiguous")
    update = (
        moment_update_triton_
        if projected.is_cuda and triton is not None
        else moment_update_reference_
    )
    return update(projected, exp_avg, exp_avg_sq, evidence, first_evidence, beta1, beta2, eps)
