"""Reports to the planner what is found in gradients: ranks with ``"rank": "auto"``, bases with ``"expert_basis": "auto"``."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Any, NamedTuple

from hmt_deepspeed.config.optimizer import ExpertBasis
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
    named with the numbers of those where it is. So are experts that have bases of their own in some layers.

    Attributes:
        decided: what experts have decided on, by the names of their weights; a weight that shares a basis is named once
            that is so in all layers that have no bases of the experts' own.
        now: as they are. to_expect: the largest candidate for a matrix whose basis is yet to be found.
        num_found, num_matrices: how many have a basis that was measured.
        mean: of those to expect.
    """

    now: Ranks
    to_expect: Ranks
    num_found: int
    num_matrices: int
    mean: float
    decided: tuple[tuple[str, ExpertBasis], ...] = ()

    def describe(self) -> str:
        """For the printed plan."""
        if not self.num_found:
            return f"found in gradients: planned for the largest candidates, {self.mean:.4g} in the mean, until bases are found"
        found, rest = f"the {self.num_matrices} matrices", ""
        if self.num_found < self.num_matrices:
            found = f"{self.num_found} of {self.num_matrices} matrices"
            rest = "; the others count as the largest candidates"
        return f"found in gradients: planned for the ranks that {found} have now{rest}, {self.mean:.4g} in the mean"


class RankWatch:
    """Looks at an optimizer's ranks at first and after the steps that found bases; they are numbers on the host.

    Args:
        zero: states of an optimizer with ``"rank": "auto"`` or ``"expert_basis": "auto"``. layer: name of a layer, ``*``
            for its number.
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
        decided = now.decided()
        return FoundRanks(now.means(), to_expect.means(), num_found, len(every), mean, decided)


class _Ranks:
    """Collects ranks by name, aside those at full rank and those of experts that have chosen bases of their own."""

    def __init__(self) -> None:
        self.every: list[int] = []
        self._ranks: dict[str, list[int]] = defaultdict(list)
        self._aside: dict[str, dict[str, int]] = defaultdict(dict)
        self._own: dict[str, set[str]] = defaultdict(set)
        self._shared: dict[
            str, bool
        ] = {}  # whether all of a name that share a basis have decided so

    def add(self, own: str, name: str, matrix: Any, rank: int) -> None:
        """``own``: of one matrix. name: with ``*`` for its layer."""
        self.every.append(rank)
        has_chosen = matrix.count > 1 and matrix.settings.expert_basis is None
        is_full, is_own = matrix.is_full_at(rank), has_chosen and matrix.own_bases
        if is_own:
            self._own[name].add(own)
        elif has_chosen:
            self._shared[name] = self._shared.get(name, True) and not matrix.undecided
        if is_full or is_own:
            self._aside[name][own] = rank
        else:
            self._ranks[name].append(rank)

    def means(self) -> Ranks:
        """Mean rank by name, without those aside; each of these by itself where others of its name have another rank."""
        found = [(name, -(-sum(ranks) // len(ranks))) for name, ranks in self._ranks.items()]
        for name, aside in self._aside.items():
            mixed = name in self._ranks or len(set(aside.values())) > 1
            found += aside.items() if mixed else [(name, next(iter(aside.values())))]
        return tuple(found)

    def decided(self) -> tuple[tuple[str, ExpertBasis], ...]:
        """What experts have decided on, see :class:`FoundRanks`."""
        found: list[tuple[str, ExpertBasis]] = [
            (name, "shared") for name, all_have in self._shared.items() if all_have
        ]
        for name, own in self._own.items():
            mixed = name in self._shared
            found += [(each, "own") for each in (sorted(own) if mixed else [name])]
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
