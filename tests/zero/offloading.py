"""Configs of ``offload_optimizer``, in pieces small enough that tiny models are several; and broken files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from training import ds_config, stock_config

ADAMW = {"method": "adamw"}
needs_async_io = pytest.mark.usefixtures("async_io_builds")


def offloaded(config: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """The config with its states in host memory; ``changes`` to the section."""
    config["zero_optimization"]["offload_optimizer"] = {
        "device": "cpu",
        "pin_memory": True,
        **changes,
    }
    return config


def offloaded_to(
    folder: str,
    stage: int,
    options: dict[str, Any] = ADAMW,
    offload: dict[str, Any] | None = None,
    section: dict[str, Any] | None = None,
    **changes: Any,
) -> dict[str, Any]:
    """``offload`` is ``hmt.offload``; ``section`` goes to ``offload_optimizer``; no folder: in host RAM."""
    config = ds_config(stage, options, **changes)
    device = {"device": "nvme", "nvme_path": folder} if folder else {"device": "cpu"}
    config["zero_optimization"]["offload_optimizer"] = {**device, **(section or {})}
    if offload:
        config["hmt"]["offload"] = offload
    return config


def stock_offload(stage: int, **changes: Any) -> dict[str, Any]:
    """DeepSpeed's own AdamW in place of HMT, which offload makes its CPU Adam."""
    import cpuinfo

    cpuinfo.get_cpu_info = dict  # takes four seconds, for a warning
    config = stock_config(stage, **changes)
    del config["optimizer"]["params"]["torch_adam"]
    return config


def small_chunks() -> None:
    """Every parameter in several chunks of two pieces, through pools that hold two chunks; in a file each piece is a
    page: of 12 bytes an element, 3072 of 4096."""
    from hmt_deepspeed.zero.offload import worker as host_worker

    host_worker.PIECE, host_worker.NUM_PIECES, host_worker.NUM_STAGED = 256, 2, 2


def flip_bit(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(1001)
        byte = file.read(1)[0]
        file.seek(1001)
        file.write(bytes([byte ^ 1]))
