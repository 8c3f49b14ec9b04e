"""SIGKILL at random instants; what is resumed must end with the numbers of the run that nobody killed."""

from __future__ import annotations

import json
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.setting import free_port
from reliability.features import FEATURES, config
from reliability.processes import Ended, environment, run, write_order
from reliability.results import CaseReport

__all__ = ["run_case"]

_SECONDS = 300.0
_STEPS, _SAVE_EVERY = 12, 2


def run_case(seed: int, small: bool) -> CaseReport:
    """Every feature is killed twice before it may end; one feature once in the small version."""
    draw = random.Random(seed)
    features = draw.sample(list(FEATURES), 1) if small else list(FEATURES)
    kills = 1 if small else 2
    report = CaseReport(
        f"SIGKILL at {kills} random instants of each of {len(features)} features' runs, then resumed"
    )
    for feature in features:
        with tempfile.TemporaryDirectory() as folder:
            _one(feature, kills, draw, Path(folder), report)
    return report


def _one(feature: str, kills: int, draw: random.Random, folder: Path, report: CaseReport) -> None:
    whole = _train(_order(feature, folder / "whole"))
    expected = _losses(folder / "whole")
    if whole.code != 0:
        report.failures.append(f"{feature}, nobody killed: {whole.code}\n{whole.output[-3000:]}")
        return
    order = _order(feature, folder / "killed")
    for _ in range(kills):
        at = draw.uniform(0.3, 1.0) * whole.seconds
        ended = _train(order, kill_after=at)
        report.count("killed" if ended.code == -9 else "ended before its kill")
    last = _train(order)
    found = _losses(folder / "killed")
    if last.code != 0:
        report.failures.append(f"{feature}, resumed: {last.code}\n{last.output[-3000:]}")
    elif found != expected:
        report.failures.append(f"{feature}: losses {found} instead of {expected}")
    else:
        report.count("resumed to the same numbers")


def _order(feature: str, folder: Path) -> Path:
    folder.mkdir()
    order: dict[str, Any] = {
        "config": config(feature),
        "steps": _STEPS,
        "save_every": _SAVE_EVERY,
        "checkpoints": str(folder / "checkpoints"),
        "losses": str(folder / "losses.jsonl"),
    }
    return write_order(folder, order)


def _train(order: Path, kill_after: float | None = None) -> Ended:
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    env = environment(**place, MASTER_PORT=str(free_port()))
    command = [sys.executable, "-m", "reliability.train_worker", str(order)]
    return run(command, _SECONDS, env, kill_after)


def _losses(folder: Path) -> dict[int, float]:
    """The last that was written of each step: a step after the last checkpoint is done again."""
    path, found = folder / "losses.jsonl", {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        record = json.loads(line)
        found[record["step"]] = record["loss"]
    return found
