"""Projection of a gradient, ``A = G B``, accumulated in fp32 from 16-bit or fp32 operands.

The gradient is widened tile by tile: no fp32 copy of it exists. Products of two 16-bit numbers of
one dtype are exact in fp32, so those tiles go to the tensor cores as they are.

Shapes: ``gradient`` rows x n, ``projection`` n x w, result rows x w.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hmt_deepspeed.kernels.chunks import row_chunks
from hmt_deepspeed.kernels.launching import on_its_device

try:
    import triton
    import triton.language as tl
except ImportError:  # platforms without Triton have no CUDA device to run it on
    triton = None

__all__ = ["project", "project_reference", "project_triton"]

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
# By whether the factors are multiplied in fp32, without tensor cores.
_TILES = {
    False: {"BLOCK_ROWS": 64, "BLOCK_N": 64, "BLOCK_W": 128, "num_warps": 4},
    True: {"BLOCK_ROWS": 32, "BLOCK_N": 64, "BLOCK_W": 64, "num_warps": 4},
}


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
        program = tl.program_id(0)
        row = (program // tiles).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        column = (program % tiles).to(tl.int64) * BLOCK_W + tl.arange(0, BLOCK_W)
        total = tl.zeros((BLOCK_ROWS, BLOCK_W), dtype=tl.float32)
        for begin in range(0, n, BLOCK_N):
            k = begin + tl.arange(0, BLOCK_N).to(tl.int64)  # times a stride it may exceed int32
            left = tl.load(
                gradient_ptr + row[:, None] * gradient_row + k[None, :] * gradient_column,
                mask=(row[:, None] < rows) & (k[None, :] < n),
                other=0.0,
            )
            right = tl.load(
                projection_ptr + k[:, None] * projection_row + column[None, :] * projection_column,
                mask=(k[:, None] < n) & (column[None, :] < width),
                other=0.0,
            )
            if WIDEN:
                left = left.to(tl.float32)
                right = right.to(tl.float32)
            total = tl.dot(left, right, total, input_precision="ieee")
        mask = (row[:, None] < rows) & (column[None, :] < width)
        tl.store(out_ptr + row[:, None] * width + column[None, :], total, mask=mask)

    @on_its_device
    def project_triton(gradient: Tensor, projection: Tensor) -> Tensor:
        """Triton launcher; see :func:`project`."""
        (rows, n), width = gradient.shape, projection.shape[1]
        out = torch.empty(rows, width, dtype=torch.float32, device=gradient.device)
        if out.numel() == 0:
            return out
        # Off CUDA this is Triton's interpreter, whose bf16 arithmetic is wrong.
        same = gradient.dtype == projection.dtype
        native = same and (gradient.is_cuda or gradient.dtype != torch.bfloat16)
        tile = _TILES[not native or gradient.dtype == torch.float32]
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
            WIDEN=not native,
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
    if gradient.is_cuda and triton is not None:
        return project_triton(gradient, projection)
    return project_reference(gradient, projection)
