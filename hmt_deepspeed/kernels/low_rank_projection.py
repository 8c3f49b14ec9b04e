"""Projection of a gradient, ``A = G B``, accumulated in fp32 from 16-bit or fp32 operands.

The gradient is widened tile by tile: no fp32 copy of it exists. Products of two 16-bit numbers of
one dtype are exact in fp32, so those tiles go to the tensor cores as they are.

Shapes: ``gradient`` rows x n, ``projection`` n x w, result rows x w.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hmt_deepspeed.kernels.chunks import row_chunks
from hmt_deepspeed.kernels.launching import (
    capability_of,
    multiplies_in_fp32,
    on_its_device,
    tile_for,
)

try:
    import triton
    import triton.language as tl
except ImportError:  # platforms without Triton have no CUDA device to run it on
    triton = None

__all__ = ["project", "project_reference", "project_triton"]

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
# By whether the factors are multiplied in fp32, without matrix units, and whether a thread's accesses are wide;
# then by the oldest architecture. Larger tiles spill registers on some architecture.
_WIDE = {"BLOCK_ROWS": 64, "BLOCK_N": 64, "BLOCK_W": 128, "num_warps": 4, "num_stages": 3}
_FP32 = {"BLOCK_ROWS": 32, "BLOCK_N": 16, "BLOCK_W": 64, "num_warps": 4, "num_stages": 2}
_TILES = {
    (False, True): {75: _WIDE},
    (False, False): {75: _WIDE | {"BLOCK_N": 32}},
    (True, True): {75: _FP32},
    (True, False): {75: _FP32},
}
_LARGEST_STRIDE = 1 << 24  # 64 rows of a tile are then less than 2^31 elements apart


def launch_options(
    gradient: torch.dtype, projection: torch.dtype, capability: int, aligned: bool
) -> dict[str, int]:
    """What the kernel is compiled with for operands of two dtypes on an architecture.

    aligned: 16 divides addresses in bytes, and all that rows are apart in elements.
    """
    widen = gradient != projection or multiplies_in_fp32(gradient, capability)
    return {"WIDEN": widen, **tile_for(_TILES[widen, aligned], capability)}


def project_reference(gradient: Tensor, projection: Tensor) -> Tensor:
    """Torch twin of the kernel; see :func:`project`."""
    columns = projection.float()
    if gradient.dtype == torch.float32:
        return gradient @ columns
    out = torch.empty(
        gradient.shape[0], projection.shape[1], dtype=torch.float32, device=gradient.device
    )
    for chunk in row_chunks(*gradient.shape):
        torch.mm(gradient[chunk].float(), columns, out=out[chunk])
    return out


if triton is not None:

    @triton.jit
    def _project_kernel(  # type: ignore[no-untyped-def]
        gradient_ptr, projection_ptr, out_ptr, rows, n, width,
        gradient_row, gradient_column, projection_row, projection_column,
        WIDEN: tl.constexpr,
        BLOCK_ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_W: tl.constexpr,
    ):  # fmt: skip
        # Programs that share rows run side by side, so the gradient's tiles are read from L2.
        tiles = tl.cdiv(width, BLOCK_W)
        first_row = (tl.program_id(0) // tiles).to(tl.int64) * BLOCK_ROWS
        first_column = (tl.program_id(0) % tiles).to(tl.int64) * BLOCK_W
        row, column, k = tl.arange(0, BLOCK_ROWS), tl.arange(0, BLOCK_W), tl.arange(0, BLOCK_N)
        in_row, in_column = row < rows - first_row, column < width - first_column
        left_ptr = gradient_ptr + first_row * gradient_row
        right_ptr = projection_ptr + first_column * projection_column
        total = tl.zeros((BLOCK_ROWS, BLOCK_W), dtype=tl.float32)
        for begin in range(0, n, BLOCK_N):
            left = tl.load(
                left_ptr + ((row * gradient_row)[:, None] + (k * gradient_column)[None, :]),
                mask=in_row[:, None] & (k < n - begin)[None, :],
                other=0.0,
            )
            right = tl.load(
                right_ptr + ((k * projection_row)[:, None] + (column * projection_column)[None, :]),
                mask=(k < n - begin)[:, None] & in_column[None, :],
                other=0.0,
            )
            left_ptr += BLOCK_N * gradient_column
            right_ptr += BLOCK_N * projection_row
            if WIDEN:
                left = left.to(tl.float32)
                right = right.to(tl.float32)
            total = tl.dot(left, right, total, input_precision="ieee")
        mask = in_row[:, None] & in_column[None, :]
        target = out_ptr + first_row * width + first_column
        tl.store(target + (row[:, None] * width + column[None, :]), total, mask=mask)

    @on_its_device
    def project_triton(gradient: Tensor, projection: Tensor) -> Tensor:
        """Triton launcher; see :func:`project`."""
        (rows, n), width = gradient.shape, projection.shape[1]
        out = torch.empty(rows, width, dtype=torch.float32, device=gradient.device)
        if out.numel() == 0:
            return out
        sizes = [width, gradient.data_ptr(), projection.data_ptr()]
        sizes += (stride for t in (gradient, projection) for stride in t.stride() if stride != 1)
        aligned = not any(size % 16 for size in sizes)
        capability = capability_of(gradient.device)
        tile = launch_options(gradient.dtype, projection.dtype, capability, aligned)
        grid = (triton.cdiv(rows, tile["BLOCK_ROWS"]) * triton.cdiv(width, tile["BLOCK_W"]),)
        _project_kernel[grid](
            gradient,
            projection,
            out,
            rows,
            n,
            width,
            *gradient.stride(),
            *projection.stride(),
            **tile,
        )
        return out


def project(gradient: Tensor, projection: Tensor) -> Tensor:
    """``gradient projection`` with fp32 products and sums.

    Args:
        gradient: rows x n, fp32, bf16 or fp16, any strides.
        projection: n x w, fp32, bf16 or fp16, any strides.

    Returns:
        rows x w, fp32, contiguous.

    Raises:
        ValueError: for other dtypes or shapes.
    """
    if gradient.dtype not in _FLOATS or projection.dtype not in _FLOATS:
        raise ValueError(
            f"gradient and projection must be fp32, bf16 or fp16, got {gradient.dtype} and {projection.dtype}"
        )
    if gradient.dim() != 2 or projection.dim() != 2 or gradient.shape[1] != projection.shape[0]:
        raise ValueError(
            f"projects rows x n by n x w, got {tuple(gradient.shape)} and {tuple(projection.shape)}"
        )
    if max(*gradient.stride(), *projection.stride()) > _LARGEST_STRIDE:
        raise ValueError(
            f"rows and columns are at most 2^24 elements apart, got strides {gradient.stride()} and "
            f"{projection.stride()}"
        )
    if gradient.is_cuda and triton is not None:
        return project_triton(gradient, projection)
    return project_reference(gradient, projection)
