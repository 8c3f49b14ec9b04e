"""A wait for the lock of an operator's compilation is told: the file, its age, who holds it, what to do."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from deepspeed.ops.op_builder import CPUAdamBuilder
from deepspeed.utils import logger
from torch.utils import cpp_extension
from torch.utils.file_baton import FileBaton

import hmt_deepspeed
from hmt_deepspeed.doctor import examine
from hmt_deepspeed.zero import operator_locks
from hmt_deepspeed.zero.operator_locks import abandoned_locks, telling_waits

DS_CONFIGS = Path(__file__).resolve().parents[2] / "ds_configs"


@pytest.fixture
def lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The lock of a cpu_adam that a process, killed three hours ago, was compiling."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    path = tmp_path / "cpu_adam" / "lock"
    path.parent.mkdir()
    path.touch()
    os.utime(path, (time.time() - 3 * 3600,) * 2)
    return path


class Clock:
    """Time that passes in ``sleep`` only; a lock is released at its 70th second."""

    def __init__(self, lock: Path) -> None:
        self.now, self._lock = 0.0, lock

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return time.time()

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        if self.now >= 70 and self._lock.exists():
            self._lock.unlink()


@pytest.fixture
def lines(lock: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What DeepSpeed's logger, which does not propagate, is told while a wait lasts 70 seconds."""
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    monkeypatch.setattr(operator_locks, "time", Clock(lock))
    logger.addHandler(handler)
    yield told
    logger.removeHandler(handler)


def test_a_lock_that_a_killed_compile_left(lock: Path, lines: list[str]) -> None:
    with telling_waits():
        FileBaton(str(lock)).wait()
    assert len(lines) == 2
    for seconds, line in zip((30, 60), lines, strict=True):
        assert f"waiting for {seconds} seconds" in line
        assert f"{lock} is the lock of an operator's compilation, made 3 hours ago" in line
        assert "No process that can be seen from here has it open" in line
        assert f"stop the runs that wait, `rm {lock}` and start again" in line


HOLD = """
import sys
from torch.utils.file_baton import FileBaton
assert FileBaton(sys.argv[1]).try_acquire()
print("held", flush=True)
sys.stdin.read()
"""


def test_a_lock_that_a_process_holds(lock: Path, lines: list[str]) -> None:
    """A compile under way is waited for: no word of deleting anything."""
    lock.unlink()
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(lock)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        assert abandoned_locks() == []
        with telling_waits():
            FileBaton(str(lock)).wait()
        holder.kill()
    assert f"process {holder.pid} (" in lines[0]
    assert "has it open: this run goes on when that has compiled" in lines[0]
    assert "rm " not in lines[0]


@pytest.mark.parametrize("local_rank", [1, 2])
def test_two_ranks_of_a_machine_may_speak(
    lock: Path, lines: list[str], monkeypatch: pytest.MonkeyPatch, local_rank: int
) -> None:
    """One of ranks 0 and 1 waits wherever any does."""
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    with telling_waits():
        FileBaton(str(lock)).wait()
    assert len(lines) == (2 if local_rank < 2 else 0)


def test_an_operator_that_deepspeed_loads(
    lock: Path, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock of the message is the one that DeepSpeed's builders wait for."""
    monkeypatch.setattr(CPUAdamBuilder, "_loaded_ops", {})
    monkeypatch.setattr(cpp_extension, "_import_module_from_library", lambda *_: torch)
    with telling_waits():
        CPUAdamBuilder().load()
    assert str(lock) in lines[0]


def test_registration_tells_and_takes_it_back() -> None:
    """Also of what DeepSpeed loads by itself: shm_comm in init_distributed, stage 3's async_io."""
    stock = FileBaton.wait
    hmt_deepspeed.register()
    try:
        with telling_waits():  # a load of our own meanwhile
            pass
        assert FileBaton.wait is not stock
    finally:
        hmt_deepspeed.unregister()
    assert FileBaton.wait is stock


def test_the_doctor_finds_what_a_run_would_wait_for(lock: Path) -> None:
    found = examine(DS_CONFIGS / "hmt.json")
    assert any(f"`rm {lock}`" in warning for warning in found.warnings)
