"""Snapshots: write the training state to an SSD every so many steps, beside training.

A snapshot is taken between two steps. Copies of weights, low-rank states and bases start on a side stream into
page-locked memory, and a thread writes them from there; the next step's update waits only while the copies are
not done. :mod:`hmt_deepspeed.zero.saving.snapshot_offloaded` takes what the optimizer keeps off the device.

Files appear as ``step<N>.saving``, synced and checksummed, and the folder gets its name when it is whole on
every rank. Weights are stored whole, or as the difference to those of an earlier snapshot that is kept as long
as it is needed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, cast
from weakref import ref

import torch
from deepspeed import comm as dist
from deepspeed.utils import logger
from torch import Tensor

from hmt_deepspeed.memory.available import host_memory_share
from hmt_deepspeed.memory.threads import background_threads
from hmt_deepspeed.memory.transfer import TransferEngine
from hmt_deepspeed.report.metrics import format_bytes
from hmt_deepspeed.zero.interfaces import Engine, HostUpdates
from hmt_deepspeed.zero.parameters.param_state import ParamState
from hmt_deepspeed.zero.saving.checkpoint import common_state
from hmt_deepspeed.zero.saving.client_objects import storable
from hmt_deepspeed.zero.saving.optimizer_state import hmt_state
from hmt_deepspeed.zero.saving.raw_tensors import map_tensors
from hmt_deepspeed.zero.saving.snapshot_offloaded import OffloadedStates
from hmt_deepspeed.zero.saving.snapshot_writer import Job, SnapshotWriter, prepare_folder
from hmt_deepspeed.zero.saving.staging import Staging
from hmt_deepspeed.zero.saving.verify import newest_steps
from hmt_deepspeed.zero.state import ZeroState
from hmt_deepspeed.zero.weights.int8_weight import EncodedWeight
from hmt_deepspeed.zero.weights.residency import on_ssd, resident

__all__ = ["SnapshotSettings", "Snapshots"]


@dataclass(frozen=True)
class SnapshotSettings:
    """``hmt.snapshot``; steps are optimizer steps."""

    path: str
    interval: int


class Snapshots:
    """Takes, writes and removes the snapshots of one rank.

    Args:
        engine: refers to a built one. settings: see :class:`SnapshotSettings`.

    Attributes:
        num_taken, num_skipped: the latter since the one before was not written yet.
        seconds_taking: that the training thread spent on them.

    Raises:
        ValueError: files cannot be made in the folder, or host memory has no room for a copy of the states.
    """

    def __init__(self, engine: ref[Engine], settings: SnapshotSettings) -> None:
        self._reference, self.settings = engine, settings
        collectives = self._zero.collectives
        self._rank = collectives.rank
        limit = host_memory_share()
        self._transfers = TransferEngine(self._engine.device, 1, outgoing_bytes=limit)
        self._offloaded = OffloadedStates(self._zero)
        self._staging = Staging(self._transfers)
        self._thread = background_threads(1, "hmt-snapshot")
        self._writing: Future[None] | None = None
        self._is_busy = False  # with one that is taken; it is written once its step counts
        self._copied, self._stopping = threading.Event(), threading.Event()
        self._writer = SnapshotWriter(
            settings.path,
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
        self._take_memory(limit)
        self._updates.synchronize_copies = self.synchronize

    @property
    def _engine(self) -> Engine:
        engine = self._reference()
        assert engine is not None
        return engine

    @property
    def _zero(self) -> ZeroState:
        zero: ZeroState = self._engine.optimizer.zero
        return zero

    @property
    def _updates(self) -> HostUpdates:
        updates: HostUpdates = self._engine.optimizer.overlap
        return updates

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

    def synchronize(self) -> None:
        """Wait for copies that are still under way; before weights or states change."""
        if self._is_busy and not self._copied.is_set():
            begin = time.perf_counter()
            self._copied.wait()
            self.seconds_taking += time.perf_counter() - begin

    def newest(self, checkpoints: str) -> str:
        """The snapshots' folder or another, whichever has the whole checkpoint of more steps; the same on all ranks.

        Args:
            checkpoints: the other folder; of equal steps it is chosen.
        """
        chosen = self.settings.path
        if self._rank == 0 and newest_steps(checkpoints) >= newest_steps(chosen):
            chosen = checkpoints
        folder: str = self._zero.collectives.broadcast_object(chosen)
        return folder

    def finish(self) -> None:
        """Wait until the last snapshot is written.

        Raises:
            RuntimeError: it could not be, or an update beside it failed.
        """
        if self._is_busy:
            self._updates.finish()  # on an SSD a step counts only then
            assert self._writing is not None
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

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory taken, from the start on; more only where ranks have risen since."""
        return self._staging.store.pinned_bytes + self._offloaded.nbytes

    def metrics(self) -> dict[str, Any]:
        """Counters since the start of the run."""
        return {
            "snapshots": self.num_taken,
            "snapshots_skipped": self.num_skipped,
            "snapshot_bytes_written": self._writer.bytes_written,
            "snapshot_bytes_linked": self._writer.bytes_linked,
            "snapshot_seconds_taking": self.seconds_taking,
            "snapshot_seconds_writing": self._seconds_writing,
            "snapshot_host_bytes": self.host_bytes,
        }

    def describe(self) -> str:
        """A line for the start table."""
        taken, settings = format_bytes(self.host_bytes), self.settings
        return f"snapshots: every {settings.interval} steps to {settings.path}; {taken} of host memory per rank"

    def _raise_failure(self) -> None:
        if self._writing is None or not self._writing.done():
            return
        done, self._writing, self._is_busy = self._writing, None, False
        error = done.exception()
        if error is not None:
            raise RuntimeError(
                f"a snapshot could not be written to {self.settings.path} (hmt.snapshot.path) on rank "
                f"{self._rank}: {error}. The one before it is whole. Make room there or give the permission, or "
                "leave hmt.snapshot out."
            ) from error

    def _is_anyone_writing(self) -> bool:
        """The same on all ranks: each takes a snapshot or none does."""
        if self._zero.collectives.world == 1:
            return self._is_busy
        busy = torch.tensor(float(self._is_busy), device=self._engine.device)
        self._zero.collectives.all_reduce(busy, op=dist.ReduceOp.MAX)
        return bool(busy.item())

    def _take(self, step: int) -> None:
        if self._offloaded.must_synchronize:
            self._updates.synchronize()
        try:
            states = self._states(*self._offloaded.take(self._zero))
        except BaseException:
            self._staging.forget()
            self._offloaded.forget()
            raise
        self._copied.clear()
        self._is_busy = True
        self._thread.submit(self._wait_for_copies)
        job = Job(f"step{step:08d}", step, states, self._offloaded.keep_files)
        self._offloaded.when_ready(self._zero, self._updates, partial(self._begin_writing, job))

    def _begin_writing(self, job: Job) -> None:
        self._writing = self._thread.submit(self._write, job)

    def _take_memory(self, limit: int) -> None:
        """With room for the states as they are, taken now: what shares out host memory later finds the rest."""
        staged = self._staging.measure(lambda: self._states(*self._offloaded.outline()))
        needed = staged + self._offloaded.nbytes
        short = torch.tensor(float(needed > limit), device=self._engine.device)
        self._zero.collectives.all_reduce(short, op=dist.ReduceOp.MAX)
        if short.item():
            raise ValueError(
                f"hmt.snapshot copies {needed} bytes of weights and states to host memory on rank {self._rank}, which "
                f"may take {limit}: half of what is free, shared by the ranks of a machine; on one rank at least that "
                "is too little. Save checkpoints instead and leave hmt.snapshot out, spread the states over more "
                'ranks, or put them on an SSD ("offload_optimizer": {"device": "nvme"}), whose files are linked.'
            )
        self._offloaded.allocate()
        self._staging.open(limit - self._offloaded.nbytes, first=staged)

    def _states(self, masters: Mapping[str, Any], moments: Mapping[str, Any]) -> dict[str, Any]:
        """States that this rank writes, by kind of file; the caller gives masters and moments off the device."""
        self._staging.begin(_storages(self._engine))
        states = {"optim": self._optimizer_state(masters, moments)}
        if self._rank == 0 or self._zero.settings.stage == 3:
            states["model"] = self._model_state()
        return states

    def _stage_weight(self, param_state: ParamState) -> Any:
        if param_state.weight.master is not None:
            return self._staging.stage(param_state.weight.master, param_state.name)
        dtype = self._zero.settings.model_dtype  # as exact, and smaller
        with param_state.weight.shard() as shard:
            return self._staging.stage(
                _to_stay(param_state.gradient.param, shard.to(dtype)), param_state.name
            )

    def _optimizer_state(
        self, offloaded: Mapping[str, Any], moments: Mapping[str, Any]
    ) -> dict[str, Any]:
        zero, masters = self._zero, {}
        for param_state in filter(zero.saves_states_of, zero.param_states):
            flat = list(param_state.weight.shards.flat(param_state.weight.rank))
            part = offloaded.get(param_state.name)
            if part is None:
                part = {"values": self._stage_weight(param_state)}
            masters[param_state.name] = {"flat": flat, **part}
        ours = map_tensors(hmt_state(zero, self._staging.stage, moments), self._staging.stage)
        return {"optimizer_state_dict": {"masters": masters, "hmt": ours}}

    def _model_state(self) -> dict[str, Any]:
        """Content of DeepSpeed's model file without the trained weights."""
        engine = self._engine
        frozen = engine._get_zero_frozen_param_attributes
        fragments = frozen(_fragment)
        shapes = frozen(engine._get_param_shape_func)
        # clones: the next forward may change them before the copies are done
        buffers = {name: b.detach().clone() for name, b in engine.module.named_buffers()}
        state = {
            **{key: storable(value) for key, value in engine.snapshot_client_state().items()},
            **common_state(engine, buffers, save_frozen=False),
            "frozen_param_fragments": {
                n: self._staging.stage(t, f"frozen {n}") for n, t in fragments.items()
            },
            "frozen_param_shapes": {n: list(shape) for n, shape in shapes.items()},
        }
        return dict(map_tensors(state, self._staging.stage))

    # -- writing thread -------------------------------------------------------------------------

    def _wait_for_copies(self) -> None:
        try:
            self._staging.wait()
        finally:  # what has failed is raised where it is read
            self._copied.set()

    def _write(self, job: Job) -> None:
        begin = time.perf_counter()
        try:
            self._offloaded.wait()
            self._writer.write(job)
        finally:
            self._staging.forget()
            self._offloaded.forget()
            self._seconds_writing += time.perf_counter() - begin

    def _host_bytes(self, name: str) -> Tensor:
        copy = self._offloaded.host_bytes(name)
        return self._staging.host_bytes(name) if copy is None else copy


