"""Measures units of work per second by repeating a call for a given time."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Any

__all__ = ["Work", "rate", "rate_of_call"]

Work = Callable[[], float]  # does something and says how many units of it

_LEAST_CALLS, _MOST_CALLS = 3, 1000


def _nothing() -> None:
    """For work that waits for itself."""


def rate(work: Work, seconds: float, synchronize: Callable[[], Any] = _nothing) -> float:
    """Units per second in the median call, after one call for what happens at the first only.

    The median, because a machine at work on other things too has calls that take many times as long.

    Args:
        seconds: to spend on calls, of which there are 3 at least. synchronize: waits for the device.
    """
    work()
    rates: list[float] = []
    end = perf_counter() + seconds
    while len(rates) < _LEAST_CALLS or (perf_counter() < end and len(rates) < _MOST_CALLS):
        rates.append(rate_of_call(work, synchronize))
    return median(rates)


def rate_of_call(work: Work, synchronize: Callable[[], Any] = _nothing) -> float:
    """Units per second of one call.

    Args:
        work: returns its number of units. synchronize: waits for the device, before and after.
    """
    synchronize()
    begin = perf_counter()
    units = work()
    synchronize()
    return units / (perf_counter() - begin)
