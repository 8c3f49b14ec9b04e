"""Weights in INT8: blocks of 256 along a row, one fp32 scale each, symmetric linear codes.

A block never crosses a row; the last of a row may be short. With a the largest magnitude of a block::

    s = max(a / 127, 2^-126),   code = round(x / s) in -127..127,   decoded y = s code

    |y - x| <= s       stochastic: a neighbour with a probability linear in x, so E y = x
    |y - x| <= s / 2   nearest (a tie to the higher)

each up to ``2^-16 s`` of fp32 arithmetic, and bf16's own ``2^-8 |y|`` on top where y is decoded to
bf16. Zeros are exact. The floor of 2^-126 keeps s a normal number; blocks smaller than 127 * 2^-126
lose precision by it and stay unbiased. A block that holds an infinity or a NaN gets a NaN scale and
decodes to NaN throughout.

Scales are fp32, 1.6 % of the codes' bytes in full blocks. fp16 overflows where bf16 weights do not; a
bf16 scale would save 0.8 % and move a whole block by up to 2^-8 of itself whenever it is rounded,
which is as much as the nearest codes' own error.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hmt_deepspeed.kernels.chunks import row_chunks
from hmt_deepspeed.kernels.launching import on_its_device
from hmt_deepspeed.kernels.noise import Key, counters, uniform

try:
    import triton
    import triton.language as tl
except ImportError:  # platforms without Triton have no CUDA device to run it on
    triton = None

__all__ = [
    "BLOCK",
    "check_encoded",
    "decode_weight",
    "decode_weight_reference",
    "decode_weight_triton",
    "encode_rows",
    "encode_weight",
    "encode_weight_reference",
    "encode_weight_triton",
]

BLOCK = 256
_SMALLEST_SCALE = 2.0**-126
_BLOCK_ROWS = 16


def _blocks(n: int) -> int:
    return -(-n // BLOCK)


def tile_grid(rows: int, n: int, block_rows: int) -> tuple[int]:
    """Launch grid of a kernel whose programs take a tile of :func:`tile_jit`."""
    return (-(-rows // block_rows) * _blocks(n),)


def encode_rows(value: Tensor, key: Key | None, offset: int) -> tuple[Tensor, Tensor]:
    """Codes and scales of a few rows, as :func:`encode_weight`, or with a key stochastic.

    Args:
        value: rows x n, fp32.
        key: 64-bit seed of stochastic rounding; None rounds to the nearest code.
        offset: index of ``value[0, 0]`` within the whole weight, so that the rounding does not depend on which rows
            are here.
    """
    rows, n = value.shape
    padding = (0, -n % BLOCK)
    padded = torch.nn.functional.pad(value, padding).view(rows, -1, BLOCK)
    largest = padded.abs().amax(dim=2)
    finite = largest.isfinite()
    scale = (largest * (1 / 127)).clamp_min(_SMALLEST_SCALE)
    scaled = torch.where(finite[..., None], padded / scale[..., None], 0.0)
    if key is None:
        code = (scaled + 0.5).floor_()
    else:
        noise = uniform(counters(value.numel(), offset, value.device), key).view(rows, n)
        low = scaled.floor()
        noise = torch.nn.functional.pad(noise, padding).view_as(scaled)
        code = low + (noise < scaled - low)
    code = code.clamp_(-127, 127).to(torch.int8).view(rows, -1)[:, :n]
    return code, torch.where(finite, scale, torch.nan)


def encode_weight_reference(value: Tensor) -> tuple[Tensor, Tensor]:
    """Torch twin of the kernel; see :func:`encode_weight`."""
    rows, n = value.shape
    codes = torch.empty(rows, n, dtype=torch.int8, device=value.device)
    scales = torch.empty(rows, _blocks(n), dtype=torch.float32, device=value.device)
    for chunk in row_chunks(rows, n):
        codes[chunk], scales[chunk] = encode_rows(value[chunk], None, 0)
    return codes, scales


def decode_weight_reference(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Torch twin of the kernel; see :func:`decode_weight`."""
    rows, n = codes.shape
    out = torch.empty(rows, n, dtype=dtype, device=codes.device)
    for chunk in row_chunks(rows, n):
        wide = scales[chunk].repeat_interleave(BLOCK, dim=1)[:, :n]
        out[chunk] = codes[chunk].float().mul_(wide)
    return out


