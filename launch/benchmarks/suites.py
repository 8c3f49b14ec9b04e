"""All suites by name, and what running one of their cases leaves behind."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from benchmarks import (
    activations,
    experts,
    foundations,
    fpdt,
    gpu,
    kernels,
    offload,
    optimizer,
    planner,
)
from benchmarks.results import CaseResult, add_case, case_record, load_average, samples_of
from benchmarks.setting import Setting, free_port, join_ranks

_MODULES = (foundations, optimizer, activations, planner, offload, fpdt, experts, kernels, gpu)
SUITES = {module.SUITE: module for module in _MODULES}


def why_skipped(suite: str, setting: Setting) -> str | None:
    """Why the cases of a suite cannot run here; None where they can."""
    if getattr(SUITES[suite], "NEEDS_GPU", False) and setting.device == "cpu" and not setting.toy:
        return "no CUDA device here; --toy --output FOLDER tries the code out on a CPU"
    return None


def options(suite: str) -> dict[str, dict[str, Any]]:
    """Options of a suite alone, as arguments of ``add_argument`` by name."""
    return getattr(SUITES[suite], "OPTIONS", {})


def run_case(suite: str, name: str, setting: Setting, folder: Path) -> Path:
    """Run one case in this process and add it to the folder's report, each time that it found something new."""
    load_before, begin = load_average(), time.monotonic()
    module = SUITES[suite]
    if name in module.USES_ENGINE:
        join_ranks(0, 1, free_port())
    earlier = (samples_of(folder, suite, name),) if hasattr(module, "KEEPS_SAMPLES") else ()
    results = module.CASES[name](setting, *earlier)
    path = folder
    for result in [results] if isinstance(results, CaseResult) else results:
        record = case_record(result, setting.record(), time.monotonic() - begin, load_before)
        path = add_case(folder, suite, name, record)
    if hasattr(module, "plot"):
        module.plot(json.loads(path.read_text(encoding="utf-8")), path.with_suffix(".svg"))
    return path
