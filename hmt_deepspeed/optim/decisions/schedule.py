"""Schedule of basis refreshes: which matrices refresh at which step.

A refresh needs the matrix's full gradient. The bytes of full gradients alive at once are bounded, so
at the first step as many matrices refresh as the bound allows, the others in the steps that follow.
Their next refreshes are spread evenly over one interval, so that no step stalls, and repeat every interval.
Matrices that share a basis form a group and refresh at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from hmt_deepspeed.config.full_gradients import auto_full_gradient_bytes

__all__ = ["RefreshSchedule"]


class RefreshSchedule:
    """Picks the matrices that refresh in the coming step.

    Args:
        matrix_bytes: bytes of each matrix's full gradient.
        interval: steps between two refreshes of one matrix, >= 1.
        budget: bytes of full gradients alive at once, >= the largest matrix and the largest group.
        groups: indices that refresh together and count their bytes together; whoever is in none is
            alone.

    Attributes:
        next_refresh, num_refreshes: per matrix: the step from which it is due, and how often it was
            refreshed. groups: all of them, those of one member too, by first member.

    Raises:
        ValueError: groups overlap or name a matrix that does not exist, or one does not fit the budget.
    """

    def __init__(
        self,
        matrix_bytes: Sequence[int],
        interval: int,
        budget: int,
        groups: Sequence[Sequence[int]] = (),
    ) -> None:
        self.matrix_bytes = list(matrix_bytes)
        self.interval = interval
        self.budget = budget
        count = len(self.matrix_bytes)
        self.groups = _all_groups(groups, count)
        self.group_of = {index: place for place, g in enumerate(self.groups) for index in g}
        self.group_bytes = [sum(self.matrix_bytes[i] for i in group) for group in self.groups]
        if max(self.group_bytes, default=0) > budget:
            raise ValueError(
                f"the budget of full gradients is {budget} bytes; legal: at least "
                f"{max(self.group_bytes)}, the largest matrix or group that refreshes together"
            )
        self.next_refresh = [0] * count
        self.num_refreshes = [0] * count

    def due(self, step: int) -> list[int]:
        """Indices that refresh at ``step``: the most overdue group first, as many as the budget allows."""
        since = [min(self.next_refresh[i] for i in group) for group in self.groups]
        waiting = [place for place, when in enumerate(since) if when <= step]
        waiting.sort(key=lambda place: (since[place], place))
        chosen: list[int] = []
        alive = 0
        for place in waiting:
            if alive + self.group_bytes[place] <= self.budget:
                chosen += self.groups[place]
                alive += self.group_bytes[place]
        return sorted(chosen)

    def postpone(self, index: int, step: int) -> None:
        """Matrix ``index``, and its group, had no gradient to refresh from at ``step``: they go on being due,
        behind those that wait now, so that parameters that nobody uses keep nobody waiting."""
        for member in self.groups[self.group_of[index]]:
            self.next_refresh[member] = step + 1

    def refreshed(self, index: int, step: int) -> None:
        """Note that matrix ``index`` refreshed at ``step`` and set its next time.

        Each group has its own phase of the interval, evenly spread over them. A refresh that had to wait
        for the budget does not move the later ones: they would drift into one another.
        """
        phase = ceil(self.interval * (self.group_of[index] + 1) / len(self.groups))
        self.num_refreshes[index] += 1
        self.next_refresh[index] = step + (phase - step - 1) % self.interval + 1

    def take_times(self, old: RefreshSchedule) -> None:
        """Carry over the times of the matrices that both schedules have."""
        self.next_refresh[: len(old.next_refresh)] = old.next_refresh
        self.num_refreshes[: len(old.num_refreshes)] = old.num_refreshes

    def regrouped(self, groups: Sequence[Sequence[int]], fixed_budget: bool) -> RefreshSchedule:
        """The same schedule with other groups; its budget grows to the largest unless it is fixed."""
        sizes, budget = self.matrix_bytes, self.budget
        if not fixed_budget:
            members = _all_groups(groups, len(sizes))
            together = [sum(sizes[i] for i in group) for group in members]
            budget = max(budget, auto_full_gradient_bytes(together))
        new = RefreshSchedule(sizes, self.interval, budget, groups)
        new.take_times(self)
        return new


def _all_groups(groups: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """The groups, and every other index alone, ordered by their smallest member."""
    named = [index for group in groups for index in group]
    if len(set(named)) < len(named) or not set(named) <= set(range(count)):
        raise ValueError(
            f"groups are {[list(g) for g in groups]}; legal: each of 0..{count - 1} at most once"
        )
    alone = [[index] for index in range(count) if index not in set(named)]
    return sorted([*(list(group) for group in groups if group), *alone], key=min)
