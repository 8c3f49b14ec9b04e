"""Files of a checkpoint: written whole or not at all, with checksums, verified before they are read."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator
from typing import Any

import torch
from deepspeed.checkpoint.constants import FROZEN_PARAM_FRAGMENTS
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

from hmt_deepspeed.memory.alternate import Record, read_kept
from hmt_deepspeed.memory.errors import StoreError
from hmt_deepspeed.zero.saving.client_objects import original
from hmt_deepspeed.zero.saving.raw_tensors import read_state

__all__ = [
    "MANIFEST",
    "AtomicCheckpointEngine",
    "candidate_tags",
    "damage",
    "fingerprint",
    "make_folder",
    "newest_steps",
    "replace_text",
    "sync_folder",
]

MANIFEST = "manifest.json"


class AtomicCheckpointEngine(TorchCheckpointEngine):
    """Saves to a temporary name, syncs, renames; remembers size and checksum of what it wrote.

    What cannot be written (a full disk) is remembered too and raised when the checkpoint is committed, on
    every rank: one that raised here would leave the others waiting for it.

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
        """What the system refuses inside is remembered as the failure of ``path`` and not raised."""
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


def damage(folder: str) -> str | None:
    """What is wrong with a checkpoint's folder, or None. A stock checkpoint has no manifest to check."""
    path = os.path.join(folder, MANIFEST)
    if not os.path.isdir(folder):
        return "the folder does not exist"
    if not os.path.isfile(path):
        stock = any(name.endswith("model_states.pt") for name in os.listdir(folder))
        return None if stock and not _was_ours(folder) else f"{MANIFEST} is missing"
    try:
        with open(path) as file:
            files = json.load(file)["files"]
    except (ValueError, KeyError):
        return f"{MANIFEST} is not readable"
    for name, expected in files.items():
        member = os.path.join(folder, name)
        if not os.path.isfile(member):
            return f"{name} is missing"
        size = os.path.getsize(member)
        if size != expected["bytes"]:
            return f"{name} has {size} bytes instead of {expected['bytes']}"
        problem = _content_problem(member, expected)
        if problem is not None:
            return problem
    return None


def _content_problem(path: str, expected: dict[str, Any]) -> str | None:
    if "sha256" in expected:
        same = fingerprint(path)["sha256"] == expected["sha256"]
        return None if same else f"{os.path.basename(path)} does not match its checksum"
    try:
        read_kept(path, Record(expected["bytes"], expected["content"], expected["checksum"]))
    except StoreError as error:
        return str(error)
    return None


def candidate_tags(load_dir: str, tag: str | None) -> list[str]:
    """Tags to try, best first: the one asked for, or ``latest`` and then the others by step.

    ``TAG.old`` stands in for a tag whose replacement was interrupted between two renames.
    """
    if not os.path.isdir(load_dir):
        return []
    names = [n for n in os.listdir(load_dir) if os.path.isdir(os.path.join(load_dir, n))]
    if tag is not None:
        tag = str(tag)
        return [name for name in (tag, f"{tag}.old") if name in names]
    whole = [n for n in names if os.path.isfile(os.path.join(load_dir, n, MANIFEST))]
    whole = [n for n in whole if not n.endswith(".saving")]
    whole.sort(key=lambda n: _steps(os.path.join(load_dir, n)), reverse=True)
    latest = os.path.join(load_dir, "latest")
    if os.path.isfile(latest):
        with open(latest) as file:
            named = file.read().strip()
        first = [n for n in (named, f"{named}.old") if n in names]
        whole = first + [n for n in whole if n not in first]
    return whole


def newest_steps(load_dir: str) -> int:
    """Optimizer steps of the newest whole checkpoint in a folder, -1 if there is none."""
    for tag in candidate_tags(load_dir, None):
        folder = os.path.join(load_dir, tag)
        if damage(folder) is None:
            return _steps(folder)
    return -1


def _steps(folder: str) -> int:
    try:
        with open(os.path.join(folder, MANIFEST)) as file:
            return int(json.load(file)["global_steps"])
    except (ValueError, KeyError):
        return -1


def _was_ours(folder: str) -> bool:
    from hmt_deepspeed.zero.saving.saved_state import SavedState

    try:
        return SavedState.is_ours(folder)
    except Exception:  # unreadable: torn or foreign, either way not a whole stock checkpoint
        return True
