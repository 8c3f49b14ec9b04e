"""Low-rank weight update in one pass: ``W <- (1 - lr wd) W - lr (U P^T)``.

Decoupled weight decay as in AdamW (Loshchilov and Hutter, algorithm 2) on an update that has only
rank w. The product is summed in fp32 tile by tile and never stored, so a weight is read once and
written once, and a 16-bit copy of a master in the same pass. A bf16 weight is rounded stochastically,
see :mod:`hmt_deepspeed.kernels.stochastic_rounding`.

Beside a bf16 factor the other one is rounded to bf16: the product is what the step's time goes into,
and matrix units multiply bf16 several times as fast. That changes each element of the update by at most
``2^-8 sum_i |u_i p_i|`` (twice that in the torch twin, which also rounds the product); the weights
themselves are still summed in fp32.

Shapes: ``weight`` rows x n, ``update`` rows x w, ``projection`` n x w.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hmt_deepspeed.kernels.chunks import row_chunks, scratch_like
from hmt_deepspeed.kernels.launching import on_its_device
from hmt_deepspeed.kernels.noise import key_halves
from hmt_deepspeed.kernels.stochastic_rounding import stochastic_round

try:
    import triton
    import triton.language as tl
except ImportError:  # platforms without Triton have no CUDA device to run it on
    triton = None

__all__ = [
    "add_product_",
    "as_factors",
    "check_low_rank",
    "low_rank_product",
    "low_rank_update_",
    "low_rank_update_reference_",
    "low_rank_update_triton_",
]

# By whether the factors are multiplied in fp32, without tensor cores.
_TILES = {
    False: {"BLOCK_ROWS": 128, "BLOCK_N": 128, "BLOCK_W": 32, "num_warps": 8},
    True: {"BLOCK_ROWS": 64, "BLOCK_N": 64, "BLOCK_W": 32, "num_warps": 4},
}
_FACTORS = (torch.float32, torch.bfloat16, torch.float16)


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
    for name, factor in (("update", update), ("projection", projection)):
        if factor.dtype not in _FACTORS:
            raise ValueError(f"{name} must be fp32, bf16 or fp16, got {factor.dtype}")


def as_factors(update: Tensor, projection: Tensor) -> tuple[Tensor, Tensor]:
    """Both in the dtype they are multiplied in: bf16 if one of them is bf16, else fp32."""
    bf16 = torch.bfloat16 in (update.dtype, projection.dtype)
    dtype = torch.bfloat16 if bf16 else torch.float32
    return update.to(dtype), projection.to(dtype)


def low_rank_product(update: Tensor, projection: Tensor) -> Tensor:
    """``update projection^T`` as :func:`low_rank_update_` applies it; in the dtype of the factors."""
    left, right = as_factors(update, projection)
    return left @ right.t()


def add_product_(value: Tensor, update: Tensor, columns: Tensor, lr: float, decay: float) -> None:
    """``value <- decay value - lr update columns`` for fp32 rows and factors of one dtype."""
    if update.dtype == torch.float32:
        value.addmm_(update, columns, beta=decay, alpha=-lr)
    else:
        product = torch.mm(update, columns, out=scratch_like(value, update.dtype))
        value.mul_(decay).add_(scratch_like(value, torch.float32).copy_(product), alpha=-lr)


def low_rank_update_reference_(
    weight: Tensor,
    update: Tensor,
    projection: Tensor,
    lr: float,
    weight_decay: float,
    key: int | None = None,
    offset: int = 0,
    copy: Tensor | None = None,
) -> None:
    """Torch twin of the kernel; see :func:`low_rank_update_`."""
    (rows, n), decay = weight.shape, 1 - lr * weight_decay
    left, right = as_factors(update, projection)
    for chunk in row_chunks(rows, n):
        value = weight[chunk].float()  # of an fp32 weight its own memory
        add_product_(value, left[chunk], right.t(), lr, decay)
        if weight.dtype == torch.bfloat16:
            assert key is not None
            stochastic_round(value, weight[chunk], key, offset + chunk.start * n)
        if copy is not None:
            copy[chunk].copy_(value)


if triton is not None:
    from hmt_deepspeed.kernels.noise import noise_bits_jit
    from hmt_deepspeed.kernels.stochastic_rounding import round_bits_jit, round_nearest_bits_jit

    @triton.jit
    def low_rank_product_jit(  # type: ignore[no-untyped-def]
        update_ptr, projection_ptr, row, column, rows, n, width,
        update_row, update_column, projection_row, projection_column, WIDEN: tl.constexpr,
        BLOCK_ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_W: tl.constexpr,
    ):  # fmt: skip
        """The tile ``U[row] P[column]^T`` in fp32; row and column int64, the rest strides and sizes.

        WIDEN: the factors are multiplied in fp32, which is exact for bf16 ones.
        """
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
            )
            if WIDEN:
                left = left.to(tl.float32)
                right = right.to(tl.float32)
            product = tl.dot(left, right, product, input_precision="ieee")
        return product

    # Not specialised: a new key every step must not compile a new kernel.
    @triton.jit(do_not_specialize=["offset", "key_low", "key_high"])
    def _low_rank_update_kernel(  # type: ignore[no-untyped-def]
        weight_ptr, copy_ptr, update_ptr, projection_ptr, rows, n, width,
        update_row, update_column, projection_row, projection_column,
        lr, decay, offset, key_low, key_high,
        ROUND: tl.constexpr, COPY: tl.constexpr, WIDEN: tl.constexpr,
        BLOCK_ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_W: tl.constexpr,
    ):  # fmt: skip
        tiles = tl.cdiv(n, BLOCK_N)
        program = tl.program_id(0)
        row = (program // tiles).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        column = (program % tiles).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
        product = low_rank_product_jit(
            update_ptr, projection_ptr, row, column, rows, n, width,
            update_row, update_column, projection_row, projection_column, WIDEN,
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
        if COPY == "bf16":
            nearest = round_nearest_bits_jit(value.to(tl.uint32, bitcast=True))
            tl.store(copy_ptr + position, nearest.to(tl.int16), mask=mask)
        elif COPY == "fp16":
            tl.store(copy_ptr + position, value.to(tl.float16), mask=mask)

    def widens(factor: Tensor) -> bool:
        """Whether a kernel multiplies factors of this dtype in fp32."""
        # Off CUDA this is Triton's interpreter, whose bf16 arithmetic is wrong.
        return factor.dtype == torch.float32 or not factor.is_cuda

    @on_its_device
    def low_rank_update_triton_(
        weight: Tensor,
        update: Tensor,
        projection: Tensor,
        lr: float,
        weight_decay: float,
        key: int | None = None,
        offset: int = 0,
        copy: Tensor | None = None,
    ) -> None:
        """Triton launcher; see :func:`low_rank_update_`."""
        (rows, n), width = weight.shape, update.shape[1]
        if weight.numel() == 0:
            return
        rounds = weight.dtype == torch.bfloat16
        update, projection = as_factors(update, projection)
        target, kind = weight, "none"
        if copy is not None and copy.dtype == torch.bfloat16:
            target, kind = copy.view(torch.int16), "bf16"
        elif copy is not None:
            target, kind = copy, "fp16"
        low, high = key_halves(key or 0)
        tile = _TILES[widens(update)]
        grid = (triton.cdiv(rows, tile["BLOCK_ROWS"]) * triton.cdiv(n, tile["BLOCK_N"]),)
        _low_rank_update_kernel[grid](
            weight.view(torch.int16) if rounds else weight,
            target,
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
            COPY=kind,
            WIDEN=widens(update),
            **tile,
        )
        written = (weight,) if copy is None else (weight, copy)
        torch.autograd.graph.increment_version(written)  # a graph that saved them must not run on


def low_rank_update_(
    weight: Tensor,
    update: Tensor,
    projection: Tensor,
    lr: float,
    weight_decay: float,
    key: int | None = None,
    offset: int = 0,
    copy: Tensor | None = None,
) -> None:
    """``W <- (1 - lr wd) W - lr (update projection^T)``, summed in fp32.

    Args:
        weight: rows x n, contiguous, fp32 or bf16 (rounded stochastically); updated in place.
        update: rows x w, any strides. projection: n x w, any strides. Both fp32, bf16 or fp16, and
            multiplied as :func:`as_factors` says.
        lr, weight_decay: step length; decay per unit of step length.
        key: 64-bit seed of the rounding; a bf16 weight needs one, an fp32 weight is not rounded.
        offset: index of ``weight[0, 0]`` within the whole weight; element (i, j) draws the noise of
            index ``offset + i n + j``, so that the rounding does not depend on which rows are here.
        copy: bf16 or fp16, contiguous, of the shape of an fp32 weight: is given the updated values,
            rounded to nearest.

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
    if copy is not None:
        _check_copy(weight, copy)
    if weight.is_cuda and triton is not None:
        low_rank_update_triton_(weight, update, projection, lr, weight_decay, key, offset, copy)
    else:
        low_rank_update_reference_(weight, update, projection, lr, weight_decay, key, offset, copy)


def _check_copy(weight: Tensor, copy: Tensor) -> None:
    if weight.dtype != torch.float32 or copy.dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(
            f"copies an fp32 weight to bf16 or fp16, got {weight.dtype} and {copy.dtype}"
        )
    if copy.shape != weight.shape or not copy.is_contiguous():
        raise ValueError(
            f"copy must be contiguous and {tuple(weight.shape)}, got {tuple(copy.shape)}"
        )
