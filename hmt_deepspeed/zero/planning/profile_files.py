"""Stores measured machines on disk: beside a plan, in a run's folder and in a cache by machine and model."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from pathlib import Path

import deepspeed
import psutil
import torch

from hmt_deepspeed.planner.hardware import Machine, machine_from_json
from hmt_deepspeed.version import __version__

__all__ = ["cache_file", "read_profile", "write_profile"]


def write_profile(machine: Machine, path: str | os.PathLike[str]) -> None:
    """Write a machine as JSON: the whole file or none of it."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(machine.to_json() + "\n", encoding="utf-8")
    os.replace(temporary, path)


def read_profile(path: str | os.PathLike[str]) -> Machine:
    """The machine that :func:`write_profile` wrote.

    Raises:
        ValueError: it cannot be read, or holds no machine.
    """
    try:
        return machine_from_json(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"the profile {os.fspath(path)!r} cannot be read ({error}). Remove the file, so that the run "
            "measures its machine again."
        ) from error


def cache_file(model: str, folder: str | os.PathLike[str] | None = None) -> Path:
    """Path of this machine's profile for a model, whether or not there is one.

    Args:
        model: what tells its products from another's, such as its config as JSON.
        folder: of the cache; None for ``hmt_deepspeed/profiles`` in the user's cache folder.
    """
    if folder is None:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        folder = Path(base) / "hmt_deepspeed" / "profiles"
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    versions = (torch.__version__, deepspeed.__version__, __version__)
    key = json.dumps([platform.node(), devices, psutil.cpu_count(), versions, model])
    return Path(folder) / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"
