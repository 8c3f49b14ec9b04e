"""A disk that fills up while a checkpoint is written: an error on every rank, the one before it intact."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from typing import Any

from reliability.features import config
from reliability.forks import fork_ranks
from reliability.results import CaseReport

__all__ = ["run_case"]

_SECONDS = 120.0
_FULL = "was not saved"


def run_case(seed: int, small: bool) -> CaseReport:
    """No file may grow beyond a limit (RLIMIT_FSIZE) from the second checkpoint on, on one of the ranks."""
    draw = random.Random(seed)
    worlds = (2,) if small else (1, 1, 2, 2, 2, 2)
    features = ("ZeRO-2",) if small else ("ZeRO-0", "ZeRO-2", "ZeRO-3", "states on the host")
    report = CaseReport("the second checkpoint meets a full disk on one of one or two ranks")
    for feature in features:
        for world in worlds:
            with tempfile.TemporaryDirectory() as folder:
                rank, limit = draw.randrange(world), draw.choice([0, 1000, 20_000])
                _fill(feature, world, rank, limit, Path(folder), report)
    return report


def _fill(
    feature: str, world: int, rank: int, limit: int, folder: Path, report: CaseReport
) -> None:
    order: dict[str, Any] = {
        "config": config(feature),
        "steps": 4,
        "save_every": 2,
        "checkpoints": str(folder / "checkpoints"),
        "losses": str(folder / "losses.jsonl"),
        "full_disk": {"rank": rank, "step": 3, "limit": limit},
    }
    name = f"{feature}, {world} ranks, rank {rank} may write {limit} bytes"
    ended = fork_ranks(order, world, _SECONDS)
    if any(e.code is None for e in ended):
        report.failures.append(f"{name}: hung\n{ended[0].output[-2000:]}")
        return
    silent = [e.output[-2000:] for e in ended if _FULL not in e.output]
    tags = sorted(path.name for path in (folder / "checkpoints").iterdir() if path.is_dir())
    again = fork_ranks({**order, "full_disk": None}, world, _SECONDS)
    resumed = all(e.code == 0 for e in again)
    if silent or tags != ["global_step2"] or not resumed:
        report.failures.append(
            f"{name}: {tags}, resumed {resumed}\n{silent or again[0].output[-2000:]}"
        )
    report.count("refused on every rank, resumed from the one before" if not silent else "silent")
