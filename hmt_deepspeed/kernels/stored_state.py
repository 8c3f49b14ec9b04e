"""A state of a stack as it is stored: fp32, bf16 with stochastic rounding, or blockwise 8 bits.

Kernels of moments read and write it in place; their torch twins by pieces.
"""

from __future__ import annotations

from math import gcd
from typing import NamedTuple

import torch
from torch import Tensor

from hmt_deepspeed.kernels.int8_state import (
    BLOCK,
    check_codes,
    decode_states_reference,
    encode_states_reference,
)
from hmt_deepspeed.kernels.noise import check_keys
from hmt_deepspeed.kernels.stochastic_rounding import stochastic_rounds_reference

try:
    import triton
    import triton.language as tl
except ImportError:  # platforms without Triton have no CUDA device to run it on
    triton = None

__all__ = ["StoredState", "stored"]


class StoredState(NamedTuple):
    """Running means of B matrices, rows x r.

    Attributes:
        data: B x rows x r, fp32 or bf16; or codes, B x (rows r) uint8. All contiguous.
        signed: whether values may be negative; of codes only.
        keys: B x 2 int32, of the rounding of what is not fp32.
        scales: of codes, B x ceil(rows r / 256) fp32.
    """

    data: Tensor
    signed: bool = True
    keys: Tensor | None = None
    scales: Tensor | None = None

    @property
    def patterns(self) -> Tensor:
        """``data``, bf16 as int16."""
        return self.data.view(torch.int16) if self.data.dtype == torch.bfloat16 else self.data

    def check(self, name: str, members: int, rows: int, rank: int) -> None:
        """Refuse other dtypes and sizes."""
        data = self.data
        if self.scales is not None:
            check_codes(data, self.scales, (members, rows * rank))
        elif data.dtype not in (torch.float32, torch.bfloat16) or not data.is_contiguous():
            raise ValueError(f"{name} must be contiguous, in fp32, bf16 or codes, got {data.dtype}")
        elif data.shape != (members, rows, rank):
            raise ValueError(f"{name} must be {members, rows, rank}, got {tuple(data.shape)}")
        if data.dtype != torch.float32:
            if self.keys is None:
                raise ValueError(f"{name} is stored in {data.dtype}, which takes keys to round by")
            check_keys(self.keys, members)

    def whole_rows(self, rank: int) -> int:
        """The number of rows that hold whole blocks."""
        return 1 if self.scales is None else BLOCK // gcd(rank, BLOCK)

    def read(self, members: slice, rows: slice, rank: int) -> Tensor:
        """fp32 values of some members' rows; of fp32 the stored ones."""
        if self.scales is None:
            part = self.data[members, rows]
            return part if part.dtype == torch.float32 else part.float()
        flat, blocks = self._places(rows, rank)
        codes = self.data[members, flat]
        shape = torch.Size((len(codes), codes.shape[1] // rank, rank))
        return decode_states_reference(codes, self.scales[members, blocks], self.signed, shape)

    def write(self, members: slice, rows: slice, value: Tensor) -> None:
        """Store what :meth:`read` gave, changed."""
        if self.data.dtype == torch.float32:
            return
        assert self.keys is not None
        keys, flat, offset = (
            self.keys[members],
            value.view(len(value), -1),
            rows.start * value.shape[2],
        )
        if self.scales is None:
            stored = self.data[members, rows].view(flat.shape)
            stochastic_rounds_reference(flat, stored, keys, offset=offset)
        else:
            places, blocks = self._places(rows, value.shape[2])
            codes, scales = self.data[members, places], self.scales[members, blocks]
            encode_states_reference(flat, self.signed, keys, codes, scales, offset=offset)

    def _places(self, rows: slice, rank: int) -> tuple[slice, slice]:
        """Elements and blocks of rows."""
        first, last = rows.start * rank, rows.stop * rank
        return slice(first, last), slice(first // BLOCK, -(-last // BLOCK))


def stored(state: Tensor | StoredState, signed: bool = True) -> StoredState:
    """fp32 as a stored state."""
    return StoredState(state, signed) if isinstance(state, Tensor) else state


if triton is not None:
    from hmt_deepspeed.kernels.noise import noise_bits_jit
    from hmt_deepspeed.kernels.stochastic_rounding import round_bits_jit

    @triton.jit
    def load_state_jit(pointer, mask, BF16: tl.constexpr):  # type: ignore[no-untyped-def]
        """fp32 of a stored state; of bf16 by its patterns, int16."""
        value = tl.load(pointer, mask=mask, other=0)
        if BF16:
            bits = value.to(tl.uint16, bitcast=True).to(tl.uint32) << 16
            value = bits.to(tl.float32, bitcast=True)
        return value

    @triton.jit
    def store_state_jit(  # type: ignore[no-untyped-def]
        pointer, value, mask, keys_ptr, member, index, BF16: tl.constexpr
    ):
        """Store fp32, or bf16 rounded by the noise of ``index``, the place in the matrix."""
        if BF16:
            low, high = tl.load(keys_ptr + 2 * member), tl.load(keys_ptr + 2 * member + 1)
            noise = noise_bits_jit(index, low, high)
            value = round_bits_jit(value.to(tl.uint32, bitcast=True), noise).to(tl.int16)
        tl.store(pointer, value, mask=mask)
