"""What the cells found: one row a cell (CSV), one line a variant (JSON, Markdown), pictures."""

from __future__ import annotations

import csv
import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from comparison.cells import SHAPES, Point, Store, point_of, read_json, write_rows
from comparison.contenders import own_embedding_lr_scale
from comparison.frontier import frontier
from comparison.plots import draw
from comparison.stages import BASELINE, lowest_point
from comparison.variants import VARIANTS

Record = dict[str, Any]

CELL_COLUMNS = (
    "key",
    "stage",
    "variant",
    "lr",
    "embedding_lr_scale",
    "decay",
    "seed",
    "tokens",
    "val_loss",
    "diverged",
    "skipped",
    "tokens_per_second",
    "step_seconds_median",
    "step_seconds_p95",
    "train_seconds",
    "cpu_seconds",
    "device_memory",
    "start_device_bytes",
    "peak_device_bytes",
    "average_device_bytes",
    "peak_host_bytes",
    "pcie_bytes",
    "checkpoint_bytes",
    "captured_energy_mean",
    "activation_error",
    "activation_error_matrices",
    "codec_error",
    "activation_bytes",
    "rank_smallest",
    "rank_mean",
    "rank_largest",
    "rank_counts",
)
STATE_COLUMNS = (
    "matrices_moments",
    "matrices_bases",
    "matrices_other",
    "dense",
    "total",
    "moments_share",
    "moments_and_bases_share",
)
HEADERS = (
    "variant",
    "lr",
    "validation loss",
    "seeds",
    "moments",
    "with bases",
    "ranks",
    "captured",
    "activation error",
    "codec error",
    "activations held",
    "tokens/s",
    "step, median / p95",
    "peak memory",
    "over start",
    "average memory",
    "host RAM",
    "PCIe",
    "checkpoint",
)
HEAD = """# compare

Written by `python launch/compare.py report` from `cells.jsonl.xz`, with pictures of every experiment (losses, \
memory, ranks), one row a cell (`cells.csv`) and the lines below as JSON (`report.json`) in `runs/compare/report`. \
An experiment is named after the stage, the tokens of a run, and a digest of setting, text and starting point; one \
line is `python launch/compare.py STAGE --variants VARIANT --lrs LR --seeds SEEDS`.
"""
NOTES = (
    "moments: bytes of the moments on the matrices as a share of AdamW's; with bases: the same and "
    "the projection bases.",
    "ranks: `32:10 64:12` is rank 32 in 10 matrices and 64 in 12 at the last evaluation.",
    "captured: mean share of the gradient's squared norm inside the basis at the last evaluation.",
    "activation error: share of the weight gradient's squared norm that is lost because the linear's "
    "input is saved projected, a mean over the matrices whose input is; blank where none is, or where "
    "it was not measured. HMT's own step does not use that part, its probe residual aside.",
    "codec error: |decoded - original| / |original| of what the activation backend encodes, by component, a "
    "mean over the steps that measure it; activations held: bytes that it holds for backward at a step's "
    "fullest moment, a mean over the steps. Blank without a backend, where autograd's are not counted.",
    "over start: peak less what the process held before its first step, which is weights, text and "
    "libraries; the rest is gradients, states, activations and temporaries.",
    "average memory: of samples after forward, backward and optimizer of every step; `^` marks cells "
    "that sampled after backward alone.",
    "host RAM: most resident bytes of the process, on a CPU the peak memory; PCIe: bytes that the "
    "training loop copied to and from the device in the whole run, blank where there is none.",
    "lr: `*` marks the lowest or highest rate that was tried: the best may lie beyond. Behind it are the factor on the "
    "rate of embeddings, head and vectors, and the weight decay, where they are not the variant's and the setting's.",
    "tokens/s and step times: `speed` measures all variants in alternation, and these are of the machine "
    "that it ran on last; `~` marks a variant it has not measured there, whose time is the training run's "
    "own, beside whatever else the machine did.",
)


