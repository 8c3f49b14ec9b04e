"""The mixed-integer linear program of a plan, on plain arrays: numbers in, counts out.

Equal layers form a class. A *column* of a class is one joint choice for all sites of one of its layers, so
whatever ties the sites of a layer together (recompute follows the graph) is priced before the program is
written, and a column's cost is exact. The integer variable ``n[k, c]`` counts the layers of class k that
take column c:

    minimise    sum_p weight[p] T[p]
    subject to  T[phase[r]] >= base[r] + sum_kc seconds[k][c, r] n[k, c]   for each row r = (phase, resource)
                sum_kc bytes[k][c, m] n[k, c] <= limits[m]                 for each memory m
                sum_c n[k, c] = num_layers[k],   n integer

Memory 0 is the GPU's. Of it, besides what all layers hold together, one layer at a time needs its *working*
bytes (what backward brings back or computes again), so its row reads

    sum_kc bytes[k][c, 0] n[k, c] + max over used (k, c) of working[k][c] <= limits[0].

The maximum is handled exactly and without big-M: a plan's largest working size is one of the columns', and
for a range [v, w] of sizes the linear relaxation over the columns with ``working <= w`` and the GPU limit
``limits[0] - v`` bounds every plan whose largest size lies in it. Ranges are halved, best bound first, down to
single sizes; there the rounded relaxation is an incumbent, columns whose reduced cost exceeds the incumbent's
distance from the bound are dropped, and HiGHS searches the few that remain.
"""

from __future__ import annotations

import heapq
import time
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, linprog, milp  # type: ignore[import-untyped]

__all__ = ["Columns", "Program", "Solution", "solve_program"]

Array = NDArray[np.float64]
Counts = list[NDArray[np.intp]]

FEASIBILITY = 1e-9  # relative: what a double leaves of a sum of a few hundred terms
_SHORT = 0.02  # seconds in which HiGHS does not get beyond its presolve
_NO_LIMIT = float("inf")


@dataclass(frozen=True)
class Columns:
    """Joint choices of a class of ``num_layers`` equal layers.

    Attributes:
        seconds: (columns, rows), what one layer adds to each time row.
        bytes: (columns, memories), what one layer holds of each memory until its backward.
        working: (columns,), GPU bytes needed only while one such layer is in backward.
    """

    num_layers: int
    seconds: Array
    bytes: Array
    working: Array


@dataclass(frozen=True)
class Program:
    """``classes`` and, per time row, its phase and the seconds no choice changes; per phase, its weight."""

    classes: tuple[Columns, ...]
    base: Array  # (rows,)
    phase: NDArray[np.intp]  # (rows,)
    weights: Array  # (phases,)
    limits: Array  # (memories,)

    def objective(self, counts: Counts) -> float:
        """Seconds of an iteration in which ``counts[k][c]`` layers of class k take column c."""
        rows = self.base.copy()
        for columns, count in zip(self.classes, counts, strict=True):
            rows += count @ columns.seconds
        return float(sum(w * rows[self.phase == p].max() for p, w in enumerate(self.weights)))

    def excess(self, counts: Counts) -> Array:
        """(memories,) bytes over each limit; feasible where none is positive."""
        used = -self.limits
        working = 0.0
        for columns, count in zip(self.classes, counts, strict=True):
            used = used + count @ columns.bytes
            working = max(working, columns.working[count > 0].max(initial=0.0))
        used[0] += working
        return used

    def is_feasible(self, counts: Counts) -> bool:
        return bool((self.excess(counts) <= FEASIBILITY * (1 + np.abs(self.limits))).all())


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
        """How much slower than the fastest counts these may be, as a fraction."""
        return max(0.0, self.objective / self.bound - 1) if self.bound > 0 else 0.0


def solve_program(program: Program, time_limit: float = 1.5) -> Solution | None:
    """The counts of the fastest iteration, or None if no counts satisfy the limits.

    After ``time_limit`` seconds the best counts known are returned with their gap. Where none are known by
    then, the search goes on to the first.
    """
    deadline = time.monotonic() + time_limit
    search = _Search(program)
    incumbent: Counts | None = None
    best = np.inf
    relaxation = bound = search.bound
    while search.open and (incumbent is None or time.monotonic() < deadline):
        bound = max(bound, search.bound)
        if bound >= best * (1 - FEASIBILITY):
            break
        part = search.take()
        for counts in (part.rounded(), search.finish(part, best, deadline)):
            if counts is not None and program.is_feasible(counts) and program.objective(counts) < best:
                incumbent, best = counts, program.objective(counts)
    if incumbent is None:
        return None
    bound = min(best, search.bound)
    return Solution(incumbent, best, min(relaxation, best), bound)


