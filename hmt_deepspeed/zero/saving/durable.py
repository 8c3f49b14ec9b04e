"""Writes files atomically and durably, with their checksums."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator
from typing import Any

import torch
from deepspeed.checkpoint.constants import FROZEN_PARAM_FRAGMENTS
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

from hmt_deepspeed.zero.saving.client_objects import original
from hmt_deepspeed.zero.saving.raw_tensors import read_state

__all__ = [
    "MANIFEST",
    "AtomicCheckpointEngine",
    "fingerprint",
    "make_folder",
    "replace_text",
    "sync_folder",
]

MANIFEST = "manifest.json"


class AtomicCheckpointEngine(TorchCheckpointEngine):
    """Saves to a temporary name, syncs, renames; remembers size and checksum of what it wrote.

    A failed write (a full disk) is remembered too and raised on every rank when the checkpoint is committed: a
    rank that raised here would leave the others waiting for it.

    Attributes:
        checksums: by file name within the checkpoint's folder: ``{"bytes": ..., "sha256": ...}``.
        failure: the first file that could not be written, and why.
    """

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.begin()

    def begin(self) -> None:
        """A new checkpoint: forget what was written of the last one."""
        self.checksums: dict[str, dict[str, Any]] = {}
        self.failure: str | None = None

    def save(self, state_dict: Any, path: str) -> None:
        """Write one file; it appears under ``path`` complete and on disk, or not at all."""
        temporary = f"{path}.tmp"
        with self.remembering(path), _removed_if_torn(temporary):
            with open(temporary, "wb") as file:
                torch.save(state_dict, file)
                file.flush()
                os.fsync(file.fileno())
            self.checksums[os.path.basename(path)] = fingerprint(temporary)
            os.replace(temporary, path)

    def load(self, path: str, map_location: Any = None) -> dict[str, Any]:
        """A model file of ours as DeepSpeed's loader wants it: memory-mapped, with the objects that callers gave.

        Without the frozen weights, which that loader would take as this world size and stage cut them.
        """
        state = {key: original(value) for key, value in read_state(path).items()}
        state.pop(FROZEN_PARAM_FRAGMENTS, None)
        return state

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """As ``os.makedirs``."""
        with self.remembering(path):
            super().makedirs(path, exist_ok)

    @contextlib.contextmanager
    def remembering(self, path: str) -> Iterator[None]:
        """Remember an error of the system inside as the failure of ``path``; it is not raised."""
        try:
            yield
        # A write that came to an end too early is a RuntimeError of torch's writer.
        except (OSError, RuntimeError) as error:
            self.failure = self.failure or f"{path}: {_reason(error)}"


@contextlib.contextmanager
def _removed_if_torn(path: str) -> Iterator[None]:
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            os.remove(path)
        raise


def _reason(error: BaseException) -> str:
    """The system's own words, also where torch's writer reports only how far it came."""
    cause = error
    while cause is not None:
        if isinstance(cause, OSError):
            return str(cause)
        cause = cause.__cause__ or cause.__context__  # type: ignore[assignment]
    return str(error).splitlines()[0]


def fingerprint(path: str) -> dict[str, Any]:
    """Size and SHA-256 of a file."""
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256") if hasattr(hashlib, "file_digest") else None
        if digest is None:  # Python 3.10
            digest = hashlib.sha256()
            while block := file.read(1 << 20):
                digest.update(block)
    return {"bytes": os.path.getsize(path), "sha256": digest.hexdigest()}


def replace_text(path: str, text: str) -> None:
    """Replace a small text file atomically and durably."""
    temporary = f"{path}.tmp"
    with open(temporary, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_folder(os.path.dirname(path) or ".")


def sync_folder(path: str) -> None:
    """Make renames inside a folder durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(path: str) -> None:
    """Make a folder and those above it, durably; nothing where it is there."""
    above = os.path.dirname(os.path.abspath(path))
    if not os.path.exists(above):
        make_folder(above)
    if not os.path.isdir(path):
        os.makedirs(path, exist_ok=True)  # another rank may have made it meanwhile
        sync_folder(above)
