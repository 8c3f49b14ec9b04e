"""Predicted against measured: seconds by phase and by resource, bytes moved, bytes held by kind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

import numpy as np

from hmt_deepspeed.planner.advise.calibrate import IterationSeconds, predicted_seconds
from hmt_deepspeed.planner.model.workload import made_again
from hmt_deepspeed.planner.run.loads import Amount, layer_load, site_choices
from hmt_deepspeed.planner.run.problem import Problem, Schedule
from hmt_deepspeed.planner.solve.cost import RESOURCES, Estimate, Resource, estimate, grouped_layers
from hmt_deepspeed.planner.solve.plan import Plan

__all__ = ["Busy", "Comparison", "Row", "compare", "held_by_component"]


@dataclass(frozen=True)
class Busy:
    """Seconds that a resource worked, and the bytes that it moved (0 for one that moves none)."""

    seconds: float
    nbytes: float


@dataclass(frozen=True)
class Row:
    """One quantity of an iteration on one rank; ``note`` says why one was not measured (None)."""

    name: str
    unit: Literal["s", "bytes"]
    predicted: float
    measured: float | None
    note: str = ""

    @property
    def error(self) -> float | None:
        """predicted / measured - 1; None where nothing was measured."""
        return self.predicted / self.measured - 1 if self.measured else None


@dataclass(frozen=True)
class Comparison:
    """Rows in the order in which they are shown."""

    rows: tuple[Row, ...]

    def row(self, name: str) -> Row:
        """The row of a name."""
        return next(row for row in self.rows if row.name == name)

    def as_json(self) -> dict[str, Any]:
        """JSON by name: unit, predicted, measured, error and, where nothing could be measured, why."""
        found: dict[str, Any] = {}
        for row in self.rows:
            found[row.name] = {
                "unit": row.unit,
                "predicted": row.predicted,
                "measured": row.measured,
                "error": row.error,
            }
            if row.note:
                found[row.name]["note"] = row.note
        return found

    def describe(self) -> str:
        """As a table; bytes in MiB."""
        lines: list[tuple[str, ...]] = [
            ("predicted against measured", "predicted", "measured", "error")
        ]
        for row in self.rows:
            unit, size = ("s", 1.0) if row.unit == "s" else ("MiB", 2.0**20)
            pair = [
                "-" if value is None else f"{value / size:.4g} {unit}"
                for value in (row.predicted, row.measured)
            ]
            error = row.note if row.error is None else f"{row.error:+.1%}"
            lines.append((row.name, *pair, error))
        first, *others = (max(len(line[column]) for line in lines) for column in range(4))
        return "\n".join(
            "  ".join([name.ljust(first), *map(str.rjust, cells[:2], others), cells[2]]).rstrip()
            for name, *cells in lines
        )


def compare(
    problem: Problem,
    plan: Plan,
    seconds: IterationSeconds,
    counted: Mapping[str, Any],
    memory: Mapping[tuple[str, str], float],
    busy: Mapping[Resource, Busy],
    refreshing_columns: Mapping[int, int] | None = None,
) -> Comparison:
    """A plan's predictions beside what its iterations did.

    Args:
        seconds: of an iteration, measured.
        counted: metrics of the activation backend: ``activation_bytes_per_component`` and what was moved.
        memory: bytes counted by (memory, kind), named as the planner names them.
        busy: of an iteration, the resources that somebody watches.
        refreshing_columns: by layer, of ``X [Q | P]`` of the linears that did not project in the iteration of
            ``counted``, because their matrices refreshed.
    """
    found = estimate(problem, plan)
    expected = predicted_seconds(plan, found)
    rows = [
        Row(f.name, "s", getattr(expected, f.name), getattr(seconds, f.name))
        for f in fields(IterationSeconds)
    ]
    rows.append(Row("iteration", "s", expected.total, seconds.total))
    rows += _resources(found, busy, problem.setup.schedule)
    moved = _moved(problem, plan)
    for name, amount in _MOVES.items():
        if moved[amount] or counted.get(name):
            rows.append(Row(name, "bytes", float(moved[amount]), float(counted.get(name, 0))))
    held = held_by_component(problem, plan)
    work = problem.workload
    for layer, columns in (refreshing_columns or {}).items():
        if plan.choices_of(layer).get("projected_inputs") == "project":
            held["projected_inputs"] -= columns * work.tokens * work.itemsize
    by_component = counted["activation_bytes_per_component"]
    # the head's input is held by its own linear, which a backend need not count
    names = [name for name in held if name != "lm_head" or name in by_component]
    for name in dict.fromkeys((*names, *by_component)):
        size, is_there = held.get(name, 0.0), float(by_component.get(name, 0))
        if size or is_there:
            rows.append(Row(f"activations: {name}", "bytes", size, is_there))
    total = sum(held[name] for name in names)
    rows.append(Row("activations", "bytes", total, float(sum(by_component.values()))))
    for kind, name in _IN_HOST_MEMORY.items():
        size = found.memory["host"].get(kind, 0.0)
        if size or counted.get(name):
            rows.append(Row(f"host: {kind}", "bytes", size, float(counted.get(name, 0))))
    for (where, kind), size in memory.items():
        predicted = found.memory[where].get(kind, 0.0)  # type: ignore[index]
        if (where, kind) == ("gpu", "gradients"):  # counted is the fullest moment so far
            predicted += problem.setup.gradient_buffer_bytes
            predicted += found.memory["gpu"].get("gradients in passing", 0.0)
        rows.append(Row(f"{where}: {kind}", "bytes", predicted, size))
    return Comparison(tuple(rows))


# What a resource itself does; the two ways of a link, and the reads and writes of SSDs, slow one another
# down too, which is not their work.
_OWN: dict[Resource, tuple[Amount, ...]] = {
    "gpu_to_host": (Amount.TO_HOST,),
    "host_to_gpu": (Amount.TO_GPU,),
    "ssd_reading": (Amount.SSD_READ,),
    "ssd_writing": (Amount.SSD_WRITE,),
    "cpu": (Amount.ADAM, Amount.ADDED),
    "network": (Amount.NETWORK,),
}
_NOT_WATCHED: dict[Resource, str] = {
    "gpu": "kernels are not timed one by one",
    "network": "collectives are not timed",
}
_MOVED_BY_DEEPSPEED = "DeepSpeed's own offload is not timed"


def _resources(found: Estimate, busy: Mapping[Resource, Busy], schedule: Schedule) -> list[Row]:
    """Busy seconds of every resource that an iteration uses, and bytes of those that move them."""
    rows = []
    for resource in RESOURCES:
        own = _OWN.get(resource)
        at_work = [p for p in found.phases if own is None or any(p.load[a] for a in own)]
        seconds = sum(phase.weight * phase.by_resource[resource] for phase in at_work)
        if schedule == "naive" and resource in ("ssd_reading", "ssd_writing"):
            # the closed form has them stand still while the CPU updates
            seconds -= sum(phase.weight * phase.by_resource["cpu"] for phase in at_work)
        measured = busy.get(resource)
        if not seconds and (measured is None or not measured.seconds):
            continue
        name = resource.replace("_", " ")
        if measured is None:
            note = _NOT_WATCHED.get(resource, _MOVED_BY_DEEPSPEED)
            rows.append(Row(f"busy: {name}", "s", seconds, None, note))
            continue
        rows.append(Row(f"busy: {name}", "s", seconds, measured.seconds))
        if own is not None and resource != "cpu":
            nbytes = sum(phase.weight * phase.load[a] for phase in at_work for a in own)
            rows.append(Row(f"moved: {name}", "bytes", nbytes, measured.nbytes))
    return rows


_IN_HOST_MEMORY = {
    "activations": "activation_peak_host_bytes",
    "staging": "activation_staging_bytes",
}
_MOVES = {
    "activation_bytes_to_host": Amount.TO_HOST,
    "activation_bytes_from_host": Amount.TO_GPU,
    "activation_bytes_to_ssd": Amount.SSD_WRITE,
    "activation_bytes_from_ssd": Amount.SSD_READ,
}


def _moved(problem: Problem, plan: Plan) -> Any:
    """Amounts of an iteration's swaps."""
    total = np.zeros(len(Amount))
    for layer, group in grouped_layers(problem.workload, plan):
        load = layer_load(layer, group.choices, problem.setup)
        total += len(group.layers) * (load.forward + load.backward)
    load = layer_load(problem.workload.head, plan.head, problem.setup)
    return problem.setup.accumulation * (total + load.forward + load.backward)


def held_by_component(problem: Problem, plan: Plan) -> dict[str, float]:
    """Device bytes held for backward of one micro-batch, by component."""
    workload = problem.workload
    held: dict[str, float] = {}
    for layer, group in grouped_layers(workload, plan):
        chosen, count = site_choices(layer, group.choices), len(group.layers)
        again = made_again(layer, chosen)
        for site in layer.sites:
            size = site.device_bytes(chosen[site.name])
            if site in again and size:
                size -= site.raw_bytes
            held[site.component] = held.get(site.component, 0.0) + count * size
    for site in workload.head.sites:
        choice = site_choices(workload.head, plan.head)[site.name]
        size = site.device_bytes(choice)
        held[site.component] = held.get(site.component, 0.0) + size
    return held
