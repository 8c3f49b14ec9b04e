"""Numbers that change from step to step, on the device: a step that was captured reads them there."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

__all__ = ["StepNumbers"]


class StepNumbers:
    """Number of the step and learning rates; each is written when it has changed, without a copy from the host."""

    def __init__(self) -> None:
        self._held: dict[Hashable, tuple[float, Tensor]] = {}

    def step(self, number: int, device: torch.device) -> Tensor:
        """0-dim int64."""
        return self._tensor(("step", device), number, device, torch.int64)

    def lr(self, rate: float, of: Hashable, device: torch.device) -> Tensor:
        """0-dim fp32.

        Args:
            of: equal for parameters that always have the same rate.
        """
        return self._tensor((of, device), rate, device, torch.float32)

    def _tensor(
        self, key: Hashable, value: float, device: torch.device, dtype: torch.dtype
    ) -> Tensor:
        known = self._held.get(key)
        tensor = torch.zeros((), dtype=dtype, device=device) if known is None else known[1]
        if known is None or known[0] != value:
            self._held[key] = value, tensor.fill_(value)
        return tensor
