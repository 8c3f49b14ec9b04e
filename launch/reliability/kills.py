"""SIGKILL at random instants; what is resumed must end with the numbers of the run that nobody killed."""

from __future__ import annotations

import json
import random
import tempfile
from pathlib import Path
from typing import Any

from reliability.features import FEATURES, config
from reliability.forks import fork_ranks
from reliability.results import CaseReport

__all__ = ["run_case"]

_SECONDS = 300.0
_STEPS, _SAVE_EVERY = 12, 2
_TWO_RANKS = ("ZeRO-2", "ZeRO-3")


def run_case(seed: int, small: bool) -> CaseReport:
    """Every feature is killed ten times before it may end; one feature twice in the small version."""
    draw, kills = random.Random(seed), 2 if small else 10
    runs = [(feature, 1) for feature in FEATURES] + [(feature, 2) for feature in _TWO_RANKS]
    runs = draw.sample(runs, 1) if small else runs
    report = CaseReport(
        f"SIGKILL at {kills} random instants of each of {len(runs)} runs of {_STEPS} steps, one after "
        "another, each resumed"
    )
    for feature, world in runs:
        with tempfile.TemporaryDirectory() as folder:
            _one(feature, world, kills, draw, Path(folder), report)
    return report


def _one(
    feature: str, world: int, kills: int, draw: random.Random, folder: Path, report: CaseReport
) -> None:
    name = f"{feature}, {world} ranks"
    whole = fork_ranks(_order(feature, folder / "whole"), world, _SECONDS)
    expected = _losses(folder / "whole")
    if any(ended.code != 0 for ended in whole):
        report.failures.append(f"{name}, nobody killed: {whole[0].code}\n{whole[0].output[-3000:]}")
        return
    order = _order(feature, folder / "killed")
    for _ in range(kills):
        at = draw.uniform(0.1, 0.9) * whole[0].seconds
        ended = fork_ranks(order, world, _SECONDS, kill_after=at)
        report.count("killed" if ended[0].code == -9 else "ended before its kill")
    last = fork_ranks(order, world, _SECONDS)
    found = _losses(folder / "killed")
    if any(ended.code != 0 for ended in last):
        report.failures.append(f"{name}, resumed: {last[0].code}\n{last[0].output[-3000:]}")
    elif found != expected:
        report.failures.append(f"{name}: losses {found} instead of {expected}")
    else:
        report.count("resumed to the same numbers")


def _order(feature: str, folder: Path) -> dict[str, Any]:
    folder.mkdir()
    return {
        "config": config(feature),
        "steps": _STEPS,
        "save_every": _SAVE_EVERY,
        "checkpoints": str(folder / "checkpoints"),
        "losses": str(folder / "losses.jsonl"),
    }


def _losses(folder: Path) -> dict[int, float]:
    """The last that was written of each step: a step after the last checkpoint is done again."""
    path, found = folder / "losses.jsonl", {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue  # killed within the line, or an empty one
        found[record["step"]] = record["loss"]
    return found
