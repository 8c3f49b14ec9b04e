"""The optimizer's parts: which case runs where."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.later_energy import later_energy
from benchmarks.range_finder import range_finder
from benchmarks.rank_rules import rank_rules
from benchmarks.results import CaseResult
from benchmarks.setting import Setting

SUITE = "optimizer"
CASES: dict[str, Callable[[Setting], CaseResult]] = {
    "range_finder": range_finder,
    "rank_rules": rank_rules,
    "later_energy": later_energy,
}
USES_ENGINE: set[str] = set()
