"""Ranks of all matrices under a total of state bytes: a knapsack with one choice per matrix.

List in, list out: nothing here knows a tensor or a rank of the process group.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

__all__ = ["Spectrum", "allocate_ranks", "improve_ranks", "total_captured"]

# Gains below this are rounding of sums of shares, not improvements.
_LEAST_GAIN = 1e-12


@dataclass(frozen=True)
class Spectrum:
    """Measurements of a matrix's last refresh at its candidate ranks.

    candidates: strictly increasing ranks. captured: share of ||G||_F^2 in [0, 1] at each, not falling.
    bytes: state bytes of this matrix at each, strictly increasing.
    """

    candidates: tuple[int, ...]
    captured: tuple[float, ...]
    bytes: tuple[int, ...]

    def __post_init__(self) -> None:
        """Raise ValueError for curves of unequal lengths or out of order."""
        if not len(self.candidates) == len(self.captured) == len(self.bytes) >= 1:
            raise ValueError(
                f"a spectrum has {len(self.candidates)} candidates, {len(self.captured)} energies and "
                f"{len(self.bytes)} sizes; legal: equally many, at least one"
            )
        for name in ("candidates", "bytes"):
            values = getattr(self, name)
            if any(a >= b for a, b in pairwise(values)):
                raise ValueError(f"{name} are {values}; legal: strictly increasing")


def allocate_ranks(spectra: Sequence[Spectrum], budget_bytes: int) -> list[int]:
    """Rank of each matrix such that the sum of captured energies is large and the bytes fit.

    Greedy by gain per byte, where a step may jump over candidates when a later one gains more per byte
    (the upper concave hull of a curve that is not concave), then the best single step or exchange (one
    matrix up, another down) until none improves the sum. Below the optimum by at most one step's gain.

    Raises:
        ValueError: the smallest candidates do not fit the budget.
    """
    least = sum(spectrum.bytes[0] for spectrum in spectra)
    if least > budget_bytes:
        raise ValueError(
            f"the rank budget is {budget_bytes} bytes; legal: at least {least}, what the smallest rank "
            "candidates take. To do: raise the budget, or lower the smallest candidate."
        )
    chosen, left = _greedy(spectra, budget_bytes - least)
    _exchange(spectra, chosen, left, _LEAST_GAIN)
    return [s.candidates[i] for s, i in zip(spectra, chosen, strict=True)]


def improve_ranks(
    spectra: Sequence[Spectrum], ranks: Sequence[int], budget_bytes: int, least_gain: float
) -> list[int]:
    """A plan that fits, after single steps and exchanges that gain ``least_gain`` for every rank they move.

    Raises:
        ValueError: a rank is no candidate, or the plan does not fit.
    """
    _, taken = total_captured(spectra, ranks)
    if taken > budget_bytes:
        raise ValueError(f"the plan takes {taken} bytes; legal: at most {budget_bytes}")
    chosen = [s.candidates.index(r) for s, r in zip(spectra, ranks, strict=True)]
    _exchange(spectra, chosen, budget_bytes - taken, least_gain)
    return [s.candidates[i] for s, i in zip(spectra, chosen, strict=True)]


def total_captured(spectra: Sequence[Spectrum], ranks: Sequence[int]) -> tuple[float, int]:
    """Evaluator of any plan: the sum of captured energies, and its bytes."""
    places = [s.candidates.index(r) for s, r in zip(spectra, ranks, strict=True)]
    energy = sum(s.captured[i] for s, i in zip(spectra, places, strict=True))
    return energy, sum(s.bytes[i] for s, i in zip(spectra, places, strict=True))


def _steps_up(spectrum: Spectrum, at: int) -> list[tuple[float, int, int]]:
    """(gain, bytes, place) of every larger candidate."""
    return [
        (spectrum.captured[i] - spectrum.captured[at], spectrum.bytes[i] - spectrum.bytes[at], i)
        for i in range(at + 1, len(spectrum.candidates))
    ]


def _greedy(spectra: Sequence[Spectrum], left: int) -> tuple[list[int], int]:
    """Places of the chosen candidates, from the smallest up, and the bytes left over."""
    chosen = [0] * len(spectra)
    heap: list[tuple[float, int, int, int]] = []  # (-gain per byte, matrix, bytes, place)

    def offer(matrix: int) -> None:
        steps = [s for s in _steps_up(spectra[matrix], chosen[matrix]) if s[1] <= left]
        gain, size, place = max(steps, key=lambda s: (s[0] / s[1], s[1]), default=(0.0, 1, 0))
        if gain > _LEAST_GAIN:
            heapq.heappush(heap, (-gain / size, matrix, size, place))

    for matrix in range(len(spectra)):
        offer(matrix)
    while heap:
        _, matrix, size, place = heapq.heappop(heap)
        if size <= left:  # else something taken meanwhile closed this step; a shorter one may fit
            chosen[matrix], left = place, left - size
        offer(matrix)
    return chosen, left


def _exchange(spectra: Sequence[Spectrum], chosen: list[int], left: int, least_gain: float) -> None:
    """Best move of two matrices at a time, in place, until none gains more than ``least_gain`` for each.

    A matrix goes up by the step of the largest gain that another's step down makes room for. For each
    matrix the steps down are few, so one pass sorts them by bytes freed and keeps, for any number of
    bytes needed, the cheapest two (of different matrices).
    """
    while True:
        downs = [
            (s.bytes[at] - s.bytes[i], s.captured[at] - s.captured[i], matrix, i)
            for matrix, (s, at) in enumerate(zip(spectra, chosen, strict=True))
            for i in range(at)
        ]
        move = _best_move(spectra, chosen, left, sorted(downs, reverse=True), least_gain)
        if move is None:
            return
        for matrix, place in move:
            left += spectra[matrix].bytes[chosen[matrix]] - spectra[matrix].bytes[place]
            chosen[matrix] = place


def _best_move(
    spectra: Sequence[Spectrum],
    chosen: Sequence[int],
    left: int,
    downs: Sequence[tuple[int, float, int, int]],
    least_gain: float,
) -> list[tuple[int, int]] | None:
    """(matrix, place) of one step up and, where it needs room, one down; None when nothing gains."""
    ups = sorted(
        ((size, gain, matrix, place))
        for matrix, at in enumerate(chosen)
        for gain, size, place in _steps_up(spectra[matrix], at)
        if gain > _LEAST_GAIN
    )
    best_gain, best = 0.0, None  # above what the matrices that move must gain
    # From the largest need of room to the smallest: ever more steps down free enough.
    cheapest: list[tuple[float, int, int]] = []  # at most two, of different matrices
    taken = 0
    for size, gain, matrix, place in reversed(ups):
        if size <= left:
            if gain - least_gain > best_gain:
                best_gain, best = gain - least_gain, [(matrix, place)]
            continue
        while taken < len(downs) and downs[taken][0] >= size - left:
            _, loss, other, lower = downs[taken]
            cheapest = _two_cheapest(cheapest, (loss, other, lower))
            taken += 1
        for loss, other, lower in cheapest:
            if other != matrix and gain - loss - 2 * least_gain > best_gain:
                best_gain, best = gain - loss - 2 * least_gain, [(other, lower), (matrix, place)]
    return best


def _two_cheapest(
    kept: list[tuple[float, int, int]], new: tuple[float, int, int]
) -> list[tuple[float, int, int]]:
    """The two cheapest steps down that belong to different matrices."""
    different: list[tuple[float, int, int]] = []
    for step in sorted([*kept, new]):
        if all(step[1] != other[1] for other in different):
            different.append(step)
    return different[:2]
