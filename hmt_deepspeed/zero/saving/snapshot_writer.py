"""Writes a rank's files of a snapshot, commits the folder, removes old ones."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hmt_deepspeed.memory.checksum import as_memoryview
from hmt_deepspeed.zero.saving.checkpoint import saving_tag
from hmt_deepspeed.zero.saving.durable import (
    MANIFEST,
    fingerprint,
    make_folder,
    replace_text,
    sync_folder,
)
from hmt_deepspeed.zero.saving.optimizer_state import FORMAT
from hmt_deepspeed.zero.saving.raw_tensors import RECORD, ByteFile, encode, map_file, map_tensors

__all__ = ["Job", "SnapshotWriter", "Staged", "prepare_folder"]

KEEP = 2  # snapshots, beside those whose weights they are differences to
_WORTH = 0.9  # share of the whole weights up to which differences are stored
_POLL_SECONDS = 0.05  # between two looks at whether the other ranks have written their files


@dataclass(frozen=True)
class Staged:
    """A tensor on its way to the host under ``name``; a weight's name stays the same from snapshot to snapshot."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    is_weight: bool


@dataclass
class _Weights:
    """Weights that a snapshot holds whole: its tag, and (file, offset) by name."""

    tag: str
    file: dict[str, Any] = field(default_factory=dict)  # size and checksum
    places: dict[str, tuple[str, int]] = field(default_factory=dict)


@dataclass
class _Saving:
    """Bytes of the weights of one snapshot, and what their differences took."""

    whole: int = 0
    stored: int = 0

    @property
    def is_worth_it(self) -> bool:
        return self.stored < _WORTH * self.whole


@dataclass(frozen=True)
class Job:
    """This rank's parts of a snapshot, tensors replaced by :class:`Staged`.

    ``link`` links existing files into the folder and returns their entries for the manifest.
    """

    tag: str
    step: int
    states: dict[str, Any]
    link: Callable[[str], Mapping[str, dict[str, Any]]]


class SnapshotWriter:
    """Writes the snapshots of one rank, one after another, in a thread of its own.

    Args:
        path: folder of all snapshots.
        rank, world: of the ranks that write; rank 0 gives the folder its name.
        read: gives the bytes of a staged tensor (uint8) by its name.
        stopping: set when nothing is to be waited for any more.

    Attributes:
        bytes_written, bytes_linked: by this rank, in all; the latter in files that were there already.
    """

    def __init__(
        self,
        path: str,
        rank: int,
        world: int,
        read: Callable[[str], Tensor],
        stopping: threading.Event,
    ) -> None:
        self.path, self._rank, self._world = path, rank, world
        self._read, self._stopping = read, stopping
        self._whole: _Weights | None = None  # of the last snapshot that is none of differences
        self.bytes_written = self.bytes_linked = 0

    def write(self, job: Job) -> None:
        """Write this rank's part; on rank 0 the snapshot is whole when this returns."""
        folder = os.path.join(self.path, saving_tag(job.tag))
        try:
            os.makedirs(folder, exist_ok=True)
            self._write_files(job, folder)
            if self._rank == 0:
                self._commit(job, folder)
        except BaseException as error:
            self._whole = None
            with suppress(OSError):  # so that rank 0 does not wait for this one
                replace_text(
                    os.path.join(folder, _done(self._rank)), json.dumps({"error": str(error)})
                )
            raise

    def _write_files(self, job: Job, folder: str) -> None:
        """This rank's files, then the note that they are there, with sizes and checksums."""
        stem = f"zero_pp_rank_{self._rank}_mp_rank_00"
        name = f"{stem}_tensors.bin"
        whole = self._whole
        made, saving = _Weights(job.tag), _Saving()
        file = ByteFile(os.path.join(folder, name))
        try:
            record = partial(
                self._record, name=name, file=file, whole=whole, made=made, saving=saving
            )
            states = {kind: map_tensors(state, record) for kind, state in job.states.items()}
            file.close()
        except BaseException:
            file.abandon()
            raise
        linked = job.link(folder)
        files: dict[str, dict[str, Any]] = {name: {"bytes": file.size, "sha256": file.sha256}}
        for kind, state in states.items():
            path = os.path.join(folder, f"{stem}_{kind}_states.pt")
            with open(path, "wb") as out:
                torch.save(state, out)
                out.flush()
                os.fsync(out.fileno())
            files[os.path.basename(path)] = fingerprint(path)
        self.bytes_written += sum(entry["bytes"] for entry in files.values())
        self.bytes_linked += sum(entry["bytes"] for entry in linked.values())
        files |= linked
        if whole is None:
            made.file = files[name]
            self._whole = made
        else:
            for file_name in {file_name for file_name, _ in whole.places.values()}:
                files[os.path.join(os.pardir, whole.tag, file_name)] = whole.file
            if not saving.is_worth_it:
                self._whole = None  # the next one is whole again
        replace_text(os.path.join(folder, _done(self._rank)), json.dumps({"files": files}))

    def _record(
        self,
        leaf: Any,
        *,
        name: str,
        file: ByteFile,
        whole: _Weights | None,
        made: _Weights,
        saving: _Saving,
    ) -> Any:
        """Write a staged tensor, and say where it is."""
        if not isinstance(leaf, Staged):
            return leaf
        data = self._read(leaf.name)
        record: dict[str, Any] = {"dtype": str(leaf.dtype).removeprefix("torch.")}
        record |= {"shape": list(leaf.shape), "file": name}
        place = whole.places.get(leaf.name) if whole is not None and leaf.is_weight else None
        if place is None or whole is None or not data.numel():
            record["offset"] = file.append(as_memoryview(data) if data.numel() else b"")
            if leaf.is_weight:
                made.places[leaf.name] = name, record["offset"]
        else:
            path = os.path.join(self.path, whole.tag, place[0])
            base = map_file(path)[place[1] : place[1] + data.numel()]
            record["base"] = {"tag": whole.tag, "file": place[0], "offset": place[1]}
            begin = file.size
            record["planes"] = encode(data, base, leaf.dtype.itemsize, file)
            saving.whole += data.numel()
            saving.stored += file.size - begin
        return {RECORD: record}

    def _commit(self, job: Job, folder: str) -> None:
        """Give the folder its name once all ranks have written, and remove what is no longer kept."""
        files: dict[str, Any] = {}
        for rank in range(self._world):
            files |= self._wait_for(os.path.join(folder, _done(rank)), rank)
        for stray in _files_in(folder) - files.keys():
            os.remove(os.path.join(folder, stray))
        manifest = {"format": FORMAT, "global_steps": job.step, "files": files}
        manifest |= {"saved_at": time.time()}
        replace_text(os.path.join(folder, MANIFEST), json.dumps(manifest, indent=1))
        final = os.path.join(self.path, job.tag)
        if os.path.isdir(final):  # of a run that was taken up again from before
            os.rename(final, f"{final}.old")
        os.rename(folder, final)
        replace_text(os.path.join(self.path, "latest"), job.tag)
        if os.path.isdir(f"{final}.old"):
            _remove(f"{final}.old")
        _remove_old(self.path)

    def _wait_for(self, path: str, rank: int) -> dict[str, Any]:
        while not os.path.isfile(path):
            if self._stopping.wait(_POLL_SECONDS):
                raise RuntimeError(f"rank {rank} has not written its part")
        with open(path) as note:
            found: dict[str, Any] = json.load(note)
        if "error" in found:
            raise RuntimeError(f"rank {rank} could not write its part: {found['error']}")
        return dict(found["files"])


