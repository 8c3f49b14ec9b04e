"""Low-rank weight update in one pass: ``W <- (1 - lr wd) W - lr (U P^T)``.

Decoupled weight decay as in AdamW (Loshchilov and Hutter, algorithm 2) on an update that has only
rank w. The product is formed tile by tile in fp32 and never stored, so a weight is read once and
written once. A bf16 weight is rounded stochastically, see
:mod:`hmt_deepspeed.kernels.stochastic_rounding`.

Shapes: ``weight`` rows x n, ``update`` rows x w, ``projection`` n x w.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hmt_deepspeed.kernels.chunks import row_chunks
from hmt_deepspeed.kernels.noise import key_halves
from hmt_deepspeed.kernels.stochastic_rounding import stochastic_round

try:
    import triton
    import triton.language as tl
except ImportError:  # platforms without Triton have no CUDA device to run it on
    triton = None

__all__ = [
    "check_low_rank",
    "low_rank_update_",
    "low_rank_update_reference_",
    "low_rank_update_triton_",
]

_BLOCK_ROWS, _BLOCK_N, _BLOCK_W = 64, 64, 32


def check_low_rank(shape: torch.Size, update: Tensor, projection: Tensor) -> None:
    """Raises ValueError unless ``update projection^T`` is an update of a matrix of this shape."""
    if len(shape) != 2 or update.dim() != 2 or projection.dim() != 2:
        raise ValueError(
            f"weight, update and projection must be matrices, got {tuple(shape)}, "
            f"{tuple(update.shape)} and {tuple(projection.shape)}"
        )
    (rows, n), width = shape, update.shape[1]
    if update.shape[0] != rows or projection.shape != (n, width):
        raise ValueError(
            f"a {rows} x {n} weight takes a {rows} x w update and a {n} x w projection, got "
            f"{tuple(update.shape)} and {tuple(projection.shape)}"
        )
    if update.dtype != torch.float32:
        raise ValueError(f"update must be fp32, got {update.dtype}")
    if projection.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"projection must be fp32 or bf16, got {projection.dtype}")


def low_rank_update_reference_(
    weight: Tensor,
    update: Tensor,
    projection: Tensor,
    lr: float,
    weight_decay: float,
    key: int | None = None,
    offset: int = 0,
) -> None:
    """Torch twin of the kernel; see :func:`low_rank_update_`."""
    columns, decay = projection.float().t(), 1 - lr * weight_decay
    if weight.dtype == torch.float32:
        weight.addmm_(update, columns, beta=decay, alpha=-lr)
        return
    assert key is not None
    rows, n = weight.shape
    for chunk in row_chunks(rows, n):
        value = weight[chunk].float().addmm_(update[chunk], columns, beta=decay, alpha=-lr)
        stochastic_round(value, weight[chunk], key, offset + chunk.start * n)


if triton is not None:
    from hmt_deepspeed.kernels.noise import noise_bits_jit
    from hmt_deepspeed.kernels.stochastic_rounding import round_bits_jit

    @triton.jit
    def low_rank_product_jit(  # type: ignore[no-untyped-def]
        update_ptr, projection_ptr, row, column, rows, n, width,
        update_row, update_column, projection_row, projection_column,
        BLOCK_ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_W: tl.constexpr,
    ):  # fmt: skip
        """The tile ``U[row] P[column]^T`` in fp32; row and column int64, the rest strides and sizes."""
        product = tl.zeros((BLOCK_ROWS, BLOCK_N), dtype=tl.float32)
        for begin in range(0, width, BLOCK_W):
            k = begin + tl.arange(0, BLOCK_W).to(tl.int64)  # times a stride it may exceed int32
            left = tl.load(
                update_ptr + row[:, None] * update_row + k[None, :] * update_column,
                mask=(row[:, None] < rows) & (k[None, :] < width),
                other=0.0,
            )
            right = tl.load(
                projection_ptr + column[None, :] * projection_row + k[:, None] * projection_column,
                mask=(column[None, :] < n) & (k[:, None] < width),
                other=0.0,
            ).to(tl.float32)
            product = tl.dot(left, right, product, input_precision="ieee")
        return product

    # Not specialised: a new key every step must not compile a new kernel.
    @triton.jit(do_not_specialize=["offset", "key_low", "key_high"])
    def _low_rank_update_kernel(  # type: ignore[no-untyped-def]
        weight_ptr, update_ptr, projection_ptr, rows, n, width,
        update_row, update_column, projection_row, projection_column,
        lr, decay, offset, key_low, key_high,
        ROUND: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_W: tl.constexpr,
    ):  # fmt: skip
        tiles = tl.cdiv(n, BLOCK_N)
        program = tl.program_id(0)
        row = (program // tiles).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        column = (program % tiles).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
        product = low_rank_product_jit(
            update_ptr, projection_ptr, row, column, rows, n, width,
            update_row, update_column, projection_row, projection_column,
            BLOCK_ROWS, BLOCK_N, BLOCK_W,
        )  # fmt: skip
        position = row[:, None] * n + column[None, :]
        mask = (row[:, None] < rows) & (column[None, :] < n)
        weight = tl.load(weight_ptr + position, mask=mask, other=0)
        if ROUND:  # weight_ptr points to the patterns of bf16, the upper halves of fp32's
            weight = (weight.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(
                tl.float32, bitcast=True
            )
        value = decay * weight - lr * product
        if ROUND:
            noise = noise_bits_jit(position + offset, key_low, key_high)
            rounded = round_bits_jit(value.to(tl.uint32, bitcast=True), noise)
            tl.store(weight_ptr + position, rounded.to(tl.int16), mask=mask)
        else:
            tl.store(weight_ptr + position, value, mask=mask)

    def low_rank_update_triton_(
        weight: Tensor,
        update: Tensor,
        projection: Tensor,
        lr: float,
        weight_decay: float,
        key: int | None = None,
        offset: int = 0,
    ) -> None:
        """Triton launcher; see :func:`low_rank_update_`."""
        (rows, n), width = weight.shape, update.shape[1]
        if weight.numel() == 0:
            return
        rounds = weight.dtype == torch.bfloat16
        low, high = key_halves(key or 0)
        grid = (triton.cdiv(rows, _BLOCK_ROWS) * triton.cdiv(n, _BLOCK_N),)
        _low_rank_update_kernel[grid](
            weight.view(torch.int16) if rounds else weight,
            update,
            projection,
            rows,
            n,
            width,
            *update.stride(),
            *projection.stride(),
            lr,
            1 - lr * weight_decay,
            offset,
            low,
            high,
            ROUND=rounds,
            BLOCK_ROWS=_BLOCK_ROWS,
            BLOCK_N=_BLOCK_N,
            BLOCK_W=_BLOCK_W,
        )


def low_rank_update_(
    weight: Tensor,
    update: Tensor,
    projection: Tensor,
    lr: float,
    weight_decay: float,
    key: int | None = None,
    offset: int = 0,
) -> None:
    """``W <- (1 - lr wd) W - lr (update projection^T)``, computed in fp32.

    Args:
        weight: rows x n, contiguous, fp32 or bf16 (rounded stochastically); updated in place.
        update: rows x w, fp32, any strides.
        projection: n x w, fp32 or bf16, any strides.
        lr, weight_decay: step length; decay per unit of step length.
        key: 64-bit seed of the rounding; a bf16 weight needs one, an fp32 weight is not rounded.
        offset: index of ``weight[0, 0]`` within the whole weight; element (i, j) draws the noise of
            index ``offset + i n + j``, so that the rounding does not depend on which rows are here.

    Raises:
        ValueError: for other dtypes, shapes, a weight that is not contiguous or a bf16 weight
            without a key.
    """
    if weight.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"weight must be fp32 or bf16, got {weight.dtype}")
    if weight.dtype == torch.bfloat16 and key is None:
        raise ValueError(
            "a bf16 weight is rounded stochastically: key must be an integer, got None"
        )
    if not weight.is_contiguous():
        raise ValueError("weight must be contiguous")
    check_low_rank(weight.shape, update, projection)
    if weight.is_cuda and triton is not None:
        low_rank_update_triton_(weight, update, projection, lr, weight_decay, key, offset)
    else:
        low_rank_update_reference_(weight, update, projection, lr, weight_decay, key, offset)
