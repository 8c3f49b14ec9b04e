"""Optimizer states in 8 bits: blocks of 256 elements, one fp32 scale each, logarithmic codes.

The scale of a block is its largest magnitude. A code names a level, a fraction of the scale; code 0
is zero and the other levels are equally spaced in the logarithm::

    signed    level_k = 2^((k - 127) 16/126),  k = 1..127, and their negatives (k + 128)
    unsigned  level_k = 2^((k - 255) 24/254),  k = 1..255

With ``rho = level_{k+1} / level_k`` = 1.0920 (signed) or 1.0677 (unsigned) and s the scale, a value
x decodes to y with

    |y - x| <= (rho - 1) |x|            stochastic     if |x| >= s 2^-16 (signed), s 2^-24 (unsigned)
    |y - x| <= (rho - 1)/(rho + 1) |x|  nearest        likewise
    |y - x| <= s 2^-16 or s 2^-24       either         below

each up to ``4 * 2^-24 |x| + 2^-149`` of fp32 arithmetic. Zeros and the largest magnitude are exact.

Stochastic rounding picks a neighbouring level with a probability linear in the value, so the
expectation of y is x. A running mean needs that: with beta2 = 0.999 one step moves it by about 0.1 %,
less than half the distance of two levels (3.3 %), and nearest rounding would return the old level for ever.
The price is noise. Rounded once per step, a mean v of x^2 that is stationary has a relative variance of
about ``E|x^2/v - x_m^2/v_m| (rho - 1)/2``, m the largest element of the block, whose movement moves all
levels (a step adds p(1-p) gap^2 with p the movement in gaps; they add up over 1/(2 (1 - beta)) steps).
For Gaussian x that is a deviation of 0.2 of v, 0.1 of sqrt(v), whatever beta is.

Unsigned states are second moments, which divide. One that became zero would throw its element by
m/eps, so a positive value below the lowest level always becomes the lowest level: the step is shorter
than it should be instead of unbounded. 24 octaves of v are 12 of sqrt(v): this happens to elements
whose gradient is 4096 times smaller than the largest of their block. A scale below 2^-125 has levels
that fp32 cannot hold and that decode to zero all the same.

A block that holds an infinity or a NaN gets a NaN scale and decodes to NaN throughout.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from hmt_deepspeed.kernels.chunks import stack_pieces
from hmt_deepspeed.kernels.launching import on_its_device
from hmt_deepspeed.kernels.noise import Key, check_keys, counters, key_halves, uniform

try:
    import triton
    import triton.language as tl
except ImportError:  # platforms without Triton have no CUDA device to run it on
    triton = None

__all__ = [
    "BLOCK",
    "CODE_RANGE",
    "check_codes",
    "decode_state",
    "decode_states",
    "decode_states_reference",
    "decode_states_triton",
    "encode_state",
    "encode_states",
    "encode_states_reference",
    "encode_states_triton",
    "levels",
]

BLOCK = 256
_BLOCKS_PER_PROGRAM = 8
_CHUNK = 1 << 17  # elements that the torch twins work on at once: whole blocks
# signed -> (code of the scale, levels per octave)
CODE_RANGE = {True: (127, 126 / 16), False: (255, 254 / 24)}


@functools.cache
def levels(signed: bool, device: torch.device) -> Tensor:
    """The fraction of the scale that each code stands for: (256,), fp32. A table, so that every
    device encodes and decodes alike whatever its exp2."""
    top, per_octave = CODE_RANGE[signed]
    code = torch.arange(1, top + 1, dtype=torch.float64)
    table = torch.cat((torch.zeros(1, dtype=torch.float64), torch.exp2((code - top) / per_octave)))
    return (torch.cat((table, -table)) if signed else table).float().to(device)


def encode_states_reference(
    values: Tensor,
    signed: bool,
    key: Tensor | Key | None,
    codes: Tensor,
    scales: Tensor,
    active: Tensor | None = None,
    offset: int = 0,
) -> None:
    """Torch twin of the kernel; see :func:`encode_states`."""
    members, numel = values.shape
    for some, part in stack_pieces([1.0] * members if active is None else active, numel, 1, _CHUNK):
        written = codes[some, part], scales[some, _blocks(part)]
        own = key[some] if isinstance(key, Tensor) else key
        _encode(values[some, part], signed, own, offset + part.start, *written)


def _blocks(part: slice) -> slice:
    return slice(part.start // BLOCK, -(-part.stop // BLOCK))


def _encode(
    value: Tensor,
    signed: bool,
    key: Key | Tensor | None,
    offset: int,
    codes: Tensor,
    scales: Tensor,
) -> None:
    """Encode the same elements, from a multiple of 256, of some members: all are members x elements."""
    members, numel = value.shape
    table = levels(signed, value.device)
    padded = torch.nn.functional.pad(value, (0, -numel % BLOCK)).view(-1, BLOCK)
    magnitude = padded.abs()
    scale = magnitude.amax(dim=1)
    usable = ((scale > 0) & scale.isfinite())[:, None]
    scales.copy_(torch.where(scale.isinf(), torch.nan, scale).view(members, -1))
    ratio = torch.where(usable, magnitude.div_(scale[:, None]), 0.0).view(-1)

    code = _level_below(ratio, signed, table)
    low = table.index_select(0, code)
    gap = table.index_select(0, (code + 1).clamp_(max=CODE_RANGE[signed][0])).sub_(low)
    if key is None:
        gap *= 0.5
    else:
        index = counters(padded.numel() // members, offset, value.device)
        gap *= uniform(index, key).view(-1)
    code += gap < ratio.sub_(low)
    if signed:
        code += ((padded.view(-1) < 0) & (code > 0)).int().mul_(128)
    else:  # see the top of the file; the ratio of a tiny value may have become zero
        code = torch.where((usable & (padded != 0)).view(-1), code.clamp_min(1), code)
    codes.copy_(code.view(members, -1)[:, :numel])


def _level_below(ratio: Tensor, signed: bool, table: Tensor) -> Tensor:
    """Code of the largest level that is not above a ratio in [0, 1]: int32.

    An estimate by the logarithm, off by one at most, then the exact place in the table: a third of the
    time of a binary search.
    """
    top, per_octave = CODE_RANGE[signed]
    code = ratio.clamp_min(1e-30).log2_().mul_(per_octave).add_(top).clamp_(0, top).int()
    code += (table.index_select(0, (code + 1).clamp_(max=top)) <= ratio) & (code < top)
    return code.sub_((table.index_select(0, code) > ratio).int())


def decode_states_reference(
    codes: Tensor, scales: Tensor, signed: bool, shape: torch.Size
) -> Tensor:
    """Torch twin of the kernel; see :func:`decode_states`."""
    (members, numel), table = codes.shape, levels(signed, codes.device)
    out = torch.empty(members, numel, dtype=torch.float32, device=codes.device)
    for some, part in stack_pieces([1.0] * members, numel, 1, _CHUNK):
        target = out[some, part]
        level = table.index_select(0, codes[some, part].int().view(-1)).view(target.shape)
        scale = scales[some, _blocks(part)].repeat_interleave(BLOCK, dim=1)
        torch.mul(level, scale[:, : target.shape[1]], out=target)
    return out.view(shape)


if triton is not None:
    from hmt_deepspeed.kernels.noise import member_key_jit, numel_if_active_jit, uniform_jit

    @triton.jit
    def encode_blocks_jit(  # type: ignore[no-untyped-def]
        bits, threshold, levels_ptr, per_octave,
        TOP: tl.constexpr, SIGNED: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        """Codes of the fp32 patterns of whole blocks, BLOCKS x BLOCK, and their scales; rounds up above the
        threshold, in shares of the gap between two levels."""
        magnitude = bits & 0x7FFFFFFF
        # Patterns order as magnitudes do, infinity and NaN last.
        largest = tl.max(magnitude, axis=1)
        finite = largest < 0x7F800000
        scale = tl.where(finite, largest, 0x7FC00000).to(tl.float32, bitcast=True)

        usable = (finite & (largest > 0))[:, None] & (magnitude >= 0)
        magnitude = tl.where(usable, magnitude, 0)
        divisor = tl.where(usable, tl.broadcast_to(scale[:, None], (BLOCKS, BLOCK)), 1.0)
        ratio = tl.div_rn(magnitude.to(tl.float32, bitcast=True), divisor)

        # An estimate by the logarithm, off by one at most, then the exact place in the table.
        estimate = tl.log2(tl.maximum(ratio, 1e-30)) * per_octave + TOP
        code = tl.minimum(tl.maximum(estimate, 0.0), TOP * 1.0).to(tl.int32)
        above = tl.load(levels_ptr + tl.minimum(code + 1, TOP))
        code = tl.where((above <= ratio) & (code < TOP), code + 1, code)
        code = tl.where(tl.load(levels_ptr + code) > ratio, code - 1, code)

        low = tl.load(levels_ptr + code)
        high = tl.load(levels_ptr + tl.minimum(code + 1, TOP))
        code = tl.where(threshold * (high - low) < ratio - low, code + 1, code)
        if SIGNED:
            code = tl.where((bits < 0) & (code > 0), code + 128, code)
        else:  # see the top of the file; the ratio of a tiny value may have become zero
            code = tl.where((magnitude > 0) & (code == 0), 1, code)
        return code.to(tl.uint8), scale

    # Not specialised: a new key every step must not compile a new kernel.
    @triton.jit(do_not_specialize=["offset", "key_low", "key_high"])
    def _encode_kernel(  # type: ignore[no-untyped-def]
        value_ptr, codes_ptr, scales_ptr, levels_ptr, keys_ptr, active_ptr,
        numel, offset, key_low, key_high, per_octave,
        TOP: tl.constexpr, SIGNED: tl.constexpr, STOCHASTIC: tl.constexpr,
        BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        blocks = tl.cdiv(numel, BLOCK)
        programs = tl.cdiv(blocks, BLOCKS)
        member = (tl.program_id(0) // programs).to(tl.int64)
        first_block = (tl.program_id(0) % programs).to(tl.int64) * BLOCKS
        first, block = first_block * BLOCK, tl.arange(0, BLOCKS)
        within = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]  # int32: half the registers
        limit = numel_if_active_jit(active_ptr, member, numel)
        there = tl.minimum(limit - first, BLOCKS * BLOCK).to(tl.int32)
        mask, place = within < there, member * numel + first
        bits = tl.load(value_ptr + place + within, mask=mask, other=0)
        if STOCHASTIC:
            low, high = member_key_jit(keys_ptr, member, key_low, key_high)
            index = within.to(tl.uint32) + (first + offset).to(tl.uint32)
            threshold = uniform_jit(index, low, high)
        else:
            threshold = tl.full((BLOCKS, BLOCK), 0.5, dtype=tl.float32)
        code, scale = encode_blocks_jit(
            bits, threshold, levels_ptr, per_octave, TOP, SIGNED, BLOCKS, BLOCK
        )
        target = scales_ptr + member * blocks + first_block
        tl.store(target + block, scale, mask=block * BLOCK < there)
        tl.store(codes_ptr + place + within, code, mask=mask)

    @triton.jit
    def _decode_kernel(  # type: ignore[no-untyped-def]
        codes_ptr, scales_ptr, levels_ptr, out_ptr, numel,
        BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        blocks = tl.cdiv(numel, BLOCK)
        programs = tl.cdiv(blocks, BLOCKS)
        member = (tl.program_id(0) // programs).to(tl.int64)
        block = (tl.program_id(0) % programs).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
        position = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
        mask, place = position < numel, member * numel + position
        code = tl.load(codes_ptr + place, mask=mask, other=0).to(tl.int32)
        scale = tl.load(scales_ptr + member * blocks + block, mask=block * BLOCK < numel, other=0.0)
        tl.store(out_ptr + place, tl.load(levels_ptr + code) * scale[:, None], mask=mask)

    @on_its_device
    def encode_states_triton(
        values: Tensor,
        signed: bool,
        key: Tensor | Key | None,
        codes: Tensor,
        scales: Tensor,
        active: Tensor | None = None,
        offset: int = 0,
    ) -> None:
        """Triton launcher; see :func:`encode_states`."""
        if values.numel() == 0:
            return
        (members, numel), (top, per_octave) = values.shape, CODE_RANGE[signed]
        programs = triton.cdiv(triton.cdiv(numel, BLOCK), _BLOCKS_PER_PROGRAM)
        keys, halves = (key, (0, 0)) if isinstance(key, Tensor) else (None, key_halves(key or 0))
        _encode_kernel[(members * programs,)](
            values.view(torch.int32),
            codes,
            scales,
            levels(signed, values.device),
            keys,
            active,
            numel,
            offset,
            *halves,
            per_octave,
            TOP=top,
            SIGNED=signed,
            STOCHASTIC=key is not None,
            BLOCKS=_BLOCKS_PER_PROGRAM,
            BLOCK=BLOCK,
        )

    @on_its_device
    def decode_states_triton(
        codes: Tensor, scales: Tensor, signed: bool, shape: torch.Size
    ) -> Tensor:
        """Triton launcher; see :func:`decode_states`."""
        members, numel = codes.shape
        out = torch.empty(shape, dtype=torch.float32, device=codes.device)
        if out.numel() > 0:
            programs = triton.cdiv(scales.shape[1], _BLOCKS_PER_PROGRAM)
            _decode_kernel[(members * programs,)](
                codes,
                scales,
                levels(signed, codes.device),
                out,
                numel,
                BLOCKS=_BLOCKS_PER_PROGRAM,
                BLOCK=BLOCK,
            )
        return out


def encode_states(
    values: Tensor,
    signed: bool,
    key: Tensor | Key | None,
    codes: Tensor,
    scales: Tensor,
    active: Tensor | None = None,
    offset: int = 0,
) -> None:
    """Write codes and scales of a stack's states, in one launch; levels and error bounds at the top of the file.

    Args:
        values: B x numel, fp32, contiguous; a shard that starts at a multiple of 256 gets the codes that it has in
            the whole tensor.
        signed: whether values may be negative. If not, their sign is not looked at.
        key: of stochastic rounding: B x 2 int32, of :func:`hmt_deepspeed.kernels.noise.step_keys`; or one key, a
            64-bit seed or its halves. None rounds to the nearest level (a tie to the lower).
        codes: B x numel, uint8, scales: B x ceil(numel / 256), fp32, contiguous; overwritten. No block holds
            elements of two members.
        active: (B,) fp32; a member whose value is 0 is not written. None writes all.
        offset: index of each member's first element, so that shards of one tensor share one stream.

    Raises:
        ValueError: for other dtypes, shapes or tensors that are not contiguous.
    """
    if values.dtype != torch.float32 or not values.is_contiguous():
        raise ValueError(f"values must be fp32 and contiguous, got {values.dtype}")
    check_codes(codes, scales, values.shape)
    if isinstance(key, Tensor):
        check_keys(key, len(values), active)
    encode = (
        encode_states_triton if values.is_cuda and triton is not None else encode_states_reference
    )
    encode(values, signed, key, codes, scales, active, offset)


def decode_states(
    codes: Tensor, scales: Tensor, signed: bool, shape: torch.Size | tuple[int, ...]
) -> Tensor:
    """The fp32 stack, of the given shape B x ..., that :func:`encode_states` made codes and scales of.

    Raises:
        ValueError: for other dtypes, sizes or tensors that are not contiguous.
    """
    shape = torch.Size(shape)
    check_codes(codes, scales, (shape[0], shape[1:].numel()))
    decode = (
        decode_states_triton if codes.is_cuda and triton is not None else decode_states_reference
    )
    return decode(codes, scales, signed, shape)


def encode_state(
    value: Tensor, signed: bool, key: Key | None, offset: int = 0
) -> tuple[Tensor, Tensor]:
    """Codes, (numel,), and scales of one tensor of any shape; see :func:`encode_states`."""
    numel, device = value.numel(), value.device
    codes = torch.empty(1, numel, dtype=torch.uint8, device=device)
    scales = torch.empty(1, -(-numel // BLOCK), dtype=torch.float32, device=device)
    flat = value.view(1, -1) if value.is_contiguous() else value
    encode_states(flat, signed, key, codes, scales, offset=offset)
    return codes[0], scales[0]


def decode_state(
    codes: Tensor, scales: Tensor, signed: bool, shape: torch.Size | tuple[int, ...]
) -> Tensor:
    """The fp32 tensor of the given shape that :func:`encode_state` made codes and scales of."""
    return decode_states(codes[None], scales[None], signed, (1, *shape))[0]


def check_codes(codes: Tensor, scales: Tensor, shape: tuple[int, ...]) -> None:
    *members, numel = shape
    if codes.dtype != torch.uint8 or scales.dtype != torch.float32:
        raise ValueError(
            f"codes must be uint8 and scales fp32, got {codes.dtype} and {scales.dtype}"
        )
    if codes.shape != (*members, numel) or scales.shape != (*members, -(-numel // BLOCK)):
        raise ValueError(
            f"{tuple(shape)} takes as many codes and one scale for each {BLOCK} of a row, got "
            f"{tuple(codes.shape)} and {tuple(scales.shape)}"
        )
    if not (codes.is_contiguous() and scales.is_contiguous()):
        raise ValueError("codes and scales must be contiguous")
