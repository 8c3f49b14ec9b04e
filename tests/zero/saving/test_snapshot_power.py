"""Power cuts at every sync of a snapshot: what the disk was told to keep is a whole snapshot, the older or the newer."""

from __future__ import annotations

import itertools
import os
import shutil
import stat
import threading
from pathlib import Path
from typing import Any

import pytest
from harness import Ranks
from offloading import offloaded_to
from snapshot_runs import INTERVAL, STEPS, snapshot_engine, train_in_step
from training import LOW_RANK, make_engine, tiny_llama, train

from hmt_deepspeed.zero.saving import snapshot_writer as snapshot_files
from hmt_deepspeed.zero.saving.snapshot_writer import SnapshotWriter, prepare_folder
from hmt_deepspeed.zero.saving.verify import candidate_tags, damage

Tree = dict[str, bytes | None]  # by path a file's content, None for a folder


class Disk:
    """What a power cut would leave of a folder: of each file the content at its last fsync, in each folder the names
    at its last; or, since a disk may keep names that it was not told to, all names as they are now.

    What was never synced is an empty file, or an empty folder.
    """

    def __init__(self, root: str) -> None:
        self.root = root
        self._contents: dict[int, bytes] = {}
        self._names: dict[int, dict[str, int]] = {}
        self._held: list[int] = []  # so that the number of no inode above is given to another
        self._lock, self._plain_fsync = threading.RLock(), os.fsync
        os.fsync = self.fsync  # type: ignore[assignment]
        descriptor = os.open(root, os.O_RDONLY)
        self.fsync(descriptor)
        os.close(descriptor)

    def fsync(self, descriptor: int) -> None:
        inside = os.readlink(f"/proc/self/fd/{descriptor}").startswith(self.root)
        if inside:  # else it changes nothing here before it is linked
            self.at_instant()
        self._plain_fsync(descriptor)
        with self._lock:
            found = os.fstat(descriptor)
            if found.st_ino not in self._contents.keys() | self._names.keys():
                self._held.append(os.dup(descriptor))
            if stat.S_ISDIR(found.st_mode):
                with os.scandir(descriptor) as entries:
                    self._names[found.st_ino] = {entry.name: entry.inode() for entry in entries}
            else:
                self._contents[found.st_ino] = Path(f"/proc/self/fd/{descriptor}").read_bytes()
        if inside:
            self.at_instant()

    def at_instant(self) -> None:
        """Called before and after each sync in the folder, in the thread that syncs."""

    def left(self, names_at_once: bool) -> Tree:
        with self._lock:
            tree: Tree = {}
            self._walk(os.stat(self.root).st_ino, "", names_at_once, tree)
            return tree

    def _walk(self, inode: int, path: str, names_at_once: bool, tree: Tree) -> None:
        names = self._names.get(inode, {})
        if names_at_once:
            with os.scandir(os.path.join(self.root, path)) as entries:
                names = {entry.name: entry.inode() for entry in entries}
        for name, member in names.items():
            place = os.path.join(path, name)
            if member in self._contents:
                tree[place] = self._contents[member]
            elif self._is_folder(member, place, names_at_once):
                tree[place] = None
                self._walk(member, place, names_at_once, tree)
            else:
                tree[place] = b""

    def _is_folder(self, inode: int, place: str, names_at_once: bool) -> bool:
        return inode in self._names or (
            names_at_once and os.path.isdir(os.path.join(self.root, place))
        )


def write_out(tree: Tree, folder: str) -> None:
    os.mkdir(folder)
    for path, content in tree.items():
        place = Path(folder, path)
        if content is None:
            place.mkdir()
        else:
            place.write_bytes(content)


