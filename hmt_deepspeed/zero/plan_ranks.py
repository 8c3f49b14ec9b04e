"""The ranks that matrices have come to under ``"rank": "auto"``, for the planner."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Any, NamedTuple

from hmt_deepspeed.planner.cost import estimate
from hmt_deepspeed.planner.loads import static_bytes
from hmt_deepspeed.planner.plan import Plan
from hmt_deepspeed.planner.problem import Problem

__all__ = ["FoundRanks", "RankWatch", "reason_to_plan_again"]

_NOTICEABLE = 0.05  # of what a plan may hold of activations


Ranks = tuple[tuple[str, int], ...]  # (name with ``*`` for a layer's number, r)


class FoundRanks(NamedTuple):
    """Ranks of all matrices at some step; of layers the mean, rounded up, since bytes are linear in r.

    Attributes:
        now: as they are. to_expect: the largest candidate for a matrix whose basis is yet to be found.
        num_found, num_matrices: how many have a basis that was measured.
        mean: of those to expect.
    """

    now: Ranks
    to_expect: Ranks
    num_found: int
    num_matrices: int
    mean: float

    def describe(self) -> str:
        """For the printed plan."""
        if not self.num_found:
            return f"rank auto: planned for the largest candidates, {self.mean:.4g} in the mean, until bases are found"
        found, rest = f"the {self.num_matrices} matrices", ""
        if self.num_found < self.num_matrices:
            found = f"{self.num_found} of {self.num_matrices} matrices"
            rest = "; the others count as the largest candidates"
        return f"rank auto: planned for the ranks that {found} have now{rest}, {self.mean:.4g} in the mean"


class RankWatch:
    """Looks at an optimizer's ranks at first and after the steps that found bases; they are numbers on the host.

    Args:
        optimizer: of an engine with ``"rank": "auto"``. layer: name of a layer, ``*`` for its number.
    """

    def __init__(self, optimizer: Any, layer: str) -> None:
        self._optimizer = optimizer
        before, _, after = layer.partition("*")
        self._layer = re.compile(f"^{re.escape(before)}[0-9]+{re.escape(after)}[.]")
        self._any_layer = f"{layer}."
        self._num_refreshes = -1

    def news(self) -> FoundRanks | None:
        """The ranks, if bases were found since the last call."""
        count = sum(self._optimizer.schedule.num_refreshes)
        if count == self._num_refreshes:
            return None
        self._num_refreshes = count
        now: dict[str, list[int]] = defaultdict(list)
        to_expect: dict[str, list[int]] = defaultdict(list)
        num_found = 0
        for entry in self._optimizer.low_rank:
            matrix = entry.matrix
            found = bool(
                getattr(matrix, "measured", True)
            )  # APOLLO's rank is its own from the start
            num_found += found
            name = self._layer.sub(self._any_layer, entry.name)
            now[name].append(matrix.rank)
            to_expect[name].append(matrix.rank if found else matrix.candidates[-1])
        every = [rank for ranks in to_expect.values() for rank in ranks]
        mean = sum(every) / len(every) if every else 0.0
        return FoundRanks(_means(now), _means(to_expect), num_found, len(every), mean)


def _means(ranks: dict[str, list[int]]) -> Ranks:
    return tuple((name, -(-sum(several) // len(several))) for name, several in ranks.items())


def reason_to_plan_again(planned: Problem, now: Problem, plan: Plan) -> str | None:
    """Why other ranks ask for another plan; None where they make no noticeable difference.

    Args:
        planned: what ``plan`` was made for. now: the same with the ranks of today.
    """
    before, after = (estimate(problem, plan) for problem in (planned, now))
    more = after.peak("gpu") - before.peak("gpu")
    for_activations = planned.budget.gpu - sum(static_bytes(planned)["gpu"].values())
    if abs(more) <= _NOTICEABLE * for_activations and not after.excess():
        return None
    size = f"{abs(more) / 2**20:,.4g} MiB {'more' if more > 0 else 'less'}"
    return f"planned again: at the ranks found the device holds {size} than planned for"
