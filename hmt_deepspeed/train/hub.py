"""Telling local paths from hub ids, and one wording for what could not be found."""

from __future__ import annotations

import re
from pathlib import Path

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_FILE_SUFFIX = re.compile(
    r"\.(txt|md|py|jsonl?|csv|parquet|bin|safetensors|gz|zst)$", re.IGNORECASE
)


def looks_like_path(name: str) -> bool:
    """Whether `name` can only be meant as a file or folder, never as a hub id (owner/name)."""
    return (
        name.startswith(("/", "./", "../", "~", ".\\"))
        or name.endswith("/")
        or _HUB_ID.fullmatch(name) is None
        or _FILE_SUFFIX.search(name) is not None
    )


def existing_path(field: str, name: str) -> Path | None:
    """The local path that `name` means, or None for what may be a hub id.

    Raises ValueError for something that can only be a path and is not there.
    """
    path = Path(name).expanduser()
    if path.exists():
        return path
    if looks_like_path(name):
        raise ValueError(
            f"{field} {name!r} does not exist (looked in {path.absolute()}); "
            "give an existing path or the id of something on the hub"
        )
    return None


def hub_error(field: str, name: str, legal: str, error: Exception) -> ValueError:
    """What to raise when the hub does not answer or does not know `name`."""
    reason = str(error).strip().splitlines()
    return ValueError(
        f"{field} {name!r} is neither a local path nor something that the hub gave us "
        f"({type(error).__name__}: {reason[0] if reason else 'no message'}); legal: {legal}. "
        "Without a network, download it elsewhere and give its path."
    )