# -- the folder -----------------------------------------------------------------------------------------

_TAG = re.compile(r"step\d{8}")
_ASIDE = re.compile(rf"{_TAG.pattern}(\.saving|\.old)?")


def _files_in(folder: str) -> set[str]:
    """Paths within it, those in folders of it too."""
    found = [os.path.join(root, name) for root, _, names in os.walk(folder) for name in names]
    return {os.path.relpath(path, folder) for path in found}


def _done(rank: int) -> str:
    return f"rank{rank}.json"


def prepare_folder(path: str) -> None:
    """Make it, and remove what a killed process left behind.

    Raises:
        ValueError: files cannot be made in it.
    """
    try:
        make_folder(path)
        os.rmdir(tempfile.mkdtemp(dir=path))
    except OSError as error:
        raise ValueError(
            f"hmt.snapshot.path is {path!r}, where no files can be made: {error}. Name a folder on the SSD that "
            "every rank can write."
        ) from error
    for name in filter(_ASIDE.fullmatch, os.listdir(path)):
        folder, whole = os.path.join(path, name), os.path.join(path, name.partition(".")[0])
        if name.endswith(".old") and not os.path.isdir(whole):
            os.rename(folder, whole)
        elif name.endswith((".saving", ".old")) or not os.path.isfile(f"{folder}/{MANIFEST}"):
            shutil.rmtree(folder)


def _remove(folder: str) -> None:
    """First its manifest, so that no half of it is ever taken for a snapshot."""
    os.remove(os.path.join(folder, MANIFEST))
    sync_folder(folder)
    shutil.rmtree(folder)


def _remove_old(path: str) -> None:
    """Keep the ``KEEP`` newest and those whose weights they are differences to."""
    manifests: dict[str, dict[str, Any]] = {}
    for name in filter(_TAG.fullmatch, os.listdir(path)):
        with open(os.path.join(path, name, MANIFEST)) as file:
            manifests[name] = json.load(file)
    newest = sorted(manifests, key=lambda name: manifests[name]["saved_at"], reverse=True)[:KEEP]
    needed = set(newest)
    for name in newest:
        others = (file for file in manifests[name]["files"] if file.startswith(os.pardir))
        needed |= {os.path.basename(os.path.dirname(other)) for other in others}
    for name in manifests.keys() - needed:
        _remove(os.path.join(path, name))
