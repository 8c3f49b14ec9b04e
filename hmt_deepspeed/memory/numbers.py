"""Numbers that the device has: what is made of them, and their way to the host without a wait."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["ArrivingNumbers", "Measured", "measured_together"]


@dataclass(frozen=True)
class Measured:
    """A record by name, some values of which the device has.

    Attributes:
        known: what the host knows, and anything in the place of the others.
        values: those of the device, flat, of any float dtype. finish: makes the others of them.
    """

    known: dict[str, Any]
    values: Tensor
    finish: Callable[[Sequence[float]], dict[str, Any]]

    def record(self, values: Sequence[float]) -> dict[str, Any]:
        """The record, given the values on the host."""
        return self.known | self.finish(values)

    def read(self) -> dict[str, Any]:
        """The record; waits for the device."""
        return self.record(self.values.tolist())


def measured_together(parts: Sequence[Measured]) -> Measured:
    """One record of several, with one tensor of values; of a name that several have the last counts."""
    values = [part.values.double() for part in parts]
    sizes = [len(v) for v in values]
    some = [v for v in values if len(v)] or [torch.zeros(0)]
    device = next((v.device for v in some if v.device.type != "cpu"), torch.device("cpu"))

    def finish(read: Sequence[float]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        begin = 0
        for part, size in zip(parts, sizes, strict=True):
            found |= part.finish(read[begin : begin + size])
            begin += size
        return found

    known: dict[str, Any] = {}
    for part in parts:
        known |= part.known
    return Measured(known, torch.cat([v.to(device) for v in some]), finish)


class ArrivingNumbers:
    """Flat device numbers on their way to page-locked memory, behind what the current stream was given so far."""

    def __init__(self, values: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if values.is_cuda:
            self._host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._host.copy_(values, non_blocking=True)
            self._event = torch.cuda.Event(blocking=True)
            self._event.record(torch.cuda.current_stream(values.device))
        else:
            self._host = values.to("cpu", copy=True)

    def have_arrived(self) -> bool:
        """Never waits."""
        return self._event is None or self._event.query()

    def read(self) -> list[float]:
        """Waits until they have arrived."""
        if self._event is not None:
            self._event.synchronize()
        found: list[float] = self._host.tolist()
        return found
