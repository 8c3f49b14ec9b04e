"""Activations in FP8 e4m3: blocks of tokens within a channel, one bf16 scale each.

With s the scale of a block (:mod:`hmt_deepspeed.kernels.token_blocks`) and v = x / s, |v| <= 448::

    code = v rounded to e4m3, whose numbers are q 2^(e - 3), q = 0..15 integer, e = -6..8
    decoded y = s code

    |y - x| <= 2^-3 max(|x|, 2^-6 s)   stochastic: a neighbour with a probability linear in x, so E y = x

up to ``2^-22 |x|`` of fp32 arithmetic, and the rounding to nearest of the dtype decoded to on top.
Zeros are exact. Codes are made and read by integer arithmetic: cards without FP8 units compute the same.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hmt_deepspeed.kernels.token_blocks import (
    check_blocks,
    check_out,
    check_value,
    decode_reference,
    encode_reference,
    rounded,
)

try:
    import triton
    import triton.language as tl
except ImportError:  # platforms without Triton have no CUDA device to run it on
    triton = None

__all__ = [
    "decode_fp8",
    "decode_fp8_reference",
    "decode_fp8_triton",
    "encode_fp8",
    "encode_fp8_reference",
    "encode_fp8_triton",
]

_TOP = 448.0


def _to_codes(scaled: Tensor, threshold: Tensor) -> Tensor:
    """A pattern is (e + 6) 8 + q: a q that is rounded up to 16 is 8 of the next exponent."""
    magnitude = scaled.abs()
    exponent = ((magnitude.view(torch.int32) >> 23) - 127).clamp_min_(-6)
    q = magnitude * ((130 - exponent) << 23).view(torch.float32)  # 2^(3 - e)
    pattern = exponent.add_(6).mul_(8).add_(rounded(q, threshold).to(torch.int32))
    pattern.clamp_max_(126)  # 127 is NaN
    return (pattern + 128 * (scaled < 0)).to(torch.uint8)


def _to_values(patterns: Tensor) -> Tensor:
    """The bits of an e4m3 number, read as those of fp16, are its value times 2^-8 (biases 7 and 15);
    subnormals included. On a CPU four times as fast as torch's own conversion."""
    wide = patterns.to(torch.int16)
    sign = (wide & 0x80) << 8
    half = wide.bitwise_and_(0x7F).bitwise_left_shift_(7).bitwise_or_(sign).view(torch.float16)
    return half.float().mul_(256.0)


def encode_fp8_reference(value: Tensor, block_size: int, key: int) -> tuple[Tensor, Tensor]:
    """Torch twin of the kernel; see :func:`encode_fp8`."""
    codes, scales = encode_reference(value, block_size, key, _TOP, _to_codes)
    return codes.view(torch.float8_e4m3fn), scales


def decode_fp8_reference(codes: Tensor, scales: Tensor, block_size: int, out: Tensor) -> None:
    """Torch twin of the kernel; see :func:`decode_fp8`."""
    decode_reference(codes.view(torch.uint8), scales, block_size, out, _to_values)


