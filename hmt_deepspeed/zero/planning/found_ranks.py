"""Reports to the planner the ranks that ``"rank": "auto"`` has found."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Any, NamedTuple

from hmt_deepspeed.planner.run.loads import static_bytes
from hmt_deepspeed.planner.run.problem import Problem
from hmt_deepspeed.planner.solve.cost import estimate
from hmt_deepspeed.planner.solve.plan import Plan, regrouped
from hmt_deepspeed.zero.state import ZeroState

__all__ = ["FoundRanks", "RankWatch", "reason_to_plan_again"]

_NOTICEABLE = 0.05  # of what a plan may hold of activations


Ranks = tuple[tuple[str, int], ...]  # (name with ``*`` for a layer's number, r)


class FoundRanks(NamedTuple):
    """Ranks of all matrices at some step; of layers the mean, rounded up, since bytes are linear in r.

    Not at full rank, where plain AdamW takes a matrix's place: what is full in some layers and not in others is
    named with the numbers of those where it is.

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
        zero: states of an optimizer with ``"rank": "auto"``. layer: name of a layer, ``*`` for its number.
    """

    def __init__(self, zero: ZeroState, layer: str) -> None:
        self._zero = zero
        before, _, after = layer.partition("*")
        self._layer = re.compile(f"^{re.escape(before)}[0-9]+{re.escape(after)}[.]")
        self._any_layer = f"{layer}."
        self._num_refreshes = -1

    def news(self) -> FoundRanks | None:
        """The ranks, if bases were found since the last call."""
        count = sum(self._zero.basis_groups.schedule.num_refreshes)
        if count == self._num_refreshes:
            return None
        self._num_refreshes = count
        now, to_expect, num_found = _Ranks(), _Ranks(), 0
        for param_state in self._zero.low_rank:
            matrix = param_state.matrix
            assert matrix is not None
            found = bool(matrix.measured)
            num_found += found
            name = self._layer.sub(self._any_layer, param_state.name)
            now.add(param_state.name, name, matrix, matrix.rank)
            to_expect.add(
                param_state.name, name, matrix, matrix.rank if found else matrix.candidates[-1]
            )
        every = to_expect.every
        mean = sum(every) / len(every) if every else 0.0
        return FoundRanks(now.means(), to_expect.means(), num_found, len(every), mean)


class _Ranks:
    """Collects ranks by name, those at full rank aside."""

    def __init__(self) -> None:
        self.every: list[int] = []
        self._ranks: dict[str, list[int]] = defaultdict(list)
        self._full: dict[str, dict[str, int]] = defaultdict(dict)

    def add(self, own: str, name: str, matrix: Any, rank: int) -> None:
        """``own``: of one matrix. name: with ``*`` for its layer."""
        self.every.append(rank)
        if matrix.is_full_at(rank):
            self._full[name][own] = rank
        else:
            self._ranks[name].append(rank)

    def means(self) -> Ranks:
        """Mean rank by name, without those at full rank; each full one by itself where others of its name are not."""
        found = [(name, -(-sum(ranks) // len(ranks))) for name, ranks in self._ranks.items()]
        for name, full in self._full.items():
            mixed = name in self._ranks
            found += full.items() if mixed else [(name, next(iter(full.values())))]
        return tuple(found)


def reason_to_plan_again(planned: Problem, now: Problem, plan: Plan) -> str | None:
    """Why other ranks ask for another plan; None where they make no noticeable difference.

    Args:
        planned: what ``plan`` was made for. now: the same with the ranks of today.
    """
    before, after = estimate(planned, plan), estimate(now, regrouped(plan, now.workload))
    more = after.peak("gpu") - before.peak("gpu")
    for_activations = planned.budget.gpu - sum(static_bytes(planned)["gpu"].values())
    if abs(more) <= _NOTICEABLE * for_activations and not after.excess():
        return None
    size = f"{abs(more) / 2**20:,.4g} MiB {'more' if more > 0 else 'less'}"
    return f"planned again: at the ranks found the device holds {size} than planned for"
