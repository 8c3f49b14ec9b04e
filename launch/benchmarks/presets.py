"""What each preset makes of a 7B on one GPU, as the planner counts it, and the README's table of presets."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.results import CaseResult, Measurement
from benchmarks.setting import Setting
from comparison.cells import Point, Store, point_of
from comparison.report import Record, newest_speed, summaries
from comparison.stages import BASELINE
from hmt_deepspeed.config import HMTConfig
from hmt_deepspeed.config.components import COMPONENTS, PAPER_POLICY, Choice, Component
from hmt_deepspeed.config.presets import PRESETS
from hmt_deepspeed.planner.advise.advise import evaluate
from hmt_deepspeed.planner.advise.setups import Request
from hmt_deepspeed.planner.hardware import named_machine
from hmt_deepspeed.planner.model.models import model_shape
from hmt_deepspeed.planner.run.modes import OptimizerMode
from hmt_deepspeed.planner.run.problem import RunSetup
from hmt_deepspeed.zero.planning.facts import optimizer_mode

GIB = 2**30
VOCABULARY, LENGTH = 32000, 2048
TOKENS = 1_000_000  # of the runs whose losses are shown
# The comparison's variant of each row.
ROWS = {"AdamW": BASELINE, "balanced": "hmt", "memory": "hmt_memory", "paper": "hmt_paper"}
NOTE = (
    f"7B, vocabulary of {VOCABULARY:,}, one sequence of {LENGTH:,} tokens, bf16, ZeRO stage 2 on one GPU; ranks that "
    "are chosen count as the largest candidate"
)
_ALL_KEPT: Mapping[Component, Choice] = {
    **dict.fromkeys(COMPONENTS, "keep"),
    "projected_inputs": "project",
}


def _peak(mode: OptimizerMode, policy: Mapping[Component, Choice]) -> float:
    """Bytes of the GPU, with as much memory as it takes."""
    machine = replace(named_machine("h200", num_gpus=1), gpu_memory=2**40)
    request = Request(
        model_shape("7b", VOCABULARY), machine, LENGTH, modes=(mode,), fixed=policy, nvme=False
    )
    answer = evaluate(request, RunSetup(zero_stage=2), mode)
    return answer.estimate.peak("gpu")


def presets(setting: Setting) -> CaseResult:
    result = CaseResult({"presets": PRESETS})
    adamw = OptimizerMode(method="adamw")
    peaks = {"AdamW": _peak(adamw, _ALL_KEPT)}
    for preset in PRESETS:
        config = HMTConfig.from_block({"preset": preset})
        mode = optimizer_mode(config.optimizer.model_dump())
        peaks[preset] = _peak(mode, PAPER_POLICY if config.gives("activations") else _ALL_KEPT)
    result.measurements = [
        Measurement(f"{name}: GPU memory of a 7B", peak, "bytes", note=NOTE)
        for name, peak in peaks.items()
    ]
    return result


# -- the README's table -------------------------------------------------------------------------------

HEADERS = (
    "preset",
    "loss against AdamW, by seed",
    "moments",
    "with bases",
    "a 7B on one GPU",
    "tokens/s, of AdamW's",
)


def preset_table(results: Path) -> str:
    """A line a preset: loss and bytes of the comparison's runs, the planner's peak for a 7B, the measured speed.

    Raises:
        ValueError: `results`/MACHINE/planner.json has no presets.
    """
    peaks = _peaks(results)
    store = Store(results / "compare", results)
    lines = _lines(store)
    baseline = lines.get(BASELINE, {})
    rows = []
    for name, variant in ROWS.items():
        line = lines.get(variant)
        peak = f"{peaks[name] / GIB:.0f} GiB"
        rows.append((name, *_compared(line, baseline), peak, _speed(line, baseline)))
    cells = (HEADERS, ["---"] * len(HEADERS), *rows)
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


def _peaks(results: Path) -> dict[str, float]:
    reports = [json.loads(path.read_text("utf-8")) for path in results.glob("*/planner.json")]
    cases = [report["cases"]["presets"] for report in reports if "presets" in report["cases"]]
    if not cases:
        raise ValueError(f"no presets in {results}: run `python launch/bench.py planner`")
    newest = max(cases, key=lambda case: str(case["measured_at"]))
    return {m["label"].partition(":")[0]: m["value"] for m in newest["measurements"]}


def _lines(store: Store) -> Mapping[str, Any]:
    """Of the sweep over `TOKENS` that has most of the rows' variants: AdamW at its best, all others at its learning rate, with
    their own rate of embeddings and the setting's decay, which is what the presets are.
    """
    records = store.records()
    baseline = _widest_sweep(records, store).get(BASELINE, {})
    at_its_rate = Point(baseline.get("lr"))
    return _widest_sweep(
        [r for r in records if r["variant"] == BASELINE or point_of(r) == at_its_rate], store
    )


def _widest_sweep(records: Sequence[Record], store: Store) -> Mapping[str, Any]:
    found = [
        experiment["variants"]
        for experiment in summaries(records, newest_speed(store.results))
        if experiment["stage"] == "sweep" and experiment["tokens"] == TOKENS
    ]
    return max(found, key=lambda variants: len(set(variants) & set(ROWS.values())), default={})


def _compared(line: Mapping[str, Any] | None, baseline: Mapping[str, Any]) -> tuple[str, str, str]:
    if line is None:
        return "", "", ""
    bytes_held, others = line["state_bytes"], baseline["losses_by_seed"]
    against = [
        f"{loss / others[seed] - 1:+.1%}"
        for seed, loss in sorted(line["losses_by_seed"].items())
        if seed in others
    ]
    shown = "" if line is baseline else " / ".join(against)
    return shown, *(
        f"{bytes_held[key]:.2f}" for key in ("moments_share", "moments_and_bases_share")
    )


def _speed(line: Mapping[str, Any] | None, baseline: Mapping[str, Any]) -> str:
    """Blank where the two were not timed together."""
    if line is None or not (line["speed_measured_alone"] and baseline["speed_measured_alone"]):
        return ""
    return f"{line['tokens_per_second'] / baseline['tokens_per_second']:.2f}"


CASES: dict[str, Callable[[Setting], CaseResult]] = {"presets": presets}
