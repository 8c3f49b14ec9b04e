"""Snapshots: the state of training to an SSD every so many steps, beside training.

A snapshot is taken between two steps. Copies of weights, low-rank states and bases start on a side stream into
page-locked memory, and a thread writes them from there; the next step's update waits only should the copies not
be done. Files appear as ``step<N>.saving``, synced and checksummed, and the folder gets its name when it is whole on
every rank. Weights are stored whole, or as the difference to those of an earlier snapshot that is kept as long
as it is needed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from deepspeed import comm as dist
from deepspeed.utils import logger
from torch import Tensor

from hmt_deepspeed.memory.checksum import as_memoryview
from hmt_deepspeed.memory.counters import run_in_background
from hmt_deepspeed.memory.errors import PoolFull
from hmt_deepspeed.memory.growing import GrowingHostStore
from hmt_deepspeed.memory.transfer import TransferEngine
from hmt_deepspeed.zero.checkpoint import FORMAT, hmt_state, saving_tag
from hmt_deepspeed.zero.files import MANIFEST, fingerprint, replace_text, sync_folder
from hmt_deepspeed.zero.raw_tensors import RECORD, ByteFile, encode, map_file, map_tensors
from hmt_deepspeed.zero.swap import host_memory_share

if TYPE_CHECKING:
    from hmt_deepspeed.zero.engine import HMTEngine

__all__ = ["SnapshotSettings", "Snapshots"]

_WORTH = 0.9  # share of the whole weights up to which differences are stored
_POLL_SECONDS = 0.05  # between two looks at whether the other ranks have written their files


@dataclass(frozen=True)
class SnapshotSettings:
    """``hmt.snapshot``; steps are optimizer steps."""

    path: str
    interval: int
    keep: int


@dataclass(frozen=True)
class _Staged:
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
class _Job:
    """What is to be written: the parts of this rank, tensors replaced by :class:`_Staged`."""

    tag: str
    step: int
    states: dict[str, Any]


class Snapshots:
    """Takes, writes and removes the snapshots of one rank.

    Args:
        engine: refers to a built one. settings: see :class:`SnapshotSettings`.

    Attributes:
        num_taken, num_skipped: the latter since the one before was not written yet.
        seconds_taking: that the training thread spent on them.
    """

    def __init__(self, engine: ref[HMTEngine], settings: SnapshotSettings) -> None:
        self._reference, self.settings = engine, settings
        collectives = self._engine.optimizer.collectives
        self._rank, self._world = collectives.rank, collectives.world
        limit = host_memory_share()
        self._transfers = TransferEngine(self._engine.device, 1, outgoing_bytes=limit)
        self._store: GrowingHostStore | None = None
        self._limit, self._staged = limit, list[str]()
        self._thread = ThreadPoolExecutor(1, "hmt-snapshot", initializer=run_in_background)
        self._writing: Future[None] | None = None
        self._copied, self._stopping = threading.Event(), threading.Event()
        self._whole: _Weights | None = None  # of the last snapshot that is none of differences
        self._last_step = self._engine.global_steps
        self.num_taken = self.num_skipped = self.bytes_written = 0
        self.seconds_taking = self._seconds_writing = 0.0
        if self._rank == 0:
            _prepare_folder(settings.path)
        dist.barrier()
        self._engine.optimizer.overlap.settle_copies = self.settle

    @property
    def _engine(self) -> HMTEngine:
        engine = self._reference()
        assert engine is not None
        return engine

    # -- training thread ------------------------------------------------------------------------

    def after_step(self) -> None:
        """Take a snapshot if it is time for one.

        Raises:
            RuntimeError: an earlier one could not be written, or there is no host memory for one.
        """
        step = self._engine.global_steps
        if step == self._last_step:
            return
        self._last_step = step
        self._raise_failure()
        if step % self.settings.interval:
            return
        begin = time.perf_counter()
        if self._is_anyone_writing():
            self.num_skipped += 1
        else:
            self._take(step)
            self.num_taken += 1
        self.seconds_taking += time.perf_counter() - begin

    def settle(self) -> None:
        """Wait for copies that are still under way; before weights or states change."""
        if self._writing is not None and not self._copied.is_set():
            begin = time.perf_counter()
            self._copied.wait()
            self.seconds_taking += time.perf_counter() - begin

    def finish(self) -> None:
        """Wait until the last snapshot is written.

        Raises:
            RuntimeError: it could not be.
        """
        if self._writing is not None:
            with suppress(Exception):
                self._writing.result()
        self._raise_failure()

    def close(self) -> None:
        """Write what is under way and stop; a failure is logged."""
        try:
            self.finish()
        except RuntimeError as error:
            logger.error(str(error))
        self._stopping.set()
        self._thread.shutdown()
        self._transfers.close()

    def metrics(self) -> dict[str, Any]:
        """Sums since the start of the run."""
        return {
            "snapshots": self.num_taken,
            "snapshots_skipped": self.num_skipped,
            "snapshot_bytes_written": self.bytes_written,
            "snapshot_seconds_taking": self.seconds_taking,
            "snapshot_seconds_writing": self._seconds_writing,
            "snapshot_host_bytes": 0 if self._store is None else self._store.pinned_bytes,
        }

    def _raise_failure(self) -> None:
        if self._writing is None or not self._writing.done():
            return
        done, self._writing = self._writing, None
        error = done.exception()
        if error is not None:
            raise RuntimeError(
                f"a snapshot could not be written to {self.settings.path} (hmt.snapshot.path) on rank "
                f"{self._rank}: {error}. The one before it is whole. Make room there or give the permission, or "
                "leave hmt.snapshot out."
            ) from error

    def _is_anyone_writing(self) -> bool:
        """The same on all ranks: each takes a snapshot or none does."""
        busy = torch.tensor(float(self._writing is not None), device=self._engine.device)
        self._engine.optimizer.collectives.all_reduce(busy, op=dist.ReduceOp.MAX)
        return bool(busy.item())

    def _take(self, step: int) -> None:
        optimizer = self._engine.optimizer
        optimizer.overlap.settle()
        if self._store is None:
            self._store = GrowingHostStore(self._transfers, self._limit, "free host memory")
        states = {"optim": self._optimizer_state()}
        if self._rank == 0 or optimizer.settings.stage == 3:
            states["model"] = self._model_state()
        self._copied.clear()
        job = _Job(f"step{step:08d}", step, states)
        self._writing = self._thread.submit(self._write, job)

    def _stage(self, value: Any, weight: str | None = None) -> Any:
        """Start the copy of a tensor to the host; other values are taken as they are."""
        if not isinstance(value, Tensor):
            return value
        assert self._store is not None
        name = f"tensor {len(self._staged)}" if weight is None else weight
        value = value.detach().to(self._transfers.device).contiguous()
        try:
            self._store.put(name, value)
        except PoolFull as full:
            raise RuntimeError(
                f"hmt.snapshot stages everything that it writes in host memory, which is too small: {full}. "
                "Save checkpoints instead, or spread the states over more ranks."
            ) from full
        self._staged.append(name)
        return _Staged(name, value.dtype, tuple(value.shape), weight is not None)

    def _optimizer_state(self) -> dict[str, Any]:
        optimizer = self._engine.optimizer
        masters = {}
        for entry in optimizer.entries if optimizer.settings.stage > 0 or self._rank == 0 else ():
            values = entry.weight.master_values()
            if entry.weight.master is None:  # as exact, and smaller
                values = values.to(optimizer.settings.model_dtype)
            flat = list(entry.gradient.shards.flat(optimizer.shard_rank))
            masters[entry.name] = {"flat": flat, "values": self._stage(values, entry.name)}
        optimizer.bases.will_use(optimizer.low_rank)
        ours = map_tensors(hmt_state(optimizer, self._stage), self._stage)
        optimizer.bases.will_use(None)
        return {"optimizer_state_dict": {"masters": masters, "hmt": ours}}

    def _model_state(self) -> dict[str, Any]:
        """What DeepSpeed's model file holds of it, the weights that are trained aside."""
        engine = self._engine
        frozen = engine._get_zero_frozen_param_attributes
        scheduler = engine.lr_scheduler
        fragments = frozen(engine._get_param_fragment_func)
        shapes = frozen(engine._get_param_shape_func)
        state = {
            **engine.snapshot_client_state(),
            "module": dict(engine.module.named_buffers()),
            "frozen_param_fragments": {
                n: self._stage(t, f"frozen {n}") for n, t in fragments.items()
            },
            "frozen_param_shapes": {n: list(shape) for n, shape in shapes.items()},
            "lr_scheduler": None if scheduler is None else scheduler.state_dict(),
            "skipped_steps": engine.skipped_steps,
            "global_steps": engine.global_steps,
            "global_samples": engine.global_samples,
            "dp_world_size": engine.seq_dp_world_size,
            "mp_world_size": engine.mp_world_size,
        }
        return dict(map_tensors(state, self._stage))

    # -- writing thread -------------------------------------------------------------------------

    def _write(self, job: _Job) -> None:
        begin, folder = time.perf_counter(), os.path.join(self.settings.path, saving_tag(job.tag))
        assert self._store is not None
        try:
            for name in self._staged:
                self._store.host_bytes(name)
            self._copied.set()
            os.makedirs(folder, exist_ok=True)
            self._write_files(job, folder)
            if self._rank == 0:
                self._commit(job, folder)
        except BaseException as error:
            with suppress(OSError):  # so that rank 0 does not wait for this one
                replace_text(
                    os.path.join(folder, _done(self._rank)), json.dumps({"error": str(error)})
                )
            raise
        finally:
            self._copied.set()
            for name in self._staged:
                self._store.drop(name)
            self._staged.clear()
            self._seconds_writing += time.perf_counter() - begin

    def _write_files(self, job: _Job, folder: str) -> None:
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
        files = {name: {"bytes": file.size, "sha256": file.sha256}}
        for kind, state in states.items():
            path = os.path.join(folder, f"{stem}_{kind}_states.pt")
            with open(path, "wb") as out:
                torch.save(state, out)
                out.flush()
                os.fsync(out.fileno())
            files[os.path.basename(path)] = fingerprint(path)
        self.bytes_written += sum(entry["bytes"] for entry in files.values())
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
        if not isinstance(leaf, _Staged):
            return leaf
        assert self._store is not None
        data = self._store.host_bytes(leaf.name)
        record: dict[str, Any] = {"dtype": str(leaf.dtype).removeprefix("torch.")}
        record |= {"shape": list(leaf.shape), "file": name}
        place = whole.places.get(leaf.name) if whole is not None and leaf.is_weight else None
        if place is None or whole is None or not data.numel():
            record["offset"] = file.append(as_memoryview(data))
            if leaf.is_weight:
                made.places[leaf.name] = name, record["offset"]
        else:
            path = os.path.join(self.settings.path, whole.tag, place[0])
            base = map_file(path)[place[1] : place[1] + data.numel()]
            record["base"] = {"tag": whole.tag, "file": place[0], "offset": place[1]}
            begin = file.size
            record["planes"] = encode(data, base, leaf.dtype.itemsize, file)
            saving.whole += data.numel()
            saving.stored += file.size - begin
        return {RECORD: record}

    def _commit(self, job: _Job, folder: str) -> None:
        """Give the folder its name once all ranks have written, and remove what is no longer kept."""
        files: dict[str, Any] = {}
        for rank in range(self._world):
            files |= self._wait_for(os.path.join(folder, _done(rank)), rank)
        for stray in set(os.listdir(folder)) - files.keys():
            os.remove(os.path.join(folder, stray))
        manifest = {"format": FORMAT, "global_steps": job.step, "files": files}
        manifest |= {"saved_at": time.time()}
        replace_text(os.path.join(folder, MANIFEST), json.dumps(manifest, indent=1))
        final = os.path.join(self.settings.path, job.tag)
        if os.path.isdir(final):  # of a run that was taken up again from before
            _remove(final)
        os.rename(folder, final)
        replace_text(os.path.join(self.settings.path, "latest"), job.tag)
        _remove_old(self.settings.path, self.settings.keep)

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


