"""Starting processes that may die or hang, and seeing how they end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.setting import free_port

__all__ = ["Ended", "environment", "run", "run_ranks", "start_rank"]

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


def start_rank(
    command: Sequence[str], rank: int, world: int, port: int, log: Path
) -> subprocess.Popen[bytes]:
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_SIZE": world}
    place |= {"LOCAL_WORLD_SIZE": world, "MASTER_PORT": port}
    env = environment(MASTER_ADDR="127.0.0.1", **{name: str(n) for name, n in place.items()})
    with open(log, "wb") as file:
        return subprocess.Popen(
            list(command), env=env, stdout=file, stderr=file, start_new_session=True
        )


def run_ranks(command: Sequence[str], world: int, timeout: float, folder: Path) -> list[Ended]:
    """The same command on every rank; those alive after ``timeout`` seconds are killed."""
    begin, port = time.monotonic(), free_port()
    logs = [folder / f"rank{rank}.log" for rank in range(world)]
    processes = [start_rank(command, r, world, port, log) for r, log in enumerate(logs)]
    ended: dict[int, tuple[int | None, float]] = {}
    while len(ended) < world:
        passed = time.monotonic() - begin
        for rank, process in enumerate(processes):
            if rank in ended:
                continue
            if process.poll() is not None:
                ended[rank] = process.returncode, passed
            elif passed > timeout:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                ended[rank] = None, passed
        time.sleep(0.05)
    texts = [log.read_text(encoding="utf-8", errors="replace") for log in logs]
    return [Ended(*ended[r][:1], texts[r], ended[r][1]) for r in range(world)]
