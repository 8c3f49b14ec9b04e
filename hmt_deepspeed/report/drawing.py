"""What the report's pictures have in common: size, colours, axes by step, units, series of runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from hmt_deepspeed.report.runs import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "COLOURS",
    "by_part",
    "bytes_unit",
    "colour_of",
    "coloured",
    "label_runs",
    "label_steps",
    "legend_once",
    "median_of",
    "new_figure",
    "unit_of",
]

# Okabe and Ito's colours, which colour-blind readers tell apart too.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")
WIDTH = 10.0  # inches


def new_figure(rows: int, columns: int, height: float, **grid: Any) -> tuple[Figure, list[Axes]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height))
    sharey = grid.pop("sharey", False)
    axes = figure.subplots(rows, columns, squeeze=False, sharey=sharey, gridspec_kw=grid)
    return figure, list(axes.flat)


def label_steps(axis: Axes, **labels: Any) -> None:
    """Steps along x, at whole numbers."""
    from matplotlib.ticker import MaxNLocator

    axis.set(xlabel="step", **labels)
    axis.xaxis.set_major_locator(MaxNLocator("auto", integer=True, steps=[1, 2, 5, 10]))


def coloured(runs: Sequence[Run]) -> Iterator[tuple[Run, str]]:
    return ((run, COLOURS[i % len(COLOURS)]) for i, run in enumerate(runs))


def colour_of(parts: Sequence[str], part: str) -> str:
    return COLOURS[parts.index(part) % len(COLOURS)]


def label_runs(axis: Axes, runs: Sequence[Run]) -> None:
    """A bar a run, first on top; one alone is no thicker and stands in the middle."""
    axis.set_yticks(range(len(runs)), [run.name for run in runs])
    room = 1.0 if len(runs) == 1 else 0.5
    axis.set_ylim(len(runs) - 1 + room, -room)
    axis.grid(axis="y", visible=False)


def legend_once(figure: Figure, axis: Axes) -> None:
    """A legend under the figure that names each colour of the axis once."""
    handles, labels = axis.get_legend_handles_labels()
    named = dict(zip(labels, handles, strict=True))
    figure.legend(named.values(), named.keys(), loc="outside lower center", ncols=5)


def by_part(run: Run, name: str) -> dict[str, tuple[list[int], list[float]]]:
    """(steps, values) by part of a mapping that records hold."""
    found: dict[str, tuple[list[int], list[float]]] = {}
    for record in run.records:
        for part, value in (record.get(name) or {}).items():
            steps, values = found.setdefault(part, ([], []))
            steps.append(record["step"])
            values.append(float(value))
    return found


def median_of(run: Run, name: str) -> float:
    """Over all steps but the first, which also compiles and allocates; 0 without the number."""
    values = run.series(name)[1]
    return median(values[1:] or values) if values else 0.0


def bytes_unit(
    runs: Sequence[Run], names: Sequence[str], together: bool = False
) -> tuple[str, float]:
    sizes: list[Mapping[str, float]] = [{n: run.last(n) or 0.0 for n in names} for run in runs]
    return unit_of(max((sum if together else max)(size.values()) for size in sizes))


def unit_of(largest: float) -> tuple[str, float]:
    """(unit, bytes in it) for an axis up to ``largest`` bytes."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if largest >= scale:
            return unit, float(scale)
    return "bytes", 1.0
