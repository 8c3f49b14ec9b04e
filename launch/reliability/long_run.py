"""Many steps: host and device bytes stay flat."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from math import inf
from pathlib import Path
from statistics import linear_regression
from typing import Any

from reliability.features import config
from reliability.processes import run_worker
from reliability.results import CaseReport

__all__ = ["run_case", "run_fpdt_case", "run_vertical_case"]

_OPTIMIZER = {**config("ZeRO-2")["hmt"]["optimizer"], "update_interval": 20}

# What may grow by how much a step: a million steps gain 25 MB at most. An object that is kept is a block, its place in
# a long list 8 bytes from malloc, and a plain torch loop on this model gains 4 to 10 of them in its first 600 steps.
# Resident bytes wander with the arenas of both allocators, which hold up to megabytes.
_MOST = {"tensor_bytes": 25.0, "python_blocks": 0.1, "host_bytes": 2000.0}


def run_case(seed: int, small: bool) -> CaseReport:
    """On at once what keeps something from one step to the next, but for FPDT, which goes with little of it."""
    del seed  # nothing here is random
    return _run(
        small,
        "ZeRO-3, bf16, states and bases on the host, swapped and INT8 activations, monitor, snapshots",
        lambda folder, steps: config(
            "ZeRO-3",
            bf16={"enabled": True},
            zero_optimization={"stage": 3, "offload_optimizer": {"device": "cpu"}},
            csv_monitor={"enabled": True, "output_path": str(folder), "job_name": "long"},
            hmt={
                "optimizer": _OPTIMIZER,
                "basis_cache": {"history": 1},
                "activations": {"policy": {"mlp_intermediate": "swap_host", "layer_input": "int8"}},
                "snapshot": {"path": str(folder / "snapshots"), "interval": steps // 10},
            },
        ),
    )


def run_fpdt_case(seed: int, small: bool) -> CaseReport:
    """Layers in chunks."""
    del seed
    return _run(
        small,
        "ZeRO-2, fp16, FPDT, DeepSpeed's timers",
        lambda *_: config(
            "ZeRO-2",
            fp16={"enabled": True},
            wall_clock_breakdown=True,
            hmt={"optimizer": _OPTIMIZER, "fpdt": {"chunk_size": 8}},
        ),
    )


def run_vertical_case(seed: int, small: bool) -> CaseReport:
    """Layer by layer over three micro-batches."""
    del seed
    hmt = config("vertical")["hmt"]
    return _run(
        small,
        "ZeRO-3, bf16, vertical accumulation, weights and layers' inputs (INT8) on the host, INT8 states, snapshots",
        lambda folder, steps: config(
            "vertical",
            hmt={
                **hmt,
                "optimizer": {**hmt["optimizer"], "update_interval": 20},
                "snapshot": {"path": str(folder / "snapshots"), "interval": steps // 10},
            },
        ),
    )


def _run(small: bool, features: str, whole: Callable[[Path, int], dict[str, Any]]) -> CaseReport:
    """10,000 steps of the small model, its memory read every hundredth of them.

    The 500 of the small version are not judged: the histories of ranks alone fill for 320.
    """
    steps = 500 if small else 10_000
    report = CaseReport(f"{steps:,} steps, host and device bytes: {features}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        order = {
            "config": whole(folder, steps),
            "layers": 1,
            "steps": steps,
            "memory_every": steps // 100,
            "save_every": steps // 10,
            "checkpoints": str(folder / "checkpoints"),
        }
        (found,) = run_worker([order], folder, seconds=7200.0)
    _judge(found, report, {} if small else _MOST)
    return report


def _judge(found: dict[str, Any], report: CaseReport, most: Mapping[str, float]) -> None:
    if "error" in found:
        report.failures.append(found["error"])
        return
    memory = found["memory"][20:]  # what is allocated once is allocated by then
    steps = [m["step"] for m in memory]
    slopes = {k: linear_regression(steps, [m[k] for m in memory]).slope for k in _MOST}
    report.details = {"growth_a_step": slopes, "memory": found["memory"]}
    for kind, slope in slopes.items():
        growing = slope > most.get(kind, inf)
        if growing:
            report.failures.append(f"{kind} grow by {slope:.3g} a step")
        trend = "growing" if growing else "flat"
        report.count(f"{kind} {trend if most else 'not judged'}")
