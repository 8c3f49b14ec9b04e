"""Stores that an engine's activations swap to: pinned host memory, then files on an SSD."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any

import torch

from hmt_deepspeed.config.codecs import Place
from hmt_deepspeed.memory.available import host_memory_share
from hmt_deepspeed.memory.counters import Counters
from hmt_deepspeed.memory.growing import GrowingHostStore
from hmt_deepspeed.memory.nvme import FileStore
from hmt_deepspeed.memory.pool import GRANULE
from hmt_deepspeed.memory.tiered import Store, TieredStore
from hmt_deepspeed.memory.transfer import TransferEngine
from hmt_deepspeed.zero.offload.ssd import file_io

__all__ = ["SwapMemory", "staging_bytes"]

LIMIT = "hmt.activations.host_memory"
_REMEDY = (
    "Raise it where the machine has more; otherwise let a step have fewer or shorter sequences "
    "(gradient_accumulation_steps, where accumulation is vertical), or hold residual in int8."
)
# Pinned bytes on their way, at most: enough to keep a copy engine busy, and what waits to be written to an SSD.
_STAGING, _SSD_STAGING = 2**26, 2**30


def staging_bytes(limit: int, nvme_path: str | None) -> int:
    """Page-locked bytes reserved for copies on their way to host memory, or on to files.

    Args:
        limit: bytes of pinned memory that the stores may take. nvme_path: folder of the files, None for none.
    """
    return min(_pages(limit // 4), _STAGING if nvme_path is None else _SSD_STAGING)


def _pages(nbytes: int) -> int:
    """Bytes of the whole pages within ``nbytes``: pools round up, and a limit must not be exceeded."""
    return nbytes // GRANULE * GRANULE


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
        self.limit = _pages(int(host_memory))
        self._moved_before: dict[str, int | float] = {}
        self._staging = staging_bytes(self.limit, nvme_path)

    @cached_property
    def engine(self) -> TransferEngine:
        return TransferEngine(self.device, self._staging)

    @cached_property
    def host(self) -> GrowingHostStore:
        return GrowingHostStore(self.engine, self.limit - self._staging, LIMIT, remedy=_REMEDY)

    @cached_property
    def files(self) -> FileStore:
        assert self.nvme_path is not None, "the config has refused swap_ssd without a folder"
        return FileStore(
            self.engine, self.nvme_path, file_io(self._aio, "hmt.activations.nvme_path")
        )

    @cached_property
    def host_then_files(self) -> Store:
        return TieredStore([self.host, self.files])

    def store(self, place: Place) -> Store | None:
        """Store that codecs of a place move tensors to; None for the device."""
        if place == "device":
            return None
        return self.host if place == "host" else self.host_then_files

    def begin_step(self) -> None:
        """Reset the moved bytes of :meth:`numbers`."""
        self._moved_before = self._moved()

    def _moved(self) -> dict[str, int | float]:
        """Sums since construction, of the stores that there are."""
        found: dict[str, int | float] = {}
        waited = 0.0
        for name, counters in self.counters():
            found[f"activation_bytes_to_{name}"] = counters.bytes_out
            found[f"activation_bytes_from_{name}"] = counters.bytes_in
            waited += counters.seconds_waited
            found["activation_seconds_waited"] = waited
        return found

    def counters(self) -> Iterator[tuple[str, Counters]]:
        """("host" or "ssd", what was moved there) of the stores that there are."""
        if "engine" in vars(self):
            yield "host", self.engine.counters
        if "files" in vars(self):
            yield "ssd", self.files.counters

    def numbers(self) -> dict[str, int | float]:
        """Bytes moved and seconds waited since :meth:`begin_step`, bytes taken; empty where nothing swaps."""
        found = {name: n - self._moved_before.get(name, 0) for name, n in self._moved().items()}
        if "engine" in vars(self):
            found["activation_staging_bytes"] = self._staging
        if "host" in vars(self):
            found["activation_host_bytes"] = self.host.pinned_bytes + self._staging
            found["activation_peak_host_bytes"] = self.host.peak_bytes
        if "files" in vars(self):
            found["activation_ssd_bytes"] = self.files.slots.file_bytes
        return found

    def close(self) -> None:
        """Free the memory and remove the files. Idempotent."""
        for name in ("files", "host", "engine"):
            made = vars(self).pop(name, None)
            if made is not None:
                made.close()
