"""States on an SSD when something breaks: disks, files, the process itself."""

from __future__ import annotations

import errno
import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
from harness import Ranks
from killed_runs import (
    assert_one_run,
    kill_after,
    kill_at_call,
    log_loss,
    undisturbed_and_resumed,
)
from offloading import ADAMW, flip_bit, offloaded_to, small_chunks
from training import make_engine, tiny_llama, train, train_step

from hmt_deepspeed.memory.file_io import PositionalIO

# -- disks and files --------------------------------------------------------------------------------------


def small_engine(home: str, overlap: str = "none", stage: int = 2) -> Any:
    small_chunks()
    config = offloaded_to(home, stage, ADAMW, {"overlap": overlap})
    return make_engine(config, tiny_llama(layers=1))


def broken(home: str, fault: str) -> list[str]:
    """What two steps after the fault say."""
    engine = small_engine(home, "forward")
    train(engine, 2)
    engine.optimizer.overlap.synchronize()  # a read under way would meet the fault half-way, with other words
    files = sorted(Path(home).glob("hmt-swap-*/*.bin"))
    if fault == "altered":
        for file in files:
            flip_bit(file)
    elif fault == "truncated":
        for file in files:
            os.truncate(file, 100)
    else:
        engine.optimizer.zero.host.ssd.slots.folder.io = Broken(fault)
    said = []
    for step in (2, 3):
        try:
            train_step(engine, step)
            engine.optimizer.overlap.synchronize()
            said.append("went on")
        except RuntimeError as error:
            said.append(str(error))
    return said


class Broken(PositionalIO):
    """A disk on which a while later nothing can be written."""

    def __init__(self, fault: str) -> None:
        self.code, self.num_writes = getattr(errno, fault), 0

    def write(self, path: str, memory: Any) -> None:
        self.num_writes += 1
        if self.num_writes > 5:
            raise OSError(self.code, os.strerror(self.code))
        super().write(path, memory)


SAYS = {
    "altered": "the content is not what was written",
    "truncated": "expected a file of 4096 bytes, found 100",
    "ENOSPC": "No space left on device",
    "EACCES": "Permission denied",
}


def all_broken(home: str) -> dict[str, list[str]]:
    return {fault: broken(f"{home}/{fault}", fault) for fault in SAYS}


def test_broken_files_are_errors_in_the_training_thread(ranks: Ranks, tmp_path: Path) -> None:
    for fault, said in ranks.run(all_broken, 1, str(tmp_path))[0].items():
        for message in said:  # every time: the states are no longer one step's
            assert "the optimizer's work on " in message, fault
            assert ".weight" in message
            assert SAYS[fault] in message
            assert "last checkpoint" in message


def without_room(home: str) -> str:
    Path(home).write_text("not a folder")
    try:
        small_engine(home)
    except RuntimeError as error:
        return str(error)
    return "went on"


def test_a_folder_that_cannot_be_made(ranks: Ranks, tmp_path: Path) -> None:
    said = ranks.run(without_room, 1, str(tmp_path / "file"))[0]
    assert "cannot make a folder" in said
    assert str(tmp_path / "file") in said


# -- the process itself ----------------------------------------------------------------------------------------

STEPS = 6


def until_killed(folder: str, home: str, overlap: str, steps: int, instant: Any = None) -> None:
    """From the last checkpoint to the end, one checkpoint after each step, unless it is killed at ``instant``:
    the n-th call of something, or seconds after it was built. Losses go to a file as they come."""
    engine = small_engine(home, overlap)
    engine.load_checkpoint(folder)
    arm(engine, instant)
    for step in range(engine.global_steps, steps):
        log_loss(folder, step, train_step(engine, step))
        engine.save_checkpoint(folder)


def arm(engine: Any, instant: Any) -> None:
    """Set the charge."""
    slots = engine.optimizer.zero.host.ssd.slots
    places = {
        "read": (slots, "read"),
        "update": (engine.optimizer.zero.host.adam, "step_"),
        "write": (slots.folder.io, "write"),
        "commit": (slots, "_retire"),
        "link": (os, "link"),
        "rename": (os, "rename"),
        "replace": (os, "replace"),
    }
    if instant is None:
        return
    if isinstance(instant, float):
        kill_after(instant)
    else:
        place, number = instant
        kill_at_call(*places[place], number, lambda: True)


INSTANTS = [
    ("update", 130),
    ("write", 270),
    ("commit", 100),
    ("link", 40),
    ("rename", 1),
    ("replace", 2),
]


