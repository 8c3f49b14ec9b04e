"""The best counts of a `program.py`: linear relaxations, rounding with repair, and HiGHS's tree.

The maximum in the GPU's row is handled exactly and without big-M: a plan's largest working size is one of
the columns', and for a range [v, w] of sizes the linear relaxation over the columns with ``working <= w`` and the GPU limit
``limits[0] - v`` bounds every plan whose largest size lies in it. Ranges are halved, best bound first, down to
single sizes; there the rounded relaxation is an incumbent, columns whose reduced cost exceeds the incumbent's
distance from the bound are dropped, and HiGHS searches the few that remain.

Where something else is the bottleneck many counts are equally fast. Of these the ones of the least *tie* cost
are taken.
"""

from __future__ import annotations

import heapq
import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hmt_deepspeed.planner.solve.program import (
    FEASIBILITY,
    Array,
    Columns,
    Counts,
    Program,
    restricted,
    split,
    standard_form,
    widened,
)

__all__ = ["Solution", "round_and_repair", "solve_program"]

_SHORT = 0.02  # seconds in which HiGHS does not get beyond its presolve
_AS_FAST = 1e-7  # relative difference in time that decides nothing
_REFINED_AMONG = 30  # columns of each class that counts are refined among
_REFINING = 0.3  # seconds for it


@dataclass(frozen=True)
class Solution:
    """``counts[k][c]`` layers take column c.

    Attributes:
        objective: seconds.
        relaxation: the linear program's optimum: no counts are faster.
        bound: what the search has proven no counts to be faster than; the objective if it was finished.
    """

    counts: Counts
    objective: float
    relaxation: float
    bound: float

    @property
    def gap(self) -> float:
        """Bound on how much slower than the fastest counts these are, as a fraction."""
        return max(0.0, self.objective / self.bound - 1) if self.bound > 0 else 0.0


def solve_program(program: Program, time_limit: float = 1.5) -> Solution | None:
    """The counts of the fastest iteration, or None if no counts satisfy the limits.

    After ``time_limit`` seconds, refining included, the best counts known are returned with their gap. Where
    none are known by then, the search goes on to the first; so 0 asks whether there are any.
    """
    deadline = time.monotonic() + max(time_limit / 2, time_limit - 2 * _REFINING)
    search = _Search(program)
    incumbent: Counts | None = None
    best = np.inf
    relaxation = search.bound
    while search.open and (incumbent is None or time.monotonic() < deadline):
        if search.bound >= best * (1 - FEASIBILITY):
            break
        part = search.take()
        for counts in (part.rounded(), search.finish(part, best, deadline)):
            if (
                counts is not None
                and program.is_feasible(counts)
                and program.objective(counts) < best
            ):
                incumbent, best = counts, program.objective(counts)
    if incumbent is None:
        return None
    if time_limit > 0:
        if search.bound < best * (1 - FEASIBILITY):
            incumbent = _refined(program, incumbent, None)
        incumbent = _refined(program, incumbent, program.objective(incumbent) * (1 + _AS_FAST))
        best = program.objective(incumbent)
    return Solution(incumbent, best, min(relaxation, best), min(search.bound, best))


def _refined(program: Program, incumbent: Counts, ties_within: float | None) -> Counts:
    """Counts of no larger working size that are faster, or cost less of those within a time; or the incumbent.

    Searched are the incumbent's columns and those that the relaxation prices lowest.
    """
    working = max(
        columns.working[count > 0].max(initial=0.0)
        for columns, count in zip(program.classes, incumbent, strict=True)
    )
    limits = program.limits.copy()
    limits[0] -= working
    allowed = [np.flatnonzero(columns.working <= working) for columns in program.classes]
    relaxed = standard_form(restricted(program, allowed, limits), ties_within).relax()
    if relaxed is None:
        return incumbent
    prices = split(allowed, relaxed.lower.marginals)
    kept = [
        np.union1d(
            indices[np.argsort(price, kind="stable")[:_REFINED_AMONG]], np.flatnonzero(count)
        )
        for indices, price, count in zip(allowed, prices, incumbent, strict=True)
    ]
    form = standard_form(restricted(program, kept, limits), ties_within)
    counts, _ = form.search(_REFINING, relative_gap=1e-3)
    if counts is None:
        return incumbent
    full = widened(program, kept, split(kept, counts))
    longest = program.objective(incumbent) if ties_within is None else ties_within * (1 + _AS_FAST)
    return full if program.objective(full) <= longest and program.is_feasible(full) else incumbent


