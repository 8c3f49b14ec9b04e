"""The ways bytes get to a file, for tests that hold for all of them."""

from __future__ import annotations

import glob
import os
from typing import Any

import pytest
from torch.utils import cpp_extension

from hmt_deepspeed.memory.file_io import AsyncIO, PositionalIO


def async_io() -> AsyncIO:
    """DeepSpeed's, or skip: it may not build here, and compiling it takes minutes."""
    from deepspeed.ops.op_builder import AsyncIOBuilder

    root = os.environ.get("TORCH_EXTENSIONS_DIR")
    folder = root or os.path.join(cpp_extension.get_default_build_root(), "*")
    if not all(glob.glob(f"{folder}/{op}/{op}.so") for op in ("async_io", "pin_memory")):
        pytest.skip("DeepSpeed's async_io is not compiled yet, see tests/zero/test_nvme.py")
    if not AsyncIOBuilder().is_compatible(verbose=False):
        pytest.skip("DeepSpeed's async_io does not build here")
    module = AsyncIOBuilder().load(verbose=False)
    return AsyncIO(*(module.aio_handle(1 << 16, 4, False, True, 2) for _ in range(2)))


def make_io(kind: str) -> Any:
    return PositionalIO() if kind == "positional" else async_io()
