"""Verifies sizes and checksums of a checkpoint's files, and finds the newest whole one."""

from __future__ import annotations

import json
import os
from typing import Any

from hmt_deepspeed.memory.alternate import Record, read_kept
from hmt_deepspeed.memory.errors import StoreError
from hmt_deepspeed.zero.saving.durable import MANIFEST, fingerprint
from hmt_deepspeed.zero.saving.saved_state import SavedState

__all__ = ["candidate_tags", "damage", "newest_steps"]


def damage(folder: str) -> str | None:
    """Describe the damage to a checkpoint's folder, or None. A stock checkpoint has no manifest to check."""
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
    try:
        return SavedState.is_ours(folder)
    except Exception:  # unreadable: torn or foreign, either way not a whole stock checkpoint
        return True
