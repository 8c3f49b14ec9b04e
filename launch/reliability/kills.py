"""SIGKILL at random instants; what is resumed must end with the numbers of the run that nobody killed."""

from __future__ import annotations

import json
import random
import tempfile
from pathlib import Path
from typing import Any

from reliability.features import FEATURES, config
from reliability.forks import fork_ranks
from reliability.processes import Ended
from reliability.results import CaseReport

__all__ = ["run_case", "run_vertical_case"]

_SECONDS = 300.0
_STEPS, _SAVE_EVERY = 24, 2
_TWO_RANKS = ("ZeRO-2", "ZeRO-3")


def run_case(seed: int, small: bool) -> CaseReport:
    """Every feature is killed ten times; one feature twice in the small version."""
    draw, kills = random.Random(seed), 2 if small else 10
    runs = [(feature, 1) for feature in FEATURES] + [(feature, 2) for feature in _TWO_RANKS]
    runs = draw.sample(runs, 1) if small else runs
    report = CaseReport(
        f"SIGKILL at {kills} random instants of each of {len(runs)} kinds of runs of {_STEPS} steps, one "
        "after another, each resumed"
    )
    for feature, world in runs:
        with tempfile.TemporaryDirectory() as folder:
            _one(feature, world, kills, draw, Path(folder), report)
    return report


def run_vertical_case(seed: int, small: bool) -> CaseReport:
    """Vertical accumulation, resumed from snapshots."""
    draw, kills = random.Random(seed), 2 if small else 50
    report = CaseReport(
        f"SIGKILL at {kills} random instants of runs of {_STEPS} steps, one after another, each resumed from its newest "
        "snapshot: vertical accumulation, weights in host memory, no masters, INT8 states, layers' inputs in INT8 on the host"
    )
    with tempfile.TemporaryDirectory() as folder:
        _one("vertical", 1, kills, draw, Path(folder), report)
    return report


def _one(
    feature: str, world: int, kills: int, draw: random.Random, folder: Path, report: CaseReport
) -> None:
    """A run that ends before its next kill is compared, and another one begun, until all kills are used up."""
    name = f"{feature}, {world} ranks"
    whole = fork_ranks(_order(feature, folder / "whole"), world, _SECONDS)
    expected = _losses(folder / "whole")
    if any(ended.code != 0 for ended in whole):
        report.failures.append(f"{name}, nobody killed: {whole[0].code}\n{whole[0].output[-3000:]}")
        return
    run = 0
    while kills:
        run, own = run + 1, folder / f"killed-{run}"
        killed, last = _kill(_order(feature, own), world, kills, whole[0].seconds, draw)
        kills -= killed
        report.counts["killed"] = report.counts.get("killed", 0) + killed
        if any(ended.code != 0 for ended in last):
            report.failures.append(f"{name}, resumed: {last[0].code}\n{last[0].output[-3000:]}")
            return
        found = _losses(own)
        if found != expected:
            report.failures.append(f"{name}: losses {found} instead of {expected}")
        report.count("ended with the same numbers" if found == expected else "with other numbers")


def _kill(
    order: dict[str, Any], world: int, most: int, seconds: float, draw: random.Random
) -> tuple[int, list[Ended]]:
    """Kill and resume at most that often: (how often it was killed, how its last start ended).

    Args:
        seconds: of the run that nobody killed; an instant is drawn within them at each start.
    """
    for killed in range(most):
        at = draw.uniform(0.1, 0.9) * seconds
        ended = fork_ranks(order, world, _SECONDS, kill_after=at)
        if all(e.code != -9 for e in ended):
            return killed, ended
    return most, fork_ranks(order, world, _SECONDS)


def _order(feature: str, folder: Path) -> dict[str, Any]:
    folder.mkdir()
    whole = config(feature)
    if feature == "vertical":
        snapshot = {"path": str(folder / "checkpoints"), "interval": _SAVE_EVERY}
        whole["hmt"]["snapshot"] = snapshot
    return {
        "config": whole,
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
