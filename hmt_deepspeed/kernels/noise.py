"""Counter-based noise: the bits of element ``i`` are a hash of ``(key, i)`` and of nothing else.

Every rank, device and sharding therefore draws the same noise for the same element. Only the low 32
bits of a counter are hashed; a counter itself may be larger.
"""

from __future__ import annotations

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # platforms without Triton have no CUDA device to run it on
    triton = None

__all__ = ["counters", "key_halves", "noise_bits", "uniform"]

# Two rounds of multiply and xor-shift: the low-bias 32-bit mixer found by C. Wellons' search.
_MIX_1, _MIX_2 = 0x7FEB352D, 0x846CA68B
_MASK64 = (1 << 64) - 1


def _signed32(value: int) -> int:
    value &= 0xFFFFFFFF
    return value - (1 << 32) if value >= 1 << 31 else value


def key_halves(key: int) -> tuple[int, int]:
    """Two halves of a mixed key (splitmix64's finaliser), so that keys 1 and 2 have nothing in common:
    the per-element mixer alone would leave keys correlated that differ in a high bit.

    As signed 32-bit numbers: Triton compiles a kernel anew for an integer that does not fit them.
    """
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


def noise_bits(index: Tensor, key: int) -> Tensor:
    """32 uniform bits (an int32) for each int32 counter in ``index``."""
    low, high = key_halves(key)
    h = index ^ low
    shifted = torch.empty_like(h)  # in place: half the time of new tensors on a CPU
    h ^= _shift_right(h, 16, shifted)
    h *= _MIX_1
    h ^= high
    h ^= _shift_right(h, 15, shifted)
    h *= _signed32(_MIX_2)
    h ^= _shift_right(h, 16, shifted)
    return h


def uniform(index: Tensor, key: int) -> Tensor:
    """A multiple of 2^-24 in [0, 1), fp32, for each int32 counter in ``index``."""
    return _shift_right(noise_bits(index, key), 8).float().mul_(2.0**-24)


if triton is not None:

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
