"""Stochastic rounding of fp32 to bf16 with counter-based noise.

The noise of element ``i`` is a hash of ``(key, i)`` and of nothing else, so every rank, device and
sharding rounds the same element the same way: replicas that apply the same update stay bit-identical.

A value between two neighbouring bf16 numbers is rounded up with a probability equal to its distance
from the lower one (in units of their spacing), so the expectation of the result is the value itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hmt_deepspeed.kernels.chunks import row_chunks, stack_pieces
from hmt_deepspeed.kernels.launching import on_its_device
from hmt_deepspeed.kernels.noise import Key, check_keys, counters, key_halves, noise_bits

try:
    import triton
    import triton.language as tl
except ImportError:  # platforms without Triton have no CUDA device to run it on
    triton = None

__all__ = [
    "stochastic_round",
    "stochastic_round_reference",
    "stochastic_round_triton",
    "stochastic_rounds",
    "stochastic_rounds_reference",
    "stochastic_rounds_triton",
]

_BLOCK = 4096
_CHUNK = 1 << 17


def stochastic_round_reference(value: Tensor, out: Tensor, key: Key, offset: int = 0) -> None:
    """Torch twin of the kernel; see :func:`stochastic_round`."""
    flat_value, flat_out = value.view(-1), out.view(-1)
    for part in row_chunks(flat_value.numel(), 1, _CHUNK):
        _round(flat_value[part], flat_out[part], key, offset + part.start)


def stochastic_rounds_reference(
    values: Tensor, out: Tensor, keys: Tensor, active: Tensor | None = None, offset: int = 0
) -> None:
    """Torch twin of the kernel; see :func:`stochastic_rounds`."""
    members, numel = values.shape
    taken = [1.0] * members if active is None else active
    for some, part in stack_pieces(taken, numel, 1, _CHUNK):
        _round(values[some, part], out[some, part], keys[some], offset + part.start)


def _round(value: Tensor, out: Tensor, key: Key | Tensor, offset: int) -> None:
    bits = value.view(torch.int32)
    rounded = noise_bits(counters(value.shape[-1], offset, value.device), key)
    rounded.bitwise_and_(0xFFFF).add_(bits)
    special = (bits & 0x7F800000) == 0x7F800000
    if value.is_meta or special.any():
        # Adding noise to the pattern of an infinity or a NaN would change what it is: infinities are
        # exact in bf16; a NaN keeps its sign and becomes quiet.
        quiet = torch.where(value.isnan(), bits | 0x00400000, bits)
        rounded = torch.where(special, quiet, rounded)
    # The high halves; all our machines are little-endian.
    out.view(torch.int16).copy_(rounded.view(torch.int16)[..., 1::2])


if triton is not None:
    from hmt_deepspeed.kernels.noise import member_key_jit, noise_bits_jit, numel_if_active_jit

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
        value_ptr, out_ptr, keys_ptr, active_ptr, numel, offset, key_low, key_high,
        BLOCK: tl.constexpr,
    ):  # fmt: skip
        blocks = tl.cdiv(numel, BLOCK)
        member = (tl.program_id(0) // blocks).to(tl.int64)
        position = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        mask = position < numel_if_active_jit(active_ptr, member, numel)
        low, high = member_key_jit(keys_ptr, member, key_low, key_high)
        place = member * numel + position
        bits = tl.load(value_ptr + place, mask=mask, other=0).to(tl.uint32, bitcast=True)
        rounded = round_bits_jit(bits, noise_bits_jit(position + offset, low, high))
        tl.store(out_ptr + place, rounded.to(tl.int16), mask=mask)

    @on_its_device
    def _launch(
        value: Tensor,
        out: Tensor,
        keys: Tensor | None,
        active: Tensor | None,
        numel: int,
        offset: int,
        key: Key,
    ) -> None:
        """Of integer views of both tensors."""
        if value.numel() == 0:
            return
        _stochastic_round_kernel[(value.numel() // numel * triton.cdiv(numel, _BLOCK),)](
            value.view(torch.int32),
            out.view(torch.int16),
            keys,
            active,
            numel,
            offset,
            *key_halves(key),
            BLOCK=_BLOCK,
        )
        torch.autograd.graph.increment_version(out)  # a graph that saved it must not run on

    def stochastic_round_triton(value: Tensor, out: Tensor, key: Key, offset: int = 0) -> None:
        """Triton launcher; see :func:`stochastic_round`."""
        _launch(value, out, None, None, value.numel(), offset, key)

    def stochastic_rounds_triton(
        values: Tensor, out: Tensor, keys: Tensor, active: Tensor | None = None, offset: int = 0
    ) -> None:
        """Triton launcher; see :func:`stochastic_rounds`."""
        _launch(values, out, keys, active, values.shape[1], offset, 0)


def stochastic_round(value: Tensor, out: Tensor, key: Key | Tensor, offset: int = 0) -> None:
    """Write ``value`` (fp32, contiguous) into ``out`` (bf16, contiguous, same size), rounding stochastically.

    Args:
        value: fp32 tensor.
        out: bf16 tensor of as many elements; overwritten.
        key: 64-bit seed, for instance of a parameter and a step, or its halves; on the device 1 x 2, int32.
        offset: global index of the first element, so that shards of one tensor share one stream.

    Raises:
        ValueError: for other dtypes, sizes or a tensor that is not contiguous.
    """
    _check(value, out)
    if value.numel() != out.numel():
        raise ValueError(f"value has {value.numel()} elements, out has {out.numel()}")
    if isinstance(key, Tensor):
        stochastic_rounds(value.view(1, -1), out.view(1, -1), key, offset=offset)
        return
    if value.is_cuda and triton is not None:
        stochastic_round_triton(value, out, key, offset)
    else:
        stochastic_round_reference(value, out, key, offset)


def stochastic_rounds(
    values: Tensor, out: Tensor, keys: Tensor, active: Tensor | None = None, offset: int = 0
) -> None:
    """:func:`stochastic_round` of a stack, in one launch.

    Args:
        values: B x numel, fp32, contiguous. out: B x numel, bf16, contiguous; overwritten.
        keys: B x 2, int32: of :func:`hmt_deepspeed.kernels.noise.step_keys`.
        active: (B,) fp32; a member whose value is 0 is not written. None writes all.
        offset: index of each member's first element.

    Raises:
        ValueError: for other dtypes, shapes or tensors that are not contiguous.
    """
    _check(values, out)
    if values.dim() != 2 or values.shape != out.shape:
        raise ValueError(
            f"values and out must be B x numel alike, got {tuple(values.shape)} and {tuple(out.shape)}"
        )
    check_keys(keys, len(values), active)
    if values.is_cuda and triton is not None:
        stochastic_rounds_triton(values, out, keys, active, offset)
    else:
        stochastic_rounds_reference(values, out, keys, active, offset)


def _check(value: Tensor, out: Tensor) -> None:
    if value.dtype != torch.float32 or out.dtype != torch.bfloat16:
        raise ValueError(f"rounds fp32 to bf16, got {value.dtype} to {out.dtype}")
    if not (value.is_contiguous() and out.is_contiguous()):
        raise ValueError("value and out must be contiguous")
