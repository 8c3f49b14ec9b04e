"""The ways bytes get to a file, for tests that hold for all of them."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from hmt_deepspeed.memory.file_io import AsyncIO, PositionalIO


def async_io() -> AsyncIO:
    """DeepSpeed's, or skip where it does not build."""
    from deepspeed.ops.op_builder import AsyncIOBuilder

    if not AsyncIOBuilder().is_compatible(verbose=False):
        pytest.skip("DeepSpeed's async_io does not build here: libaio's headers are missing")
    module = AsyncIOBuilder().load(verbose=False)
    return AsyncIO(*(module.aio_handle(1 << 16, 4, False, True, 2) for _ in range(2)))


def make_io(kind: str) -> Any:
    return PositionalIO() if kind == "positional" else async_io()


class Gated(PositionalIO):
    """Writes, and reads, wait until they are let through."""

    def __init__(self):
        self.writes, self.reads = threading.Event(), threading.Event()
        self.reads.set()

    def write(self, path, memory):
        assert self.writes.wait(120)
        super().write(path, memory)

    def read(self, path, memory):
        assert self.reads.wait(120)
        super().read(path, memory)
