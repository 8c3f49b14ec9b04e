"""Pictures of one experiment: loss against tokens, time and memory; ranks over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Record = dict[str, Any]


def draw(experiment: Mapping[str, Any], records: Sequence[Record], folder: Path) -> list[Path]:
    """NAME-loss.png, NAME-memory.png and, where ranks differ in a model or change, NAME-ranks.png."""
    import matplotlib

    matplotlib.use("Agg")
    best = {
        name: next(r for r in records if r["key"] == line["key"])
        for name, line in experiment["variants"].items()
    }
    if not best:
        return []
    paths = [_losses(experiment, best, folder), _memory(experiment, folder)]
    ranked = {name: r for name, r in best.items() if _has_several_ranks(r)}
    return [*paths, _ranks(experiment, ranked, folder)] if ranked else paths


def _has_several_ranks(record: Record) -> bool:
    ranks = record["curves"]["ranks"].values()
    return len({rank for of_matrix in ranks for rank in of_matrix}) > 1


def _losses(experiment: Mapping[str, Any], best: Mapping[str, Record], folder: Path) -> Path:
    """Training loss (thin) and validation loss (dots), against tokens and against time."""
    figure, (by_tokens, by_time) = _figure(2)
    for number, (name, record) in enumerate(best.items()):
        curves, colour = record["curves"], f"C{number}"
        style = "-" if number < 10 else "--"  # there are ten colours
        rate = experiment["variants"][name]["tokens_per_second"]
        for axes, x, evaluated in (
            (by_tokens, curves["tokens"], curves["eval_tokens"]),
            (by_time, _over(curves["tokens"], rate), _over(curves["eval_tokens"], rate)),
        ):
            axes.plot(x, curves["train_loss"], style, color=colour, linewidth=0.6, alpha=0.6)
            axes.plot(evaluated, curves["val_loss"], "." + style, color=colour, label=name)
    for axes, label in ((by_tokens, "tokens"), (by_time, "seconds at the measured tokens/s")):
        axes.set_xlabel(label)
        axes.set_ylabel("loss (thin: training)")
        lowest = min(min(r["curves"]["val_loss"]) for r in best.values())
        axes.set_ylim(lowest - 0.1, lowest + 1.5)
    by_time.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
    seeds = sorted({record["seed"] for record in best.values()})
    title = f"{experiment['name']}, seed {', '.join(map(str, seeds))}"
    return _saved(figure, folder / f"{experiment['name']}-loss.png", title)


def _over(tokens: Sequence[float], rate: float) -> list[float]:
    return [count / rate for count in tokens]


def _memory(experiment: Mapping[str, Any], folder: Path) -> Path:
    """Final validation loss against the state bytes of the matrices and against peak memory."""
    figure, (by_states, by_peak) = _figure(2)
    for name, line in experiment["variants"].items():
        share = line["state_bytes"]["moments_and_bases_share"]
        points = [(by_peak, line["peak_over_start_bytes"] / 2**20)]
        points += [] if share is None else [(by_states, share)]
        for axes, x in points:
            axes.plot(x, line["val_loss"], "o")
            axes.annotate(
                name, (x, line["val_loss"]), (4, 4), textcoords="offset points", fontsize=7
            )
    by_states.set_xlabel("moments and bases of the matrices / AdamW's moments")
    by_peak.set_xlabel(f"peak memory over the start, MiB, {experiment['device_memory']}")
    for axes in (by_states, by_peak):
        axes.set_ylabel("final validation loss")
    return _saved(figure, folder / f"{experiment['name']}-memory.png", experiment["name"])


def _ranks(experiment: Mapping[str, Any], best: Mapping[str, Record], folder: Path) -> Path:
    """Rank of every matrix over time, one picture a variant."""
    columns = min(4, len(best))
    figure, grid = _figure(columns, -(-len(best) // columns))
    for axes, (name, record) in zip(grid, best.items(), strict=False):
        for values in record["curves"]["ranks"].values():
            axes.plot(record["curves"]["eval_tokens"][: len(values)], values, linewidth=0.8)
        axes.set_title(name, fontsize=8)
        axes.set_xlabel("tokens")
        axes.set_ylabel("rank")
        axes.set_ylim(bottom=0)
    for axes in grid[len(best) :]:
        axes.set_visible(False)
    return _saved(figure, folder / f"{experiment['name']}-ranks.png", experiment["name"])


def _figure(columns: int, rows: int = 1) -> tuple[Any, list[Any]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5 * columns, 4 * rows))
    grid = figure.subplots(rows, columns, squeeze=False)
    return figure, [axes for row in grid for axes in row]


def _saved(figure: Any, path: Path, title: str) -> Path:
    figure.suptitle(title, fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=100, metadata={"Software": None})
    return path