class PowerCuts(Disk):
    """Cuts the power around every sync and change of name of a snapshot, and looks at what loads after it.

    Attributes:
        found: whether names were kept at once, the last snapshot that was finished, and what is there: the tag that
            loads, and what is wrong with any.
    """

    def __init__(self, root: str, snapshots: str, aside: str) -> None:
        self.found: list[tuple[bool, str, str, list[str]]] = []
        self.seen: set[int] = set()
        self._snapshots, self._aside = snapshots, aside
        self._finished, self._looks = "", False
        super().__init__(root)
        write, rename = SnapshotWriter.write, os.rename

        def finishing(writer: SnapshotWriter, job: Any) -> None:
            write(writer, job)
            self._finished = job.tag
            self.at_instant()

        def renaming(source: str, target: str) -> None:
            self.at_instant()
            if os.path.basename(target) == "step00000006":  # all is written, and does not count yet
                write_out(self.left(names_at_once=True), os.path.join(aside, "before"))
            rename(source, target)
            self.at_instant()

        def removing(plain: Any) -> Any:
            return lambda *arguments, **keyword: (plain(*arguments, **keyword), self.at_instant())[
                0
            ]

        os.unlink, os.rmdir = removing(os.unlink), removing(os.rmdir)
        SnapshotWriter.write = finishing  # type: ignore[method-assign]
        os.rename = renaming  # type: ignore[assignment]

    def at_instant(self) -> None:
        if self._looks or threading.current_thread() is threading.main_thread():
            return
        self._looks = True
        try:
            self._cut()
        finally:
            self._looks = False

    def _cut(self) -> None:
        for names_at_once in (False, True):
            tree = self.left(names_at_once)
            signature = hash((self._finished, names_at_once, frozenset(tree.items())))
            if signature in self.seen:
                continue
            self.seen.add(signature)
            folder = os.path.join(self._aside, "cut")
            write_out(tree, folder)
            place = os.path.join(folder, self._snapshots)
            loads, wrong = self._look(place) if os.path.isdir(place) else ("", [])
            self.found.append((names_at_once, self._finished, loads, wrong))
            shutil.rmtree(folder)  # not seen: it looks

    @staticmethod
    def _look(folder: str) -> tuple[str, list[str]]:
        """As the next run does."""
        prepare_folder(folder)
        tags = candidate_tags(folder, None)
        problems = {tag: damage(os.path.join(folder, tag)) for tag in tags}
        wrong = [f"{tag}: {problem}" for tag, problem in problems.items() if problem]
        return next((tag for tag, problem in problems.items() if problem is None), ""), wrong


def engine_of(home: str, folder: str | None, ssd: str, seed: int = 0) -> Any:
    if home == "none":
        options = {"master_weights": "none"}  # weights as differences, too
        changes = {"bf16": {"enabled": True}, "options": options}
        return snapshot_engine(2, folder, seed=seed, **changes)
    snapshot_files.KEEP = 1
    config = offloaded_to(ssd if home == "nvme" else "", 2, LOW_RANK, {"overlap": "forward"})
    if folder is not None:
        config["hmt"]["snapshot"] = {"path": folder, "interval": INTERVAL}
    return make_engine(config, tiny_llama(layers=1, seed=seed))


def cut_off(home: str, tmp: str) -> dict[str, Any]:
    for name in ("disk", "aside"):
        os.mkdir(os.path.join(tmp, name))
    disk = PowerCuts(f"{tmp}/disk", "runs/one", f"{tmp}/aside")
    engine = engine_of(home, f"{tmp}/disk/runs/one", f"{tmp}/ssd")
    losses = train_in_step(engine, STEPS)
    engine.destroy()
    return {"losses": losses, "found": disk.found}


def taken_up(home: str, tmp: str) -> tuple[int, list[float]]:
    engine = engine_of(home, None, f"{tmp}/ssd", seed=7)
    engine.load_checkpoint(f"{tmp}/aside/before/runs/one")
    step = engine.global_steps
    losses = train(engine, STEPS - step, first=step)
    engine.destroy()
    return step, losses


@pytest.mark.parametrize("home", ["none", "cpu", "nvme"])
def test_a_power_cut_leaves_the_older_or_the_newer_snapshot(
    ranks: Ranks, tmp_path: Path, home: str
) -> None:
    run = ranks.run(cut_off, 1, home, str(tmp_path))[0]
    tags = ["", "step00000002", "step00000004", "step00000006"]
    between = set()
    for names_at_once, finished, loads, wrong in run["found"]:
        assert wrong == []
        older = tags.index(finished)
        assert loads in tags[older : older + 2], (names_at_once, finished)
        between.add((names_at_once, finished, loads))
    for names_at_once in (False, True):
        for older, newer in itertools.pairwise(tags):
            # before it counts, and after
            assert {(names_at_once, older, older), (names_at_once, newer, newer)} <= between
    step, losses = ranks.run(taken_up, 1, home, str(tmp_path))[0]
    assert step == 4
    assert losses == run["losses"][4:]
