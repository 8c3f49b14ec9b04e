"""Pictures of one experiment: loss against tokens, time and memory; ranks over time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from comparison.cells import Point, point_of
from comparison.variants import VARIANTS

Record = dict[str, Any]
# There are ten colours.
LINES = ("-", "--", ":", "-.")
MARKERS = ("o", "s", "^", "D")


def draw(experiment: Mapping[str, Any], records: Sequence[Record], folder: Path) -> list[Path]:
    """NAME-loss.png, NAME-memory.png and, where ranks differ in a model or change, NAME-ranks.png."""
    import matplotlib

    matplotlib.use("Agg")
    shown = pictured(experiment, records)
    if not shown:
        return []
    paths = [_losses(experiment, shown, folder), _memory(experiment, shown, folder)]
    ranked = {name: r for name, r in shown.items() if _has_several_ranks(r)}
    return [*paths, _ranks(experiment, ranked, folder)] if ranked else paths


def pictured(experiment: Mapping[str, Any], records: Sequence[Record]) -> dict[str, Record]:
    """One record a variant, at its best rate: of the seed that most variants have, else of its first.

    Of more variants than the table has, the table's.
    """
    runs = {
        name: {r["seed"]: r for r in records if _is_best(r, name, point_of(line))}
        for name, line in experiment["variants"].items()
    }
    counts = Counter(seed for own in runs.values() for seed in sorted(own))
    common = min(counts, key=lambda seed: (-counts[seed], seed), default=None)
    shown = {name: own.get(common, own[min(own)]) for name, own in runs.items()}
    if len(shown) > len(VARIANTS):
        shown = {name: record for name, record in shown.items() if name in VARIANTS}
    return shown


def _is_best(record: Record, name: str, point: Point) -> bool:
    finished = record.get("val_loss") is not None
    return finished and record["variant"] == name and point_of(record) == point


def _has_several_ranks(record: Record) -> bool:
    ranks = record["curves"]["ranks"].values()
    return len({rank for of_matrix in ranks for rank in of_matrix}) > 1


def _losses(experiment: Mapping[str, Any], shown: Mapping[str, Record], folder: Path) -> Path:
    """Training loss (thin) and validation loss (dots), against tokens and against time.

    Against time only what was timed on a quiet machine, where anything was.
    """
    figure, (by_tokens, by_time) = _figure(2)
    lines = experiment["variants"]
    timed = [name for name in shown if lines[name]["speed_measured_alone"]] or list(shown)
    seed, labels = _labels(shown)
    for number, (name, record) in enumerate(shown.items()):
        curves, colour, label = record["curves"], f"C{number}", labels[name]
        style = LINES[number // 10 % len(LINES)]
        rate = lines[name]["tokens_per_second"]
        drawn = [(by_tokens, curves["tokens"], curves["eval_tokens"])]
        if name in timed:
            drawn.append((by_time, *(_over(curves[k], rate) for k in ("tokens", "eval_tokens"))))
        for axes, x, evaluated in drawn:
            axes.plot(x, curves["train_loss"], style, color=colour, linewidth=0.6, alpha=0.6)
            axes.plot(
                evaluated, curves["val_loss"], marker=".", ls=style, color=colour, label=label
            )
    for axes, label in ((by_tokens, "tokens"), (by_time, "seconds at the measured tokens/s")):
        axes.set_xlabel(label)
        axes.set_ylabel("loss (thin: training)")
        lowest = min(min(r["curves"]["val_loss"]) for r in shown.values())
        axes.set_ylim(lowest - 0.1, lowest + 1.5)
    _legend(by_time, by_tokens)
    title = f"{experiment['name']}, seed {seed}"
    return _saved(figure, folder / f"{experiment['name']}-loss.png", title)


def _labels(shown: Mapping[str, Record]) -> tuple[int, dict[str, str]]:
    """The seed that most have, and names, with the seed where it is another."""
    seed = Counter(record["seed"] for record in shown.values()).most_common(1)[0][0]
    return seed, {
        name: name if record["seed"] == seed else f"{name}, seed {record['seed']}"
        for name, record in shown.items()
    }


def _legend(right: Any, complete: Any) -> None:
    """What is drawn in ``complete``, beside the picture at the right."""
    handles, labels = complete.get_legend_handles_labels()
    right.legend(handles, labels, fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))


def _over(tokens: Sequence[float], rate: float) -> list[float]:
    return [count / rate for count in tokens]


def _memory(experiment: Mapping[str, Any], shown: Mapping[str, Record], folder: Path) -> Path:
    """Final validation loss against the state bytes of the matrices and against peak memory."""
    figure, (by_states, by_peak) = _figure(2)
    seed, labels = _labels(shown)
    for number, (name, record) in enumerate(shown.items()):
        line = experiment["variants"][name]
        share = line["state_bytes"]["moments_and_bases_share"]
        points = [(by_peak, line["peak_over_start_bytes"] / 2**20)]
        points += [] if share is None else [(by_states, share)]
        marker = MARKERS[number // 10 % len(MARKERS)]
        for axes, x in points:
            axes.plot(x, record["val_loss"], marker, color=f"C{number}", label=labels[name])
    by_states.set_xlabel("moments and bases of the matrices / AdamW's moments")
    by_peak.set_xlabel(f"peak memory over the start, MiB, {experiment['device_memory']}")
    for axes in (by_states, by_peak):
        axes.set_ylabel("final validation loss")
    _legend(by_peak, by_peak)
    title = f"{experiment['name']}, seed {seed}"
    return _saved(figure, folder / f"{experiment['name']}-memory.png", title)


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

    figure = Figure(figsize=(6 * columns, 4.5 * rows))
    grid = figure.subplots(rows, columns, squeeze=False)
    return figure, [axes for row in grid for axes in row]


def _saved(figure: Any, path: Path, title: str) -> Path:
    figure.suptitle(title, fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=100, metadata={"Software": None})
    return path
