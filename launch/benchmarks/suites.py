"""All suites by name, and what running one of their cases leaves behind."""

from __future__ import annotations

import time
from pathlib import Path

from benchmarks import activations, foundations, fpdt, offload, optimizer
from benchmarks.results import add_case, case_record, load_average
from benchmarks.setting import Setting, free_port, join_ranks

SUITES = {module.SUITE: module for module in (foundations, optimizer, activations, fpdt, offload)}


def run_case(suite: str, name: str, setting: Setting, folder: Path) -> Path:
    """Run one case in this process and add it to the folder's report."""
    load_before, begin = load_average(), time.monotonic()
    module = SUITES[suite]
    if name in module.USES_ENGINE:
        join_ranks(0, 1, free_port())
    result = module.CASES[name](setting)
    record = case_record(result, setting.record(), time.monotonic() - begin, load_before)
    return add_case(folder, suite, name, record)
