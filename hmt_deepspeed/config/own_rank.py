"""The rank of experts' own bases under ``"expert_basis": "auto"``, for the optimizer and the planner."""

from __future__ import annotations

from hmt_deepspeed.rules import MULTIPLE, Rule

__all__ = ["own_rank"]


def own_rank(
    rule: Rule, rank: int, rows: int, columns: int, count: int, dtype: str, itemsize: int
) -> int:
    """Rank of bases of ``count`` experts' own, on the other side, that take with their states at most the bytes of one basis
    of ``rank`` that all share with its states; at least 1.

    Args:
        rows, columns: of one expert's matrix, as the shared basis projects it. dtype: of states, see
            :meth:`Rule.states_dtype`. itemsize: of bases.
    """
    kept = [state for state in rule.states if state.in_budget and state.stored != "model"]
    beside = [state for state in rule.states if state.stored == "model"]
    bound = columns * rank * itemsize
    bound += count * sum(state.nbytes(rows, columns, rank, dtype) for state in kept)
    bound += sum(state.nbytes(rows, columns, rank, "fp32", itemsize) for state in beside)

    def fits(own: int) -> bool:
        states = sum(state.nbytes(columns, rows, own, dtype) for state in kept)
        return count * (states + rows * own * itemsize) <= bound

    legal = [*range(2, MULTIPLE), *range(MULTIPLE, min(rows, columns) + 1, MULTIPLE)]
    return max(filter(fits, legal), default=1)
