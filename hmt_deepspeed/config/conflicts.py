"""Conflicts of a section's fields as problems of the block: those of `hmt.optimizer` are in `optimizer_conflicts`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from hmt_deepspeed.config.optimizer_conflicts import Conflict, Given

__all__ = ["conflict_problems", "snapshot_conflicts"]


def conflict_problems(
    section: object,
    prefix: str,
    known_bad: Mapping[str, str],
    find: Callable[[Given], list[Conflict]],
) -> dict[str, str]:
    """Conflicts of a raw section, leaving out those that rest on a field already reported.

    Args:
        section: as parsed. prefix: its full key. known_bad: problems by key. find: lists its conflicts.
    """
    if not isinstance(section, dict):
        return {}
    # the problem of an element (`target_modules[1]`, `policy.residual`) is its field's problem
    bad_fields = {
        re.split(r"[.\[]", key.removeprefix(f"{prefix}."))[0]
        for key in known_bad
        if key.startswith(f"{prefix}.")
    }
    given = {key: value for key, value in section.items() if key not in bad_fields}
    return {
        f"{prefix}.{conflict.key}": f"got {conflict.value!r}. {conflict.advice}"
        for conflict in find(given)
        if not bad_fields & set(conflict.depends_on)
    }


def snapshot_conflicts(given: Given) -> list[Conflict]:
    """Explicitly given `hmt.snapshot` fields without which, or with which alone, nothing is saved."""
    path, interval = given.get("path"), given.get("interval", 0)
    if path is not None and interval == 0:
        advice = 'Nothing would be saved: set "interval" to a number of steps, or remove it.'
        return [Conflict("path", path, ("interval",), advice)]
    if path is None and interval != 0:
        advice = 'It needs a folder: set "path", or remove it.'
        return [Conflict("interval", interval, ("path",), advice)]
    return []
