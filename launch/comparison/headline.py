"""The README's table: finals and fine-tuning, every variant against AdamW at the same seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from comparison.cells import Store, read_json
from comparison.report import summaries
from comparison.stages import BASELINE

STAGES = {"final": "pretraining", "finetune": "fine-tuning"}
HEADERS = (
    "run",
    "variant",
    "moments",
    "lr",
    "validation loss",
    "seeds",
    "against AdamW",
    "tokens/s",
)


def headline(store: Store) -> str:
    """One line a variant, the lowest loss first, of a stage's experiment with the most variants.

    Raises:
        ValueError: no final and no fine-tuning has finished.
    """
    speed = _newest_speed(store.results)
    largest: dict[str, Mapping[str, Any]] = {}
    for experiment in sorted(summaries(store.records(), speed), key=_num_variants):
        largest[experiment["stage"]] = experiment
    experiments = [largest[stage] for stage in STAGES if stage in largest]
    rows = [row for experiment in experiments for row in _rows(experiment)]
    if not rows:
        raise ValueError(f"no final in {store.results}: run `python launch/compare.py final`")
    lines = [f"| {' | '.join(row)} |" for row in (HEADERS, ["---"] * len(HEADERS), *rows)]
    return "\n".join(lines)


def _num_variants(experiment: Mapping[str, Any]) -> int:
    return len(experiment["variants"])


def _newest_speed(folder: Path) -> Mapping[str, Any]:
    """Speeds are compared within one machine: the file that was measured into last."""
    files = [found for path in folder.glob("speed-*.json") if (found := read_json(path))]
    return max(files, key=_measured_at, default={})


def _measured_at(speed: Mapping[str, Any]) -> str:
    return max(own.get("measured_at", "") for own in speed.values())


def _rows(experiment: Mapping[str, Any]) -> Sequence[Sequence[str]]:
    variants = experiment["variants"]
    baseline = variants.get(BASELINE, {"losses_by_seed": {}})
    name = f"{STAGES[experiment['stage']]}, {experiment['tokens'] / 1e6:g}M tokens"
    ordered = sorted(variants, key=lambda variant: variants[variant]["val_loss"])
    return [[name, variant, *_cells(variants[variant], baseline)] for variant in ordered]


def _cells(line: Mapping[str, Any], baseline: Mapping[str, Any]) -> Sequence[str]:
    losses, others = line["losses_by_seed"], baseline["losses_by_seed"]
    shared = [seed for seed in losses if seed in others]
    against = mean(losses[s] / others[s] - 1 for s in shared) if shared else None
    spread = "" if line["val_loss_std"] is None else f" ± {line['val_loss_std']:.3f}"
    share = line["state_bytes"]["moments_share"]
    return [
        "" if share is None else f"{share:.3f}",
        f"{line['lr']:g}",
        f"{line['val_loss']:.3f}{spread}",
        str(len(losses)),
        "" if against is None or line is baseline else f"{against:+.1%}",
        f"{line['tokens_per_second']:.0f}" if line["speed_measured_alone"] else "",
    ]
