"""The saved outputs of one call of a checkpointed function, from its forward until its graph is freed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from hmt_deepspeed.activations.codecs import Codec, SavedBlocks, SavedTensor

__all__ = ["Blank", "Constant", "Operation", "Recording", "Site", "storage_of"]


def storage_of(tensor: Tensor) -> int:
    """Identity of a tensor's storage, as long as somebody refers to that storage, be it weakly."""
    identity: int = tensor.untyped_storage()._cdata
    return identity


@dataclass(frozen=True, eq=False)
class Site:
    """A module of an attributed layer, and the choice for outputs of operations directly in it.

    Attributes:
        layer: name of the layer.
        label: its component, or ``exit`` or ``unattributed``.
        codec: holds the outputs; None: they are computed again.
        attention: an attention module: only the output of its attention operation is the component's.
        input_codec: of an output projection whose input is held, because the attention operation before it
            is run again and gives another one.
    """

    layer: str
    label: str
    codec: Codec | None
    attention: bool = False
    input_codec: Codec | None = None


class Constant:
    """An output that no codec is for: a number, a generator's seed and offset."""

    nbytes = 0

    def __init__(self, value: Any) -> None:
        self.value = value

    def prefetch(self) -> None:
        return None

    def decode(self) -> Any:
        return self.value


class Blank:
    """An output that nobody reads in backward: memory of its geometry that holds nothing."""

    nbytes = 0

    def __init__(self, tensor: Tensor) -> None:
        self.shape, self.strides = tensor.shape, tensor.stride()
        self.dtype, self.device = tensor.dtype, tensor.device

    def prefetch(self) -> None:
        return None

    def decode(self) -> Tensor:
        blank = torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=self.device)
        return blank if blank.is_floating_point() else blank.zero_()  # a legal index


Part = SavedTensor | Blank | Constant


@dataclass(eq=False)
class Operation:
    """A heavy operation of the call.

    Attributes:
        func: what was called; None for a tensor that is held without being an operation's output.
        site: where. label: whose output it is in the report.
        bit: its bit in sets of operations. codes_bit: of its codes where a linear may save those; else 0.
        blanks: what stands for its outputs where nobody reads them.
        codec: of its first output. held: its outputs; None: it is run again.
        single: it returned a tensor and not a tuple.
        random_state: of its device's generator after it, if it drew.
        decodes: the tensor itself is needed, and not only its codes.
        read: a replay has asked for it.
    """

    func: Any
    site: Site
    label: str
    bit: int
    blanks: tuple[Part, ...]
    codec: Codec | None = None
    held: tuple[Part, ...] | None = None
    single: bool = True
    random_state: Tensor | None = None
    codes_bit: int = 0
    decodes: bool = True
    read: bool = False

    @property
    def is_blank(self) -> bool:
        return self.held is self.blanks

    @property
    def codes(self) -> SavedBlocks | None:
        """Codes that a linear may save in place of the tensor."""
        held = None if self.held is None else self.held[0]
        return held if isinstance(held, SavedBlocks) else None

    @property
    def name(self) -> str:
        return f"{self.site.layer}: {self.label}"

    @property
    def nbytes(self) -> int:
        """Device bytes of what is held."""
        return sum(part.nbytes for part in self.held or ())

    def decode(self, part: int) -> Tensor:
        """An output that is held."""
        assert self.held is not None
        self.read = True
        value: Tensor = self.held[part].decode()
        return value

    def prefetch(self) -> None:
        for part in self.held or ():
            part.prefetch()


@dataclass(eq=False)
class Recording:
    """One call's saved outputs.

    Attributes:
        redraws: a replay draws the random numbers that forward drew.
        previous: the call before this one, if it is still held.
        operations: heavy ones in call order. products: those of projected linears, ``X [Q | P]``.
        substitutes: what output projections read, see :class:`Site`.
        inputs: the arguments that are encoded.
        input_storages: keep the identities of their storages from being given away.
        charges: device bytes by layer and label.
        is_coming: what is held off the device has been asked for.
        is_given_up: no operation's output is held, so all are run again.
    """

    redraws: bool
    previous: Callable[[], Recording | None]
    operations: list[Operation] = field(default_factory=list)
    products: list[Operation] = field(default_factory=list)
    substitutes: list[Operation] = field(default_factory=list)
    inputs: list[SavedTensor] = field(default_factory=list)
    input_storages: list[StorageWeakRef] = field(default_factory=list)
    charges: dict[tuple[str, str], int] = field(default_factory=dict)
    is_coming: bool = False
    is_given_up: bool = False

    def all_operations(self) -> list[Operation]:
        return [*self.operations, *self.products, *self.substitutes]

    def charge(self, layer: str, label: str, nbytes: int) -> None:
        key = (layer, label)
        self.charges[key] = self.charges.get(key, 0) + nbytes

    def bring_back(self) -> None:
        """Start to fetch what is held off the device, and one call ahead."""
        for recording in (self, self.previous()):
            if recording is not None and not recording.is_coming:
                recording.is_coming = True
                for held in recording.inputs:
                    held.prefetch()
                for operation in recording.all_operations():
                    operation.prefetch()
