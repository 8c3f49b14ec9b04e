"""This rank's parts of weights in host memory, on the device for their update: the next on their way, the last on theirs
back, beside the work on the one at hand."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from hmt_deepspeed.memory.streams import Direction, Event, Streams

__all__ = ["HostParts"]

MOST = 2**28  # bytes each way beside the part at hand, unless a single part is larger


class HostParts:
    """Takes partitions of stage-3 parameters to the device and back.

    Args:
        streams: of the device. device: where updates are made.
    """

    def __init__(self, streams: Streams, device: torch.device) -> None:
        self._streams, self._device = streams, device
        self._expected: dict[Any, None] = {}  # parameters, in the order in which they will be taken
        self._coming: dict[Any, tuple[Tensor, Event]] = {}
        self._coming_bytes = 0
        self._leaving: deque[tuple[Event, int]] = deque()
        self._leaving_bytes = 0

    def expect(self, params: Iterable[Any]) -> None:
        """Say which parameters will be taken, in order."""
        self._expected = dict.fromkeys(params)
        self._bring_ahead()

    def take(self, param: Any) -> Tensor:
        """The values of a parameter's partition on the device, flat: the caller's, to write to and :meth:`put` back."""
        self._expected.pop(param, None)
        if param not in self._coming:
            self._bring(param)
        flat, event = self._coming.pop(param)
        self._coming_bytes -= flat.numel()
        self._streams.use(flat, event, self._streams.current())
        self._bring_ahead()
        return flat.view(param.dtype)

    def put(self, param: Any, values: Tensor) -> None:
        """Replace a partition's values by those of the device, of which the caller writes to none any more."""
        flat = values.view(torch.uint8)
        while self._leaving and self._leaving_bytes + flat.numel() > MOST:
            self._wait_for_oldest()
        target, ready = _bytes_of(param)[: flat.numel()], self._streams.mark()
        event = self._streams.copy(Direction.TO_HOST, target, flat, [ready])
        self._streams.keep(flat, Direction.TO_HOST)
        self._leaving.append((event, flat.numel()))
        self._leaving_bytes += flat.numel()

    def finish(self) -> None:
        """The host waits until all that was put is there; what was expected in vain is given up."""
        self._expected = {}
        for flat, _ in self._coming.values():
            self._streams.keep(flat, Direction.TO_DEVICE)
        self._coming.clear()
        self._coming_bytes = 0
        while self._leaving:
            self._wait_for_oldest()

    # -- steps --------------------------------------------------------------------------------------

    def _bring_ahead(self) -> None:
        for param in list(self._expected):
            if self._coming and self._coming_bytes + _bytes_of(param).numel() > MOST:
                return
            del self._expected[param]
            self._bring(param)

    def _bring(self, param: Any) -> None:
        source = _bytes_of(param)
        flat = torch.empty(source.numel(), dtype=torch.uint8, device=self._device)
        self._streams.scrub(flat)
        event = self._streams.copy(Direction.TO_DEVICE, flat, source, [self._streams.mark()])
        self._coming[param] = flat, event
        self._coming_bytes += flat.numel()

    def _wait_for_oldest(self) -> None:
        event, nbytes = self._leaving.popleft()
        event.wait()
        self._leaving_bytes -= nbytes


def _bytes_of(param: Any) -> Tensor:
    flat: Tensor = param.ds_tensor.detach().view(-1).view(torch.uint8)
    return flat
