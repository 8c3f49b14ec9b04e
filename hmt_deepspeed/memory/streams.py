"""Streams and events: on CUDA the real ones, on CPU a twin that exposes a missing wait.

Only these two classes know how to run a copy beside the caller's work; everything above is the same code
on both.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from enum import Enum
from typing import Any, Protocol

import torch
from torch import Tensor

__all__ = ["CudaStreams", "Direction", "Event", "Streams", "TwinStreams", "streams_of"]


class Direction(Enum):
    """Each direction has a side stream of its own, on which copies run in order of submission."""

    TO_HOST = "device to host"
    TO_DEVICE = "host to device"


class Event(Protocol):
    """A point in a stream."""

    def done(self) -> bool:
        """Whether the stream has passed it. Never blocks."""

    def wait(self) -> None:
        """Blocks the calling thread until it has; raises what the copy before it raised."""

    def seconds(self) -> float:
        """Seconds of the copy that it ends, once done, without the time that the copy waited."""


class Streams(Protocol):
    """Side streams of one device; every method may be called from any thread."""

    def current(self) -> Any:
        """The caller's current stream."""

    def mark(self) -> Event:
        """The point that the caller's current stream has reached."""

    def copy(
        self, direction: Direction, destination: Tensor, source: Tensor, after: Sequence[Event]
    ) -> Event:
        """Copies flat bytes on the direction's stream after ``after``; the event that ends the copy.

        The caller keeps both tensors alive until the event, or hands the device's one to :meth:`keep`.
        """

    def keep(self, tensor: Tensor, direction: Direction) -> None:
        """The device memory of ``tensor`` is not reused before that stream's copies so far are done."""

    def use(self, tensor: Tensor, event: Event, home: Any) -> None:
        """The caller's current stream waits for ``event``, and may then use ``tensor``, which was
        allocated on the stream ``home``."""

    def drain(self) -> None:
        """Waits for all copies; their errors stay with their events."""

    def pin(self, memory: Tensor) -> None:
        """Page-locks host memory."""

    def unpin(self, memory: Tensor) -> None:
        """Undoes :meth:`pin`, when no copy runs any more."""

    def scrub(self, memory: Tensor) -> None:
        """Destroys bytes that nobody may read any more (twin only)."""


class _EventPool:
    """CUDA events that nobody has: what makes one costs more than what records it.

    An event may be recorded again while its stream has not passed it: who waits on a stream waits for what was
    recorded when the wait was submitted.
    """

    def __init__(self) -> None:
        self._free: dict[bool, list[torch.cuda.Event]] = {False: [], True: []}

    def take(self, timed: bool) -> torch.cuda.Event:
        try:
            return self._free[timed].pop()
        except IndexError:
            # a waiting thread sleeps
            return torch.cuda.Event(blocking=True, enable_timing=timed)

    def give(self, event: torch.cuda.Event, timed: bool) -> None:
        self._free[timed].append(event)


class _CudaEvent:
    """``begin``: recorded before the copy that this event ends, of the pool too; None where it ends none."""

    def __init__(
        self, stream: torch.cuda.Stream, pool: _EventPool, begin: torch.cuda.Event | None = None
    ) -> None:
        self._pool, self._begin = pool, begin
        self.event = pool.take(timed=begin is not None)
        self.event.record(stream)

    def __del__(self) -> None:
        self._pool.give(self.event, self._begin is not None)
        if self._begin is not None:
            self._pool.give(self._begin, True)

    def done(self) -> bool:
        return self.event.query()

    def wait(self) -> None:
        self.event.synchronize()

    def seconds(self) -> float:
        return 0.0 if self._begin is None else self._begin.elapsed_time(self.event) / 1e3


