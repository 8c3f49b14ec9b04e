"""Snapshots: the state of training to an SSD every so many steps, beside training.

A snapshot is taken between two steps. Copies of weights, low-rank states and bases start on a side stream into
page-locked memory, and a thread writes them from there; the next step's update waits only should the copies not
be done. Files appear as ``step<N>.saving``, synced and checksummed, and the folder gets its name when it is whole on
every rank. Weights are stored whole, or as the difference to those of an earlier snapshot that is kept as long
as it is needed.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from deepspeed import comm as dist
from deepspeed.utils import logger
from torch import Tensor

from hmt_deepspeed.memory.counters import run_in_background
from hmt_deepspeed.memory.errors import PoolFull
from hmt_deepspeed.memory.growing import GrowingHostStore
from hmt_deepspeed.memory.transfer import TransferEngine
from hmt_deepspeed.zero.checkpoint import hmt_state
from hmt_deepspeed.zero.files import newest_steps
from hmt_deepspeed.zero.raw_tensors import map_tensors
from hmt_deepspeed.zero.snapshot_files import Job, SnapshotWriter, Staged, prepare_folder
from hmt_deepspeed.zero.swap import host_memory_share

if TYPE_CHECKING:
    from hmt_deepspeed.zero.engine import HMTEngine

__all__ = ["SnapshotSettings", "Snapshots"]


@dataclass(frozen=True)
class SnapshotSettings:
    """``hmt.snapshot``; steps are optimizer steps."""

    path: str
    interval: int
    keep: int


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
        self._rank = collectives.rank
        limit = host_memory_share()
        self._transfers = TransferEngine(self._engine.device, 1, outgoing_bytes=limit)
        self._store: GrowingHostStore | None = None
        self._limit, self._staged = limit, list[str]()
        self._thread = ThreadPoolExecutor(1, "hmt-snapshot", initializer=run_in_background)
        self._writing: Future[None] | None = None
        self._copied, self._stopping = threading.Event(), threading.Event()
        self._writer = SnapshotWriter(
            settings.path,
            settings.keep,
            self._rank,
            collectives.world,
            self._host_bytes,
            self._stopping,
        )
        self._last_step = self._engine.global_steps
        self.num_taken = self.num_skipped = 0
        self.seconds_taking = self._seconds_writing = 0.0
        problem = _problem_of(settings.path) if self._rank == 0 else None
        if problem := collectives.broadcast_object(problem):
            raise ValueError(problem)
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

    def newest(self, checkpoints: str) -> str:
        """Of the snapshots' folder and another, the one whose newest whole checkpoint has taken more steps; the
        same on all ranks."""
        chosen = self.settings.path
        if self._rank == 0 and newest_steps(checkpoints) >= newest_steps(chosen):
            chosen = checkpoints
        folder: str = self._engine.optimizer.collectives.broadcast_object(chosen)
        return folder

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
            "snapshot_bytes_written": self._writer.bytes_written,
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
        if self._engine.optimizer.collectives.world == 1:
            return self._writing is not None
        busy = torch.tensor(float(self._writing is not None), device=self._engine.device)
        self._engine.optimizer.collectives.all_reduce(busy, op=dist.ReduceOp.MAX)
        return bool(busy.item())

    def _take(self, step: int) -> None:
        optimizer = self._engine.optimizer
        optimizer.overlap.settle()
        if self._store is None:
            self._store = GrowingHostStore(self._transfers, self._limit, "free host memory")
        try:
            states = {"optim": self._optimizer_state()}
            if self._rank == 0 or optimizer.settings.stage == 3:
                states["model"] = self._model_state()
        except BaseException:
            self._forget_staged()
            raise
        self._copied.clear()
        job = Job(f"step{step:08d}", step, states)
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
        return Staged(name, value.dtype, tuple(value.shape), weight is not None)

    def _optimizer_state(self) -> dict[str, Any]:
        optimizer = self._engine.optimizer
        masters = {}
        for entry in optimizer.entries if optimizer.settings.stage > 0 or self._rank == 0 else ():
            values = entry.weight.master_values()
            if entry.weight.master is None:  # as exact, and smaller
                values = values.to(optimizer.settings.model_dtype)
            flat = list(entry.gradient.shards.flat(optimizer.shard_rank))
            masters[entry.name] = {"flat": flat, "values": self._stage(values, entry.name)}
        ours = map_tensors(hmt_state(optimizer, self._stage), self._stage)
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

    def _write(self, job: Job) -> None:
        begin = time.perf_counter()
        assert self._store is not None
        try:
            for name in self._staged:
                self._store.host_bytes(name)
            self._copied.set()
            self._writer.write(job)
        finally:
            self._copied.set()
            self._forget_staged()
            self._seconds_writing += time.perf_counter() - begin

    def _host_bytes(self, name: str) -> Tensor:
        assert self._store is not None
        return self._store.host_bytes(name)

    def _forget_staged(self) -> None:
        assert self._store is not None
        for name in self._staged:
            self._store.drop(name)
        self._staged.clear()


def _problem_of(path: str) -> str | None:
    """Why no snapshot can be written to a folder, which is made ready if it can."""
    try:
        prepare_folder(path)
    except ValueError as error:
        return str(error)
    return None
