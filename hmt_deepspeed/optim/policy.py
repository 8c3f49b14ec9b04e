"""Rank decisions of all matrices: by energy, by a global budget of bytes, or full rank as a fallback.

Every process of a data-parallel group gives the same captured energies in the same order and so comes
to the same ranks. Bytes are those of whole matrices, before sharding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hmt_deepspeed.optim.low_rank import LowRankMatrix
from hmt_deepspeed.optim.matrix import MatrixRule
from hmt_deepspeed.optim.rank import select_rank

__all__ = ["RankPolicy", "build_policy"]


def build_policy(groups: Sequence[Sequence[MatrixRule]], options: Mapping[str, Any]) -> RankPolicy:
    """The policy that the fields of ``hmt.optimizer`` ask for."""
    dense = sum(8 * m.shape[0] * m.shape[1] for group in groups for m in group)
    budget = options["rank_budget"]
    return RankPolicy(
        groups,
        None if budget is None else int(budget * dense),
        int(options["full_rank_budget"] * dense),
    )


class RankPolicy:
    """Chooses the rank of each matrix at its refresh.

    Args:
        groups: matrices that take one basis together; alone, a group of one.
        rank_budget: bytes for the states of all matrices, or None: each by its energy threshold.
        full_rank_bytes: what matrices may take, together, for full-rank AdamW when no candidate
            reaches the threshold.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[MatrixRule]],
        rank_budget: int | None,
        full_rank_bytes: int,
    ) -> None:
        self.groups = groups
        self.rank_budget, self.full_rank_bytes = rank_budget, full_rank_bytes

    def choose(self, index: int, captured: Sequence[float]) -> int:
        """Rank of group ``index``; the number of columns means full rank.

        Args:
            captured: energy at each of the leader's candidates.
        """
        leader = self.groups[index][0]
        assert isinstance(leader, LowRankMatrix)
        if len(leader.candidates) == 1:
            return leader.candidates[0]
        threshold = leader.settings.energy_threshold
        curve = dict(zip(leader.candidates, captured, strict=True))
        current = leader.rank if leader.measured and not leader.full_rank else None
        if captured[-1] < threshold and self._affords_full_rank(index):
            return leader.shape[1]
        return select_rank(curve, threshold, current)

    def _affords_full_rank(self, index: int) -> bool:
        others = sum(
            m.bytes_at(m.shape[1])
            for i, group in enumerate(self.groups)
            for m in group
            if i != index and isinstance(m, LowRankMatrix) and m.full_rank
        )
        own = sum(
            m.bytes_at(m.shape[1]) for m in self.groups[index] if isinstance(m, LowRankMatrix)
        )
        return others + own <= self.full_rank_bytes

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore."""