class _Search:
    """Ranges of working sizes that may hold the optimum, by the bound of their relaxation."""

    def __init__(self, program: Program):
        self.program = program
        self.kept = [_undominated(columns) for columns in program.classes]
        working = [c.working[kept] for c, kept in zip(program.classes, self.kept, strict=True)]
        self.sizes = np.unique(np.concatenate(working))
        self.open: list[tuple[float, int, _Part]] = []
        self.unfinished = np.inf  # least bound among parts whose tree the time limit cut
        self._push(0, len(self.sizes) - 1)

    @property
    def bound(self) -> float:
        return min(self.open[0][0] if self.open else np.inf, self.unfinished)

    def take(self) -> _Part:
        return heapq.heappop(self.open)[2]

    def finish(self, part: _Part, best: float, deadline: float) -> Counts | None:
        """Halve the part's range, or search its tree if it is a single size."""
        if part.low < part.high:
            middle = (part.low + part.high) // 2
            self._push(part.low, middle)
            self._push(middle + 1, part.high)
            return None
        left = max(deadline - time.monotonic(), 0.0)
        counts, finished = None, False
        if left >= _SHORT:
            counts, finished = part.search(best, left, relative_gap=0.0)
        if counts is None and not finished and np.isinf(best):
            # without counts there is no answer: when time is up, the first counts end the search
            counts, proven = part.search(best, None, relative_gap=1e9)
            finished = proven and counts is None
        if not finished:
            self.unfinished = min(self.unfinished, part.bound)
        return counts

    def _push(self, low: int, high: int) -> None:
        """Relax the plans whose largest working size lies in ``sizes[low..high]``; none may fit."""
        kept = [
            indices[columns.working[indices] <= self.sizes[high]]
            for columns, indices in zip(self.program.classes, self.kept, strict=True)
        ]
        limits = self.program.limits.copy()
        limits[0] -= self.sizes[low]
        if (limits < 0).any() or any(len(indices) == 0 for indices in kept):
            return
        program = restricted(self.program, kept, limits)
        form = standard_form(program)
        relaxed = form.relax()
        if relaxed is not None:
            bound = float(relaxed.fun * form.unit)
            part = _Part(
                self.program,
                program,
                kept,
                low,
                high,
                bound,
                relaxed.x,
                relaxed.lower.marginals * form.unit,
            )
            heapq.heappush(self.open, (bound, low, part))


@dataclass(frozen=True)
class _Part:
    """The relaxation over plans whose largest working size lies in ``sizes[low..high]``.

    Attributes:
        program: fewer columns, GPU limit less ``sizes[low]``. kept: of the whole program's columns.
        fractions, reduced_costs: of n and T; by how many seconds one layer in a column raises the bound.
    """

    whole: Program
    program: Program
    kept: list[NDArray[np.intp]]
    low: int
    high: int
    bound: float
    fractions: Array
    reduced_costs: Array

    def rounded(self) -> Counts | None:
        counts = round_and_repair(self.program, split(self.kept, self.fractions))
        return None if counts is None else widened(self.whole, self.kept, counts)

    def search(
        self, best: float, time_limit: float | None, relative_gap: float
    ) -> tuple[Counts | None, bool]:
        """(counts better than ``best`` or None, whether there are none better)."""
        promising = self.reduced_costs <= best - self.bound + FEASIBILITY * self.bound
        parts = [
            indices[chosen]
            for indices, chosen in zip(self.kept, split(self.kept, promising), strict=True)
        ]
        if any(len(indices) == 0 for indices in parts):
            return None, True
        form = standard_form(restricted(self.whole, parts, self.program.limits))
        counts, finished = form.search(time_limit, relative_gap)
        return (
            None if counts is None else widened(self.whole, parts, split(parts, counts))
        ), finished


