"""Counter-based noise: the bits of element ``i`` are a hash of ``(key, i)`` and of nothing else.

Every rank, device and sharding therefore draws the same noise for the same element. Only the low 32
bits of a counter are hashed; a counter itself may be larger.

A name has a base key, :func:`base_key`; each step and :class:`Stream` makes another key of it, two 32-bit
halves, on the device and without the host: :func:`step_keys`.

Normals come from a table of 65,536 quantiles, so no device's logarithm or cosine is in them: element
``2i`` has the low 16 bits of hash ``i`` as its index, element ``2i + 1`` the high ones. The largest is 4.3.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Sequence
from enum import IntEnum
from statistics import NormalDist

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from hmt_deepspeed.kernels.launching import on_its_device, upload

try:
    import triton
    import triton.language as tl
except ImportError:  # platforms without Triton have no CUDA device to run it on
    triton = None

__all__ = [
    "Key",
    "Stream",
    "base_key",
    "base_keys",
    "check_keys",
    "counters",
    "host_step_key",
    "key_halves",
    "noise_bits",
    "normal_quantiles",
    "normals",
    "normals_reference",
    "normals_triton",
    "step_keys",
    "step_keys_reference",
    "step_keys_triton",
    "uniform",
]

Key = int | tuple[int, int]  # a number, or the two halves that are made of one

# Two rounds of multiply and xor-shift: the low-bias 32-bit mixer found by C. Wellons' search.
_MIX_1, _MIX_2 = 0x7FEB352D, 0x846CA68B
_MASK64 = (1 << 64) - 1
_GOLDEN, _MIX_64 = 0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93  # splitmix64's step, degski's multiplier
_NUM_STREAMS = 64
_PAIRS = 1 << 15  # that the torch twin draws at once: its temporaries stay in the cache
_BLOCK_PAIRS = 1024
_BLOCK_KEYS = 256


class Stream(IntEnum):
    """What a key is for: keys of one name and step that have nothing in common. Numbers stay as they are,
    or a run that resumes draws others."""

    WEIGHT_ROUNDING = 0
    FIRST_STATE = 1
    SECOND_STATE = 2
    PROBES = 3
    BASIS = 4
    LEFT_BASIS = 5
    TURN = 6
    AUXILIARY_SPACE = 7
    SKETCH = 8


def base_key(seed: int, *parts: object) -> int:
    """A 63-bit key from ``seed`` and any labels, the same in every process and on every rank.

    Keys are of names, never of an order of enumeration, so what is drawn does not depend on world size,
    sharding or how many parameters come before.
    """
    text = "/".join(str(part) for part in (seed, *parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def base_keys(seed: int, names: Sequence[str], device: torch.device) -> Tensor:
    """:func:`base_key` of each name: (N,), int64."""
    return upload([base_key(seed, name) for name in names], torch.int64, device)


def host_step_key(base: int, step: int, stream: int) -> tuple[int, int]:
    """Twin of :func:`step_keys` for one key: its halves, as signed 32-bit numbers."""
    key = (base + (step * _NUM_STREAMS + stream) * _GOLDEN) & _MASK64
    for _ in range(2):
        key = ((key ^ (key >> 32)) * _MIX_64) & _MASK64
    key ^= key >> 32
    return _signed32(key), _signed32(key >> 32)


def step_keys_reference(base: Tensor, step: Tensor | int, stream: int) -> Tensor:
    """Torch twin of the kernel; see :func:`step_keys`."""
    start = _signed64(stream * _GOLDEN)
    if isinstance(step, Tensor):
        key = torch.add(base, step, alpha=_signed64(_NUM_STREAMS * _GOLDEN)).add_(start)
    else:
        key = base + _signed64((step * _NUM_STREAMS + stream) * _GOLDEN)
    halves = key.view(torch.int32).view(-1, 2)  # low first: all our machines are little-endian
    low, high = halves.unbind(1)
    for _ in range(2):
        low.bitwise_xor_(high)
        key *= _signed64(_MIX_64)
    low.bitwise_xor_(high)
    return halves


def _signed32(value: int) -> int:
    value &= 0xFFFFFFFF
    return value - (1 << 32) if value >= 1 << 31 else value


def _signed64(value: int) -> int:
    value &= _MASK64
    return value - (1 << 64) if value >= 1 << 63 else value


def key_halves(key: Key) -> tuple[int, int]:
    """Two halves of a mixed key (splitmix64's finaliser), so that keys 1 and 2 have nothing in common:
    the per-element mixer alone would leave keys correlated that differ in a high bit. Halves stay as they are.

    As signed 32-bit numbers: Triton compiles a kernel anew for an integer that does not fit them.
    """
    if isinstance(key, tuple):
        return key
    key = (key + 0x9E3779B97F4A7C15) & _MASK64
    key = ((key ^ (key >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    key = ((key ^ (key >> 27)) * 0x94D049BB133111EB) & _MASK64
    key ^= key >> 31
    return _signed32(key), _signed32(key >> 32)


def _shift_right(x: Tensor, bits: int, out: Tensor | None = None) -> Tensor:
    """Logical shift of int32: torch's own shift keeps the sign."""
    return torch.bitwise_right_shift(x, bits, out=out).bitwise_and_((1 << (32 - bits)) - 1)


def counters(count: int, offset: int, device: torch.device) -> Tensor:
    """The low 32 bits of ``offset, offset + 1, ...``: int32, (count,)."""
    first = _signed32(offset)
    return torch.arange(count, dtype=torch.int32, device=device).add_(first)


def noise_bits(index: Tensor, key: Key | Tensor) -> Tensor:
    """32 uniform bits (an int32) for each int32 counter in ``index``; with keys of a stack (B x 2, int32) for
    each matrix and counter: B x count."""
    low, high = (key[:, :1], key[:, 1:]) if isinstance(key, Tensor) else key_halves(key)
    h = index ^ low
    shifted = torch.empty_like(h)  # in place: half the time of new tensors on a CPU
    h ^= _shift_right(h, 16, shifted)
    h *= _MIX_1
    h ^= high
    h ^= _shift_right(h, 15, shifted)
    h *= _signed32(_MIX_2)
    h ^= _shift_right(h, 16, shifted)
    return h


def uniform(index: Tensor, key: Key | Tensor) -> Tensor:
    """A multiple of 2^-24 in [0, 1), fp32, where :func:`noise_bits` has 32 bits."""
    return _shift_right(noise_bits(index, key), 8).float().mul_(2.0**-24)


def check_keys(keys: Tensor, members: int, active: Tensor | None = None) -> None:
    """Refuse what are not keys of a stack, and a vector that is not of which members are active."""
    if keys.dtype != torch.int32 or keys.shape != (members, 2) or not keys.is_contiguous():
        raise ValueError(
            f"keys must be {members} x 2 int32 and contiguous, got {tuple(keys.shape)} {keys.dtype} with strides "
            f"{keys.stride()}"
        )
    if active is not None and (active.dtype != torch.float32 or active.shape != (members,)):
        raise ValueError(
            f"active must be ({members},) fp32, got {tuple(active.shape)} {active.dtype}"
        )


@functools.cache
def normal_quantiles(device: torch.device) -> Tensor:
    """Quantiles ``(i + 1/2) / 65536`` of the normal distribution, scaled to variance 1: (65536,), fp32.

    On the host by scalar code, which no device's or vector unit's own functions enter.
    """
    inverse = NormalDist().inv_cdf
    upper = [inverse((i + 0.5) / 65536) for i in range(32768, 65536)]
    half = torch.tensor(upper, dtype=torch.float64)
    half /= math.sqrt(math.fsum(x * x for x in upper) / len(upper))
    return torch.cat((-half.flip(0), half)).float().to(device)


def normals_reference(
    keys: Tensor, rows: int, columns: int, first_row: int = 0, scale: float = 1.0
) -> Tensor:
    """Torch twin of the kernel; see :func:`normals`."""
    table, count = normal_quantiles(keys.device) * scale, rows * columns
    # before: half of a pair is of the row above
    first_pair, before = divmod(first_row * columns, 2)
    pairs = -(-(before + count) // 2)
    out = torch.empty(len(keys), rows, columns, dtype=torch.float32, device=keys.device)
    members = max(1, _PAIRS // max(pairs, 1))
    flats = out.view(len(keys), count).split(members)
    for part, flat in zip(keys.split(members), flats, strict=True):
        for begin in range(0, pairs, _PAIRS):
            index = counters(min(_PAIRS, pairs - begin), first_pair + begin, keys.device)
            halves = noise_bits(index, part).view(torch.int16).flatten()
            drawn = table.index_select(0, halves.int().bitwise_and_(0xFFFF)).view(len(part), -1)
            skipped = before if begin == 0 else 0
            target = flat[:, 2 * begin + skipped - before :][:, : drawn.shape[1] - skipped]
            target.copy_(drawn[:, skipped : skipped + target.shape[1]])
    return out


if triton is not None:
    # Not specialised: a number of the host must not compile a kernel for every step.
    @triton.jit(do_not_specialize=["count", "base_stride", "step_stride", "step", "stream"])
    def _step_keys_kernel(  # type: ignore[no-untyped-def]
        base_ptr, step_ptr, out_ptr, count, base_stride, step_stride, step, stream,
        BLOCK: tl.constexpr,
    ):  # fmt: skip
        place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        mask = place < count
        number = tl.zeros((BLOCK,), tl.int64) + step
        if step_ptr is not None:
            number = tl.load(step_ptr + place * step_stride, mask=mask, other=0)
        key = tl.load(base_ptr + place * base_stride, mask=mask, other=0).to(tl.uint64)
        key += (number * 64 + stream).to(tl.uint64) * 0x9E3779B97F4A7C15
        key = (key ^ (key >> 32)) * 0xD6E8FEB86659FD93
        key = (key ^ (key >> 32)) * 0xD6E8FEB86659FD93
        tl.store(out_ptr + place, (key ^ (key >> 32)).to(tl.int64), mask=mask)

    @on_its_device
    def step_keys_triton(base: Tensor, step: Tensor | int, stream: int) -> Tensor:
        """Triton launcher; see :func:`step_keys`."""
        keys = torch.empty(len(base), dtype=torch.int64, device=base.device)
        numbers, number = (step, 0) if isinstance(step, Tensor) else (None, step)
        step_stride = 0 if numbers is None or numbers.dim() == 0 else numbers.stride(0)
        if len(base) > 0:
            _step_keys_kernel[(triton.cdiv(len(base), _BLOCK_KEYS),)](
                base,
                numbers,
                keys,
                len(base),
                base.stride(0),
                step_stride,
                number,
                int(stream),
                BLOCK=_BLOCK_KEYS,
            )
        return keys.view(torch.int32).view(-1, 2)  # low first: all our machines are little-endian

    @triton.jit
    def noise_bits_jit(index, key_low, key_high):  # type: ignore[no-untyped-def]
        """uint32 twin of :func:`noise_bits` for int64 counters and the halves of the key."""
        h = (index & 0xFFFFFFFF).to(tl.uint32) ^ key_low.to(tl.uint32)
        h = (h ^ (h >> 16)) * 0x7FEB352D
        h = h ^ key_high.to(tl.uint32)
        h = (h ^ (h >> 15)) * 0x846CA68B
        return h ^ (h >> 16)

    @triton.jit
    def uniform_jit(index, key_low, key_high):  # type: ignore[no-untyped-def]
        """Twin of :func:`uniform`."""
        return (noise_bits_jit(index, key_low, key_high) >> 8).to(tl.float32) * (1.0 / (1 << 24))

    @triton.jit
    def member_key_jit(keys_ptr, member, key_low, key_high):  # type: ignore[no-untyped-def]
        """Halves of a member's key; those given where there are no keys of a stack."""
        low, high = key_low, key_high
        if keys_ptr is not None:
            low, high = tl.load(keys_ptr + 2 * member), tl.load(keys_ptr + 2 * member + 1)
        return low, high

    @triton.jit
    def numel_if_active_jit(active_ptr, member, numel):  # type: ignore[no-untyped-def]
        """``numel``, or 0 of a member that is not active; without a vector all are."""
        if active_ptr is not None:
            numel = tl.where(tl.load(active_ptr + member) != 0, numel, 0)
        return numel

    # Not specialised: another shard must not compile another kernel.
    @triton.jit(do_not_specialize=["first_pair", "before"])
    def _normals_kernel(  # type: ignore[no-untyped-def]
        keys_ptr, table_ptr, out_ptr, count, first_pair, before, scale, BLOCK_PAIRS: tl.constexpr
    ):
        blocks = tl.cdiv(before + count, 2 * BLOCK_PAIRS)
        member = (tl.program_id(0) // blocks).to(tl.int64)
        pair = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK_PAIRS + tl.arange(0, BLOCK_PAIRS)
        low, high = tl.load(keys_ptr + 2 * member), tl.load(keys_ptr + 2 * member + 1)
        bits = noise_bits_jit(first_pair + pair, low, high)
        even = tl.load(table_ptr + (bits & 0xFFFF).to(tl.int32))
        odd = tl.load(table_ptr + (bits >> 16).to(tl.int32))
        position = tl.interleave(2 * pair, 2 * pair + 1) - before
        target = out_ptr + member * count + position
        value = tl.interleave(even, odd) * scale
        tl.store(target, value, mask=(position >= 0) & (position < count))

    @on_its_device
    def normals_triton(
        keys: Tensor, rows: int, columns: int, first_row: int = 0, scale: float = 1.0
    ) -> Tensor:
        """Triton launcher; see :func:`normals`."""
        out = torch.empty(len(keys), rows, columns, dtype=torch.float32, device=keys.device)
        if out.numel() > 0:
            first_pair, before = divmod(first_row * columns, 2)
            count = rows * columns
            grid = (len(keys) * triton.cdiv(before + count, 2 * _BLOCK_PAIRS),)
            table = normal_quantiles(keys.device)
            places = (count, first_pair, before, scale)
            _normals_kernel[grid](keys, table, out, *places, BLOCK_PAIRS=_BLOCK_PAIRS)
        return out


def step_keys(base: Tensor, step: Tensor | int, stream: int) -> Tensor:
    """Keys of one step: output ``64 step + stream`` of the splitmix64 that starts at ``base``, with a mixer
    (degski's) that shifts by whole halves only: one launch for all names.

    Args:
        base: (N,), int64: :func:`base_key` of each name.
        step: number, or 0-dim or (N,) int64 on the device of ``base``.
        stream: of :class:`Stream`, or any number from 0 to 63.

    Returns:
        N x 2, int32: low and high half of each key.
    """
    make = step_keys_triton if base.is_cuda and triton is not None else step_keys_reference
    return make(base, step, stream)


def normals(
    keys: Tensor, rows: int, columns: int, first_row: int = 0, scale: float = 1.0
) -> Tensor:
    """Normals of a stack of matrices, of mean 0 and a deviation, bit for bit the same on every device.

    Args:
        keys: B x 2, int32, contiguous: halves of each matrix' key, from :func:`step_keys`.
        rows, columns: of a matrix, of at most 2^33 elements. first_row: of the whole matrix, where only ``rows`` of its
            rows are drawn, the same as whole. scale: the deviation.

    Returns:
        B x rows x columns, fp32.

    Raises:
        ValueError: for other keys.
    """
    check_keys(keys, len(keys))
    if isinstance(
        keys, FakeTensor
    ):  # of a dry run: the table is none of its tensors, and would outlive it
        return keys.new_empty((len(keys), rows, columns), dtype=torch.float32)
    draw = normals_triton if keys.is_cuda and triton is not None else normals_reference
    return draw(keys, rows, columns, first_row, scale)
