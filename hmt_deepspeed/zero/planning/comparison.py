"""Times and traffic of the iterations under a plan, compared with the plan's predictions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from statistics import median
from typing import Any

from hmt_deepspeed.planner.advise.calibrate import IterationSeconds
from hmt_deepspeed.planner.advise.compare import Busy, Comparison, compare
from hmt_deepspeed.planner.run.problem import Problem
from hmt_deepspeed.planner.solve.cost import Resource
from hmt_deepspeed.planner.solve.plan import Plan

__all__ = ["PlannedIterations"]

Resources = Mapping[Resource, Busy]


class PlannedIterations:
    """Timed iterations of one plan.

    Args:
        busy: of each resource since the start, as far as somebody counts it.
    """

    def __init__(self, busy: Callable[[], Resources]) -> None:
        self._busy = busy
        self._before: Resources = {}
        self._seconds: list[IterationSeconds] = []
        self._resources: list[Resources] = []

    def begin(self) -> None:
        """An iteration that is timed is about to begin."""
        self._before = self._busy()

    def end(self, seconds: IterationSeconds) -> None:
        """It is over, and the device is done with it."""
        self._seconds.append(seconds)
        self._resources.append(
            {
                name: Busy(now.seconds - before.seconds, now.nbytes - before.nbytes)
                for name, now in self._busy().items()
                for before in [self._before[name]]
            }
        )

    def compared(
        self,
        problem: Problem,
        plan: Plan,
        activations: Mapping[str, Any],
        memory: Mapping[tuple[str, str], float],
        refreshing_columns: Mapping[int, int],
    ) -> Comparison | None:
        """Medians of the timed iterations beside the plan's predictions, see :func:`compare`.

        Args:
            problem: what the plan is for. activations: metrics of the activation backend.
            memory: bytes by (memory, kind), under the planner's names.
            refreshing_columns: columns of ``X [Q | P]`` that no linear forms, by layer.

        Returns:
            None before the first timed iteration.
        """
        if not self._seconds:
            return None
        seconds = {
            field.name: median(getattr(timed, field.name) for timed in self._seconds)
            for field in fields(IterationSeconds)
        }
        busy: dict[Resource, Busy] = {
            name: Busy(
                median(each[name].seconds for each in self._resources),
                median(each[name].nbytes for each in self._resources),
            )
            for name in self._resources[0]
        }
        return compare(
            problem,
            plan,
            IterationSeconds(**seconds),
            activations,
            memory,
            busy,
            refreshing_columns,
        )
