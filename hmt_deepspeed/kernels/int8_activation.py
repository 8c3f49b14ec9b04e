"""Activations in INT8: blocks of tokens within a channel, one bf16 scale each, linear codes.

With s the scale of a block (:mod:`hmt_deepspeed.kernels.token_blocks`)::

    code = round(x / s) in -127..127,   decoded y = s code

    |y - x| <= s       stochastic: a neighbour with a probability linear in x, so E y = x
    |y - x| <= s / 2   nearest (a tie to the higher)

each up to ``2^-16 s`` of fp32 arithmetic, and the rounding to nearest of the dtype decoded to on top.
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
)

__all__ = ["decode_int8", "decode_int8_reference", "encode_int8", "encode_int8_reference"]

_TOP = 127.0


def _to_codes(scaled: Tensor, noise: Tensor | None) -> Tensor:
    low = scaled.floor()
    code = scaled.add_(0.5).floor_() if noise is None else low.add_(noise < scaled - low)
    return code.clamp_(-_TOP, _TOP).to(torch.int8).view(torch.uint8)


def encode_int8_reference(value: Tensor, block_size: int, key: int | None) -> tuple[Tensor, Tensor]:
    """Torch twin of the kernel; see :func:`encode_int8`."""
    codes, scales = encode_reference(value, block_size, key, _TOP, _to_codes)
    return codes.view(torch.int8), scales


def decode_int8_reference(codes: Tensor, scales: Tensor, block_size: int, out: Tensor) -> None:
    """Torch twin of the kernel; see :func:`decode_int8`."""
    decode_reference(codes, scales, block_size, out)


def encode_int8(value: Tensor, block_size: int, key: int | None) -> tuple[Tensor, Tensor]:
    """Codes and scales of an activation; formulas and error bounds at the top of the file.

    Args:
        value: tokens x channels, fp32, bf16 or fp16, any strides.
        block_size: tokens of a channel that share a scale.
        key: 64-bit seed of stochastic rounding, whose noise is a function of it and of the element's
            index; None rounds to the nearest code.

    Returns:
        codes: tokens x channels, int8, contiguous.
        scales: ceil(tokens / block_size) x channels, bf16, contiguous.

    Raises:
        ValueError: for another dtype or shape.
    """
    check_value(value, block_size)
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
    decode_int8_reference(codes, scales, block_size, out)
