"""Waits for a lock in torch's extension folder, told to the user: a killed compile leaves one for ever.

DeepSpeed's operators are compiled by ``torch.utils.cpp_extension``, one process at a time: that process makes
a file ``lock`` beside the operator and keeps it open, the others wait until the file is gone. They wait without
a word, also when the first was killed and nobody will remove it.
"""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partialmethod
from pathlib import Path

import psutil
from deepspeed.utils import logger
from torch.utils import cpp_extension
from torch.utils.file_baton import FileBaton

__all__ = ["abandoned_locks", "telling_waits"]

_TELL_AFTER = (
    30.0  # seconds; DeepSpeed's operators take about a minute each, which is worth a line too
)


@contextmanager
def telling_waits(after: float = _TELL_AFTER) -> Iterator[None]:
    """Warn when a lock is waited for inside the block: which file, how old it is, who holds it, what to do.

    The wait itself is torch's. Nothing is deleted: a process on another machine or in another container may
    hold a lock that nobody here has open.

    Args:
        after: seconds of waiting before the first line and between lines.
    """
    before = FileBaton.wait
    FileBaton.wait = partialmethod(_wait, after)  # type: ignore[assignment]
    try:
        yield
    finally:
        FileBaton.wait = before  # type: ignore[method-assign]


def _wait(baton: FileBaton, after: float) -> None:
    """``FileBaton.wait``, with a line every ``after`` seconds."""
    begin = told = time.monotonic()
    while os.path.exists(baton.lock_file_path):
        time.sleep(baton.wait_seconds)
        if time.monotonic() >= told + after:
            told = time.monotonic()
            # Of a machine's ranks at most one compiles, so one of these two waits wherever any does.
            if int(os.environ.get("LOCAL_RANK", "0")) < 2:
                with suppress(FileNotFoundError):  # released meanwhile
                    logger.warning(_told(Path(baton.lock_file_path), told - begin))


def abandoned_locks() -> list[str]:
    """A line for each lock in the extension folder that no process which can be seen from here has open."""
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or cpp_extension.get_default_build_root())
    lines = []
    for path in sorted([*root.glob("*/lock"), *root.glob("*/*/lock")]):
        with suppress(FileNotFoundError):  # released meanwhile
            if not _holders(path):
                lines.append(f"{_described(path)} {_remedy(path)}")
    return lines


def _told(path: Path, waited: float) -> str:
    text = f"hmt: waiting for {_duration(waited)}. {_described(path)} "
    if holders := _holders(path):
        return (
            f"{text}{' and '.join(holders)} has it open: this run goes on when that has compiled."
        )
    return text + _remedy(path)


def _described(path: Path) -> str:
    age = time.time() - path.stat().st_mtime
    return f"{path} is the lock of an operator's compilation, made {_duration(age)} ago."


def _remedy(path: Path) -> str:
    return (
        "No process that can be seen from here has it open: one that was killed left it, and every run that needs "
        "the operator waits for ever. If none compiles under another user, or on another machine or in another "
        f"container that shares the folder, stop the runs that wait, `rm {shlex.quote(str(path))}` and start again."
    )


def _holders(path: Path) -> list[str]:
    """Processes that have the file open, as far as this user may look into them."""
    name = os.path.realpath(path)
    return [
        f"process {process.pid} ({shlex.join(process.info['cmdline'] or ())[:80]})"
        for process in psutil.process_iter(["cmdline", "open_files"])
        if any(file.path == name for file in process.info["open_files"] or ())
    ]


def _duration(seconds: float) -> str:
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} seconds"
