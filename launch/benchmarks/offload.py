"""The numbers of offload: what waits in host memory or on an SSD, and what training pays for it."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks import basis_cache
from benchmarks.results import CaseResult
from benchmarks.setting import Setting

SUITE = "offload"
CASES: dict[str, Callable[[Setting], CaseResult]] = {**basis_cache.CASES}
USES_ENGINE = set(CASES)
