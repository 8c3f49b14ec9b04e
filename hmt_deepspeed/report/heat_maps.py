"""Rank and captured energy of every matrix over the steps of a run, as heat maps."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hmt_deepspeed.report.drawing import label_steps, new_figure
from hmt_deepspeed.report.runs import Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["energies", "ranks"]


def ranks(runs: Sequence[Run]) -> Figure | None:
    """Rank of every matrix; None where no run records it."""
    return _heat_maps(runs, "rank_per_matrix", "rank", "viridis")


def energies(runs: Sequence[Run]) -> Figure | None:
    """Captured energy of every matrix, 0 to 1; None where no run records it."""
    return _heat_maps(runs, "captured_energy_per_matrix", "share of ||G||²", "magma", (0.0, 1.0))


def _heat_maps(
    runs: Sequence[Run],
    name: str,
    label: str,
    colours: str,
    limits: tuple[float, float] | None = None,
) -> Figure | None:
    """A row a matrix: those of one kind together, layer by layer; a column a step that was recorded."""
    found = {
        run.name: run.per_matrix(name) for run in runs if any(r.get(name) for r in run.records)
    }
    if not found:
        return None
    last = {run.name: run.records[-1]["step"] for run in runs}
    rows = max(len(matrices) for _, matrices, _ in found.values())
    figure, axes = new_figure(1, len(found), min(max(0.14 * rows, 2.8), 9.0))
    if limits is None:
        numbers = [v for *_, rows_ in found.values() for row in rows_ for v in row if v is not None]
        limits = (0, max(numbers))
    mesh: Any = None
    named: list[str] = []
    for axis, (run_name, (steps, matrices, values)) in zip(axes, found.items(), strict=True):
        placed = [_kind_and_layer(matrix) for matrix in matrices]
        first = list(dict.fromkeys(kind for kind, _ in placed))  # as the model has them
        order = sorted(
            range(len(matrices)), key=lambda i: (first.index(placed[i][0]), placed[i][1])
        )
        grid = [[float("nan") if v is None else v for v in values[i]] for i in order]
        edges = [*steps, max(last[run_name], steps[-1]) + 1]  # a record holds until the next
        mesh = axis.pcolormesh(
            edges,
            range(len(order) + 1),
            grid,
            cmap=colours,
            vmin=limits[0],
            vmax=limits[1],
            rasterized=True,
        )
        kinds = [placed[i][0] for i in order]
        starts = [i for i, kind in enumerate(kinds) if i == 0 or kinds[i - 1] != kind]
        ends = [*starts[1:], len(kinds)]
        middles = [(a + b) / 2 for a, b in zip(starts, ends, strict=True)]
        axis.set_yticks(middles, [] if kinds == named else [kinds[i] for i in starts])
        named = kinds
        axis.hlines(starts[1:], edges[0], edges[-1], colors="white", linewidth=1.5)
        axis.tick_params(axis="y", length=0)
        axis.grid(visible=False)
        label_steps(axis, title=run_name)
        axis.invert_yaxis()
    figure.colorbar(mesh, ax=axes, label=label, pad=0.01)
    return figure


def _kind_and_layer(matrix: str) -> tuple[str, tuple[int, ...]]:
    """("self_attn.q_proj", (3,)) of "model.layers.3.self_attn.q_proj.weight"."""
    layers = tuple(int(number) for number in re.findall(r"\d+", matrix))
    return re.sub(r"^.*\.\d+\.|\.weight$", "", matrix), layers
