"""A rank that dies: the others stop by themselves, and the ``deepspeed`` launcher says which it was."""

from __future__ import annotations

import random
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.setting import free_port
from reliability.features import config
from reliability.forks import fork_ranks
from reliability.processes import run, write_order
from reliability.results import CaseReport

__all__ = ["run_case"]

_PLACES = ("before forward", "before backward", "before step")
_STAGES = ("ZeRO-0", "ZeRO-1", "ZeRO-2", "ZeRO-3")
_SECONDS = (
    180.0  # gloo's and NCCL's own timeout, which nothing may have to wait for, is half an hour
)
_STEPS = 100_000  # that is, until somebody dies


def run_case(seed: int, small: bool) -> CaseReport:
    """Of two ranks either is killed in the third step, at every stage and in every part of a step.

    One of them again under the launcher, which also has to name the rank.
    """
    draw = random.Random(seed)
    cases = [(stage, place) for stage in _STAGES for place in _PLACES]
    cases = draw.sample(cases, 2) if small else cases
    report = CaseReport(
        "one of two ranks gets SIGKILL in a step, at each ZeRO stage; once under the launcher"
    )
    report.details["seconds_from_start_to_end"] = []
    for stage, place in cases:
        with tempfile.TemporaryDirectory() as folder:
            _die(stage, place, draw.randrange(2), Path(folder), report)
    with tempfile.TemporaryDirectory() as folder:
        _die_launched(*draw.choice(cases), draw.randrange(2), Path(folder), report)
    return report


def _order(stage: str, place: str, rank: int, folder: Path) -> dict[str, Any]:
    return {
        "config": config(stage),
        "steps": _STEPS,
        "save_every": 0,
        "losses": str(folder / "losses.jsonl"),
        "die": {"rank": rank, "step": 2, "place": place},
    }


def _die(stage: str, place: str, rank: int, folder: Path, report: CaseReport) -> None:
    ended = fork_ranks(_order(stage, place, rank, folder), 2, _SECONDS)
    other = ended[1 - rank]
    report.details["seconds_from_start_to_end"].append(other.seconds)
    stopped = ended[rank].code == -9 and other.code not in (None, 0)
    if not stopped:
        codes = [e.code for e in ended]
        report.failures.append(f"{stage}, {rank} dies {place}: {codes}\n{other.output[-3000:]}")
    report.count("the other stopped by itself" if stopped else "the other hung")


def _die_launched(stage: str, place: str, rank: int, folder: Path, report: CaseReport) -> None:
    order = write_order(folder, _order(stage, place, rank, folder))
    command = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", "2"]
    command += ["--master_port", str(free_port()), "--module", "reliability.train_worker"]
    ended = run([*command, str(order)], _SECONDS)
    named = f"--local_rank={rank}" in ended.output and "-9" in ended.output
    if ended.code in (None, 0) or not named:
        how = "hung" if ended.code is None else ended.code
        report.failures.append(
            f"{stage}, {rank} dies {place}, launched: {how}\n{ended.output[-3000:]}"
        )
    report.count(
        "launched: stopped, the dead rank named"
        if named and ended.code
        else "launched: hung or silent"
    )
