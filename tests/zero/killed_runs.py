"""Runs that are killed, and the run that goes on from what they left."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from harness import Ranks

Losses = dict[int, set[str]]  # every loss that any of the runs has seen, by step


def kill_after(seconds: float) -> None:
    """This process dies so many seconds from now."""
    threading.Timer(seconds, _die).start()


def kill_at_call(of: Any, name: str, number: int, counts: Callable[[], bool]) -> None:
    """This process dies at a call of ``of.name``, by its number among those that ``counts`` says yes to."""
    method, calls = getattr(of, name), []

    def counted(*arguments: Any, **keyword: Any) -> Any:
        if counts():
            calls.append(1)
            if len(calls) == number:
                _die()
        return method(*arguments, **keyword)

    setattr(of, name, counted)


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def log_loss(folder: str, step: int, loss: float) -> None:
    with open(f"{folder}/losses", "a") as file:
        file.write(json.dumps([step, loss.hex()]) + "\n")


def undisturbed_and_resumed(
    ranks: Ranks,
    case: Callable[..., Any],
    world: int,
    tmp_path: Path,
    arguments: tuple[Any, ...],
    kills: Iterable[tuple[Any, ...]],
) -> tuple[Losses, Losses]:
    """Losses of a run that nothing disturbs, and of one that goes on each time from where it was killed.

    Args:
        case: called with a folder of its own, the one on the SSD, ``arguments`` and what one of ``kills`` says.
    """
    found = []
    for name, disturbances in (("undisturbed", ()), ("disturbed", kills)):
        folder = tmp_path / name
        folder.mkdir()
        given = (str(folder), str(tmp_path / "ssd"), *arguments)
        for kill in disturbances:
            codes, *_ = ranks.attempt(case, world, *given, *kill)
            assert -signal.SIGKILL in codes, kill
        ranks.run(case, world, *given)
        losses: Losses = {}
        for line in (folder / "losses").read_text().splitlines():
            step, loss = json.loads(line)
            losses.setdefault(step, set()).add(loss)
        found.append(losses)
    return found[0], found[1]


def assert_one_run(runs: tuple[Losses, Losses], steps: int) -> None:
    """No loss differs from the undisturbed run's, in any run that was killed."""
    undisturbed, resumed = runs
    assert sorted(undisturbed) == list(range(steps))
    assert all(len(losses) == 1 for losses in undisturbed.values())
    assert resumed == undisturbed
