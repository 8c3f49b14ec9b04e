"""The verdict over a step: decided on the device, read by the host once nobody waits for it."""

from __future__ import annotations

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor

__all__ = ["Verdict"]


class Verdict:
    """Whether a step was taken.

    Args:
        taken: 0-dim bool on the device; a copy to the host begins at once. scale: what the losses were multiplied by.
    """

    def __init__(self, taken: Tensor, scale: float) -> None:
        self.scale = scale
        self._event = None
        self._taken = taken
        if taken.device.type != "cpu":
            accelerator = get_accelerator()
            self._taken = accelerator.pin_memory(torch.empty((), dtype=torch.bool))
            self._taken.copy_(taken, non_blocking=True)
            self._event = accelerator.Event()
            self._event.record()

    def read(self) -> bool:
        """Whether it was taken; waits until the device has decided."""
        if self._event is not None and not self._event.query():
            self._event.synchronize()
        return bool(self._taken)