def write_report(store: Store) -> Path:
    """Write report.md beside the cells, and beside the unfinished runs the folder `report`.

    That folder, which git ignores, has cells.csv, report.json and the pictures.

    Returns:
        The folder of the pictures.

    Raises:
        ValueError: no cell has finished.
    """
    records = store.records()
    if not any("skipped" not in record for record in records):
        raise ValueError(
            f"no finished cell in {store.results}: run `python launch/compare.py sweep`"
        )
    experiments = summaries(records, newest_speed(store.results))
    (store.results / "report.md").write_text(report_text(experiments), encoding="utf-8")
    folder = store.runs / "report"
    folder.mkdir(parents=True, exist_ok=True)
    _write_csv(folder / "cells.csv", records)
    write_rows(folder / "report.json", {e["name"]: e for e in experiments})
    for experiment, own in zip(experiments, group(records), strict=True):
        draw(experiment, own, folder)
    return folder


def report_text(experiments: Sequence[Mapping[str, Any]]) -> str:
    """report.md: what its columns mean, the frontier where there is one, then every experiment."""
    sections = [HEAD, *(f"- {note}" for note in NOTES)]
    sections += ["", found.rstrip()] if (found := frontier(experiments)) else []
    for experiment in experiments:
        sections += ["", markdown(experiment)]
    return "\n".join(sections) + "\n"


def newest_speed(folder: Path) -> Mapping[str, Any]:
    """Speeds are compared within one machine: the file that was measured into last."""
    files = [found for path in folder.glob("speed-*.json") if (found := read_json(path))]
    return max(files, key=_measured_at, default={})


def _measured_at(speed: Mapping[str, Any]) -> str:
    return max(own.get("measured_at", "") for own in speed.values())


def group(records: Sequence[Record]) -> list[list[Record]]:
    """Records that may be compared: same stage, text, tokens, setting and starting point."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        if record["stage"] != "base":
            groups.setdefault(_identity(record), []).append(record)
    return [groups[name] for name in sorted(groups)]


def _identity(record: Record) -> str:
    return f"{record['stage']}-{record['tokens']}-{_common(record)}"


def _common(record: Record) -> str:
    """What a sweep and the finals that take its rates share."""
    fields = [record[key] for key in ("setting", "text", "start")]
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:6]


def _write_csv(path: Path, records: Sequence[Record]) -> None:
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*CELL_COLUMNS, *STATE_COLUMNS])
        for record in records:
            states = record.get("state_bytes", {})
            found = {**record, **last_ranks(record), "activation_error": activation_error(record)}
            found["codec_error"] = _errors(record.get("codec_error"))
            row = [found.get(key) for key in CELL_COLUMNS]
            writer.writerow([*row, *(states.get(key) for key in STATE_COLUMNS)])


def last_ranks(record: Record) -> Record:
    """Ranks of the matrices at the last evaluation: smallest, mean, largest, how many have each.

    None without any.
    """
    curves = record.get("curves", {"ranks": {}})
    last = [ranks[-1] for ranks in curves["ranks"].values()]
    return {
        "rank_smallest": min(last, default=None),
        "rank_mean": mean(last) if last else None,
        "rank_largest": max(last, default=None),
        "rank_counts": " ".join(f"{rank}:{n}" for rank, n in sorted(Counter(last).items())) or None,
    }


def activation_error(record: Record) -> float | None:
    """The activation error of a cell.

    Cells without `activation_error_matrices` averaged over all matrices: theirs is right where all
    are projected from the right, and is not given elsewhere.
    """
    options = record["options"]
    all_right = options.get("projection", "right") == "right" and options.get("residual") != "full"
    known = "activation_error_matrices" in record or all_right
    return record.get("activation_error") if known else None


def _by_table(names: Iterable[str]) -> list[str]:
    """Each name once: the table's in its order, then those that have left it, sorted."""
    found = set(names)
    return [name for name in VARIANTS if name in found] + sorted(found - set(VARIANTS))


# -- one experiment ---------------------------------------------------------------------------------


