"""NaN and inf in a batch: the step is skipped and said to be, in every precision."""

from __future__ import annotations

import json
import random
import tempfile
from pathlib import Path
from typing import Any

from reliability.features import config
from reliability.processes import run_worker
from reliability.results import CaseReport

__all__ = ["run_case"]

_STEPS = 6
_PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True}},
}
_FEATURES = ("ZeRO-2", "ZeRO-3", "states on the host", "activations", "APOLLO")


def run_case(seed: int, small: bool) -> CaseReport:
    """One loss of a run is NaN or inf, in an ordinary step and in one that refreshes bases."""
    tried = [
        (precision, feature, bad, at)
        for precision in _PRECISIONS
        for feature in _FEATURES
        for bad in ("nan", "inf")
        for at in (1, 3)
    ]
    tried = random.Random(seed).sample(tried, 3) if small else tried
    report = CaseReport("one NaN or inf loss in six steps, by precision, feature and step")
    with tempfile.TemporaryDirectory() as folder:
        orders = [
            {
                "config": config(feature, **_PRECISIONS[precision]),
                "steps": _STEPS,
                "bad": {"step": at, "value": bad},
                "feature": f"{feature} in {precision}",
            }
            for precision, feature, bad, at in tried
        ]
        for order, found in zip(orders, run_worker(orders, Path(folder)), strict=True):
            _judge(order, found, report)
    return report


def _judge(order: dict[str, Any], found: dict[str, Any], report: CaseReport) -> None:
    name = f"{order['feature']}, {json.dumps(order['bad'])}"
    finite = [value is not None for value in found.get("losses", [])]
    expected = [step != order["bad"]["step"] for step in range(_STEPS)]
    if "error" in found:
        report.failures.append(f"{name}: {found['error']}")
    elif (
        finite == expected
        and (found["skipped"], found["unchanged"]) == (1, True)
        and "a gradient is not finite: this step is skipped" in found["said"]
    ):
        report.count("skipped and said, weights unchanged, went on")
    else:
        report.failures.append(f"{name}: {found}")
