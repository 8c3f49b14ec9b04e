"""Projected backward, optimizer and ZeRO: which case runs where."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.memory import memory
from benchmarks.projected import projected_backward
from benchmarks.results import CaseResult
from benchmarks.setting import Setting
from benchmarks.steps import galore, muon_step, optimizer_step, refresh, whole_step
from benchmarks.two_ranks import communication, overlap

SUITE = "foundations"
CASES: dict[str, Callable[[Setting], CaseResult]] = {
    "projected_backward": projected_backward,
    "whole_step": whole_step,
    "galore": galore,
    "optimizer_step": optimizer_step,
    "muon_step": muon_step,
    "memory": memory,
    "communication": communication,
    "refresh": refresh,
    "overlap": overlap,
}
USES_ENGINE = {"whole_step", "galore", "optimizer_step", "muon_step", "memory", "refresh"}
