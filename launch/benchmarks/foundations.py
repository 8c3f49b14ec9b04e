"""The numbers of the foundations: which case runs where, and what running one leaves behind."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.memory import memory
from benchmarks.projected import projected_backward
from benchmarks.results import CaseResult, add_case, case_record, load_average
from benchmarks.setting import Setting, free_port, join_ranks
from benchmarks.steps import galore, optimizer_step, refresh, whole_step
from benchmarks.two_ranks import communication, overlap

SUITE = "foundations"
CASES: dict[str, Callable[[Setting], CaseResult]] = {
    "projected_backward": projected_backward,
    "whole_step": whole_step,
    "galore": galore,
    "optimizer_step": optimizer_step,
    "memory": memory,
    "communication": communication,
    "refresh": refresh,
    "overlap": overlap,
}
USES_ENGINE = {"whole_step", "galore", "optimizer_step", "memory", "refresh"}


def run_case(name: str, setting: Setting, folder: Path) -> Path:
    """Run one case in this process and add it to the folder's report."""
    load_before, begin = load_average(), time.monotonic()
    if name in USES_ENGINE:
        join_ranks(0, 1, free_port())
    result = CASES[name](setting)
    record = case_record(result, setting.record(), time.monotonic() - begin, load_before)
    return add_case(folder, SUITE, name, record)
