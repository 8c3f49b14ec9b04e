"""Activations in FP8 e4m3: blocks of tokens within a channel, one bf16 scale each.

With s the scale of a block (:mod:`hmt_deepspeed.kernels.token_blocks`) and v = x / s, |v| <= 448::

    code = v rounded to e4m3, whose numbers are q 2^(e - 3), q = 0..15 integer, e = -6..8
    decoded y = s code

    |y - x| <= 2^-3 max(|x|, 2^-6 s)   stochastic: a neighbour with a probability linear in x, so E y = x
    |y - x| <= 2^-4 max(|x|, 2^-6 s)   nearest (a tie away from zero)

each up to ``2^-22 |x|`` of fp32 arithmetic, and the rounding to nearest of the dtype decoded to on top.
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
)

__all__ = ["decode_fp8", "decode_fp8_reference", "encode_fp8", "encode_fp8_reference"]

_TOP = 448.0


def _to_codes(scaled: Tensor, noise: Tensor | None) -> Tensor:
    """A pattern is (e + 6) 8 + q: a q that is rounded up to 16 is 8 of the next exponent."""
    magnitude = scaled.abs()
    exponent = ((magnitude.view(torch.int32) >> 23) - 127).clamp_min_(-6)
    q = magnitude * ((130 - exponent) << 23).view(torch.float32)  # 2^(3 - e)
    low = q.floor()
    rounded = q.add_(0.5).floor_() if noise is None else low.add_(noise < q - low)
    pattern = exponent.add_(6).mul_(8).add_(rounded.to(torch.int32)).clamp_max_(126)  # 127 is NaN
    return (pattern + 128 * (scaled < 0)).to(torch.uint8)


def encode_fp8_reference(value: Tensor, block_size: int, key: int | None) -> tuple[Tensor, Tensor]:
    """Torch twin of the kernel; see :func:`encode_fp8`."""
    codes, scales = encode_reference(value, block_size, key, _TOP, _to_codes)
    return codes.view(torch.float8_e4m3fn), scales


def decode_fp8_reference(codes: Tensor, scales: Tensor, block_size: int, out: Tensor) -> None:
    """Torch twin of the kernel; see :func:`decode_fp8`."""
    decode_reference(codes, scales, block_size, out)


def encode_fp8(value: Tensor, block_size: int, key: int | None) -> tuple[Tensor, Tensor]:
    """Codes and scales of an activation; formulas and error bounds at the top of the file.

    Args:
        value: tokens x channels, fp32, bf16 or fp16, any strides.
        block_size: tokens of a channel that share a scale.
        key: 64-bit seed of stochastic rounding, whose noise is a function of it and of the element's
            index; None rounds to the nearest code.

    Returns:
        codes: tokens x channels, float8_e4m3fn, contiguous.
        scales: ceil(tokens / block_size) x channels, bf16, contiguous.

    Raises:
        ValueError: for another dtype or shape.
    """
    check_value(value, block_size)
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
    decode_fp8_reference(codes, scales, block_size, out)