def test_killed_at_a_few_instants(ranks: Ranks, tmp_path: Path) -> None:
    kills = [(instant,) for instant in INSTANTS]
    runs = undisturbed_and_resumed(ranks, until_killed, 1, tmp_path, ("backward", STEPS), kills)
    assert_one_run(runs, STEPS)
    # what the killed runs left on the SSD the next one has taken away
    assert len(list((tmp_path / "ssd").glob("hmt-swap-*"))) <= 1


@pytest.mark.slow
@pytest.mark.parametrize(("overlap", "world"), [("backward", 1), ("forward", 2)])
def test_killed_at_random_instants(ranks: Ranks, tmp_path: Path, overlap: str, world: int) -> None:
    """Sooner than so many steps could end."""
    kills = [(random.Random(number).uniform(0.0, 0.2),) for number in range(25)]
    runs = undisturbed_and_resumed(ranks, until_killed, world, tmp_path, (overlap, 60), kills)
    assert_one_run(runs, 60)
    assert len(list((tmp_path / "ssd").glob("hmt-swap-*"))) <= world


# -- the power -----------------------------------------------------------------------------------------------------


class ForgetfulDisk(PositionalIO):
    """What is written reaches the file with the next fsync, and is read from memory until then; folders whose
    names have changed since their last fsync are known."""

    def __init__(self) -> None:
        self.unsynced: dict[int, tuple[str, bytes]] = {}
        self.synced: set[int] = set()
        self.dirty: dict[int, str] = {}
        self._fsync = os.fsync
        os.fsync = self.fsync  # type: ignore[assignment]
        for name, target in (("link", 1), ("rename", 1), ("replace", 1), ("mkdir", 0)):
            setattr(os, name, self.watched(getattr(os, name), target))

    def write(self, path: str, memory: Any) -> None:
        self.unsynced[os.stat(path).st_ino] = (path, memory.numpy().tobytes())

    def read(self, path: str, memory: Any) -> None:
        inode = os.stat(path).st_ino
        if inode in self.unsynced:
            data = bytearray(self.unsynced[inode][1])
            memory.copy_(memory.new_tensor(data))
        else:
            super().read(path, memory)

    def fsync(self, descriptor: int) -> None:
        inode = os.fstat(descriptor).st_ino
        if inode in self.unsynced:
            path, data = self.unsynced.pop(inode)
            with open(path, "r+b") as file:
                file.write(data)
        self._fsync(descriptor)
        self.synced.add(inode)
        self.dirty.pop(inode, None)

    def watched(self, method: Any, target: int) -> Any:
        def changing(*arguments: Any, **keyword: Any) -> Any:
            result = method(*arguments, **keyword)
            folder = os.path.dirname(os.path.abspath(arguments[target]))
            self.dirty[os.stat(folder).st_ino] = folder
            return result

        return changing


def on_a_forgetful_disk(folder: str, home: str) -> dict[str, Any]:
    from hmt_deepspeed.zero.offload import ssd

    disk = ForgetfulDisk()
    ssd.file_io = lambda *_: disk  # type: ignore[assignment]
    engine = small_engine(home)
    train(engine, 3)
    assert disk.unsynced  # or nothing is tested
    engine.save_checkpoint(folder)
    above = os.path.dirname(folder)  # which got its name
    dirty = [path for path in disk.dirty.values() if path.startswith(folder) or path == above]
    tag = Path(folder, "global_step3")
    needed = json.loads((tag / "manifest.json").read_text())["files"]
    paths = [*(tag / name for name in needed), tag / "manifest.json", Path(folder, "latest")]
    missing = [str(p) for p in paths if p.stat().st_ino not in disk.synced]
    losses = train(engine, STEPS - 3, first=3)
    return {"dirty": dirty, "missing": missing, "losses": losses}


def after_the_power_cut(folder: str, home: str) -> list[float]:
    engine = small_engine(home)
    engine.load_checkpoint(folder)
    return train(engine, STEPS - 3, first=3)


def test_a_checkpoint_survives_the_power(ranks: Ranks, tmp_path: Path) -> None:
    folder, home = str(tmp_path / "saved"), str(tmp_path / "ssd")
    found = ranks.run(on_a_forgetful_disk, 1, folder, home)[0]
    assert found["dirty"] == []
    assert found["missing"] == []
    assert ranks.run(after_the_power_cut, 1, folder, home)[0] == found["losses"]