if triton is not None:
    from hmt_deepspeed.kernels.noise import uniform_jit
    from hmt_deepspeed.kernels.stochastic_rounding import round_bits_jit

    @triton.jit
    def tile_jit(program, rows, n, BLOCK_ROWS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        """First row (int64), number of the block in its row and how many rows there are, of a program's tile."""
        blocks = tl.cdiv(n, BLOCK)
        first = (program // blocks).to(tl.int64) * BLOCK_ROWS
        return first, program % blocks, (tl.minimum(rows - first, BLOCK_ROWS)).to(tl.int32)

    @triton.jit
    def store_encoded_jit(  # type: ignore[no-untyped-def]
        value, codes_ptr, scales_ptr, first, block, rows, n, offset, key_low, key_high,
        STOCHASTIC: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        """Encode a tile of :func:`tile_jit`, whose rows are ``rows``, and store it."""
        row, column = tl.arange(0, BLOCK_ROWS), tl.arange(0, BLOCK)
        mask = (row < rows)[:, None] & (column < n - block * BLOCK)[None, :]
        value = tl.where(mask, value, 0.0)
        bits = value.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        largest = tl.max(bits, axis=1)  # patterns order as magnitudes do, infinity and NaN last
        finite = largest < 0x7F800000
        largest = tl.where(finite, largest, 0).to(tl.float32, bitcast=True)
        scale = tl.maximum(largest * (1 / 127), 2.0**-126)
        value = tl.where(finite[:, None] & (bits >= 0), value, 0.0)
        scaled = tl.div_rn(value, tl.broadcast_to(scale[:, None], value.shape))
        start = first * n + block * BLOCK
        position = row[:, None] * n + column[None, :]
        if STOCHASTIC:
            low = tl.floor(scaled)
            index = position.to(tl.uint32) + (start + offset).to(tl.uint32)
            noise = uniform_jit(index, key_low, key_high)
            code = tl.where(noise < scaled - low, low + 1.0, low)
        else:
            code = tl.floor(scaled + 0.5)
        code = tl.minimum(tl.maximum(code, -127.0), 127.0).to(tl.int8)
        tl.store(codes_ptr + start + position, code, mask=mask)
        blocks = tl.cdiv(n, BLOCK)
        scale = tl.where(finite, scale, float("nan"))
        tl.store(scales_ptr + first * blocks + block + row * blocks, scale, mask=row < rows)

    @triton.jit
    def load_decoded_jit(  # type: ignore[no-untyped-def]
        codes_ptr, scales_ptr, first, block, rows, n, BLOCK_ROWS: tl.constexpr, BLOCK: tl.constexpr
    ):
        """A tile of :func:`tile_jit` in fp32; zero where there is no element."""
        row, column = tl.arange(0, BLOCK_ROWS), tl.arange(0, BLOCK)
        mask = (row < rows)[:, None] & (column < n - block * BLOCK)[None, :]
        source = codes_ptr + first * n + block * BLOCK
        code = tl.load(source + (row[:, None] * n + column[None, :]), mask=mask, other=0)
        blocks = tl.cdiv(n, BLOCK)
        source = scales_ptr + first * blocks + block
        scale = tl.load(source + row * blocks, mask=row < rows, other=0.0)
        return tl.where(mask, code.to(tl.float32) * scale[:, None], 0.0)

    @triton.jit
    def _encode_kernel(  # type: ignore[no-untyped-def]
        value_ptr, codes_ptr, scales_ptr, rows, n, BLOCK_ROWS: tl.constexpr, BLOCK: tl.constexpr
    ):
        first, block, rows = tile_jit(tl.program_id(0), rows, n, BLOCK_ROWS, BLOCK)
        row, column = tl.arange(0, BLOCK_ROWS), tl.arange(0, BLOCK)
        mask = (row < rows)[:, None] & (column < n - block * BLOCK)[None, :]
        source = value_ptr + first * n + block * BLOCK
        value = tl.load(source + (row[:, None] * n + column[None, :]), mask=mask, other=0.0)
        store_encoded_jit(
            value, codes_ptr, scales_ptr, first, block, rows, n, 0, 0, 0, False, BLOCK_ROWS, BLOCK
        )

    @triton.jit
    def _decode_kernel(  # type: ignore[no-untyped-def]
        codes_ptr, scales_ptr, out_ptr, rows, n,
        TO_BF16: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        first, block, rows = tile_jit(tl.program_id(0), rows, n, BLOCK_ROWS, BLOCK)
        value = load_decoded_jit(codes_ptr, scales_ptr, first, block, rows, n, BLOCK_ROWS, BLOCK)
        row, column = tl.arange(0, BLOCK_ROWS), tl.arange(0, BLOCK)
        mask = (row < rows)[:, None] & (column < n - block * BLOCK)[None, :]
        if TO_BF16:  # to nearest, a tie to even; out_ptr points to patterns
            bits = value.to(tl.uint32, bitcast=True)
            value = round_bits_jit(bits, 0x7FFF + ((bits >> 16) & 1)).to(tl.int16)
        target = out_ptr + first * n + block * BLOCK
        tl.store(target + (row[:, None] * n + column[None, :]), value, mask=mask)

    @on_its_device
    def encode_weight_triton(value: Tensor) -> tuple[Tensor, Tensor]:
        """Triton launcher; see :func:`encode_weight`."""
        rows, n = value.shape
        codes = torch.empty(rows, n, dtype=torch.int8, device=value.device)
        scales = torch.empty(rows, _blocks(n), dtype=torch.float32, device=value.device)
        if value.numel() > 0:
            _encode_kernel[tile_grid(rows, n, _BLOCK_ROWS)](
                value, codes, scales, rows, n, BLOCK_ROWS=_BLOCK_ROWS, BLOCK=BLOCK
            )
        return codes, scales

    @on_its_device
    def decode_weight_triton(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        """Triton launcher; see :func:`decode_weight`."""
        rows, n = codes.shape
        out = torch.empty(rows, n, dtype=dtype, device=codes.device)
        to_bf16 = dtype == torch.bfloat16
        if codes.numel() > 0:
            _decode_kernel[tile_grid(rows, n, _BLOCK_ROWS)](
                codes, scales, out.view(torch.int16) if to_bf16 else out, rows, n,
                TO_BF16=to_bf16, BLOCK_ROWS=_BLOCK_ROWS, BLOCK=BLOCK,
            )  # fmt: skip
        return out


def check_encoded(codes: Tensor, scales: Tensor) -> None:
    """Raises ValueError unless the two are what :func:`encode_weight` returns."""
    if codes.dtype != torch.int8 or scales.dtype != torch.float32:
        raise ValueError(
            f"an encoded weight is int8 with fp32 scales, got {codes.dtype} and {scales.dtype}"
        )
    if codes.dim() not in (2, 3) or scales.shape != (*codes.shape[:-1], _blocks(codes.shape[-1])):
        raise ValueError(
            f"an encoded weight has rows x n or E x rows x n codes and a scale for {BLOCK} of a row, got "
            f"{tuple(codes.shape)} and {tuple(scales.shape)}"
        )
    if not (codes.is_contiguous() and scales.is_contiguous()):
        raise ValueError("codes and scales must be contiguous")


def encode_weight(value: Tensor) -> tuple[Tensor, Tensor]:
    """Nearest codes, and scales, of a weight; formulas and error bounds at the top of the file.

    Args:
        value: rows x n, fp32, contiguous.

    Returns:
        codes: rows x n, int8.
        scales: rows x ceil(n / 256), fp32.

    Raises:
        ValueError: for another dtype, another shape or a tensor that is not contiguous.
    """
    if value.dtype != torch.float32 or value.dim() != 2 or not value.is_contiguous():
        raise ValueError(
            f"encodes a contiguous fp32 matrix, got {value.dtype} of shape {tuple(value.shape)} "
            f"with strides {value.stride()}"
        )
    if value.is_cuda and triton is not None:
        return encode_weight_triton(value)
    return encode_weight_reference(value)


def decode_weight(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight that :func:`encode_weight` encoded: rows x n, or E x rows x n in one launch; fp32 or bf16 (to nearest).

    Raises:
        ValueError: for other dtypes, shapes or tensors that are not contiguous.
    """
    check_encoded(codes, scales)
    if dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"decodes to fp32 or bf16, got {dtype}")
    use_triton = codes.is_cuda and triton is not None
    decode = decode_weight_triton if use_triton else decode_weight_reference
    return decode(codes.flatten(0, -2), scales.flatten(0, -2), dtype).view(codes.shape)
