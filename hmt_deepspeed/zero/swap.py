"""Where one engine's activations swap to: pinned host memory, and files on an SSD for what that cannot hold."""

from __future__ import annotations

import os
from functools import cached_property
from typing import Any

import psutil
import torch
from deepspeed.ops.op_builder import AsyncIOBuilder
from torch import Tensor

from hmt_deepspeed.memory.errors import PoolFull
from hmt_deepspeed.memory.file_io import AsyncIO, FileIO, PositionalIO
from hmt_deepspeed.memory.growing import GrowingHostStore
from hmt_deepspeed.memory.nvme import FileStore
from hmt_deepspeed.memory.tiered import Store, TieredStore
from hmt_deepspeed.memory.transfer import TransferEngine

__all__ = ["SwapMemory", "free_host_memory", "host_memory_share"]

LIMIT = "hmt.activations.host_memory"
# Pinned bytes on their way: enough to keep a copy engine busy, and a tensor on its way to an SSD whole.
_STAGING, _SSD_STAGING = 2**26, 2**30


def free_host_memory() -> int:
    """Bytes that the machine, or the container that the process is in, could still give."""
    free = int(psutil.virtual_memory().available)
    try:
        with open("/sys/fs/cgroup/memory.max", encoding="ascii") as file:
            limit = file.read().strip()
        with open("/sys/fs/cgroup/memory.current", encoding="ascii") as file:
            used = int(file.read())
    except OSError:
        return free
    return free if limit == "max" else min(free, int(limit) - used)


def host_memory_share() -> int:
    """Bytes that "auto" lets one rank take: half of what is free now, shared by the ranks of the machine."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("LOCAL_SIZE", "1")))
    return free_host_memory() // 2 // ranks


class SwapMemory:
    """The stores of one rank, each made when it is first asked for.

    Args:
        device: of the activations.
        host_memory: bytes; "auto": half of what is free now, shared by the ranks of the machine.
        nvme_path: folder for what host memory cannot hold.
        aio: DeepSpeed's ``aio`` section, if its ``async_io`` is to read and write the files.

    Attributes:
        limit: bytes of pinned memory that the stores may take.
    """

    def __init__(
        self,
        device: torch.device,
        host_memory: int | str,
        nvme_path: str | None,
        aio: dict[str, Any] | None,
    ) -> None:
        self.device, self.nvme_path, self._aio = device, nvme_path, aio
        if host_memory == "auto":
            host_memory = host_memory_share()
        self.limit = int(host_memory)
        self._moved_before: dict[str, int | float] = {}
        self._staging = min(self.limit // 4, _STAGING if nvme_path is None else _SSD_STAGING)

    @cached_property
    def engine(self) -> TransferEngine:
        return TransferEngine(self.device, self._staging)

    @cached_property
    def host(self) -> GrowingHostStore:
        return GrowingHostStore(self.engine, self.limit - self._staging, LIMIT)

    @cached_property
    def files(self) -> FileStore:
        assert self.nvme_path is not None, "the config has refused swap_ssd without a folder"
        return FileStore(self.engine, self.nvme_path, self._file_io())

    @cached_property
    def host_then_files(self) -> Store:
        return _HostThenFiles(self.host, self.files, self.limit)

    def begin_step(self) -> None:
        """What :meth:`numbers` says of moved bytes starts anew."""
        self._moved_before = self._moved()

    def _moved(self) -> dict[str, int | float]:
        """Sums since construction, of the stores that there are."""
        found: dict[str, int | float] = {}
        waited = 0.0
        for name, counters in (
            ("host", self.engine.counters if "engine" in vars(self) else None),
            ("ssd", self.files.counters if "files" in vars(self) else None),
        ):
            if counters is not None:
                found[f"activation_bytes_to_{name}"] = counters.bytes_out
                found[f"activation_bytes_from_{name}"] = counters.bytes_in
                waited += counters.seconds_waited
                found["activation_seconds_waited"] = waited
        return found

    def numbers(self) -> dict[str, int | float]:
        """Bytes moved and seconds waited since :meth:`begin_step`, bytes taken; empty where nothing swaps."""
        found = {name: n - self._moved_before.get(name, 0) for name, n in self._moved().items()}
        if "host" in vars(self):
            found["activation_host_bytes"] = self.host.pinned_bytes + self._staging
            found["activation_peak_host_bytes"] = self.host.peak_bytes
        if "files" in vars(self):
            found["activation_ssd_bytes"] = self.files.slots.file_bytes
        return found

    def close(self) -> None:
        """Frees the memory and removes the files. Idempotent."""
        for name in ("files", "host", "engine"):
            made = vars(self).pop(name, None)
            if made is not None:
                made.close()

    def _file_io(self) -> FileIO:
        """Through the page cache, unless the JSON sets up DeepSpeed's ``async_io``."""
        if self._aio is None:
            return PositionalIO()
        builder = AsyncIOBuilder()
        if not builder.is_compatible(verbose=False):
            raise ValueError(
                "the config has an aio section, but DeepSpeed's async_io does not build here, for which "
                "hmt.activations.nvme_path would use it: install libaio-dev (Debian, Ubuntu) or "
                "libaio-devel (Fedora), or remove the section."
            )
        handle = builder.load().aio_handle
        keys = ("block_size", "queue_depth", "single_submit", "overlap_events")
        settings = [self._aio[key] for key in keys]
        reader, writer = (handle(*settings, self._aio["intra_op_parallelism"]) for _ in range(2))
        return AsyncIO(reader, writer)


class _HostThenFiles(TieredStore):
    """Says which key is too small where a tensor does not even fit on the way to its file."""

    def __init__(self, host: Store, files: FileStore, limit: int) -> None:
        super().__init__([host, files])
        self._limit = limit

    def put(self, name: str, tensor: Tensor) -> None:
        try:
            super().put(name, tensor)
        except PoolFull as full:
            raise PoolFull(
                f"{name!r} of {tensor.nbytes} bytes has no room in host memory on its way to the SSD: "
                f"{LIMIT} is {self._limit}, of which a quarter is for that. Give at least "
                f"{4 * tensor.nbytes} bytes, or a smaller micro-batch."
            ) from full