if triton is not None:
    from hmt_deepspeed.kernels.token_blocks import (
        block_jit,
        launch_decode,
        launch_encode,
        places_jit,
        program_jit,
        rounded_jit,
        scaled_tile_jit,
        store_decoded_jit,
        store_scale_jit,
    )

    @triton.jit
    def half_codes_jit(pattern):  # type: ignore[no-untyped-def]
        """Values of uint8 patterns times 2^-8, in fp16; see :func:`_to_values`."""
        wide = pattern.to(tl.int16)
        return (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True)

    # Not specialised: a new key every step must not compile a new kernel.
    @triton.jit(do_not_specialize=["key_low", "key_high"])
    def _encode_kernel(  # type: ignore[no-untyped-def]
        value_ptr, codes_ptr, scales_ptr, tokens, channels, block_size, value_row, value_column,
        key_low, key_high,
        TILE_TOKENS: tl.constexpr, TILE_CHANNELS: tl.constexpr,
    ):  # fmt: skip
        block, token, channel, height, width, begin = block_jit(
            value_ptr, tokens, channels, block_size, value_row, value_column, TILE_CHANNELS
        )
        inverse = store_scale_jit(
            begin, scales_ptr + block * channels + channel, height, width, value_row, value_column,
            448, TILE_TOKENS, TILE_CHANNELS,
        )  # fmt: skip
        for first in range(0, height, TILE_TOKENS):  # once more, from the cache
            scaled, mask = scaled_tile_jit(
                begin, inverse, first, height, width, value_row, value_column,
                TILE_TOKENS, TILE_CHANNELS,
            )  # fmt: skip
            position, index = places_jit(
                token + first, channel, channels, TILE_TOKENS, TILE_CHANNELS
            )
            bits = scaled.to(tl.int32, bitcast=True)
            exponent = tl.maximum(((bits >> 23) & 0xFF) - 127, -6)
            q = tl.abs(scaled) * ((130 - exponent) << 23).to(tl.float32, bitcast=True)
            q = rounded_jit(q, index, key_low, key_high)
            pattern = (exponent + 6) * 8 + q.to(tl.int32)
            pattern = tl.minimum(pattern, 126) + tl.where(scaled < 0, 128, 0)
            tl.store(codes_ptr + position, pattern.to(tl.uint8), mask=mask)

    @triton.jit
    def _decode_kernel(  # type: ignore[no-untyped-def]
        codes_ptr, scales_ptr, out_ptr, tokens, channels, block_size, out_row, out_column, largest,
        TO_BF16: tl.constexpr, TILE_TOKENS: tl.constexpr, TILE_CHANNELS: tl.constexpr,
    ):  # fmt: skip
        tile, channel = program_jit(channels, TILE_CHANNELS)
        token = tile * TILE_TOKENS + tl.arange(0, TILE_TOKENS)
        mask = (token < tokens)[:, None] & (channel < channels)[None, :]
        position = token[:, None] * channels + channel[None, :]
        pattern = tl.load(codes_ptr + position, mask=mask, other=0)
        code = half_codes_jit(pattern).to(tl.float32) * 256.0
        store_decoded_jit(
            scales_ptr, out_ptr, code, token, channel, mask, channels, block_size, out_row,
            out_column, largest, TO_BF16,
        )  # fmt: skip

    def encode_fp8_triton(value: Tensor, block_size: int, key: int) -> tuple[Tensor, Tensor]:
        """Triton launcher; see :func:`encode_fp8`."""
        return launch_encode(_encode_kernel, value, block_size, key, torch.float8_e4m3fn)

    def decode_fp8_triton(codes: Tensor, scales: Tensor, block_size: int, out: Tensor) -> None:
        """Triton launcher; see :func:`decode_fp8`."""
        launch_decode(_decode_kernel, codes, scales, block_size, out)


def encode_fp8(value: Tensor, block_size: int, key: int) -> tuple[Tensor, Tensor]:
    """Codes and scales of an activation; formulas and error bounds at the top of the file.

    Args:
        value: tokens x channels, fp32, bf16 or fp16, any strides.
        block_size: tokens of a channel that share a scale.
        key: 64-bit seed of stochastic rounding, whose noise is a function of it and of the element's
            index.

    Returns:
        codes: tokens x channels, float8_e4m3fn, contiguous.
        scales: ceil(tokens / block_size) x channels, bf16, contiguous.

    Raises:
        ValueError: for another dtype or shape.
    """
    check_value(value, block_size)
    if value.is_cuda and triton is not None:
        return encode_fp8_triton(value, block_size, key)
    return encode_fp8_reference(value, block_size, key)


def decode_fp8(codes: Tensor, scales: Tensor, block_size: int, out: Tensor) -> None:
    """Write the activation that :func:`encode_fp8` encoded into ``out``.

    Args:
        out: tokens x channels, fp32, bf16 or fp16, any strides; overwritten.

    Raises:
        ValueError: for other dtypes or shapes.
    """
    if codes.dtype != torch.float8_e4m3fn:
        raise ValueError(f"codes are float8_e4m3fn, got {codes.dtype}")
    check_blocks(codes, scales, block_size)
    check_out(out, codes)
    if codes.is_cuda and triton is not None:
        decode_fp8_triton(codes, scales, block_size, out)
    else:
        decode_fp8_reference(codes, scales, block_size, out)
