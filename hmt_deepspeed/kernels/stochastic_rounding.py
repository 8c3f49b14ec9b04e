"""Stochastic rounding of fp32 to bf16 with counter-based noise.

The noise of element ``i`` is a hash of ``(key, i)`` and of nothing else, so every rank, device and
sharding rounds the same element the same way: replicas that apply the same update stay bit-identical.

A value between two neighbouring bf16 numbers is rounded up with a probability equal to its distance
from the lower one (in units of their spacing), so the expectation of the result is the value itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hmt_deepspeed.kernels.launching import on_its_device
from hmt_deepspeed.kernels.noise import Key, counters, key_halves, noise_bits

try:
    import triton
    import triton.language as tl
except ImportError:  # platforms without Triton have no CUDA device to run it on
    triton = None

__all__ = ["stochastic_round", "stochastic_round_reference", "stochastic_round_triton"]

_BLOCK = 4096
_CHUNK = 1 << 20


def stochastic_round_reference(value: Tensor, out: Tensor, key: Key, offset: int = 0) -> None:
    """Torch twin of the kernel; see :func:`stochastic_round`."""
    flat_value, flat_out = value.view(-1), out.view(-1)
    for begin in range(0, flat_value.numel(), _CHUNK):  # bounds the int32 temporaries
        chunk = flat_value[begin : begin + _CHUNK]
        noise = noise_bits(counters(chunk.numel(), offset + begin, chunk.device), key) & 0xFFFF
        bits = chunk.view(torch.int32)
        # Adding noise to the pattern of an infinity or a NaN would change what it is: infinities are
        # exact in bf16; a NaN keeps its sign and becomes quiet.
        special = torch.where(torch.isnan(chunk), bits | 0x00400000, bits)
        bits = torch.where(torch.isfinite(chunk), bits + noise, special) >> 16
        flat_out[begin : begin + _CHUNK].copy_(bits.to(torch.int16).view(torch.bfloat16))


if triton is not None:
    from hmt_deepspeed.kernels.noise import noise_bits_jit

    @triton.jit
    def round_bits_jit(bits, noise):  # type: ignore[no-untyped-def]
        """Pattern of the bf16 (low half of a uint32) that fp32 ``bits`` round to with uint32 ``noise``."""
        special = (bits & 0x7F800000) == 0x7F800000
        # Infinities are exact in bf16; a NaN keeps its sign and becomes quiet.
        quiet = tl.where((bits & 0x007FFFFF) != 0, bits | 0x00400000, bits)
        return tl.where(special, quiet, bits + (noise & 0xFFFF)) >> 16

    @triton.jit
    def round_nearest_bits_jit(bits):  # type: ignore[no-untyped-def]
        """The same to nearest, ties to even. By bits: the interpreter's own conversion truncates."""
        return round_bits_jit(bits, 0x7FFF + ((bits >> 16) & 1))

    # Not specialised: a new key every step must not compile a new kernel.
    @triton.jit(do_not_specialize=["offset", "key_low", "key_high"])
    def _stochastic_round_kernel(  # type: ignore[no-untyped-def]
        value_ptr, out_ptr, numel, offset, key_low, key_high, BLOCK: tl.constexpr
    ):
        position = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        mask = position < numel
        bits = tl.load(value_ptr + position, mask=mask, other=0).to(tl.uint32, bitcast=True)
        noise = noise_bits_jit(position + offset, key_low, key_high)
        rounded = round_bits_jit(bits, noise)
        tl.store(out_ptr + position, rounded.to(tl.int16), mask=mask)

    @on_its_device
    def stochastic_round_triton(value: Tensor, out: Tensor, key: int, offset: int = 0) -> None:
        """Triton launcher; see :func:`stochastic_round`. Works on integer views of both tensors."""
        numel, (low, high) = value.numel(), key_halves(key)
        if numel == 0:
            return
        _stochastic_round_kernel[(triton.cdiv(numel, _BLOCK),)](
            value.view(torch.int32),
            out.view(torch.int16),
            numel,
            offset,
            low,
            high,
            BLOCK=_BLOCK,
        )
        torch.autograd.graph.increment_version(out)  # a graph that saved it must not run on


def stochastic_round(value: Tensor, out: Tensor, key: int, offset: int = 0) -> None:
    """Write ``value`` (fp32, contiguous) into ``out`` (bf16, contiguous, same size), rounding stochastically.

    Args:
        value: fp32 tensor.
        out: bf16 tensor of as many elements; overwritten.
        key: 64-bit seed, for instance of a parameter and a step.
        offset: global index of the first element, so that shards of one tensor share one stream.

    Raises:
        ValueError: for other dtypes, sizes or a tensor that is not contiguous.
    """
    if value.dtype != torch.float32 or out.dtype != torch.bfloat16:
        raise ValueError(f"rounds fp32 to bf16, got {value.dtype} to {out.dtype}")
    if value.numel() != out.numel():
        raise ValueError(f"value has {value.numel()} elements, out has {out.numel()}")
    if not (value.is_contiguous() and out.is_contiguous()):
        raise ValueError("value and out must be contiguous")
    if value.is_cuda and triton is not None:
        stochastic_round_triton(value, out, key, offset)
    else:
        stochastic_round_reference(value, out, key, offset)