class _Search:
    """Ranges of working sizes that may hold the optimum, by the bound of their relaxation."""

    def __init__(self, program: Program):
        self.program = program
        classes = [_undominated(columns, with_working=True) for columns in program.classes]
        self.kept = classes
        self.columns = [_select(c, kept) for c, kept in zip(program.classes, classes, strict=True)]
        self.sizes = np.unique(np.concatenate([columns.working for columns in self.columns]))
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
        if np.isinf(best):  # without counts there is no answer: the first counts end the search
            counts, finished = part.search(best, _NO_LIMIT, first=left < _SHORT)
        elif left < _SHORT:
            counts, finished = None, False
        else:
            counts, finished = part.search(best, left, first=False)
        if not finished:
            self.unfinished = min(self.unfinished, part.bound)
        return counts

    def _push(self, low: int, high: int) -> None:
        part = _relax(self, low, high)
        if part is not None:
            heapq.heappush(self.open, (part.bound, low, part))


@dataclass(frozen=True)
class _Part:
    """The relaxation over plans whose largest working size lies in ``sizes[low..high]``."""

    whole: Program
    program: Program  # fewer columns, GPU limit less ``sizes[low]``
    kept: list[NDArray[np.intp]]
    low: int
    high: int
    bound: float
    fractions: Array
    reduced_costs: Array  # seconds by which one layer in that column raises the bound

    def rounded(self) -> Counts | None:
        counts = round_and_repair(self.program, _split(self.program, self.fractions))
        return None if counts is None else self._expanded(counts)

    def search(self, best: float, time_limit: float, first: bool) -> tuple[Counts | None, bool]:
        """(counts better than ``best`` or None, whether there are none better)."""
        promising = self.reduced_costs <= best - self.bound + FEASIBILITY * self.bound
        parts = [np.flatnonzero(p) for p in _split(self.program, promising)]
        if any(len(indices) == 0 for indices in parts):
            return None, True
        classes = tuple(_select(c, p) for c, p in zip(self.program.classes, parts, strict=True))
        counts, finished = _branch_and_bound(replace(self.program, classes=classes), time_limit, first)
        if counts is None:
            return None, finished
        full = [np.zeros(len(c.working), dtype=np.intp) for c in self.program.classes]
        for target, indices, count in zip(full, parts, counts, strict=True):
            target[indices] = count
        return self._expanded(full), finished

    def _expanded(self, counts: Counts) -> Counts:
        full = [np.zeros(len(columns.working), dtype=np.intp) for columns in self.whole.classes]
        for target, kept, count in zip(full, self.kept, counts, strict=True):
            target[kept] = count
        return full


def _relax(search: _Search, low: int, high: int) -> _Part | None:
    """None where even the relaxation does not fit."""
    allowed = [np.flatnonzero(columns.working <= search.sizes[high]) for columns in search.columns]
    if any(len(indices) == 0 for indices in allowed):
        return None
    inner = [_select(columns, indices) for columns, indices in zip(search.columns, allowed, strict=True)]
    undominated = [_undominated(columns, with_working=False) for columns in inner]
    classes = tuple(_select(c, u) for c, u in zip(inner, undominated, strict=True))
    kept = [
        outer[indices[survivors]]
        for outer, indices, survivors in zip(search.kept, allowed, undominated, strict=True)
    ]
    limits = search.program.limits.copy()
    limits[0] -= search.sizes[low]
    if (limits < 0).any():
        return None
    program = replace(search.program, classes=classes, limits=limits)
    form = _standard_form(program)
    result = linprog(
        form.cost,
        A_ub=form.upper_matrix,
        b_ub=form.upper_limit,
        A_eq=form.equal_matrix,
        b_eq=form.equal_limit,
        bounds=form.bounds,
        method="highs",
    )
    if result.status != 0:
        return None
    num_columns = len(form.cost) - len(program.weights)
    return _Part(
        whole=search.program,
        program=program,
        kept=kept,
        low=low,
        high=high,
        bound=float(result.fun * form.unit),
        fractions=result.x[:num_columns],
        reduced_costs=result.lower.marginals[:num_columns] * form.unit,
    )


