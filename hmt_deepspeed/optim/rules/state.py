"""Storage of optimizer states: fp32, bf16 with stochastic rounding, or blockwise 8 bits.

A state is read as fp32, changed, and written back. 16- and 8-bit storage must round stochastically: a
running mean with beta_2 = 0.999 moves by less than half a unit in the last place per step, so rounding
to nearest would freeze it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from math import prod
from typing import Any, ClassVar

import torch
from torch import Tensor

from hmt_deepspeed.kernels.int8_state import (
    BLOCK,
    decode_state,
    decode_states,
    encode_state,
    encode_states,
)
from hmt_deepspeed.kernels.launching import upload
from hmt_deepspeed.kernels.noise import Key, base_key, key_halves
from hmt_deepspeed.kernels.stochastic_rounding import stochastic_round, stochastic_rounds
from hmt_deepspeed.kernels.stored_state import StoredState

__all__ = ["KeptStates", "StateTensor", "restored_state"]


class StateTensor:
    """One optimizer state, zero at first.

    Args:
        shape: of the state of one matrix. dtype: ``fp32``, ``bf16`` or ``int8``.
        signed: False for a state that is never negative; int8 then has twice the levels.
        device: where it lives.
        several: (E,) of E matrices, whose tensors have that leading dimension; () of one.

    Attributes:
        data: the stored tensor (fp32, bf16, or uint8 codes). scales: of int8 blocks, else None.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: str,
        signed: bool,
        device: torch.device,
        several: tuple[int, ...] = (),
    ) -> None:
        self.shape, self.dtype, self.signed = torch.Size(shape), dtype, signed
        self.several = several
        self.scales: Tensor | None = None
        if dtype == "int8":
            # The code and the scale of zeros, made without the kernel's table: a dry run has fake tensors, and
            # a table of them would outlive it.
            numel = prod(shape)
            self.data = torch.zeros(*several, numel, dtype=torch.uint8, device=device)
            self.scales = torch.zeros(*several, -(-numel // BLOCK), device=device)
        else:
            kind = torch.bfloat16 if dtype == "bf16" else torch.float32
            self.data = torch.zeros((*several, *shape), dtype=kind, device=device)

    def read(self) -> Tensor:
        """The values in fp32; the stored tensor itself when that is fp32."""
        if self.scales is None:
            return self.data.float()
        if self.several:
            shape = (*self.several, *self.shape)
            return decode_states(self.data, self.scales, self.signed, shape)
        return decode_state(self.data, self.scales, self.signed, tuple(self.shape))

    def write(self, value: Tensor, key: Key | Tensor | None) -> None:
        """Store fp32 values of the same shape; ``key`` seeds the rounding, None rounds to nearest.

        Args:
            key: of E matrices E x 2, see :func:`hmt_deepspeed.kernels.noise.step_keys`.
        """
        if value is self.data:
            return
        if self.several:
            self._write_several(value.contiguous(), key)
        elif self.scales is not None:
            assert not isinstance(key, Tensor)
            self.data, self.scales = encode_state(value.contiguous().view(-1), self.signed, key)
        elif self.dtype == "bf16" and key is not None:
            assert not isinstance(key, Tensor)
            stochastic_round(value.contiguous(), self.data, key)
        else:
            self.data.copy_(value)

    def _write_several(self, value: Tensor, key: Key | Tensor | None) -> None:
        flat = value.view(len(value), -1)
        if self.scales is not None:
            encode_states(flat, self.signed, key, self.data, self.scales)
        elif self.dtype == "bf16" and key is not None:
            assert isinstance(key, Tensor)
            stochastic_rounds(flat, self.data.view(flat.shape), key)
        else:
            self.data.copy_(value)

    def write_some(self, value: Tensor, keys: Callable[[], Tensor], active: Tensor) -> None:
        """Store fp32 values of a state :meth:`of_many`; a matrix whose ``active``, (B,) fp32, is 0 keeps its bits.

        Args:
            keys: makes those of the rounding, B x 2, where it rounds.
        """
        if value is self.data:
            return
        flat = value.contiguous().view(len(value), -1)
        if self.scales is not None:
            encode_states(flat, self.signed, keys(), self.data, self.scales, active)
        else:
            stochastic_rounds(flat, self.data.view(flat.shape), keys(), active)

    def stored(self, rows: int, keys: Callable[[], Tensor]) -> StoredState:
        """What a kernel updates in place, of a state :meth:`of_many`.

        Args:
            rows: of each matrix, as the kernel sees it. keys: makes those of the rounding, where it rounds.
        """
        if self.scales is None:
            data = self.data.view(len(self.data), rows, -1)
            return StoredState(data, self.signed, None if self.dtype == "fp32" else keys())
        return StoredState(self.data, self.signed, keys(), self.scales)

    def read_part(self, begin: int, end: int) -> Tensor:
        """fp32 values of a range of the flat state, which starts at a multiple of 256; of fp32 the stored ones."""
        data = self.data.view(-1)[begin:end]
        if self.scales is None:
            return data.float()
        scales = self.scales[begin // BLOCK : -(-end // BLOCK)]
        return decode_state(data, scales, self.signed, (end - begin,))

    def write_part(
        self, begin: int, value: Tensor, key: Tensor | None, active: Tensor | None = None
    ) -> None:
        """Store a range in place; what :meth:`read_part` of fp32 gave is there already. Rounds as :meth:`write`
        of the whole would.

        Args:
            value: flat. key: 1 x 2, int32; None rounds to nearest.
            active: (1,) fp32; where it is 0, and the values are those that were read, nothing changes.
        """
        data = self.data.view(-1)[begin : begin + value.numel()]
        if self.scales is not None:
            scales = self.scales[begin // BLOCK : -(-(begin + value.numel()) // BLOCK)]
            stored = data.view(1, -1), scales.view(1, -1)
            encode_states(value.view(1, -1), self.signed, key, *stored, active, begin)
        elif self.dtype == "bf16" and key is not None:
            stochastic_round(value, data, key, begin)
        elif value.data_ptr() != data.data_ptr():
            data.copy_(value)

    def tensors(self) -> list[Tensor]:
        """Stored tensors: ``data``, and ``scales`` where there are."""
        return [self.data] if self.scales is None else [self.data, self.scales]

    def holding(self, tensors: Sequence[Tensor]) -> StateTensor:
        """A state of the same shape and dtype that stores other :meth:`tensors`."""
        other = copy(self)
        other.data, *scales = tensors
        other.scales = scales[0] if scales else None
        return other

    def part(self, some: slice) -> StateTensor:
        """Of some of several matrices: a view."""
        other = self.holding([tensor[some] for tensor in self.tensors()])
        other.several = (len(other.data),)
        return other

    def of_many(self, tensors: Sequence[Tensor]) -> StateTensor:
        """The same state of B matrices, from their :meth:`tensors` with a leading dimension."""
        many = self.holding(tensors)
        many.several = (len(tensors[0]),)
        return many

    def move(self, place: Callable[[Tensor], Tensor]) -> None:
        """Take what ``place`` gives for what is stored: the same elsewhere."""
        self.data = place(self.data)
        if self.scales is not None:
            self.scales = place(self.scales)

    @property
    def nbytes(self) -> int:
        """Bytes stored."""
        return self.data.nbytes + (0 if self.scales is None else self.scales.nbytes)


def restored_state(
    value: Any, dtype: str, signed: bool, device: torch.device, several: tuple[int, ...] = ()
) -> StateTensor:
    """A state of values read before; those that were 8- or 16-bit come back exactly."""
    value = torch.as_tensor(value).to(device=device, dtype=torch.float32)
    made = StateTensor(tuple(value.shape[len(several) :]), dtype, signed, device, several)
    made.write(value, None)
    return made


class KeptStates(ABC):
    """States of a rule for the rows of a matrix held here, without its bases.

    Args:
        names, seed: key the stochastic rounding: of the matrix, or of each of several.
        several: (E,) of several matrices, which all tensors have as leading dimension; () of one.

    Attributes:
        steps: begun, those that the device skipped included.
        STATES: attributes that are stored states, by their names in the table.
        EVIDENCE: names of the attributes that are fp32 tensors of their own, and that every step changes.
    """

    STATES: ClassVar[Mapping[str, str]]
    EVIDENCE: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        device: torch.device,
        names: Sequence[str],
        seed: int,
        several: tuple[int, ...] = (),
    ) -> None:
        self.device, self.names, self.seed, self.several = device, names, seed, several
        self.steps = 0

    def states(self) -> dict[str, StateTensor]:
        """Stored states by their names in the table."""
        return {name: getattr(self, attribute) for name, attribute in self.STATES.items()}

    def rounding_key(self, which: int) -> Key | Tensor:
        """Of a state that is carried to another basis, by its number; of several matrices E x 2."""
        of = [base_key(self.seed, name, "state", which, self.steps) for name in self.names]
        if not self.several:
            return of[0]
        halves = [half for key in of for half in key_halves(key)]
        return upload(halves, torch.int32, self.device).view(-1, 2)

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of everything."""

    @abstractmethod
    def rotate(self, overlap: Tensor) -> None:
        """Carry the states to a new basis.

        Args:
            overlap: r_old x r_new, ``Q_old^T Q_new``.
        """

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Plain fp32 tensors and numbers, by their names in the table."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore values of :meth:`state_dict`, at any rank; values that were 8- or 16-bit come back exactly."""
