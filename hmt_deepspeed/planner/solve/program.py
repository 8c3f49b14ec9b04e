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
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, linprog, milp  # type: ignore[import-untyped]

__all__ = [
    "FEASIBILITY",
    "Array",
    "Columns",
    "Counts",
    "Program",
    "StandardForm",
    "restricted",
    "split",
    "standard_form",
    "widened",
]

Array = NDArray[np.float64]
Counts = list[NDArray[np.intp]]

FEASIBILITY = 1e-9  # relative: what a double leaves of a sum of a few hundred terms


@dataclass(frozen=True)
class Columns:
    """Joint choices of a class of ``num_layers`` equal layers.

    Attributes:
        seconds: (columns, rows), what one layer adds to each time row.
        bytes: (columns, memories), what one layer holds of each memory until its backward.
        working: (columns,), GPU bytes needed only while one such layer is in backward.
        tie: (columns,), cost of one layer that decides between equally fast counts.
    """

    num_layers: int
    seconds: Array
    bytes: Array
    working: Array
    tie: Array


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
class StandardForm:
    """``min cost x`` over x = [n of each class..., T of each phase] >= 0, in scaled units.

    Times are in units of the longest row, bytes in units of their limit, so that HiGHS's absolute
    tolerances mean the same for a toy as for a 175B model.
    """

    cost: Array
    upper_matrix: Array
    upper_limit: Array
    equal_matrix: Array
    equal_limit: Array
    integer: Array  # 1 for n, 0 for T
    unit: float

    def relax(self) -> Any | None:
        """SciPy's result, None where not even the relaxation is feasible."""
        result = linprog(
            self.cost,
            A_ub=self.upper_matrix,
            b_ub=self.upper_limit,
            A_eq=self.equal_matrix,
            b_eq=self.equal_limit,
            method="highs",
        )
        return result if result.status == 0 else None

    def search(
        self, time_limit: float | None, relative_gap: float
    ) -> tuple[NDArray[np.intp] | None, bool]:
        """(counts of all columns or None, whether the tree was searched to its end)."""
        options: dict[str, float] = {"mip_rel_gap": relative_gap}
        if time_limit is not None:
            options["time_limit"] = time_limit
        result = milp(
            self.cost,
            integrality=self.integer,
            bounds=Bounds(0, np.inf),
            constraints=[
                LinearConstraint(self.upper_matrix, -np.inf, self.upper_limit),
                LinearConstraint(self.equal_matrix, self.equal_limit, self.equal_limit),
            ],
            options=options,
        )
        counts = None if result.x is None else np.rint(result.x[self.integer > 0]).astype(np.intp)
        return counts, result.status != 1  # 1: the time limit


def standard_form(program: Program, ties_within: float | None = None) -> StandardForm:
    """Args: ties_within: seconds; the least tie cost among counts of at most these is sought instead."""
    num_phases, num_memories = len(program.weights), len(program.limits)
    seconds = np.vstack([columns.seconds for columns in program.classes])
    held = np.vstack([columns.bytes for columns in program.classes])
    layers = np.array([columns.num_layers for columns in program.classes], dtype=float)
    sizes = [len(columns.working) for columns in program.classes]
    unit = max(program.base.max(initial=0.0), seconds.max(initial=0.0) * layers.sum(), 1e-30)
    scale = np.where(program.limits > 0, program.limits, 1.0)

    minus_time = np.zeros((len(program.base), num_phases))
    minus_time[np.arange(len(program.base)), program.phase] = -1.0
    upper = [
        np.hstack([seconds.T / unit, minus_time]),
        np.hstack([held.T / scale[:, None], np.zeros((num_memories, num_phases))]),
    ]
    upper_limit = [-program.base / unit, program.limits / scale]
    cost = np.concatenate([np.zeros(sum(sizes)), program.weights])
    if ties_within is not None:
        upper.append(cost[None])
        upper_limit.append(np.array([ties_within / unit]))
        tie = np.concatenate([columns.tie for columns in program.classes])
        cost = np.concatenate([tie / max(np.abs(tie).max(), 1e-30), np.zeros(num_phases)])
    membership = np.repeat(np.eye(len(sizes)), sizes, axis=1)
    return StandardForm(
        cost=cost,
        upper_matrix=np.vstack(upper),
        upper_limit=np.concatenate(upper_limit),
        equal_matrix=np.hstack([membership, np.zeros((len(sizes), num_phases))]),
        equal_limit=layers,
        integer=np.concatenate([np.ones(sum(sizes)), np.zeros(num_phases)]),
        unit=unit,
    )


def restricted(program: Program, kept: list[NDArray[np.intp]], limits: Array) -> Program:
    """The program over some of each class's columns, with other limits."""
    classes = tuple(
        Columns(c.num_layers, c.seconds[i], c.bytes[i], c.working[i], c.tie[i])
        for c, i in zip(program.classes, kept, strict=True)
    )
    return replace(program, classes=classes, limits=limits)


def widened(program: Program, kept: list[NDArray[np.intp]], counts: Counts) -> Counts:
    """Counts over the columns kept as counts over all columns."""
    full = [np.zeros(len(columns.working), dtype=np.intp) for columns in program.classes]
    for target, indices, count in zip(full, kept, counts, strict=True):
        target[indices] = count
    return full


def split(kept: list[NDArray[np.intp]], flat: NDArray[Any]) -> list[NDArray[Any]]:
    """One value per column kept, and perhaps some for the phases, class by class."""
    ends = np.cumsum([len(indices) for indices in kept])
    return np.split(flat[: ends[-1]], ends[:-1])
