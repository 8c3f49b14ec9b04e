"""Times an engine's forwards, backwards and updates in the iterations that are asked for."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

from hmt_deepspeed.planner.advise.calibrate import IterationSeconds

__all__ = ["StepTimer"]


class StepTimer:
    """Times each micro-step's phases. Backward lasts from the end of a forward to the call of ``step``.

    Args:
        synchronize: waits for the device; called five times a micro-step while timing, never otherwise.
    """

    def __init__(self, synchronize: Callable[[], object]) -> None:
        self._synchronize = synchronize
        self._is_on, self._is_whole = False, False
        self._seconds = dict.fromkeys(("forward", "backward", "update"), 0.0)
        self._mark: float | None = None

    def clock(self) -> float:
        """Seconds, once the device has done what it was given."""
        self._synchronize()
        return perf_counter()

    def begin_iteration(self, on: bool) -> None:
        """The next forward is an iteration's first; ``on``: it is timed."""
        self._is_on = self._is_whole = on
        self._seconds = dict.fromkeys(self._seconds, 0.0)
        self._mark = None

    def begin_forward(self) -> None:
        """A forward is about to run."""
        if self._is_on:
            self._mark = self.clock()

    def end_forward(self) -> None:
        """It has run; backward follows."""
        self._pass("forward")

    def begin_step(self) -> None:
        """Backward has run; the engine's ``step`` follows."""
        self._pass("backward")

    def end_step(self, ends_iteration: bool) -> IterationSeconds | None:
        """``step`` has run; the iteration's seconds if it was the last, and the whole of it was timed."""
        self._pass("update")
        self._mark = None
        return IterationSeconds(**self._seconds) if ends_iteration and self._is_whole else None

    def _pass(self, phase: str) -> None:
        if not self._is_on:
            return
        now = self.clock()
        if self._mark is None:  # a phase without the one before it
            self._is_whole = False
        else:
            self._seconds[phase] += now - self._mark
        self._mark = now
