"""ZeRO-R's defragmentation (M_D): saved checkpoints live in memory that is allocated once.

Source: ZeRO, section 6.3 (Rajbhandari et al., 2020): checkpoints live from forward to backward among tensors
that live shortly, and fragment the memory between them. Its gradient side is the optimizer's: gradients
are reduced in buckets of constant size.
"""

from __future__ import annotations

import heapq
import weakref

import torch
from torch import Tensor

from hmt_deepspeed.config.components import Choice
from hmt_deepspeed.memory.layout import Layout, flatten, new_like

__all__ = ["Contiguous"]

_ALIGNMENT = 512  # of the CUDA allocator; vectorised copies need 16


class Contiguous:
    """Codec: keeps tensors in the slots of one allocation, of ``number_checkpoints`` equal slots.

    It is made for the first tensor and stays: every further one goes to the lowest free slot, so that the
    same checkpoint has the same address in every step. A slot is free again when its ``SavedTensor`` is gone.
    Smaller tensors than the first fit; a larger one makes the allocation anew, once no slot is taken.

    Encode and decode copy: what was computed before may be written to, and what is decoded outlives the
    slot. Both belong on one stream.

    Args:
        number_checkpoints: tensors held at once, at most.

    Raises:
        ValueError: it is below 1.
    """

    choice: Choice = "keep"
    lossy = False

    def __init__(self, number_checkpoints: int) -> None:
        if number_checkpoints < 1:
            raise ValueError(
                f"activation_checkpointing.number_checkpoints is {number_checkpoints}, legal is an integer "
                ">= 1: give the number of checkpoints held at once."
            )
        self.number_checkpoints = number_checkpoints
        self.slots: Tensor | None = None  # uint8, number_checkpoints x bytes of a slot
        self._free = list(range(number_checkpoints))

    @torch.no_grad()
    def encode(
        self,
        tensor: Tensor,
        token_dims: int | tuple[int, ...] = 0,
        key: int = 0,
        name: str = "activation",
    ) -> SavedSlot:
        """Copies the tensor to a slot.

        Raises:
            ValueError: more tensors are held than announced; a tensor is larger than the slots while
                others are held; see :func:`hmt_deepspeed.memory.layout.flatten`.
        """
        layout, flat = flatten(tensor)
        slots = self._slots_for(layout, flat.device, name)
        if not self._free and self._num_taken() == self.number_checkpoints:
            raise ValueError(
                f"activation_checkpointing.number_checkpoints is {self.number_checkpoints}, and {name!r} is one "
                "more. Set it to the number held at once: checkpoints of one forward, times the forwards "
                "before a backward."
            )
        index = heapq.heappop(self._free)
        slots[index, : layout.nbytes].copy_(flat)
        held = SavedSlot(slots[index, : layout.nbytes], layout)
        weakref.finalize(held, heapq.heappush, self._free, index).atexit = False
        return held

    def _num_taken(self) -> int:
        """Slots that hold a tensor, once those of a backward that broke off have been freed."""
        if len(self._free) < self.number_checkpoints:
            _empty_ready_queue()
        return self.number_checkpoints - len(self._free)

    def _slots_for(self, layout: Layout, device: torch.device, name: str) -> Tensor:
        slots = self.slots
        if slots is not None and slots.device == device and layout.nbytes <= slots.shape[1]:
            return slots
        if slots is not None and (num_taken := self._num_taken()):
            raise ValueError(
                f"activation_checkpointing.contiguous_memory_optimization is true, but {name!r} "
                f"({layout.nbytes} bytes, {layout.shape} in {layout.dtype} on {device}) does not fit the slots "
                f"of {slots.shape[1]} bytes on {slots.device}, of which {num_taken} are taken. Legal "
                "are checkpoints of one size within a forward: pad them, or turn it off."
            )
        slots = self.slots = None  # before the next is allocated
        slot_bytes = max(1, -(-layout.nbytes // _ALIGNMENT)) * _ALIGNMENT
        self.slots = torch.empty(
            self.number_checkpoints, slot_bytes, dtype=torch.uint8, device=device
        )
        return self.slots


class SavedSlot:
    """A tensor in a slot.

    Attributes:
        memory: its bytes there.
        nbytes: how many.
    """

    def __init__(self, memory: Tensor, layout: Layout) -> None:
        self.memory, self._layout = memory, layout
        self.nbytes = layout.nbytes

    def prefetch(self) -> None:
        """Nothing to do: it is on the device."""

    @torch.no_grad()
    def decode(self) -> Tensor:
        tensor, flat = new_like(self._layout, self.memory.device)
        flat.copy_(self.memory)
        return tensor


def _empty_ready_queue() -> None:
    """Empty the thread's queue, where work of a backward on the CPU that raised waits for the next backward."""
    with torch.enable_grad():
        torch.zeros((), requires_grad=True).backward()