def _fragment(param: Any) -> Tensor:
    """This rank's part of a frozen parameter, where it is."""
    if not hasattr(param, "ds_tensor"):
        return cast(Tensor, param.detach())
    with resident(param) as part:
        return _to_stay(param, part)


def _to_stay(param: Any, part: Tensor) -> Tensor:
    """A partition that is valid beyond its block: one that an SSD holds was read for the block only."""
    return part.clone() if on_ssd(param) else part


def _storages(engine: Engine) -> set[int]:
    """Addresses of what lives on after a snapshot: weights, masters and states as they are stored."""
    params = list(engine.module.parameters())
    tensors = [*params, *(param.ds_tensor for param in params if hasattr(param, "ds_tensor"))]
    for param_state in engine.optimizer.zero.param_states:
        dense = (
            ()
            if param_state.dense_state is None or param_state.host is not None
            else param_state.dense_state[:2]
        )
        states = dense if param_state.matrix is None else param_state.matrix.states().values()
        tensors += [tensor for state in states for tensor in state.tensors()]
        tensors += [] if param_state.weight.master is None else [param_state.weight.master]
        if isinstance(param_state.weight, EncodedWeight):
            tensors += param_state.weight.state_dict().values()
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


def _problem_of(path: str) -> str | None:
    """Why no snapshot can be written to a folder, which is made ready if it can."""
    try:
        prepare_folder(path)
    except ValueError as error:
        return str(error)
    return None
