"""Tasks on resources, event by event: what `simulate.py` plays a plan with.

A resource serves one task at a time; of the tasks whose predecessors have ended it takes the one that comes
first in the list. Nothing here knows of layers or phases, and nothing of the closed form in `cost.py`.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Span", "Task", "Timeline", "play"]


@dataclass(frozen=True)
class Task:
    """One piece of work.

    Attributes:
        name: for the picture. resource: who does it. seconds: how long alone.
        after: indices of tasks, earlier in the list, that must have ended.
        takes, gives: (memory, bytes) occupied when it starts and freed when it ends.
    """

    name: str
    resource: str
    seconds: float
    after: tuple[int, ...] = ()
    takes: tuple[tuple[str, float], ...] = ()
    gives: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class Span:
    """When a task ran."""

    task: Task
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """``spans[i]`` is when task i ran."""

    spans: tuple[Span, ...]

    @property
    def seconds(self) -> float:
        """When the last task ended."""
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
        changes = [
            (when, change)
            for span in self.spans
            for when, sign, pairs in (
                (span.start, 1, span.task.takes),
                (span.end, -1, span.task.gives),
            )
            for memory, size in pairs
            if memory == kind and (change := sign * size)
        ]
        held, curve = start, [(0.0, start)]
        for when, change in sorted(changes):
            held += change
            curve.append((when, held))
        return curve

    def peak(self, kind: str, start: float = 0.0) -> float:
        """Most bytes of a memory at once."""
        return max(held for _, held in self.memory(kind, start))


def play(tasks: Sequence[Task]) -> Timeline:
    """Run the tasks; the earlier in the list, the more urgent.

    Raises:
        ValueError: a task that waits for itself or for a later one.
    """
    waiting = []
    followers: list[list[int]] = [[] for _ in tasks]
    for index, task in enumerate(tasks):
        if any(not 0 <= before < index for before in task.after):
            raise ValueError(f"task {index} ({task.name}) waits for {task.after}; legal: earlier tasks only")
        waiting.append(len(task.after))
        for before in task.after:
            followers[before].append(index)

    ready: dict[str, list[int]] = defaultdict(list)
    idle = {task.resource for task in tasks}
    running: list[tuple[float, int]] = []
    spans: list[Span | None] = [None] * len(tasks)
    for index, count in enumerate(waiting):
        if count == 0:
            heapq.heappush(ready[tasks[index].resource], index)

    now = 0.0
    while True:
        for resource in [r for r in idle if ready[r]]:
            index = heapq.heappop(ready[resource])
            idle.discard(resource)
            end = now + tasks[index].seconds
            spans[index] = Span(tasks[index], now, end)
            heapq.heappush(running, (end, index))
        if not running:
            break
        now = running[0][0]
        while running and running[0][0] <= now:
            _, index = heapq.heappop(running)
            idle.add(tasks[index].resource)
            for follower in followers[index]:
                waiting[follower] -= 1
                if waiting[follower] == 0:
                    heapq.heappush(ready[tasks[follower].resource], follower)
    assert all(span is not None for span in spans)
    return Timeline(tuple(span for span in spans if span is not None))
