"""Keeps the optimizer's states in files on an SSD."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from deepspeed.ops.op_builder import AsyncIOBuilder
from torch import Tensor

from hmt_deepspeed.memory.alternate import AlternateSlots
from hmt_deepspeed.memory.errors import StoreError
from hmt_deepspeed.memory.file_io import AsyncIO, FileIO, PositionalIO
from hmt_deepspeed.memory.own_folder import OwnFolder
from hmt_deepspeed.memory.slot_pipeline import SlotPipeline
from hmt_deepspeed.memory.slots import SlotFolder
from hmt_deepspeed.memory.transfer import TransferEngine
from hmt_deepspeed.report.metrics import format_bytes
from hmt_deepspeed.zero.operator_locks import telling_waits
from hmt_deepspeed.zero.settings import SsdSettings

__all__ = ["MIN_BUFFERS", "Ssd", "file_io"]

NUM_STATES = 3  # fp32 of an element: its master and two moments
MIN_BUFFERS = 3  # for a read, an update and a write at once


class Ssd(SlotPipeline):
    """The files of one rank's states, in a folder that is removed when the process ends.

    Args:
        engine: gives the buffers. chunk: elements of the largest piece.
        failed: see :class:`SlotPipeline`.

    Raises:
        StoreError: the folder cannot be made.
        ValueError: an ``aio`` section where async_io does not build.
    """

    def __init__(
        self,
        settings: SsdSettings,
        engine: TransferEngine,
        chunk: int,
        failed: Callable[[str, Exception], None],
    ) -> None:
        self.settings = settings
        io = file_io(settings.aio, "zero_optimization.offload_optimizer.nvme_path")
        self._own_folder = OwnFolder(settings.path)
        pool = engine.new_pool(
            settings.num_buffers * NUM_STATES * torch.float32.itemsize * chunk, "pool of states"
        )
        super().__init__(
            AlternateSlots(SlotFolder(self._own_folder.path, io)),
            pool,
            settings.read_ahead,
            settings.write_behind,
            failed,
        )

    def describe(self) -> list[str]:
        """Lines for the start table: bytes by place."""
        through = "the page cache" if self.settings.aio is None else "DeepSpeed's async_io"
        order = ("after", "beside")
        read, write = order[self.settings.read_ahead], order[self.settings.write_behind]
        return [
            f"{format_bytes(self.slots.folder.file_bytes)} of states in {self._own_folder.path}",
            "twice that from the first step on",
            f"through {through} and {format_bytes(self.buffer_bytes)} of buffers",
            f"reads {read} and writes {write} updates",
        ]

    def scratch(self, numel: int) -> Tensor:
        """Flat fp32 zeros in a file that is gone when the tensor is: host memory is not held by it.

        Args:
            numel: how many; 4 bytes each.

        Raises:
            StoreError: the disk has no room for it.
        """
        if not numel:
            return torch.zeros(0)
        path = os.path.join(self._own_folder.path, "scratch")
        try:
            with open(path, "xb") as file:
                os.posix_fallocate(file.fileno(), 0, numel * torch.float32.itemsize)
            return torch.from_file(path, shared=True, size=numel, dtype=torch.float32)
        except OSError as error:
            raise StoreError(f"{path}: no room for {numel} fp32 masters: {error}") from error
        finally:
            with suppress(FileNotFoundError):
                os.unlink(path)

    def close(self) -> None:
        """Waits for the threads and removes the folder. Idempotent."""
        super().close()
        self._own_folder.close()


def file_io(aio: dict[str, Any] | None, used_for: str) -> FileIO:
    """Through the page cache, unless the JSON sets up DeepSpeed's ``async_io``.

    Args:
        aio: the section, or None. used_for: the key that asks for files.

    Raises:
        ValueError: there is a section, and async_io does not build.
    """
    if aio is None:
        return PositionalIO()
    builder = AsyncIOBuilder()
    if not builder.is_compatible(verbose=False):
        raise ValueError(
            "the config has an aio section, but DeepSpeed's async_io does not build here, for which "
            f"{used_for} would use it: install libaio-dev (Debian, Ubuntu) or "
            "libaio-devel (Fedora), or remove the section."
        )
    with telling_waits():  # the first activation may swap long after `initialize`
        handle = builder.load().aio_handle
    keys = ("block_size", "queue_depth", "single_submit", "overlap_events")
    settings = [aio[key] for key in keys]
    reader, writer = (handle(*settings, aio["intra_op_parallelism"]) for _ in range(2))
    return AsyncIO(reader, writer)
