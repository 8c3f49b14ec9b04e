"""Seconds of the phases of a step, by the device's own clock where it has one: measuring waits for nothing."""

from __future__ import annotations

import time
from collections import deque
from typing import Any, Protocol

__all__ = ["PHASES", "PhaseTimer"]

PHASES = ("forward", "backward", "reduce", "optimizer")
_REMEMBERED_STEPS = 4  # the device is never that many steps behind the host


class Clock(Protocol):
    """The part of a DeepSpeed-like accelerator object that timing needs."""

    def use_host_timers(self) -> bool: ...
    def Event(self, **kwargs: Any) -> Any: ...


class PhaseTimer:
    """Where the time of optimizer steps goes; every moment belongs to the innermost open phase.

    Micro-batches of a step are summed. An exception may leave a phase open: starting it again forgets
    what was open since.

    Args:
        clock: an accelerator; host time where it has no events of its own (a CPU), else its events.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._open: list[str] = []
        self._begun: Any = None
        self._spans: list[tuple[str, Any, Any]] = []
        self._steps: deque[list[tuple[str, Any, Any]]] = deque(maxlen=_REMEMBERED_STEPS)
        self._latest: dict[str, float] = {}

    def start(self, phase: str) -> None:
        now = self._now()
        if phase in self._open:
            del self._open[self._open.index(phase) :]
        elif self._open:
            self._spans.append((self._open[-1], self._begun, now))
        self._open.append(phase)
        self._begun = now

    def stop(self, phase: str) -> None:
        """End a phase; one that is not the innermost open one is left alone."""
        if not self._open or self._open[-1] != phase:
            return
        now = self._now()
        self._spans.append((self._open.pop(), self._begun, now))
        self._begun = now

    def end_step(self) -> None:
        """The step is over; whatever is open is forgotten."""
        self._open.clear()
        self._steps.append(self._spans)
        self._spans = []

    def seconds(self) -> dict[str, float]:
        """Of each phase in the newest step that the device is done with; empty before the first."""
        while self._steps and all(_has_passed(end) for _, _, end in self._steps[0]):
            self._latest = dict.fromkeys(PHASES, 0.0)
            for phase, begin, end in self._steps.popleft():
                self._latest[phase] += _seconds_between(begin, end)
        return dict(self._latest)

    def _now(self) -> Any:
        if self._clock.use_host_timers():
            return time.perf_counter()
        event = self._clock.Event(enable_timing=True)
        event.record()
        return event


def _has_passed(mark: Any) -> bool:
    return isinstance(mark, float) or bool(mark.query())


def _seconds_between(begin: Any, end: Any) -> float:
    if isinstance(begin, float):
        return float(end - begin)
    return float(begin.elapsed_time(end)) / 1e3  # events count milliseconds
