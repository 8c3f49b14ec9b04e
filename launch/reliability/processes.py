"""Starting processes that may die or hang, and seeing how they end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Ended", "environment", "run", "run_worker", "write_order"]

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Ended:
    """How a process ended. code: negative for a signal, None for one that hung and was killed."""

    code: int | None
    output: str
    seconds: float


def environment(**more: str) -> dict[str, str]:
    """Of a process on one core of the CPU that finds this checkout."""
    paths = [str(ROOT), str(ROOT / "launch"), os.environ.get("PYTHONPATH", "")]
    own = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, **own, "PATH": path, "PYTHONPATH": os.pathsep.join(paths), **more}


def run(
    command: Sequence[str],
    timeout: float,
    env: Mapping[str, str] | None = None,
    kill_after: float | None = None,
) -> Ended:
    """Run to the end; after ``timeout`` seconds it and its children are killed.

    Args:
        kill_after: seconds until it is killed on purpose (SIGKILL), as by the kernel for want of memory.
    """
    begin = time.monotonic()
    process = subprocess.Popen(
        list(command),
        env=dict(env or environment()),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    hung = False
    try:
        output, _ = process.communicate(timeout=kill_after or timeout)
    except subprocess.TimeoutExpired:
        hung = kill_after is None
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
    return Ended(None if hung else process.returncode, output, time.monotonic() - begin)


def write_order(folder: Path, order: Mapping[str, Any]) -> Path:
    """The file that ``train_worker`` is given."""
    path = folder / "order.json"
    path.write_text(json.dumps(order), encoding="utf-8")
    return path


def run_worker(
    orders: Sequence[Mapping[str, Any]], folder: Path, seconds: float = 1800.0
) -> list[dict[str, Any]]:
    """What ``order_worker`` answers to each order; an error to those that it did not come to."""
    asked, answered = folder / "orders.json", folder / "answers.jsonl"
    asked.write_text(json.dumps(list(orders)), encoding="utf-8")
    answered.unlink(missing_ok=True)
    command = [sys.executable, "-m", "reliability.order_worker", str(asked), str(answered)]
    ended = run(command, seconds)
    found = []
    if answered.exists():
        found = [json.loads(line) for line in answered.read_text(encoding="utf-8").splitlines()]
    ending = "hung" if ended.code is None else f"ended with {ended.code}"
    missing = {"error": f"the worker {ending}: {ended.output[-2000:]}"}
    return found + [missing] * (len(orders) - len(found))
