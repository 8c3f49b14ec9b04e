"""Which matrices refresh their basis at which step, so that no step stalls.

A refresh needs the matrix's full gradient. The bytes of full gradients alive at once are bounded, so
at the first step as many matrices refresh as the bound allows, the others in the steps that follow;
their next refreshes are then spread evenly over one interval and repeat every interval.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

__all__ = ["RefreshSchedule", "default_full_gradient_bytes"]


def default_full_gradient_bytes(matrix_bytes: Sequence[int]) -> int:
    """A thirty-second of all low-rank gradients, but never less than the largest of them."""
    return max(max(matrix_bytes, default=0), ceil(sum(matrix_bytes) / 32))


class RefreshSchedule:
    """Picks the matrices that refresh in the coming step.

    Args:
        matrix_bytes: bytes of each matrix's full gradient.
        interval: steps between two refreshes of one matrix, >= 1.
        budget: bytes of full gradients alive at once, >= the largest of ``matrix_bytes``.
    """

    def __init__(self, matrix_bytes: Sequence[int], interval: int, budget: int) -> None:
        self.matrix_bytes = list(matrix_bytes)
        self.interval = interval
        self.budget = budget
        self.next_refresh = [0] * len(self.matrix_bytes)
        self.num_refreshes = [0] * len(self.matrix_bytes)

    def due(self, step: int) -> list[int]:
        """Indices that refresh at ``step``: the most overdue first, as many as the budget allows."""
        waiting = [i for i, when in enumerate(self.next_refresh) if when <= step]
        waiting.sort(key=lambda i: (self.next_refresh[i], i))
        chosen, alive = [], 0
        for index in waiting:
            if alive + self.matrix_bytes[index] <= self.budget:
                chosen.append(index)
                alive += self.matrix_bytes[index]
        return sorted(chosen)

    def refreshed(self, index: int, step: int) -> None:
        """Note that matrix ``index`` refreshed at ``step`` and set its next time.

        Each matrix has its own phase of the interval, evenly spread over them. A refresh that had to
        wait for the budget does not move the later ones: they would drift into one another.
        """
        phase = ceil(self.interval * (index + 1) / len(self.matrix_bytes))
        wait = (phase - step - 1) % self.interval + 1
        self.num_refreshes[index] += 1
        self.next_refresh[index] = step + wait
