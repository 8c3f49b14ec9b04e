"""Plays tasks on resources event by event; `simulate.py` plays plans with it.

A resource serves one task at a time; of the tasks whose predecessors have ended it takes the one that comes
first in the list. Resources that run together may slow one another down, as two directions of a link do.
Nothing here knows of layers or phases, and nothing of the closed form in `cost.py`.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["Contention", "Span", "Task", "Timeline", "play"]

# (resource, resource) -> speed of each while both are busy; alone it is 1
Contention = Mapping[tuple[str, str], tuple[float, float]]


@dataclass(frozen=True)
class Task:
    """One piece of work.

    Attributes:
        name: for the picture. resource: who does it. seconds: how long alone.
        after: indices of tasks, earlier in the list, that must have ended.
        takes: (memory, bytes) occupied from its start. gives: (memory, bytes) free from its end.
    """

    name: str
    resource: str
    seconds: float
    after: tuple[int, ...] = ()
    takes: tuple[tuple[str, float], ...] = ()
    gives: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class Span:
    """Start and end of a task."""

    task: Task
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """``spans[i]`` is when task i ran."""

    spans: tuple[Span, ...]

    @property
    def seconds(self) -> float:
        """Seconds until the last task ends."""
        return max((span.end for span in self.spans), default=0.0)

    def busy(self) -> dict[str, float]:
        """Seconds that each resource worked."""
        total: dict[str, float] = defaultdict(float)
        for span in self.spans:
            total[span.task.resource] += span.end - span.start
        return dict(total)

    def memory(self, kind: str, start: float = 0.0) -> list[tuple[float, float]]:
        """(time, bytes from then on) of a memory that holds ``start`` bytes at first.

        Of changes at one instant those that free come first: a task that starts when another ends finds
        the other's bytes.
        """
        changes = []
        for span in self.spans:
            changes += [(span.start, size) for memory, size in span.task.takes if memory == kind]
            changes += [(span.end, -size) for memory, size in span.task.gives if memory == kind]
        held, curve = start, [(0.0, start)]
        for when, change in sorted(changes):
            held += change
            curve.append((when, held))
        return curve

    def peak(self, kind: str, start: float = 0.0) -> float:
        """Most bytes of a memory at once."""
        return max(held for _, held in self.memory(kind, start))


def play(tasks: Sequence[Task], contention: Contention | None = None) -> Timeline:
    """Run the tasks; the earlier in the list, the more urgent.

    Raises:
        ValueError: a task that waits for itself or for a later one.
    """
    waiting = [len(task.after) for task in tasks]
    followers: list[list[int]] = [[] for _ in tasks]
    for index, task in enumerate(tasks):
        for before in task.after:
            if not 0 <= before < index:
                raise ValueError(
                    f"task {index} ({task.name}) waits for task {before}; legal: earlier tasks only. "
                    "Put it later in the list."
                )
            followers[before].append(index)

    ready: dict[str, list[int]] = defaultdict(list)
    for index, count in enumerate(waiting):
        if count == 0:
            heapq.heappush(ready[tasks[index].resource], index)
    left: dict[str, float] = {}  # seconds alone that the running task of a resource still needs
    running: dict[str, int] = {}
    starts, ends = [0.0] * len(tasks), [0.0] * len(tasks)
    now = 0.0
    while True:
        for resource, queue in ready.items():
            if queue and resource not in running:
                index = heapq.heappop(queue)
                running[resource], left[resource] = index, tasks[index].seconds
                starts[index] = now
        if not running:
            break
        speed = _speeds(running, contention or {})
        step = min(left[resource] / speed[resource] for resource in running)
        now += step
        for resource in list(running):
            left[resource] -= step * speed[resource]
            if left[resource] > _ROUNDING * now:
                continue
            index = running.pop(resource)
            ends[index] = now
            for follower in followers[index]:
                waiting[follower] -= 1
                if waiting[follower] == 0:
                    heapq.heappush(ready[tasks[follower].resource], follower)
    return Timeline(tuple(Span(*each) for each in zip(tasks, starts, ends, strict=True)))


_ROUNDING = 1e-12  # of the time of day: what is left of a task that has ended


def _speeds(running: Mapping[str, int], contention: Contention) -> dict[str, float]:
    speed = dict.fromkeys(running, 1.0)
    for (first, second), (of_first, of_second) in contention.items():
        if first in running and second in running:
            speed[first] = min(speed[first], of_first)
            speed[second] = min(speed[second], of_second)
    return speed
