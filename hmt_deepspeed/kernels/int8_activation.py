"""Activations in INT8: blocks of tokens within a channel, one bf16 scale each, linear codes.

With s the scale of a block (:mod:`hmt_deepspeed.kernels.token_blocks`)::

    code = round(x / s) in -127..127,   decoded y = s code

    |y - x| <= s   stochastic: a neighbour with a probability linear in x, so E y = x

up to ``2^-16 s`` of fp32 arithmetic, and the rounding to nearest of the dtype decoded to on top.
Zeros are exact.
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
    "decode_int8",
    "decode_int8_reference",
    "decode_int8_triton",
    "encode_int8",
    "encode_int8_reference",
    "encode_int8_triton",
]

_TOP = 127.0


def _to_codes(scaled: Tensor, threshold: Tensor) -> Tensor:
    return rounded(scaled, threshold).clamp_(-_TOP, _TOP).to(torch.int8).view(torch.uint8)


def encode_int8_reference(value: Tensor, block_size: int, key: int) -> tuple[Tensor, Tensor]:
    """Torch twin of the kernel; see :func:`encode_int8`."""
    codes, scales = encode_reference(value, block_size, key, _TOP, _to_codes)
    return codes.view(torch.int8), scales


def decode_int8_reference(codes: Tensor, scales: Tensor, block_size: int, out: Tensor) -> None:
    """Torch twin of the kernel; see :func:`decode_int8`."""
    decode_reference(codes, scales, block_size, out, Tensor.float)


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
            127, TILE_TOKENS, TILE_CHANNELS,
        )  # fmt: skip
        for first in range(0, height, TILE_TOKENS):  # once more, from the cache
            scaled, mask = scaled_tile_jit(
                begin, inverse, first, height, width, value_row, value_column,
                TILE_TOKENS, TILE_CHANNELS,
            )  # fmt: skip
            position, index = places_jit(
                token + first, channel, channels, TILE_TOKENS, TILE_CHANNELS
            )
            code = rounded_jit(scaled, index, key_low, key_high)
            code = tl.minimum(tl.maximum(code, -127.0), 127.0)
            tl.store(codes_ptr + position, code.to(tl.int8), mask=mask)

    @triton.jit
    def _decode_kernel(  # type: ignore[no-untyped-def]
        codes_ptr, scales_ptr, out_ptr, tokens, channels, block_size, out_row, out_column, largest,
        TO_BF16: tl.constexpr, TILE_TOKENS: tl.constexpr, TILE_CHANNELS: tl.constexpr,
    ):  # fmt: skip
        tile, channel = program_jit(channels, TILE_CHANNELS)
        token = tile * TILE_TOKENS + tl.arange(0, TILE_TOKENS)
        mask = (token < tokens)[:, None] & (channel < channels)[None, :]
        position = token[:, None] * channels + channel[None, :]
        code = tl.load(codes_ptr + position, mask=mask, other=0).to(tl.float32)
        store_decoded_jit(
            scales_ptr, out_ptr, code, token, channel, mask, channels, block_size, out_row,
            out_column, largest, TO_BF16,
        )  # fmt: skip

    def encode_int8_triton(value: Tensor, block_size: int, key: int) -> tuple[Tensor, Tensor]:
        """Triton launcher; see :func:`encode_int8`."""
        return launch_encode(_encode_kernel, value, block_size, key, torch.int8)

    def decode_int8_triton(codes: Tensor, scales: Tensor, block_size: int, out: Tensor) -> None:
        """Triton launcher; see :func:`decode_int8`."""
        launch_decode(_decode_kernel, codes, scales, block_size, out)


def encode_int8(value: Tensor, block_size: int, key: int) -> tuple[Tensor, Tensor]:
    """Codes and scales of an activation; formulas and error bounds at the top of the file.

    Args:
        value: tokens x channels, fp32, bf16 or fp16, any strides.
        block_size: tokens of a channel that share a scale.
        key: 64-bit seed of stochastic rounding, whose noise is a function of it and of the element's
            index.

    Returns:
        codes: tokens x channels, int8, contiguous.
        scales: ceil(tokens / block_size) x channels, bf16, contiguous.

    Raises:
        ValueError: for another dtype or shape.
    """
    check_value(value, block_size)
    if value.is_cuda and triton is not None:
        return encode_int8_triton(value, block_size, key)
    return encode_int8_reference(value, block_size, key)


def decode_int8(codes: Tensor, scales: Tensor, block_size: int, out: Tensor) -> None:
    """Write the activation that :func:`encode_int8` encoded into ``out``.

    Args:
        out: tokens x channels, fp32, bf16 or fp16, any strides; overwritten.

    Raises:
        ValueError: for other dtypes or shapes.
    """
    if codes.dtype != torch.int8:
        raise ValueError(f"codes are int8, got {codes.dtype}")
    check_blocks(codes, scales, block_size)
    check_out(out, codes)
    if codes.is_cuda and triton is not None:
        decode_int8_triton(codes, scales, block_size, out)
    else:
        decode_int8_reference(codes, scales, block_size, out)