class CudaStreams:
    """The streams of a CUDA device. Creates its context."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._side = {direction: torch.cuda.Stream(device) for direction in Direction}
        self._events = _EventPool()

    def current(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.device)

    def mark(self) -> Event:
        return _CudaEvent(self.current(), self._events)

    def copy(
        self, direction: Direction, destination: Tensor, source: Tensor, after: Sequence[Any]
    ) -> Event:
        stream = self._side[direction]
        for event in after:
            stream.wait_event(event.event)
        begin = self._events.take(timed=True)
        begin.record(stream)
        # A thread begins on device 0, and leaving a stream's context alone would open a context there.
        with torch.cuda.device(self.device), torch.cuda.stream(stream):
            destination.copy_(source, non_blocking=True)
        return _CudaEvent(stream, self._events, begin)

    def keep(self, tensor: Tensor, direction: Direction) -> None:
        tensor.record_stream(self._side[direction])

    def use(self, tensor: Tensor, event: Any, home: Any) -> None:
        current = self.current()
        current.wait_event(event.event)
        if current != home:
            tensor.record_stream(current)

    def drain(self) -> None:
        for stream in self._side.values():
            stream.synchronize()

    def pin(self, memory: Tensor) -> None:
        # Not torch's pinned allocator, which rounds a request up to a power of two.
        portable = 1
        code = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), portable)
        if int(code) != 0:
            with suppress(RuntimeError):  # else the next kernel raises what is the last error still
                torch.ones((), device=self.device)
            raise RuntimeError(
                f"cannot page-lock {memory.numel()} bytes of host memory (CUDA error {int(code)}): "
                "ask for a smaller pool, or raise the limit of locked memory (ulimit -l)"
            )

    def unpin(self, memory: Tensor) -> None:
        self.drain()
        torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())

    def scrub(self, memory: Tensor) -> None:
        return None


class _TwinEvent:
    def __init__(self, streams: TwinStreams | None, direction: Direction | None) -> None:
        self._streams, self._direction = streams, direction
        self.passed = streams is None
        self.error: Exception | None = None
        self.took = 0.0

    def done(self) -> bool:
        return self.passed

    def wait(self) -> None:
        if self._streams is not None and self._direction is not None:
            self._streams.run_until(self, self._direction)
        if self.error is not None:
            raise self.error

    def seconds(self) -> float:
        return self.took


class _TwinCopy:
    """A copy not yet run. It does not keep device memory alive: that is its caller's duty."""

    def __init__(
        self,
        direction: Direction,
        destination: Tensor,
        source: Tensor,
        after: Sequence[Event],
        event: _TwinEvent,
    ) -> None:
        outward = direction is Direction.TO_HOST
        self.host = destination if outward else source
        self.device = weakref.ref(source if outward else destination)
        self.direction, self.after, self.event = direction, after, event
        self.kept: list[Tensor] = []

    def run(self) -> None:
        for event in self.after:
            event.wait()
        device = self.device()
        if device is None:
            raise RuntimeError("device memory was freed before its copy ran: keep() was forgotten")
        begin = time.perf_counter()
        if self.direction is Direction.TO_HOST:
            self.host.copy_(device)
        else:
            device.copy_(self.host)
        self.event.took = time.perf_counter() - begin


class TwinStreams:
    """The same order of operations on a CPU, as late as allowed.

    The caller's own stream is the CPU itself: what was computed is done. A copy runs only when its event,
    or one after it in its stream, is waited for, or when the host waits for room; memory that may not be
    read holds 0xFF bytes (NaN in every float type). Whoever forgets to wait reads those, whoever frees or
    overwrites too early loses the data, every time and not once in a thousand runs.

    Attributes:
        pending: copies that have not run, by direction, oldest first.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self.pending: dict[Direction, deque[_TwinCopy]] = {d: deque() for d in Direction}

    def current(self) -> None:
        return None

    def mark(self) -> Event:
        return _TwinEvent(None, None)

    def copy(
        self, direction: Direction, destination: Tensor, source: Tensor, after: Sequence[Event]
    ) -> Event:
        event = _TwinEvent(self, direction)
        with self._lock:
            copy = _TwinCopy(direction, destination, source, after, event)
            self.pending[direction].append(copy)
        return event

    def keep(self, tensor: Tensor, direction: Direction) -> None:
        with self._lock:
            if copies := self.pending[direction]:
                copies[-1].kept.append(tensor)

    def use(self, tensor: Tensor, event: Event, home: None) -> None:
        event.wait()

    def run_until(self, event: _TwinEvent, direction: Direction) -> None:
        """Runs what is pending in a stream, oldest first, until ``event`` is passed."""
        with self._lock:
            while not event.passed:
                self._run_oldest(direction)

    def drain(self) -> None:
        with self._lock:
            for direction, copies in self.pending.items():
                while copies:
                    self._run_oldest(direction)

    def _run_oldest(self, direction: Direction) -> None:
        copy = self.pending[direction].popleft()
        try:
            copy.run()
        except Exception as error:
            copy.event.error = error
        copy.event.passed = True

    def pin(self, memory: Tensor) -> None:
        return None

    def unpin(self, memory: Tensor) -> None:
        return None

    def scrub(self, memory: Tensor) -> None:
        memory.fill_(0xFF)


def streams_of(device: torch.device) -> Streams:
    """Those of a device.

    Raises:
        ValueError: none are known for it.
    """
    if device.type == "cuda":
        return CudaStreams(device)
    if device.type == "cpu":
        return TwinStreams()
    raise ValueError(f"no streams are known for device {device}: cpu or cuda, or hand them in")