def round_and_repair(program: Program, fractions: list[Array]) -> Counts | None:
    """Fractions rounded down; then each layer left over takes the cheapest column that still fits.

    What comes out is improved by exchanges: one layer at a time takes another column where that is faster.
    Rounding down frees memory, and while layers are left over, the bytes of the smallest column are set
    aside for each of the others, so that the last one finds room wherever one memory alone is scarce.
    """
    counts = [np.floor(fraction + 1e-7).astype(np.intp) for fraction in fractions]
    classes = program.classes
    left_over = [
        index
        for index, (columns, count) in enumerate(zip(classes, counts, strict=True))
        for _ in range(columns.num_layers - int(count.sum()))
    ]
    smallest = [columns.bytes.min(axis=0) for columns in classes]
    reserved = np.sum([smallest[index] for index in left_over], axis=0) if left_over else 0.0
    used = np.sum([count @ c.bytes for c, count in zip(classes, counts, strict=True)], axis=0)
    rows = program.base + np.sum(
        [count @ c.seconds for c, count in zip(classes, counts, strict=True)], axis=0
    )
    slack = FEASIBILITY * (1 + program.limits)
    for index in left_over:
        columns = classes[index]
        reserved = reserved - smallest[index]
        fits = (used + reserved + columns.bytes <= program.limits + slack).all(axis=1)
        if not fits.any():
            return None
        cost = _weighted_phases(program, rows + columns.seconds)
        chosen = int(np.argmin(np.where(fits, cost, np.inf)))
        counts[index][chosen] += 1
        used, rows = used + columns.bytes[chosen], rows + columns.seconds[chosen]
    _exchange(program, counts, used, rows)
    return counts


def _exchange(program: Program, counts: Counts, used: Array, rows: Array) -> None:
    """Move one layer at a time to the column that shortens the iteration most, until none does."""
    slack = FEASIBILITY * (1 + program.limits)
    best = float(_weighted_phases(program, rows))
    for _ in range(2 * sum(columns.num_layers for columns in program.classes)):
        found = None
        for columns, count in zip(program.classes, counts, strict=True):
            for leaving in np.flatnonzero(count):
                after = rows - columns.seconds[leaving] + columns.seconds
                bytes_after = used - columns.bytes[leaving] + columns.bytes
                fits = (bytes_after <= program.limits + slack).all(axis=1)
                cost = np.where(fits, _weighted_phases(program, after), np.inf)
                taken = int(np.argmin(cost))
                if cost[taken] < best * (1 - FEASIBILITY):
                    best = float(cost[taken])
                    found = (count, leaving, taken, bytes_after[taken], after[taken])
        if found is None:
            return
        count, leaving, taken, used, rows = found
        count[leaving] -= 1
        count[taken] += 1


def _weighted_phases(program: Program, rows: Array) -> Array:
    """(...,) seconds of an iteration whose time rows are ``rows`` (..., rows)."""
    phases = [rows[..., program.phase == p].max(axis=-1) for p in range(len(program.weights))]
    return np.tensordot(program.weights, np.stack(phases), axes=1)


def _undominated(columns: Columns) -> NDArray[np.intp]:
    """Indices of the columns that no other column matches or beats in every row, memory and working size."""
    table = np.hstack([columns.seconds, columns.bytes, columns.working[:, None]])
    table = table[:, np.ptp(table, axis=0) > 0]
    if table.shape[1] == 0:
        return np.zeros(1, dtype=np.intp)
    table = np.round(table / np.abs(table).max(axis=0), 12)
    table, indices = np.unique(table, axis=0, return_index=True)
    order = np.argsort(table.sum(axis=1), kind="stable")  # a dominator has the smaller sum
    table, indices = table[order], indices[order]
    survivors = np.empty_like(table)
    kept: list[int] = []
    for position, row in enumerate(table):
        if not (survivors[: len(kept)] <= row).all(axis=1).any():
            survivors[len(kept)] = row
            kept.append(position)
    return indices[kept]
