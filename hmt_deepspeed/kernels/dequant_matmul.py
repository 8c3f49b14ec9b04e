"""A linear's weight gradient from its encoded input, ``dW = D^T X``, without the decoded X.

With c the codes and s_b the scales of block b of tokens (:mod:`hmt_deepspeed.kernels.token_blocks`)::

    dW_mn = sum_b s_bn (sum_{t in b} D_tm c_tn)

Codes are exact in bf16 and in fp16, and so are their products with a 16-bit D in fp32: the tensor cores
see the codes themselves, and X is never rounded to 16 bits. Sums are fp32.

Shapes: ``delta`` tokens x m, ``codes`` tokens x n, ``scales`` blocks x n, result m x n.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hmt_deepspeed.kernels.chunks import CHUNK_ELEMENTS
from hmt_deepspeed.kernels.fp8_activation import decode_fp8_reference
from hmt_deepspeed.kernels.int8_activation import decode_int8_reference
from hmt_deepspeed.kernels.launching import (
    capability_of,
    multiplies_in_fp32,
    on_its_device,
    tile_for,
)
from hmt_deepspeed.kernels.token_blocks import FLOATS, check_blocks

try:
    import triton
    import triton.language as tl
except ImportError:  # platforms without Triton have no CUDA device to run it on
    triton = None

__all__ = ["dequant_matmul", "dequant_matmul_reference", "dequant_matmul_triton"]

# By whether tiles are fp32, without matrix units, and whether a thread's accesses are wide; then by the oldest
# architecture. Larger tiles spill registers on some architecture.
_NARROW = {"BLOCK_T": 32, "BLOCK_M": 64, "BLOCK_N": 128, "num_warps": 8, "num_stages": 3}
_FP32 = {"BLOCK_T": 16, "BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 8, "num_stages": 2}
_TILES = {
    (False, True): {
        75: _NARROW,
        80: _NARROW | {"BLOCK_M": 128},
        86: _NARROW,
        90: _NARROW | {"BLOCK_T": 64, "BLOCK_M": 128},
        120: _NARROW,
    },
    (False, False): {75: _NARROW},
    (True, True): {75: _FP32},
    (True, False): {75: _FP32},
}
_LARGEST_STRIDE = 1 << 24  # what a tile spans is then less than 2^31 elements


def launch_options(dtype: torch.dtype, capability: int, aligned: bool) -> dict[str, int]:
    """What the kernel is compiled with for gradients of a dtype on an architecture.

    aligned: 16 divides addresses in bytes, and all that rows are apart in elements.
    """
    widen = multiplies_in_fp32(dtype, capability)
    return {"WIDEN": widen, **tile_for(_TILES[widen, aligned], capability)}


def dequant_matmul_reference(
    delta: Tensor, codes: Tensor, scales: Tensor, block_size: int, dtype: torch.dtype
) -> Tensor:
    """Torch twin of the kernel; see :func:`dequant_matmul`. Decodes some blocks at a time."""
    (tokens, m), n = delta.shape, codes.shape[1]
    decode = decode_int8_reference if codes.dtype == torch.int8 else decode_fp8_reference
    out = torch.zeros(m, n, dtype=torch.float32, device=delta.device)
    blocks = max(1, CHUNK_ELEMENTS // (block_size * max(m, n, 1)))
    for block in range(0, len(scales), blocks):
        begin, end = block * block_size, min((block + blocks) * block_size, tokens)
        x = torch.empty(end - begin, n, dtype=torch.float32, device=codes.device)
        decode(codes[begin:end], scales[block : block + blocks], block_size, x)
        out.addmm_(delta[begin:end].float().t(), x)
    return out.to(dtype)


if triton is not None:
    from hmt_deepspeed.kernels.fp8_activation import half_codes_jit
    from hmt_deepspeed.kernels.token_blocks import patterns, store_rounded_jit, widened_jit

    @triton.jit
    def _dequant_matmul_kernel(  # type: ignore[no-untyped-def]
        delta_ptr, codes_ptr, scales_ptr, out_ptr, tokens, m, n, block_size,
        delta_row, delta_column,
        FP8: tl.constexpr, WIDEN: tl.constexpr, TO_BF16: tl.constexpr,
        BLOCK_T: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    ):  # fmt: skip
        # Programs that share columns of D run side by side, so those are read from L2.
        tiles = tl.cdiv(n, BLOCK_N)
        first_row = (tl.program_id(0) // tiles).to(tl.int64) * BLOCK_M
        first_column = (tl.program_id(0) % tiles).to(tl.int64) * BLOCK_N
        row, column, token = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_T)
        in_row, in_column = row < m - first_row, column < n - first_column
        delta_ptr += first_row * delta_column
        codes_ptr += first_column
        scales_ptr += first_column
        total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for begin in range(0, tokens, block_size):
            end = tl.minimum(begin + block_size, tokens)
            part = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
            for first in range(begin, end, BLOCK_T):
                there = (token < end - first)[:, None]
                source = delta_ptr + ((token * delta_row)[:, None] + (row * delta_column)[None, :])
                delta = tl.load(source, mask=there & in_row[None, :], other=0)
                if WIDEN:
                    delta = widened_jit(delta)
                source = codes_ptr + ((token * n)[:, None] + column[None, :])
                code = tl.load(source, mask=there & in_column[None, :], other=0)
                if FP8:
                    code = half_codes_jit(code)  # times 2^-8
                code = code.to(tl.float32).to(delta.dtype)
                part = tl.dot(tl.trans(delta), code, part, input_precision="ieee")
                count = tl.minimum(end - first, BLOCK_T)
                delta_ptr += count * delta_row
                codes_ptr += count * n
            bits = tl.load(scales_ptr + column, mask=in_column, other=0).to(tl.int32) << 16
            total += part * bits.to(tl.float32, bitcast=True)[None, :]
            scales_ptr += n
        if FP8:
            total *= 256.0
        target = out_ptr + first_row * n + first_column + (row[:, None] * n + column[None, :])
        mask = in_row[:, None] & in_column[None, :]
        store_rounded_jit(target, total, mask, TO_BF16)

    @on_its_device
    def dequant_matmul_triton(
        delta: Tensor, codes: Tensor, scales: Tensor, block_size: int, dtype: torch.dtype
    ) -> Tensor:
        """Triton launcher; see :func:`dequant_matmul`."""
        (tokens, m), n = delta.shape, codes.shape[1]
        out = torch.empty(m, n, dtype=dtype, device=delta.device)
        if out.numel() == 0:
            return out
        addresses = [tensor.data_ptr() for tensor in (delta, codes, scales, out)]
        aligned = not any(size % 16 for size in (n, delta.stride(0), *addresses))
        aligned = aligned and delta.stride(1) == 1
        tile = launch_options(delta.dtype, capability_of(delta.device), aligned)
        grid = (triton.cdiv(m, tile["BLOCK_M"]) * triton.cdiv(n, tile["BLOCK_N"]),)
        _dequant_matmul_kernel[grid](
            patterns(delta) if tile["WIDEN"] else delta, patterns(codes), patterns(scales), patterns(out),
            tokens, m, n, block_size, *delta.stride(),
            FP8=codes.dtype != torch.int8, TO_BF16=dtype == torch.bfloat16,
            **tile,
        )  # fmt: skip
        return out


def dequant_matmul(
    delta: Tensor, codes: Tensor, scales: Tensor, block_size: int, dtype: torch.dtype
) -> Tensor:
    """``delta^T X`` with fp32 products and sums, X given by its codes and scales.

    Args:
        delta: tokens x m, fp32, bf16 or fp16, any strides: the gradient of the linear's output.
        codes, scales: of X, as :func:`encode_int8` or :func:`encode_fp8` returns them.
        block_size: tokens of a channel that share a scale.
        dtype: of the result: fp32, bf16 or fp16.

    Returns:
        m x n, contiguous.

    Raises:
        ValueError: for other dtypes or shapes.
    """
    if codes.dtype not in (torch.int8, torch.float8_e4m3fn):
        raise ValueError(f"codes are int8 or float8_e4m3fn, got {codes.dtype}")
    check_blocks(codes, scales, block_size)
    if delta.dtype not in FLOATS or dtype not in FLOATS:
        raise ValueError(f"delta and dtype must be fp32, bf16 or fp16, got {delta.dtype}, {dtype}")
    if delta.dim() != 2 or len(delta) != len(codes):
        raise ValueError(
            f"multiplies tokens x m by tokens x n, got {tuple(delta.shape)} and "
            f"{tuple(codes.shape)}"
        )
    if max(*delta.stride(), codes.shape[1]) > _LARGEST_STRIDE:
        raise ValueError(
            f"rows and columns are at most 2^24 elements apart, got strides {delta.stride()} and "
            f"{codes.shape[1]} channels"
        )
    if delta.is_cuda and triton is not None:
        return dequant_matmul_triton(delta, codes, scales, block_size, dtype)
    return dequant_matmul_reference(delta, codes, scales, block_size, dtype)
