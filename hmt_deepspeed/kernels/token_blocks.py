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
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hmt_deepspeed.kernels.launching import on_its_device
from hmt_deepspeed.kernels.noise import counters, key_halves, uniform

try:
    import triton
    import triton.language as tl
except ImportError:  # platforms without Triton have no CUDA device to run it on
    triton = None

__all__ = [
    "FLOATS",
    "check_blocks",
    "check_out",
    "check_value",
    "decode_reference",
    "encode_reference",
    "new_blocks",
    "num_blocks",
    "rounded",
]

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_SMALLEST_SCALE = 2.0**-126
_TILE_ELEMENTS = 1 << 18  # of the references: what they hold in fp32 at once


class _Tile(NamedTuple):
    """Whole blocks of neighbouring channels, or the short last blocks of some."""

    tokens: slice
    blocks: slice
    channels: slice


def num_blocks(tokens: int, block_size: int) -> int:
    """Blocks of one channel."""
    return -(-tokens // block_size)


def _tiles(tokens: int, channels: int, block_size: int) -> Iterator[_Tile]:
    whole = tokens // block_size
    width = max(1, min(channels, _TILE_ELEMENTS // block_size))
    step = max(1, _TILE_ELEMENTS // (block_size * width))
    spans = [(block, min(block + step, whole)) for block in range(0, whole, step)]
    if tokens % block_size:
        spans.append((whole, whole + 1))
    for begin, end in spans:
        span = slice(begin * block_size, min(end * block_size, tokens))
        for channel in range(0, channels, width):
            yield _Tile(span, slice(begin, end), slice(channel, min(channel + width, channels)))


def _block_scales(blocks: Tensor, top: float) -> Tensor:
    """Scales of blocks x rows x channels: blocks x channels, fp32 numbers that bf16 holds exactly."""
    largest = blocks.abs().amax(dim=1)
    bits = (largest * (1 / top)).clamp_min_(_SMALLEST_SCALE).view(torch.int32)
    scale = ((bits + 0xFFFF) & -0x10000).view(torch.float32)
    return torch.where(largest.isfinite(), scale, torch.nan)


def rounded(q: Tensor, threshold: Tensor) -> Tensor:
    """``q`` up where its fractional part exceeds the threshold, else down; new memory."""
    low = q.floor()
    return low.add_((q - low).sub_(threshold).ceil_())


def new_blocks(value: Tensor, block_size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Uninitialised codes and scales for a tokens x channels matrix."""
    tokens, channels = value.shape
    codes = torch.empty(tokens, channels, dtype=dtype, device=value.device)
    shape = num_blocks(tokens, block_size), channels
    return codes, torch.empty(shape, dtype=torch.bfloat16, device=value.device)


def encode_reference(
    value: Tensor,
    block_size: int,
    key: int,
    top: float,
    to_codes: Callable[[Tensor, Tensor], Tensor],
) -> tuple[Tensor, Tensor]:
    """Patterns of the codes (tokens x channels, uint8) and scales (blocks x channels, bf16).

    Args:
        to_codes: the patterns of ``x / s``, given the thresholds of :func:`rounded`.
    """
    tokens, channels = value.shape
    codes, scales = new_blocks(value, block_size, torch.uint8)
    for tile in _tiles(tokens, channels, block_size):
        part = value[tile.tokens, tile.channels].float()
        x = part.unflatten(0, (tile.blocks.stop - tile.blocks.start, -1))
        scale = _block_scales(x, top)
        scaled = (x * scale.reciprocal()[:, None]).nan_to_num_(
            0.0
        )  # blocks with a NaN scale have any
        row = counters(len(part), 0, value.device).mul_(channels)[:, None]
        first = tile.tokens.start * channels + tile.channels.start
        index = row + counters(part.shape[1], first, value.device)
        threshold = uniform(index, key).view(scaled.shape)
        codes[tile.tokens, tile.channels] = to_codes(scaled, threshold).flatten(0, 1)
        scales[tile.blocks, tile.channels] = scale
    return codes, scales


def decode_reference(
    codes: Tensor,
    scales: Tensor,
    block_size: int,
    out: Tensor,
    to_values: Callable[[Tensor], Tensor],
) -> None:
    """Write ``s code``, rounded to nearest, to ``out`` (tokens x channels).

    Args:
        to_values: new fp32 values of codes.
    """
    largest = torch.finfo(out.dtype).max
    for tile in _tiles(codes.shape[0], codes.shape[1], block_size):
        part = to_values(codes[tile.tokens, tile.channels])
        scale = scales[tile.blocks, tile.channels].float()[:, None]
        part.unflatten(0, (len(scale), -1)).mul_(scale)
        out[tile.tokens, tile.channels] = part.clamp_(-largest, largest)  # leaves NaN


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
    if codes.dim() != 2 or scales.shape != (num_blocks(len(codes), block_size), codes.shape[1]):
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


if triton is not None:
    from hmt_deepspeed.kernels.noise import uniform_jit
    from hmt_deepspeed.kernels.stochastic_rounding import round_bits_jit

    # Of a program's registers; the fastest of 15 on an H100.
    _ENCODED = {"TILE_TOKENS": 64, "TILE_CHANNELS": 64}
    _DECODED = {"TILE_TOKENS": 32, "TILE_CHANNELS": 256}
    _LARGEST_STRIDE = 1 << 24  # what a tile spans is then less than 2^31 elements

    @on_its_device
    def launch_encode(
        kernel: Any, value: Tensor, block_size: int, key: int, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Codes and scales by a kernel whose programs have one block of some channels."""
        (tokens, channels), (low, high) = value.shape, key_halves(key)
        codes, scales = new_blocks(value, block_size, dtype)
        if max(value.stride()) > _LARGEST_STRIDE:
            value = value.contiguous()
        if value.numel() > 0:
            tiles = triton.cdiv(channels, _ENCODED["TILE_CHANNELS"])
            kernel[(num_blocks(tokens, block_size) * tiles,)](
                patterns(value), patterns(codes), patterns(scales), tokens, channels, block_size,
                *value.stride(), low, high, **_ENCODED,
            )  # fmt: skip
        return codes, scales

    @on_its_device
    def launch_decode(
        kernel: Any, codes: Tensor, scales: Tensor, block_size: int, out: Tensor
    ) -> None:
        """Fills ``out`` by a kernel whose programs have one tile of tokens x channels."""
        tokens, channels = codes.shape
        if codes.numel() > 0:
            rows, columns = _DECODED["TILE_TOKENS"], _DECODED["TILE_CHANNELS"]
            kernel[(triton.cdiv(tokens, rows) * triton.cdiv(channels, columns),)](
                patterns(codes), patterns(scales), patterns(out), tokens, channels, block_size,
                *out.stride(), torch.finfo(out.dtype).max, TO_BF16=out.dtype == torch.bfloat16,
                **_DECODED,
            )  # fmt: skip

    def patterns(tensor: Tensor) -> Tensor:
        """bf16 and FP8 as integers: not all cards have the types, nor does the interpreter."""
        as_integers = {torch.bfloat16: torch.int16, torch.float8_e4m3fn: torch.uint8}
        return tensor.view(as_integers.get(tensor.dtype, tensor.dtype))

    @triton.jit
    def program_jit(channels, TILE_CHANNELS: tl.constexpr):  # type: ignore[no-untyped-def]
        """Number of this program among its channels', and its channels, int64."""
        tiles = tl.cdiv(channels, TILE_CHANNELS)
        program = tl.program_id(0).to(tl.int64)
        return program // tiles, (program % tiles) * TILE_CHANNELS + tl.arange(0, TILE_CHANNELS)

    @triton.jit
    def widened_jit(value):  # type: ignore[no-untyped-def]
        """In fp32, where int16 are patterns of bf16."""
        if value.dtype == tl.int16:
            value = (value.to(tl.int32) << 16).to(tl.float32, bitcast=True)
        return value.to(tl.float32)

    @triton.jit
    def block_jit(  # type: ignore[no-untyped-def]
        value_ptr,
        tokens,
        channels,
        block_size,
        value_row,
        value_column,
        TILE_CHANNELS: tl.constexpr,
    ):
        """This program's block: its number, first token and first channel, int64; its tokens and channels, int32; and
        where its values begin."""
        tiles = tl.cdiv(channels, TILE_CHANNELS)
        block = (tl.program_id(0) // tiles).to(tl.int64)
        channel = (tl.program_id(0) % tiles).to(tl.int64) * TILE_CHANNELS
        token = block * block_size
        height = tl.minimum(block_size, tokens - token).to(tl.int32)
        width = tl.minimum(TILE_CHANNELS, channels - channel).to(tl.int32)
        begin = value_ptr + token * value_row + channel * value_column
        return block, token, channel, height, width, begin

    @triton.jit
    def load_tile_jit(  # type: ignore[no-untyped-def]
        begin, first, height, width, value_row, value_column,
        TILE_TOKENS: tl.constexpr, TILE_CHANNELS: tl.constexpr,
    ):  # fmt: skip
        """Values of a block from its token ``first`` on, in fp32, zero where there are none; and where some are."""
        token, channel = tl.arange(0, TILE_TOKENS), tl.arange(0, TILE_CHANNELS)
        mask = (token < height - first)[:, None] & (channel < width)[None, :]
        source = begin + tl.cast(first, tl.int64) * value_row
        source += token[:, None] * value_row + channel[None, :] * value_column
        return widened_jit(tl.load(source, mask=mask, other=0)), mask

    @triton.jit
    def store_scale_jit(  # type: ignore[no-untyped-def]
        begin, scales_ptr, height, width, value_row, value_column,
        TOP: tl.constexpr, TILE_TOKENS: tl.constexpr, TILE_CHANNELS: tl.constexpr,
    ):  # fmt: skip
        """Stores a block's scales from ``scales_ptr`` on, as patterns of bf16; their inverses, NaN of a NaN."""
        largest = tl.zeros((TILE_CHANNELS,), dtype=tl.int32)
        for first in range(0, height, TILE_TOKENS):
            value, _ = load_tile_jit(
                begin, first, height, width, value_row, value_column, TILE_TOKENS, TILE_CHANNELS
            )
            # Patterns order as magnitudes do, infinity and NaN last.
            bits = value.to(tl.int32, bitcast=True) & 0x7FFFFFFF
            largest = tl.maximum(largest, tl.max(bits, axis=0))
        finite = largest < 0x7F800000
        scale = tl.where(finite, largest, 0).to(tl.float32, bitcast=True) * (1 / TOP)
        bits = tl.maximum(scale, 2.0**-126).to(tl.int32, bitcast=True)
        bits = tl.where(finite, (bits + 0xFFFF) & -65536, 0x7FC00000)
        channel = tl.arange(0, TILE_CHANNELS)
        tl.store(scales_ptr + channel, (bits >> 16).to(tl.int16), mask=channel < width)
        scale = bits.to(tl.float32, bitcast=True)
        return tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)

    @triton.jit
    def scaled_tile_jit(  # type: ignore[no-untyped-def]
        begin, inverse, first, height, width, value_row, value_column,
        TILE_TOKENS: tl.constexpr, TILE_CHANNELS: tl.constexpr,
    ):  # fmt: skip
        """``x / s`` of a tile, zero in blocks whose scale is NaN; and where there are elements."""
        value, mask = load_tile_jit(
            begin, first, height, width, value_row, value_column, TILE_TOKENS, TILE_CHANNELS
        )
        usable = tl.broadcast_to((inverse == inverse)[None, :], value.shape)
        return tl.where(usable, value * inverse[None, :], 0.0), mask

    @triton.jit
    def places_jit(  # type: ignore[no-untyped-def]
        token, channel, channels, TILE_TOKENS: tl.constexpr, TILE_CHANNELS: tl.constexpr
    ):
        """Where a tile's elements are in the whole matrix, int64, and the uint32 indices of their noise."""
        row, column = tl.arange(0, TILE_TOKENS), tl.arange(0, TILE_CHANNELS)
        within, first = row[:, None] * channels + column[None, :], token * channels + channel
        return first + within, within.to(tl.uint32) + first.to(tl.uint32)

    @triton.jit
    def rounded_jit(q, index, key_low, key_high):  # type: ignore[no-untyped-def]
        """Twin of :func:`rounded`, which makes its thresholds from uint32 indices."""
        low = tl.floor(q)
        return tl.where(uniform_jit(index, key_low, key_high) < q - low, low + 1.0, low)

    @triton.jit
    def load_scales_jit(scales_ptr, block, channel, mask, channels):  # type: ignore[no-untyped-def]
        """Scales of one shape that ``block`` and ``channel`` broadcast to, from patterns of bf16."""
        bits = tl.load(scales_ptr + block * channels + channel, mask=mask, other=0).to(tl.int32)
        return (bits << 16).to(tl.float32, bitcast=True)

    @triton.jit
    def store_rounded_jit(  # type: ignore[no-untyped-def]
        out_ptr, value, mask, TO_BF16: tl.constexpr
    ):
        """To fp32 or fp16; to bf16 (nearest, a tie to even) through a pointer to patterns."""
        if TO_BF16:
            bits = value.to(tl.uint32, bitcast=True)
            value = round_bits_jit(bits, 0x7FFF + ((bits >> 16) & 1)).to(tl.int16)
        tl.store(out_ptr, value.to(out_ptr.dtype.element_ty), mask=mask)

    @triton.jit
    def store_decoded_jit(  # type: ignore[no-untyped-def]
        scales_ptr, out_ptr, code, token, channel, mask, channels, block_size, out_row, out_column,
        largest, TO_BF16: tl.constexpr,
    ):  # fmt: skip
        """``s code`` of a tile, no further from zero than ``largest``."""
        value = code * load_scales_jit(
            scales_ptr, (token // block_size)[:, None], channel[None, :], mask, channels
        )
        value = tl.where(value > largest, largest, tl.where(value < -largest, -largest, value))
        target = out_ptr + token[:, None] * out_row + channel[None, :] * out_column
        store_rounded_jit(target, value, mask, TO_BF16)
