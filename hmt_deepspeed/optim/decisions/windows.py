"""Measures the energies of later gradients in refresh windows, the steps from one basis to the next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

import torch
from torch import Tensor

from hmt_deepspeed.optim.decisions.later_energy import (
    USUAL_EXPONENT,
    exponent_of,
    fading_of,
    later_curve,
)
from hmt_deepspeed.optim.decisions.rank_history import RankHistory, RankRecord, layer_type
from hmt_deepspeed.optim.rules.matrix import OWN_WEIGHT, MatrixRule
from hmt_deepspeed.optim.rules.projected import ProjectedMatrix

__all__ = ["Windows", "group_energy"]

_TINY = 1e-30


def group_energy(members: Sequence[MatrixRule]) -> Tensor:
    """Smoothed squared norms of a group's gradients inside their basis and in all, and the most weight that
    a member's gradients have in them; (3,) fp32."""
    squares = torch.stack([m.mean_square_norm for m in members])
    shares = torch.stack([m.smoothed_energy() for m in members])
    weights = torch.stack([m.energy_weight for m in members])
    return torch.stack(((shares * squares).sum(), squares.sum(), weights.max()))


class Windows:
    """Records later energies of all groups in their histories; expectations are as of the last :meth:`close`.

    Args:
        leaders: low-rank ones, by group. groups: matrices that take one basis together.
        histories: by the leader's name.
    """

    def __init__(
        self,
        leaders: Mapping[int, ProjectedMatrix],
        groups: Sequence[Sequence[MatrixRule]],
        histories: Mapping[str, RankHistory],
    ) -> None:
        self.leaders, self.groups, self.histories = leaders, groups, histories
        self._types = {leader.name: layer_type(leader.name) for leader in leaders.values()}
        self._learned: dict[str, RankRecord] = {}  # the last that a curve is of
        self._curves: dict[str, list[float]] = {}
        self._exponents: dict[str, float] = {}

    # -- a window ends ----------------------------------------------------------------------------

    def close(self, column_energies: Mapping[int, Tensor]) -> None:
        """Note what bases have captured since their refresh; waits for the device once.

        Args:
            column_energies: by group, :func:`hmt_deepspeed.optim.decisions.column_energies.column_energies` of all holders.
        """
        seen = {i: e for i, e in column_energies.items() if self._tells(self.leaders[i])}
        if seen:
            parts = [self._measured(i, energies) for i, energies in seen.items()]
            sizes = [len(part) for part in parts]
            for index, values in zip(seen, torch.cat(parts).cpu().split(sizes), strict=True):
                self._note(self.leaders[index], *values.tolist())
        self._learn()

    def _tells(self, leader: ProjectedMatrix) -> bool:
        refreshed = self.histories[leader.name].latest is not None
        return refreshed and leader.measures_energy and leader.rank in leader.candidates

    def _measured(self, index: int, column_energies: Tensor) -> Tensor:
        """:func:`group_energy`, and which share of what is inside the first half of the basis has, then the first
        columns of it that are a candidate: fp32."""
        leader = self.leaders[index]
        cuts = [leader.rank // 2, *(r for r in leader.candidates if r <= leader.rank)]
        leading = torch.nn.functional.pad(column_energies.cumsum(0), (1, 0))
        shares = torch.stack([leading[cut] for cut in cuts]) / leading[-1].clamp_min(_TINY)
        if leader.settings.rule.gradient == "core":
            # A smaller core lacks as much on the left, where directions are in no order.
            shares = shares.square()
        return torch.cat((group_energy(self.groups[index]), shares))

    def _note(
        self, leader: ProjectedMatrix, inside: float, total: float, weight: float, *shares: float
    ) -> None:
        if weight <= OWN_WEIGHT:
            return
        half, *energies = (inside / total * share for share in shares)
        fading = fading_of(half, energies[-1], leader.rank - leader.rank // 2)
        self.histories[leader.name].note_later(energies, fading)

    def _learn(self) -> None:
        for leader in self.leaders.values():
            records, whole = self.histories[leader.name].records, leader.shape[1]
            last = next((record for record in reversed(records) if record.later), None)
            if last is None or last is self._learned.get(leader.name):
                continue
            columns = whole if leader.is_full_at(whole) else None
            curve, seen = later_curve(records, leader.candidates, columns), last.later or ()
            assert curve is not None
            self._learned[leader.name], self._curves[leader.name] = last, curve
            self._exponents[leader.name] = exponent_of(last.captured[len(seen) - 1], seen[-1])

    # -- what is expected -------------------------------------------------------------------------

    def curve(self, leader: ProjectedMatrix) -> list[float] | None:
        """E of later gradients at each candidate of a group: its own, else the median of its layer type's.

        None before there is any, and for a matrix of full rank, of which no window has shown a basis since.
        """
        if leader.full_rank and leader.measured:
            return None
        if leader.name in self._curves:
            return self._curves[leader.name]
        kind, length = self._types[leader.name], len(leader.candidates)
        others = [c for n, c in self._curves.items() if self._types[n] == kind and len(c) == length]
        return [median(at) for at in zip(*others, strict=True)] or None

    def exponent(self, leader: ProjectedMatrix) -> float:
        """Exponent of a group without a curve: its own as last seen, else the median of all, else the usual one."""
        if leader.name in self._exponents:
            return self._exponents[leader.name]
        return median(self._exponents.values()) if self._exponents else USUAL_EXPONENT
