"""Finds the heavy operations of a checkpointed function that its backward needs.

Every storage has a set of heavy operations: those that its bytes depend on. When autograd saves a tensor, the
operations in its set are needed. If an operation's output is saved, the output's set has only the operation itself;
if it is run again, the set has those of its inputs too. So nobody needs an operation that only leads to saved
outputs, or whose output only leaves the function.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from hmt_deepspeed.activations.ops import Traits
from hmt_deepspeed.activations.recording import storage_of

__all__ = ["Dependence", "tensors_among"]

_ALL_BEFORE = -1  # as a set: whatever there was when it is asked for


class Dependence:
    """Follows the operations of a call, in order.

    Sets are integers, a bit for each heavy operation. A storage of unknown origin is older than the call:
    it depends on nothing. No storage is mistaken for a dead one at the same address, because whatever
    allocates one is an operation, and sets it anew.

    Attributes:
        needed: the set of operations that backward needs, so far.
        num_bits: heavy operations so far.
    """

    def __init__(self) -> None:
        self.needed = self.num_bits = 0
        self._origins: dict[int, int] = {}  # by storage

    def new_bit(self) -> int:
        """The set of one further operation."""
        bit, self.num_bits = 1 << self.num_bits, self.num_bits + 1
        return bit

    def origin(self, values: Sequence[Any]) -> int:
        """The set of all tensors among values."""
        found = 0
        for tensor in tensors_among(values):
            origin = self._origins.get(storage_of(tensor), 0)
            if origin == _ALL_BEFORE:
                origin = 0 if _is_weight(tensor) else (1 << self.num_bits) - 1
            found |= origin
        return found

    def need(self, values: Sequence[Any]) -> None:
        """Backward reads these."""
        self.needed |= self.origin(values)

    def set(self, outputs: Sequence[Any], origin: int) -> None:
        """A heavy operation has made these."""
        for output in tensors_among(outputs):
            self._origins[storage_of(output)] = origin

    def follow(self, traits: Traits, inputs: Sequence[Any], out: Any) -> None:
        """A light operation has made ``out``, which depends on what its inputs do.

        Fresh memory may be filled by a kernel that no mode sees, with anything there was. What is not a
        floating-point tensor may decide what the function does next, and so is needed.
        """
        if traits.fresh:
            self._origins[storage_of(out)] = _ALL_BEFORE
            return
        outputs = out if isinstance(out, (list, tuple)) else (out,)
        if traits.masks:
            self._origins[storage_of(outputs[1])] = 0
            outputs = outputs[:1]
        if traits.fills and self._origins.get(storage_of(out)) == _ALL_BEFORE:
            self._origins[storage_of(out)] = 0
        origin = self.origin(inputs)
        given = [storage_of(tensor) for tensor in tensors_among(inputs)]
        for output in outputs:
            if not isinstance(output, Tensor) or not output.is_floating_point():
                self.needed |= origin
            if isinstance(output, Tensor):
                storage = storage_of(output)
                if storage not in given or self._origins.get(storage) != _ALL_BEFORE:
                    self._origins[storage] = origin  # else there is more of it to be filled


def tensors_among(values: Sequence[Any]) -> list[Tensor]:
    """Also in lists and tuples."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += tensors_among(value)
    return found


def _is_weight(tensor: Tensor) -> bool:
    return isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)
