"""Finals and fine-tuning as Markdown tables: every variant against AdamW at the same seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from comparison.cells import Store
from comparison.frontier import losses_by_seed, markdown_table, number
from comparison.report import newest_speed, rate_text, summaries
from comparison.stages import BASELINE
from comparison.variants import VARIANTS

STAGES = {"final": "pretraining", "finetune": "fine-tuning"}
HEADERS = (
    "run",
    "variant",
    "moments",
    "with bases",
    "over start",
    "lr",
    "validation loss",
    "by seed",
    "against AdamW, by seed",
    "tokens/s",
)


def headline(store: Store) -> str:
    """One line a variant of the table, of a stage's experiment with the most variants, seeds from the lowest.

    Raises:
        ValueError: no final and no fine-tuning has finished.
    """
    largest = _largest(store)
    experiments = [largest[stage] for stage in STAGES if stage in largest]
    rows = [row for experiment in experiments for row in _rows(experiment)]
    if not rows:
        raise ValueError(f"no final in {store.results}: run `python launch/compare.py final`")
    return markdown_table(HEADERS, rows)


def _largest(store: Store) -> dict[str, Mapping[str, Any]]:
    """By stage: the experiment with the most variants."""
    largest: dict[str, Mapping[str, Any]] = {}
    experiments = summaries(store.records(), newest_speed(store.results))
    for experiment in sorted(experiments, key=_num_variants):
        largest[experiment["stage"]] = experiment
    return largest


def _num_variants(experiment: Mapping[str, Any]) -> int:
    return len(experiment["variants"])


def _rows(experiment: Mapping[str, Any]) -> Sequence[Sequence[str]]:
    """Variants that ran at every seed of AdamW's first: means over other seeds are of other runs."""
    variants = {name: line for name, line in experiment["variants"].items() if name in VARIANTS}
    baseline = variants.get(BASELINE, {"losses_by_seed": {}})
    seeds = sorted(baseline["losses_by_seed"])
    name = f"{STAGES[experiment['stage']]}, {experiment['tokens'] / 1e6:g}M tokens"

    def place(variant: str) -> tuple[bool, float]:
        line = variants[variant]
        return any(seed not in line["losses_by_seed"] for seed in seeds), line["val_loss"]

    return [[name, v, *_cells(variants[v], baseline)] for v in sorted(variants, key=place)]


def _cells(line: Mapping[str, Any], baseline: Mapping[str, Any]) -> Sequence[str]:
    by_seed, against = losses_by_seed(line, baseline)
    return [
        number(line["state_bytes"]["moments_share"], ".3f"),
        number(line["state_bytes"]["moments_and_bases_share"], ".3f"),
        f"{line['peak_over_start_bytes'] / 2**20:.0f} MiB",
        rate_text(line, mark=""),
        f"{line['val_loss']:.3f}",
        by_seed,
        against,
        f"{line['tokens_per_second']:.0f}" if line["speed_measured_alone"] else "",
    ]