def summaries(records: Sequence[Record], speed: Mapping[str, Any]) -> list[dict[str, Any]]:
    """:func:`summarize` of every experiment among the records."""
    sweeps = [record for record in records if record["stage"] == "sweep"]
    return [summarize(own, speed, sweeps) for own in group(records)]


def summarize(
    records: Sequence[Record], speed: Mapping[str, Any], sweeps: Sequence[Record] = ()
) -> dict[str, Any]:
    """The best learning rate of every variant (`lowest_rate`), and what it measured.

    Args:
        sweeps: where the finals' rates come from; those of another setting or text are left out.
    """
    first = records[0]
    lines, skipped = {}, {}
    for name in _by_table(record["variant"] for record in records):
        own = [r for r in records if r["variant"] == name]
        reasons = [r["skipped"] for r in own if "skipped" in r]
        finished = [r for r in own if r.get("val_loss") is not None]
        if finished:
            swept = [r for r in sweeps if r["variant"] == name and _common(r) == _common(first)]
            tried = [point_of(r) for r in [*own, *swept]]
            lines[name] = _best(finished, tried, _comparable(speed.get(name), first["setting"]))
        else:
            skipped[name] = reasons[0] if reasons else "every learning rate diverged"
    return {
        "name": _identity(first),
        "compared": _common(first),
        "stage": first["stage"],
        "tokens": first["tokens"],
        "setting": first["setting"],
        "device_memory": next((r["device_memory"] for r in records if "machine" in r), None),
        "machines": sorted({_machine(r["machine"]) for r in records if "machine" in r}),
        "variants": lines,
        "skipped": skipped,
    }


def _comparable(speed: Mapping[str, Any] | None, setting: Mapping[str, Any]) -> Record | None:
    """The speed of a variant, if it was measured at the same shape, dtype and device."""
    same = ("model", "vocab_size", "seq_length", "batch_rows", "dtype", "device")
    if not speed or "skipped" in speed or any(speed["setting"][k] != setting[k] for k in same):
        return None
    return dict(speed)


def _best(finished: Sequence[Record], tried: Sequence[Point], speed: Record | None) -> Record:
    by_point: dict[Point, list[Record]] = {}
    for record in finished:
        by_point.setdefault(point_of(record), []).append(record)
    point, rates = lowest_point(finished), sorted({p.lr for p in tried})
    own = by_point[point]
    timed = speed or own[0]
    values = [r["val_loss"] for r in own]
    return {
        **point._asdict(),
        "lr_at_the_edge": point.lr in (rates[0], rates[-1]),
        "embeddings": _embeddings(own[0]),
        "tried": [len(rates), *(len({p[place] for p in tried}) for place in (1, 2))],
        "points": list(by_point),
        "val_loss": mean(values),
        "val_loss_std": stdev(values) if len(values) > 1 else None,
        "losses_by_seed": {str(r["seed"]): r["val_loss"] for r in own},
        "state_bytes": own[0]["state_bytes"],
        **last_ranks(own[0]),
        "speed_measured_alone": speed is not None,
        **{key: timed[key] for key in ("tokens_per_second", "step_seconds_median")},
        "step_seconds_p95": timed["step_seconds_p95"],
        "captured_energy_mean": own[0].get("captured_energy_mean"),
        "activation_error": activation_error(own[0]),
        "codec_error": own[0].get("codec_error"),
        "activation_bytes": own[0].get("activation_bytes"),
        "activation_bytes_per_component": own[0].get("activation_bytes_per_component"),
        "peak_device_bytes": max(r["peak_device_bytes"] for r in own),
        "peak_over_start_bytes": max(r["peak_device_bytes"] - r["start_device_bytes"] for r in own),
        "average_device_bytes": mean(r["average_device_bytes"] for r in own),
        "sampled_after_backward_alone": any("device_samples" not in r for r in own),
        "peak_host_bytes": max(r["peak_host_bytes"] for r in own),
        "pcie_bytes": own[0]["pcie_bytes"],
        "checkpoint_bytes": own[0]["checkpoint_bytes"],
        "key": own[0]["key"],
    }


