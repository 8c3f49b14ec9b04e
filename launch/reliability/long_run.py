"""Many steps: host and device bytes stay flat."""

from __future__ import annotations

import tempfile
from pathlib import Path
from statistics import linear_regression

from reliability.features import config
from reliability.processes import run_worker
from reliability.results import CaseReport

__all__ = ["run_case"]

_FEATURES = ("ZeRO-2", "activations")
_BYTES_A_STEP = (
    200.0  # growth below this is 2 MB in 10,000 steps, less than an allocator's own wandering
)


def run_case(seed: int, small: bool) -> CaseReport:
    """10,000 steps of the small model (500 in the small version), its memory read every hundredth of them."""
    del seed  # nothing here is random
    steps = 500 if small else 10_000
    report = CaseReport(f"{steps:,} steps, host and device bytes")
    for feature in _FEATURES[:1] if small else _FEATURES:
        with tempfile.TemporaryDirectory() as folder:
            order = {"config": config(feature), "steps": steps, "memory_every": steps // 100}
            (found,) = run_worker([order], Path(folder), seconds=7200.0)
        if "error" in found:
            report.failures.append(f"{feature}: {found['error']}")
            continue
        memory = found["memory"][20:]  # what is allocated once is allocated by then
        slope = linear_regression([m["step"] for m in memory], [m["host"] for m in memory]).slope
        report.details[feature] = {"bytes_a_step": slope, "memory": found["memory"]}
        if slope > _BYTES_A_STEP:
            report.failures.append(f"{feature}: host memory grows by {slope:.0f} bytes a step")
        report.count("flat" if slope <= _BYTES_A_STEP else "growing")
    return report
