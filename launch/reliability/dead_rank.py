"""A rank that dies: the others stop, and the launcher says which it was."""

from __future__ import annotations

import random
import sys
import tempfile
from pathlib import Path

from benchmarks.setting import free_port
from reliability.features import config
from reliability.processes import run, write_order
from reliability.results import CaseReport

__all__ = ["run_case"]

_PLACES = ("before forward", "before backward", "before step")
_STAGES = ("ZeRO-0", "ZeRO-1", "ZeRO-2", "ZeRO-3")
_SECONDS = (
    300.0  # gloo's and NCCL's own timeout, which nothing may have to wait for, is half an hour
)
_STEPS = 100_000  # that is, until somebody dies


def run_case(seed: int, small: bool) -> CaseReport:
    """Two ranks under the ``deepspeed`` launcher; either is killed in an early step."""
    draw = random.Random(seed)
    cases = [(stage, place) for stage in _STAGES for place in _PLACES]
    cases = draw.sample(cases, 1) if small else cases
    report = CaseReport("one of two ranks gets SIGKILL in a step, at each ZeRO stage")
    seconds = []
    for stage, place in cases:
        with tempfile.TemporaryDirectory() as folder:
            rank = draw.randrange(2)
            seconds.append(_die(stage, place, rank, Path(folder), report))
    report.details["seconds_from_start_to_end"] = seconds
    return report


def _die(stage: str, place: str, rank: int, folder: Path, report: CaseReport) -> float:
    order = {
        "config": config(stage),
        "steps": _STEPS,
        "save_every": 0,
        "losses": str(folder / "losses.jsonl"),
        "die": {"rank": rank, "step": 2, "place": place},
    }
    command = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", "2"]
    command += ["--master_port", str(free_port()), "--module", "reliability.train_worker"]
    ended = run([*command, str(write_order(folder, order))], _SECONDS)
    said = f"--local_rank={rank}" in ended.output and "-9" in ended.output
    if ended.code in (None, 0) or not said:
        report.failures.append(
            f"{stage}, rank {rank} dies {place}: "
            f"{'hung' if ended.code is None else ended.code}\n{ended.output[-3000:]}"
        )
    report.count(
        "stopped, and the dead rank was named" if said and ended.code else "hung or silent"
    )
    return ended.seconds