@dataclass(frozen=True)
class _StandardForm:
    """``min cost x`` over x = [n of each class..., T of each phase], in scaled units.

    Times are in units of the longest row, bytes in units of their limit, so that HiGHS's absolute
    tolerances mean the same for a toy as for a 175B model.
    """

    cost: Array
    upper_matrix: Array
    upper_limit: Array
    equal_matrix: Array
    equal_limit: Array
    bounds: list[tuple[float, float | None]]
    unit: float


def _standard_form(program: Program) -> _StandardForm:
    num_phases, num_memories = len(program.weights), len(program.limits)
    seconds = np.vstack([columns.seconds for columns in program.classes])
    held = np.vstack([columns.bytes for columns in program.classes])
    layers = np.array([columns.num_layers for columns in program.classes], dtype=float)
    sizes = [len(columns.working) for columns in program.classes]
    unit = max(program.base.max(initial=0.0), seconds.max(initial=0.0) * layers.sum(), 1e-30)
    scale = np.where(program.limits > 0, program.limits, 1.0)

    minus_time = np.zeros((len(program.base), num_phases))
    minus_time[np.arange(len(program.base)), program.phase] = -1.0
    time_rows = np.hstack([seconds.T / unit, minus_time])
    memory_rows = np.hstack([held.T / scale[:, None], np.zeros((num_memories, num_phases))])
    membership = np.repeat(np.eye(len(sizes)), sizes, axis=1)
    bounds: list[tuple[float, float | None]] = [(0.0, None)] * (sum(sizes) + num_phases)
    return _StandardForm(
        cost=np.concatenate([np.zeros(sum(sizes)), program.weights]),
        upper_matrix=np.vstack([time_rows, memory_rows]),
        upper_limit=np.concatenate([-program.base / unit, program.limits / scale]),
        equal_matrix=np.hstack([membership, np.zeros((len(sizes), num_phases))]),
        equal_limit=layers,
        bounds=bounds,
        unit=unit,
    )


def _branch_and_bound(program: Program, time_limit: float, first: bool) -> tuple[Counts | None, bool]:
    """(counts or None, whether the tree was searched to its end)."""
    form = _standard_form(program)
    num_columns = len(form.cost) - len(program.weights)
    options: dict[str, float] = {"mip_rel_gap": 1e9 if first else 0.0}
    if time_limit < _NO_LIMIT:
        options["time_limit"] = time_limit
    result = milp(
        form.cost,
        integrality=np.concatenate([np.ones(num_columns), np.zeros(len(program.weights))]),
        bounds=Bounds(0, np.inf),
        constraints=[
            LinearConstraint(form.upper_matrix, -np.inf, form.upper_limit),
            LinearConstraint(form.equal_matrix, form.equal_limit, form.equal_limit),
        ],
        options=options,
    )
    finished = not first and result.status != 1  # 1: time limit
    if result.x is None:
        return None, result.status == 2  # infeasible
    return _split(program, np.rint(result.x[:num_columns]).astype(np.intp)), finished


def round_and_repair(program: Program, fractions: list[Array]) -> Counts | None:
    """Fractions rounded down; then each layer left over takes the cheapest column that still fits.

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
    return counts


def _weighted_phases(program: Program, rows: Array) -> Array:
    """(...,) seconds of an iteration whose time rows are ``rows`` (..., rows)."""
    phases = [rows[..., program.phase == p].max(axis=-1) for p in range(len(program.weights))]
    return np.tensordot(program.weights, np.stack(phases), axes=1)


def _undominated(columns: Columns, with_working: bool) -> NDArray[np.intp]:
    """Indices of the columns that no other column matches or beats in every respect."""
    respects = [columns.seconds, columns.bytes]
    if with_working:
        respects.append(columns.working[:, None])
    table = np.hstack(respects)
    table = table[:, np.ptp(table, axis=0) > 0]
    if table.shape[1] == 0:
        return np.zeros(1, dtype=np.intp)
    scale = np.abs(table).max(axis=0, initial=0.0)
    table = np.round(table / np.where(scale > 0, scale, 1.0), 12)
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


def _select(columns: Columns, indices: NDArray[np.intp]) -> Columns:
    return Columns(
        columns.num_layers, columns.seconds[indices], columns.bytes[indices], columns.working[indices]
    )


def _split(program: Program, flat: NDArray) -> list[NDArray]:
    sizes = [len(columns.working) for columns in program.classes]
    return np.split(flat, np.cumsum(sizes)[:-1])