def _done(rank: int) -> str:
    return f"rank{rank}.json"


def _prepare_folder(path: str) -> None:
    """Remove what a killed process left behind."""
    os.makedirs(path, exist_ok=True)
    for name in os.listdir(path):
        folder = os.path.join(path, name)
        torn = _TAG.fullmatch(name) and not os.path.isfile(os.path.join(folder, MANIFEST))
        if torn or (name.endswith(".saving") and _TAG.fullmatch(name.removesuffix(".saving"))):
            shutil.rmtree(folder)


def _remove(folder: str) -> None:
    """First its manifest, so that no half of it is ever taken for a snapshot."""
    os.remove(os.path.join(folder, MANIFEST))
    sync_folder(folder)
    shutil.rmtree(folder)


def _remove_old(path: str, keep: int) -> None:
    """Keep the newest and those whose weights they are differences to."""
    manifests: dict[str, dict[str, Any]] = {}
    for name in filter(_TAG.fullmatch, os.listdir(path)):
        with open(os.path.join(path, name, MANIFEST)) as file:
            manifests[name] = json.load(file)
    newest = sorted(manifests, key=lambda name: manifests[name]["saved_at"], reverse=True)[:keep]
    needed = set(newest)
    for name in newest:
        others = (file for file in manifests[name]["files"] if file.startswith(os.pardir))
        needed |= {os.path.basename(os.path.dirname(other)) for other in others}
    for name in manifests.keys() - needed:
        _remove(os.path.join(path, name))
