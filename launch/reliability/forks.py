"""Ranks as forks of this process: imported once, they start in milliseconds and can be killed at any instant."""

from __future__ import annotations

import fcntl
import os
import signal
import sys
import time
import traceback
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from deepspeed.ops.op_builder import CPUAdamBuilder, ShareMemCommBuilder

import hmt_deepspeed.zero.engine.engine  # noqa: F401 - each fork would import it anew
from benchmarks.setting import free_port
from reliability import train_worker
from reliability.processes import Ended

__all__ = ["fork_ranks"]

_MOST_OUTPUT = 1 << 20  # bytes of a pipe; files are what a full disk is played with


def fork_ranks(
    order: Mapping[str, Any], world: int, timeout: float, kill_after: float | None = None
) -> list[Ended]:
    """``train_worker`` on every rank; those alive after ``timeout`` seconds are killed and count as hung.

    Args:
        kill_after: seconds after which all of them are killed on purpose.
    """
    os.environ["DS_ACCELERATOR"] = "cpu"
    torch.set_num_threads(1)  # a pool of threads would not survive the fork
    _load_operators()
    begin, port = time.monotonic(), free_port()
    sys.stdout.flush()
    pids, outputs = zip(*(_fork(order, rank, world, port) for rank in range(world)), strict=True)
    ended: dict[int, tuple[int | None, float]] = {}
    while len(ended) < world:
        passed = time.monotonic() - begin
        late = passed > (kill_after or timeout)
        for rank, pid in enumerate(pids):
            if rank in ended:
                continue
            if late:
                os.kill(pid, signal.SIGKILL)
            done, status = os.waitpid(pid, 0 if late else os.WNOHANG)
            if done:
                code = os.waitstatus_to_exitcode(status)
                hung = late and kill_after is None and code == -signal.SIGKILL
                ended[rank] = (None if hung else code), passed
        time.sleep(0.001)
    for leftover in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_{port}_*"):
        leftover.unlink()  # DeepSpeed's shared memory of ranks that did not end by themselves
    return [Ended(ended[r][0], _read(outputs[r]), ended[r][1]) for r in range(world)]


@cache
def _load_operators() -> None:
    """DeepSpeed's C++ ones, for each of which it asks other programs about the CPU."""
    for builder in (CPUAdamBuilder(), ShareMemCommBuilder()):
        builder.load(verbose=False)


def _fork(order: Mapping[str, Any], rank: int, world: int, port: int) -> tuple[int, int]:
    """(process, reading end of the pipe that it prints to)."""
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, _MOST_OUTPUT)
    pid = os.fork()
    if pid:
        os.close(writing)
        return pid, reading
    for descriptor in (1, 2):
        os.dup2(writing, descriptor)
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_SIZE": world}
    os.environ.update({name: str(number) for name, number in place.items()})
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    code = 1
    try:
        train_worker.train(order)
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _read(pipe: int) -> str:
    with open(pipe, "rb") as file:
        return file.read().decode(errors="replace")
