"""Interleaved timing: every contender is built first, then they take turns, A B A B ..."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median, quantiles

import torch
from torch import Tensor

Sample = dict[str, float]  # one run of one contender: "seconds" and whatever else it measured
Samples = list[Sample]


def now() -> float:
    """Seconds on a monotonic clock, once the device has finished what was launched before."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def timed(action: Callable[[], object]) -> Sample:
    """Run `action` once."""
    begin = now()
    action()
    return {"seconds": now() - begin}


def timed_cold(action: Callable[[], object], flush: Tensor | None) -> Sample:
    """Run `action` once between CUDA events, after a fill of `flush`, which is larger than the L2.

    It is queued while the device still fills: short work is timed without the host's share. Without
    `flush`, by the clock.
    """
    if flush is None:
        return timed(action)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    flush.zero_()
    begin.record()
    action()
    end.record()
    end.synchronize()
    return {"seconds": begin.elapsed_time(end) / 1000}


def interleave(
    contenders: Mapping[str, Callable[[], Sample]], rounds: int, warmup: int
) -> dict[str, Samples]:
    """Samples by contender; the first `warmup` rounds are run and left out."""
    samples: dict[str, Samples] = {name: [] for name in contenders}
    for index in range(warmup + rounds):
        for name, run in contenders.items():
            sample = run()
            if index >= warmup:
                samples[name].append(sample)
    return samples


def column(samples: Sequence[Sample], key: str = "seconds") -> list[float]:
    return [sample[key] for sample in samples]


def median_of(samples: Sequence[Sample], key: str = "seconds") -> float:
    return median(column(samples, key))


def spread(values: Sequence[float]) -> tuple[float, float]:
    """First and third quartile; of a single value, that value twice."""
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = quantiles(values, n=4, method="inclusive")
    return low, high


def paired_spread(numerator: Sequence[float], denominator: Sequence[float]) -> tuple[float, float]:
    """Quartiles of the ratio inside each round, where both saw the same state of the machine."""
    return spread([a / b for a, b in zip(numerator, denominator, strict=True)])


def percentile(values: Sequence[float], share: float) -> float:
    """Value below which `share` of the values lie, interpolated; of few values near the largest."""
    return float(torch.quantile(torch.tensor(values, dtype=torch.float64), share))
