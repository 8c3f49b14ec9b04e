"""What the 8-bit activations share: blocks of tokens within a channel, and a bf16 scale for each.

An activation of tokens x channels is cut into blocks of ``block_size`` tokens of one channel (the last
of a channel may be short), because outliers sit in a few channels: a scale shared along a row of channels
would be theirs. With a the largest magnitude of a block and t the largest code::

    s = max(a / t, 2^-126), rounded up to bf16,   so that |x / s| <= t

The floor keeps s a normal number; blocks smaller than t 2^-126 lose precision by it and stay unbiased.
A block that holds an infinity or a NaN gets a NaN scale and decodes to NaN throughout, so that a check
for overflow sees it; other blocks do not. A finite value comes back finite: where ``t s`` exceeds the
largest number of the dtype (s was rounded up), decoding stops at that number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from hmt_deepspeed.kernels.chunks import CHUNK_ELEMENTS
from hmt_deepspeed.kernels.noise import counters, uniform

__all__ = [
    "FLOATS",
    "check_blocks",
    "check_out",
    "check_value",
    "decode_reference",
    "encode_reference",
    "num_blocks",
    "token_chunks",
]

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_SMALLEST_SCALE = 2.0**-126


def num_blocks(tokens: int, block_size: int) -> int:
    """Blocks of one channel."""
    return -(-tokens // block_size)


def token_chunks(tokens: int, channels: int, block_size: int) -> Iterator[tuple[slice, slice]]:
    """Spans of tokens of some ``CHUNK_ELEMENTS`` elements, and their blocks; a short last block alone."""
    whole = tokens // block_size
    step = max(1, CHUNK_ELEMENTS // max(block_size * channels, 1))
    for begin in range(0, whole, step):
        end = min(begin + step, whole)
        yield slice(begin * block_size, end * block_size), slice(begin, end)
    if tokens % block_size:
        yield slice(whole * block_size, tokens), slice(whole, whole + 1)


def _block_scales(blocks: Tensor, top: float) -> Tensor:
    """Scales of blocks x rows x channels: blocks x channels, fp32 numbers that bf16 holds exactly."""
    largest = blocks.abs().amax(dim=1)
    bits = (largest * (1 / top)).clamp_min_(_SMALLEST_SCALE).view(torch.int32)
    scale = ((bits + 0xFFFF) & -0x10000).view(torch.float32)
    return torch.where(largest.isfinite(), scale, torch.nan)


def encode_reference(
    value: Tensor,
    block_size: int,
    key: int | None,
    top: float,
    to_codes: Callable[[Tensor, Tensor | None], Tensor],
) -> tuple[Tensor, Tensor]:
    """Codes (uint8 patterns, tokens x channels) and scales (bf16, blocks x channels).

    Args:
        to_codes: rounds ``x / s`` with the noise of each element, None for nearest, and gives the
            patterns of the codes.
    """
    tokens, channels = value.shape
    codes = torch.empty(tokens, channels, dtype=torch.uint8, device=value.device)
    shape = num_blocks(tokens, block_size), channels
    scales = torch.empty(shape, dtype=torch.bfloat16, device=value.device)
    for span, blocks in token_chunks(tokens, channels, block_size):
        x = value[span].float().unflatten(0, (blocks.stop - blocks.start, -1))
        scale = _block_scales(x, top)
        scaled = (x / scale[:, None]).nan_to_num_(0.0)  # only blocks with a NaN scale have any
        noise = None
        if key is not None:
            index = counters(scaled.numel(), span.start * channels, value.device)
            noise = uniform(index, key).view_as(scaled)
        codes[span] = to_codes(scaled, noise).flatten(0, 1)
        scales[blocks] = scale
    return codes, scales


def decode_reference(codes: Tensor, scales: Tensor, block_size: int, out: Tensor) -> None:
    """Write ``s code`` to ``out`` (tokens x channels), rounded to nearest; codes of a dtype that says
    their value."""
    largest = torch.finfo(out.dtype).max
    for span, blocks in token_chunks(codes.shape[0], codes.shape[1], block_size):
        x = codes[span].float().unflatten(0, (blocks.stop - blocks.start, -1))
        x.mul_(scales[blocks].float()[:, None]).clamp_(-largest, largest)  # leaves NaN
        out[span] = x.flatten(0, 1)


def check_value(value: Tensor, block_size: int) -> None:
    """Raises ValueError for what cannot be encoded."""
    if value.dtype not in FLOATS or value.dim() != 2:
        raise ValueError(
            f"encodes fp32, bf16 or fp16 of tokens x channels, got {value.dtype} of shape "
            f"{tuple(value.shape)}"
        )
    if block_size < 1:
        raise ValueError(f"block_size is at least 1 token, got {block_size}")


def check_blocks(codes: Tensor, scales: Tensor, block_size: int) -> None:
    """Raises ValueError unless the geometry is that of encoded blocks."""
    if block_size < 1:
        raise ValueError(f"block_size is at least 1 token, got {block_size}")
    if codes.dim() != 2 or scales.shape != (
        num_blocks(codes.shape[0], block_size),
        codes.shape[1],
    ):
        raise ValueError(
            f"an encoded activation has tokens x channels codes and one scale per channel for each "
            f"{block_size} tokens, got {tuple(codes.shape)} and {tuple(scales.shape)}"
        )
    if scales.dtype != torch.bfloat16:
        raise ValueError(f"scales are bf16, got {scales.dtype}")
    if not (codes.is_contiguous() and scales.is_contiguous()):
        raise ValueError("codes and scales must be contiguous")


def check_out(out: Tensor, codes: Tensor) -> None:
    """Raises ValueError unless the codes can be decoded into ``out``."""
    if out.dtype not in FLOATS or out.shape != codes.shape:
        raise ValueError(
            f"decodes to fp32, bf16 or fp16 of shape {tuple(codes.shape)}, got {out.dtype} of shape "
            f"{tuple(out.shape)}"
        )