def _embeddings(record: Record) -> float | None:
    """Factor on the rate of embeddings, head and vectors; None of a block whose own is not known or not one."""
    name, given = record["variant"], record.get("embedding_lr_scale")
    if given is not None or record["kind"] != "hmt":
        return given or 1.0
    if name not in VARIANTS or VARIANTS[name].options != record["options"]:
        return None
    return own_embedding_lr_scale(name, SHAPES[record["setting"]["model"]].hidden)


def _machine(info: Mapping[str, Any]) -> str:
    return str(info["device"] if info["gpus"] else info["cpu"])


# -- Markdown ---------------------------------------------------------------------------------------


def markdown(experiment: Mapping[str, Any]) -> str:
    """An experiment as text: where, on what, one line a variant, what was skipped and why."""
    setting, where = experiment["setting"], " and ".join(experiment["machines"]) or "?"
    lines = [
        f"## {experiment['name']}",
        "",
        f"{where}; {setting['model']} on {setting['data']}, {experiment['tokens']:,} tokens a run, "
        f"{setting['batch_rows']} x {setting['seq_length']} a step, {setting['dtype']}, weight decay "
        f"{weight_decay(setting)}; memory: {experiment['device_memory']}.",
        "",
        _row(HEADERS),
        _row(["---"] * len(HEADERS)),
    ]
    variants = experiment["variants"]
    ordered = sorted(variants, key=lambda name: variants[name]["val_loss"])
    lines += [_row([name, *_cells(variants[name])]) for name in ordered]
    lines += ["", *(f"- {name}: skipped, {why}." for name, why in experiment["skipped"].items())]
    if BASELINE not in variants:
        lines.append(f"- {BASELINE} has not run in this experiment.")
    return "\n".join(lines).rstrip()


def weight_decay(setting: Mapping[str, Any]) -> str:
    """In words; older cells have the same weight_decay at every learning rate."""
    return f"{setting['decay']:g} / lr" if "decay" in setting else f"{setting['weight_decay']:g}"


def _cells(line: Mapping[str, Any]) -> list[str]:
    states = line["state_bytes"]
    spread = "" if line["val_loss_std"] is None else f" ± {line['val_loss_std']:.4f}"
    about = "" if line["speed_measured_alone"] else "~"
    sampled = "^" if line["sampled_after_backward_alone"] else ""
    ranks = ""
    if line["rank_mean"] is not None:
        ranks = f"{line['rank_counts']}, mean {line['rank_mean']:.0f}"
    return [
        rate_text(line),
        f"{line['val_loss']:.4f}{spread}",
        str(len(line["losses_by_seed"])),
        _share(states["moments_share"]),
        _share(states["moments_and_bases_share"]),
        ranks,
        _share(line["captured_energy_mean"]),
        _share(line["activation_error"]),
        _errors(line["codec_error"]),
        _megabytes(line["activation_bytes"]),
        f"{about}{line['tokens_per_second']:.0f}",
        f"{about}{line['step_seconds_median']:.3f} / {line['step_seconds_p95']:.3f} s",
        _megabytes(line["peak_device_bytes"]),
        _megabytes(line["peak_over_start_bytes"]),
        sampled + _megabytes(line["average_device_bytes"]),
        _megabytes(line["peak_host_bytes"]),
        _megabytes(line["pcie_bytes"]),
        _megabytes(line["checkpoint_bytes"]),
    ]


def rate_text(line: Mapping[str, Any], mark: str = "*") -> str:
    """The point of a line, with the mark of a learning rate at the edge."""
    rate, *beside = str(point_of(line)).split(", ")
    return ", ".join([rate + mark * line["lr_at_the_edge"], *beside])


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _errors(of_components: Mapping[str, float] | None) -> str:
    found = (of_components or {}).items()
    return ", ".join(f"{name} {error:.4f}" for name, error in found if error is not None)


def _megabytes(value: float | None) -> str:
    return "" if value is None else f"{value / 2**20:.0f} MiB"


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
