"""Rank decisions of all matrices: by energy, by a global budget of bytes, or full rank as a fallback.

Every process of a data-parallel group gives the same energies in the same order and so comes to the
same ranks. Bytes are those of whole matrices, before sharding.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import log
from typing import Any

import torch
from torch import Tensor

from hmt_deepspeed.optim.bases.host_read import read_together
from hmt_deepspeed.optim.bases.rank import misses_threshold, select_rank
from hmt_deepspeed.optim.bases.rank_budget import (
    Spectrum,
    allocate_ranks,
    improve_ranks,
    total_captured,
)
from hmt_deepspeed.optim.decisions.later_energy import later_energies, own_energy
from hmt_deepspeed.optim.decisions.rank_history import (
    RankHistory,
    layer_type,
    predict_rank,
    prior_rank,
)
from hmt_deepspeed.optim.decisions.windows import Windows
from hmt_deepspeed.optim.rules.matrix import MatrixRule
from hmt_deepspeed.optim.rules.projected import ProjectedMatrix

__all__ = ["RankPolicy", "build_policy"]


def build_policy(groups: Sequence[Sequence[MatrixRule]], options: Mapping[str, Any]) -> RankPolicy:
    """The policy that the fields of ``hmt.optimizer`` ask for.

    Raises:
        ValueError: a rank budget below the bytes of the smallest candidates.
    """
    dense = sum(map(_dense_bytes, groups))
    share = options["rank_budget"]
    policy = RankPolicy(
        groups,
        None if share in (None, "auto") else int(share * dense),
        int(options["full_rank_budget"] * dense),
        options["energy_estimate"] == "out_of_sample",
    )
    if share == "auto":
        policy.rank_budget = policy.usual_budget()
    budget, least = policy.rank_budget, policy.least_bytes()
    if budget is not None and least > budget:
        raise ValueError(
            f"hmt.optimizer.rank_budget is {share}, {budget} bytes, but the smallest rank candidates "
            f"take {least}; legal: at least {least / max(dense, 1):.4f}. Raise it, or lower the smallest "
            "of rank_candidates."
        )
    return policy


# Of what AdamW's moments take, where no budget is given: of a Llama's matrices, a quarter of the width takes 0.32.
USUAL_BUDGET = 0.5
# Share of its gradient's energy that a matrix must gain, or make room for, to change its rank under a budget:
# less is noise of the last spectra, and every change of rank costs moments.
LEAST_GAIN = 0.02
_TINY = 1e-30


class RankPolicy:
    """Chooses where range finding starts, and the rank of each group of matrices.

    Args:
        groups: matrices that take one basis together; alone, a group of one. The first member leads.
        rank_budget: bytes for the states of all matrices; None: each by its energy threshold alone.
        full_rank_bytes: what matrices may take, together, for full-rank AdamW when no candidate
            reaches the threshold.
        out_of_sample: ranks are chosen by what bases are expected to capture of the gradients that follow,
            instead of what they capture of the one they are made from.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[MatrixRule]],
        rank_budget: int | None,
        full_rank_bytes: int,
        out_of_sample: bool = False,
    ) -> None:
        self.groups = groups
        self.rank_budget, self.full_rank_bytes = rank_budget, full_rank_bytes
        self.histories = {group[0].name: RankHistory() for group in groups}
        leaders = {i: self._leader(i) for i in self._budgeted()}
        self._windows = Windows(leaders, groups, self.histories) if out_of_sample else None
        self._types = {name: layer_type(name) for name in self.histories}
        # of the gradient, at each group's last refresh before which it had taken a step
        self.log_norms: dict[str, float] = {}
        self._read: dict[int, Tensor] = {}  # of the groups that refresh in this step

    def _leader(self, index: int) -> ProjectedMatrix:
        leader = self.groups[index][0]
        assert isinstance(leader, ProjectedMatrix)
        return leader

    # -- a refresh ------------------------------------------------------------------------------

    def reads_columns(self, index: int) -> bool:
        """Whether group ``index`` needs the energies along its old basis' directions for a new one."""
        return self._windows is not None and self._leader(index).settings.rank is None

    def close_windows(self, column_energies: Mapping[int, Tensor]) -> None:
        """Note what the bases of groups that refresh now have captured since their last refresh.

        Before any of them chooses: every process must have seen the same when the first does.

        Args:
            column_energies: by group, :func:`hmt_deepspeed.optim.decisions.column_energies.column_energies` of all holders.
        """
        if self._windows is not None:
            self._windows.close(column_energies)

    def ordered(self, indices: Iterable[int]) -> list[int]:
        """Groups that refresh in one step: under a budget those first whose rank falls, for they make room."""
        if self.rank_budget is None:
            return list(indices)
        return sorted(indices, key=lambda i: not self._falls(i))

    def _falls(self, index: int) -> bool:
        """Whether a budget is known to want a lower rank of a group, before its new basis is found."""
        leader, budget = self._leader(index), self.rank_budget
        curve = self._curve(leader)
        if budget is None or curve is None:
            return False
        return self._plan(index, curve, budget)[0] < leader.rank

    def reads(self, indices: Iterable[int]) -> bool:
        """Whether the host has to read something of groups before their range finding starts."""
        return any(len(self._leader(i).candidates) > 1 or self.reads_columns(i) for i in indices)

    def read_averages(self, indices: Sequence[int]) -> None:
        """Read what later calls ask of groups that refresh now: waits for the device once, and not for each."""
        asked = [i for i in indices if len(self._leader(i).candidates) > 1]
        flat = read_together([self._averages(i) for i in asked])
        self._read = dict(zip(asked, flat, strict=True))

    def _averages(self, index: int) -> Tensor:
        """Of each member: smoothed squared norm, weight behind it, captured energy; flat fp32."""
        members = self.groups[index]
        averages = [(m.mean_square_norm, m.energy_weight, m.smoothed_energy()) for m in members]
        return torch.stack([value for values in averages for value in values])

    def _averages_on_host(self, index: int) -> Tensor:
        """:meth:`_averages` as 3 x members on the host."""
        read = self._read.get(index)
        return (self._averages(index).cpu() if read is None else read).view(-1, 3).t()

    def _energy(self, index: int) -> float:
        """Smoothed energy that a group's basis captures of all its gradients."""
        squares, _, shares = self._averages_on_host(index)
        if len(squares) == 1:
            return float(shares)
        return float((shares * squares).sum() / squares.sum().clamp_min(_TINY))

    def _log_norm(self, index: int) -> float:
        """Logarithm of the smoothed norm of a group's stacked gradients."""
        squares, weights, _ = self._averages_on_host(index)
        means = (squares / weights.clamp_min(1e-12)).clamp_min(_TINY)
        logs = torch.tensor([log(mean) for mean in means.tolist()], dtype=torch.float64)
        return 0.5 * float(logs.logsumexp(0))

    def knows_width(self, index: int) -> bool:
        """Whether what others choose in this step does not change :meth:`first_width` of a group."""
        leader = self._leader(index)
        if len(leader.candidates) == 1:
            return True
        if self.rank_budget is not None:
            return self._curve(leader) is None
        return self.histories[leader.name].latest is not None or self._curve(leader) is not None

    def first_width(self, index: int) -> int:
        """Candidate rank at which group ``index`` starts its range finding.

        Where later energies are known, what it will choose; a budget that does not know them needs all.
        """
        leader = self._leader(index)
        if len(leader.candidates) == 1:
            return leader.candidates[0]
        curve = self._curve(leader)
        if self.rank_budget is not None:
            if curve is None:
                return leader.candidates[-1]
            return self._plan(index, curve, self.rank_budget)[0]
        if curve is not None:
            return self._reaching(leader, curve)
        history = self.histories[leader.name]
        latest = history.latest
        if latest is None:
            prior = prior_rank(self._types[leader.name], self.histories, leader.candidates)
            return leader.candidates[0] if prior is None else prior
        if not leader.measures_energy:
            known = [rank for rank in leader.candidates if rank <= latest.rank]
            return known[-1] if known else leader.candidates[0]
        now = self._log_norm(index)
        trend = now - self.log_norms.get(leader.name, now)
        when_new = dict(zip(leader.candidates, latest.captured, strict=False)).get(latest.rank, 1.0)
        lost = when_new - self._energy(index)
        sought = self.sought_energy(index)
        return predict_rank(leader.candidates, history, lost, trend, sought)

    def sought_energy(self, index: int) -> float:
        """Captured energy of its own gradient at which group ``index`` can end its range finding."""
        leader = self._leader(index)
        threshold = leader.settings.energy_threshold
        if self._windows is None:
            return threshold
        known = self._windows.curve(leader) is not None
        return 0.0 if known else own_energy(threshold, self._windows.exponent(leader))

    def _curve(self, leader: ProjectedMatrix) -> Sequence[float] | None:
        """Energies of later gradients at the candidates, where windows have shown them."""
        return None if self._windows is None else self._windows.curve(leader)

    def _expected(self, leader: ProjectedMatrix, energies: Sequence[float]) -> Sequence[float]:
        """Captured energies to choose by, at as many candidates as are known; ``energies``: of the own gradient."""
        if self._windows is None:
            return energies
        curve = self._windows.curve(leader)
        return later_energies(energies, self._windows.exponent(leader)) if curve is None else curve

    def choose(self, index: int, energies: Sequence[float], step: int) -> int:
        """Rank of group ``index``; its number of columns means full rank.

        Args:
            energies: captured energy at the leader's candidates, as far as was sketched.
        """
        leader = self._leader(index)
        rank = self._choose(index, leader, energies)
        self.histories[leader.name].add(step, rank, energies)
        if len(leader.candidates) > 1 and self._averages_on_host(index)[1, 0] > 0:
            self.log_norms[leader.name] = self._log_norm(index)
        return rank

    def _choose(self, index: int, leader: ProjectedMatrix, energies: Sequence[float]) -> int:
        if leader.settings.rank is not None:
            return leader.candidates[0]
        if self.rank_budget is not None:
            return self._within_budget(index, leader, energies, self.rank_budget)
        expected = self._expected(leader, energies)
        complete = len(expected) == len(leader.candidates)
        threshold = leader.settings.energy_threshold
        missed = complete and misses_threshold(expected[-1], threshold, _is_full(leader))
        if missed and self._affords_full_rank(index):
            return leader.shape[1]
        return min(self._reaching(leader, expected), leader.candidates[len(energies) - 1])

    def _reaching(self, leader: ProjectedMatrix, energies: Sequence[float]) -> int:
        current = leader.rank if leader.measured and not leader.full_rank else None
        return select_rank(energies, leader.candidates, leader.settings.energy_threshold, current)

    # -- bytes ----------------------------------------------------------------------------------

    def bytes_at(self, index: int, rank: int) -> int:
        """State bytes of group ``index`` at a rank: everyone's moments, one right basis."""
        members = [m for m in self.groups[index] if isinstance(m, ProjectedMatrix)]
        return sum(m.moment_bytes_at(rank) for m in members) + members[0].basis_bytes_at(rank)

    def least_bytes(self) -> int:
        """State bytes with every rank at its smallest candidate."""
        return sum(self.bytes_at(i, self._leader(i).candidates[0]) for i in self._budgeted())

    def taken_bytes(self) -> int:
        """State bytes at the ranks in force."""
        return sum(self.bytes_at(i, self._leader(i).rank) for i in self._budgeted())

    def usual_budget(self) -> int | None:
        """Bytes of ``"rank_budget": "auto"``: :data:`USUAL_BUDGET` of AdamW's moments, or what the smallest candidates
        take, and beside it what matrices of a fixed rank take; None where every rank is fixed."""
        chosen = [i for i in self._budgeted() if self._leader(i).settings.rank is None]
        if not chosen:
            return None
        least = sum(self.bytes_at(i, self._leader(i).candidates[0]) for i in chosen)
        usual = int(USUAL_BUDGET * sum(_dense_bytes(self.groups[i]) for i in chosen))
        return self.least_bytes() - least + max(usual, least)

    def _budgeted(self) -> list[int]:
        return [i for i, g in enumerate(self.groups) if isinstance(g[0], ProjectedMatrix)]

    def _within_budget(
        self, index: int, leader: ProjectedMatrix, energies: Sequence[float], budget: int
    ) -> int:
        """This group's part of the plan, as far as the others' present ranks and what was sketched leave room."""
        planned, legal = self._plan(index, energies, budget)
        others = sum(self.bytes_at(i, self._leader(i).rank) for i in self._budgeted() if i != index)
        fitting = [
            rank
            for rank in legal
            if rank <= min(planned, leader.candidates[len(energies) - 1])
            and self.bytes_at(index, rank) + others <= budget
        ]
        return fitting[-1] if fitting else legal[0]

    def _plan(
        self, index: int, energies: Sequence[float], budget: int
    ) -> tuple[int, tuple[int, ...]]:
        """The rank that the plan for all has for this group, and those that it may choose from.

        The plan knows every group by its last spectrum, one that was not measured yet by that of its type.
        The others reach their part of it at their own refreshes.

        Args:
            energies: of the gradient that makes the group's new basis, or its curve of later ones.
        """
        spectra, present = [], []
        for i, captured in (self._known(energies) | {index: energies}).items():
            member = self._leader(i)
            spectra.append(self._spectrum(i, self._expected(member, captured)))
            kept = [rank for rank in spectra[-1].candidates if rank <= member.rank]
            present.append(kept[-1] if kept else spectra[-1].candidates[0])
        place = self._budgeted().index(index)
        return _planned(spectra, present, budget)[place], spectra[place].candidates

    def _known(self, energies: Sequence[float]) -> dict[int, Sequence[float]]:
        """Captured energies of each group at its last refresh.

        Before the first, those of another group of its type that had one, else ``energies``, those of the
        group that refreshes now: without a guess the first to refresh would take what is meant for all.
        """
        measured = {name: h.latest.captured for name, h in self.histories.items() if h.latest}
        of_a_type = {self._types[name]: captured for name, captured in measured.items()}
        known: dict[int, Sequence[float]] = {}
        for i in self._budgeted():
            leader = self._leader(i)
            guess = of_a_type.get(self._types[leader.name], energies)
            captured = measured.get(leader.name, guess)
            missing = len(leader.candidates) - len(captured)
            known[i] = [*captured, *[captured[-1]] * missing]
        return known

    def _spectrum(self, index: int, captured: Sequence[float]) -> Spectrum:
        """Candidates for the plan.

        One that takes no fewer bytes than a larger one is left out: full-rank AdamW has no basis and may be smaller
        than the rank below it. Of the others, those up to the first that reaches the threshold.
        """
        leader = self._leader(index)
        kept: list[tuple[int, float, int]] = []
        known = leader.candidates[: len(captured)]
        for rank, energy in zip(reversed(known), reversed(captured[: len(known)]), strict=True):
            size = self.bytes_at(index, rank)
            if not kept or size < kept[-1][2]:
                kept.append((rank, energy, size))
        enough = self._reaching(leader, captured)
        below = sum(rank < enough for rank, *_ in kept)
        ranks, energies, sizes = zip(*kept[::-1][: below + 1], strict=True)
        return Spectrum(ranks, energies, sizes)

    def _affords_full_rank(self, index: int) -> bool:
        if not all(m.is_full_at(m.shape[1]) for m in self.groups[index]):
            return False
        taken = sum(
            self.bytes_at(i, self._leader(i).shape[1])
            for i in self._budgeted()
            if i != index and self._fell_back(i)
        )
        return taken + self.bytes_at(index, self._leader(index).shape[1]) <= self.full_rank_bytes

    def _fell_back(self, index: int) -> bool:
        """Whether a group is full-rank for want of a candidate, and not because one is its whole side."""
        leader = self._leader(index)
        return leader.full_rank and not leader.is_full_at(leader.candidates[-1])

    # -- checkpoint -----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers and lists."""
        return {
            "histories": {name: h.to_list() for name, h in self.histories.items()},
            "candidates": {group[0].name: list(group[0].candidates) for group in self.groups},
            "log_norms": dict(self.log_norms),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` of the same groups gave.

        Energies of other candidates say nothing of the present ones: such a group's history begins anew.
        """
        candidates = state.get("candidates", {})  # an older checkpoint has none
        for group in self.groups:
            name, own = group[0].name, list(group[0].candidates)
            if name in state["histories"] and candidates.get(name, own) == own:
                self.histories[name] = RankHistory.from_list(state["histories"][name])
        norms = state["log_norms"].items()
        self.log_norms = {name: float(v) for name, v in norms if name in self.histories}


def _planned(spectra: Sequence[Spectrum], present: Sequence[int], budget: int) -> Sequence[int]:
    """The best plan where it gains :data:`LEAST_GAIN` for every matrix it moves; else the present one,
    improved by the moves that do."""
    best = allocate_ranks(spectra, budget)
    held, taken = total_captured(spectra, present)
    moved = sum(a != b for a, b in zip(best, present, strict=True))
    if taken > budget or total_captured(spectra, best)[0] - held >= LEAST_GAIN * moved:
        return best
    return improve_ranks(spectra, present, budget, LEAST_GAIN)


def _dense_bytes(group: Sequence[MatrixRule]) -> int:
    """Bytes of AdamW's moments for a group's low-rank matrices."""
    matrices = (m for m in group if isinstance(m, ProjectedMatrix))
    return sum(8 * m.count * m.shape[0] * m.shape[1] for m in matrices)


def _is_full(leader: ProjectedMatrix) -> bool | None:
    """None before the first refresh."""
    return leader.full_rank if leader.measured else None
