"""Finds new bases at one rank, broadcasts them, and carries the moments over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hmt_deepspeed.kernels.precision import fp32_products
from hmt_deepspeed.optim.bases.host_read import read_together
from hmt_deepspeed.optim.bases.range_finder import Subspace
from hmt_deepspeed.optim.bases.search import Search
from hmt_deepspeed.optim.decisions.column_energies import column_energies
from hmt_deepspeed.optim.decisions.expert_bases import captured_energies, propose_own_bases
from hmt_deepspeed.optim.decisions.policy import RankPolicy
from hmt_deepspeed.optim.decisions.schedule import RefreshSchedule
from hmt_deepspeed.optim.decisions.sharing import stacked_gradient
from hmt_deepspeed.optim.rules.moments import Recalled
from hmt_deepspeed.optim.rules.projected import ProjectedMatrix, adopt_together
from hmt_deepspeed.zero.bases.storage import BasisStorage
from hmt_deepspeed.zero.gradients.gradient import Gradient
from hmt_deepspeed.zero.parameters.param_state import ParamState
from hmt_deepspeed.zero.sharding.collectives import Collectives

__all__ = ["BasisRefresh"]


class BasisRefresh:
    """Refreshes of one optimizer.

    Args:
        low_rank: parameters with a matrix. bases: stores them between uses.
        collectives: of the ranks that hold them. dtype: that other gradients accumulate in.
    """

    def __init__(
        self,
        low_rank: Sequence[ParamState],
        bases: BasisStorage,
        collectives: Collectives,
        dtype: torch.dtype,
    ) -> None:
        self.low_rank, self.bases, self.collectives = low_rank, bases, collectives
        # What is projected now may be infinite in fp16, and nobody looks for that any more.
        self._dtype = torch.float32 if dtype == torch.float16 else dtype
        self.sharded = any(p.gradient.shards.world > 1 for p in low_rank)

    @fp32_products()
    def run(
        self,
        groups: Sequence[Sequence[int]],
        policy: RankPolicy,
        schedule: RefreshSchedule,
        step: int,
        overflow: Tensor | None = None,
    ) -> bool:
        """Find new bases from the mean full gradients once, at each owner, and broadcast them.

        Every rank sees the same captured energies and so chooses the same ranks.

        Args:
            groups: places of matrices that take one basis together. policy: chooses the ranks of the groups.
            schedule: of the matrices; it is told who has refreshed. step: number of optimizer steps taken.
            overflow: 0-dim fp32, alike on all ranks: where it is not 0 nothing changes.

        Returns:
            Whether ``overflow`` is 0 or None.
        """
        refreshing = [(i, g) for i, g in enumerate(groups) if self._gradient(g[0]).refreshing]
        # What is asked of the host before a search can begin, or changes with it, waits for the overflow decision.
        proposed = [g[0] for _, g in refreshing if self._is_undecided(g[0], proposed=True)]
        waits = proposed or policy.reads(i for i, _ in refreshing) or self.bases.cache is not None
        if not refreshing or waits:
            if overflow is not None and _is_overflow(overflow):
                return False
            overflow = None
        if not refreshing:
            return True
        self._decide(proposed)
        policy.close_windows(self._column_energies(refreshing, policy))
        policy.read_averages([index for index, _ in refreshing])
        refreshing = [(i, groups[i]) for i in policy.ordered(index for index, _ in refreshing)]
        leaders = [self.low_rank[group[0]] for _, group in refreshing]
        self.bases.will_use(
            [[p] for p in leaders + leaders]
        )  # to start the range finders from, and to leave
        searches = self._search_all(refreshing, policy, step)
        numbers = [search.numbers for search in searches.values()]
        read = read_together(numbers if overflow is None else [*numbers, overflow.view(1)])
        if overflow is not None and _is_overflow(read.pop()):
            return False
        subspaces = [s.finish(own) for s, own in zip(searches.values(), read, strict=True)]
        subspace_of = dict(zip(searches, subspaces, strict=True))
        found, captured, missing = self._tell_all(refreshing, subspace_of)
        for place, (index, group) in enumerate(refreshing):
            for _, near in refreshing[place : place + 2]:
                self.bases.history.expect(self._matrix(near[0]))
            known = [energy for energy in captured[place] if energy > 0]
            rank = policy.choose(index, known, step) if known else 0
            with self.bases.whole(self.low_rank[group[0]]):
                if rank:
                    self._change_basis(group, rank, found.pop(place, None), missing[place])
                    if self._is_undecided(group[0], proposed=False):
                        self._propose(group[0], step)
                self._project_full(group, step, bool(rank))
            if rank:
                for member in group:
                    schedule.refreshed(member, step)
            if not rank or self._is_undecided(group[0], proposed=True):
                schedule.postpone(group[0], step)
        self.bases.history.release()
        return True

    def _is_undecided(self, index: int, proposed: bool) -> bool:
        """Whether experts are to decide by a gradient whether they share a basis, with bases of their own ``proposed``."""
        matrix = self.low_rank[index].matrix
        if not isinstance(matrix, ProjectedMatrix) or not matrix.undecided or matrix.full_rank:
            return False
        return (matrix.proposed is not None) == proposed

    def _propose(self, index: int, step: int) -> None:
        """Bases of experts' own from their whole gradient, on every rank."""
        matrix, gradient = self._matrix(index), self._gradient(index)
        if gradient.full is not None and gradient.owner == self.collectives.rank:
            whole = gradient.full.unflatten(0, (matrix.count, -1))
            propose_own_bases({matrix: whole}, step)
        if matrix.proposed is None:
            size = matrix.count, matrix.shape[0], matrix.own_rank(matrix.rank)
            matrix.proposed = torch.zeros(size, dtype=matrix.dtype, device=matrix.device)
        self.collectives.broadcast(matrix.proposed, gradient.owner)

    def _decide(self, proposed: Sequence[int]) -> None:
        """Let experts have the kind of bases that captures more of their whole gradients; on every rank alike."""
        if not proposed:
            return
        energies = torch.zeros(len(proposed), 2, device=self.low_rank[0].weight.device)
        for place, index in enumerate(proposed):
            matrix, full = self._matrix(index), self._gradient(index).full
            with self.bases.whole(self.low_rank[index]):
                if full is not None and self._gradient(index).owner == self.collectives.rank:
                    whole = full.unflatten(0, (matrix.count, -1))
                    energies[place] = captured_energies(matrix, whole)
        self.collectives.all_reduce(energies)
        for index, (shared, own) in zip(proposed, energies.tolist(), strict=True):
            if not 0 < shared + own < float("inf"):
                continue
            if own > shared:
                self.bases.forget(self.low_rank[index])
                self.low_rank[index].have_own_bases()
            else:
                self._matrix(index).decide(own_bases=False)

    def _search_all(
        self, refreshing: Sequence[tuple[int, Sequence[int]]], policy: RankPolicy, step: int
    ) -> dict[int, Search]:
        """Begin to find the dominant subspaces of the groups that this rank owns: by place in ``refreshing``."""
        searches: dict[int, Search] = {}
        for place, (index, group) in enumerate(refreshing):
            with self.bases.whole(self.low_rank[group[0]]):  # warm start, at the owner
                if self._has_gradient(group):
                    searches[place] = self._search(index, group, policy, step)
        return searches

    def _tell_all(
        self,
        refreshing: Sequence[tuple[int, Sequence[int]]],
        subspaces: Mapping[int, Subspace | None],
    ) -> tuple[dict[int, tuple[Subspace, Tensor]], list[list[float]], list[list[float]]]:
        """One reduction tells all ranks what was found.

        Args:
            subspaces: by place in ``refreshing``, what this rank's searches have found.

        Returns:
            By place in ``refreshing``: what this rank has found, and the gradient of a group that is alone; the energy
            captured at each candidate rank, 0 where no gradient came; of each previous basis the number of ranks
            that lack its moments.
        """
        history = self.bases.history
        found: dict[int, tuple[Subspace, Tensor]] = {}
        most = max(len(self._matrix(group[0]).candidates) for _, group in refreshing)
        energies = torch.zeros(len(refreshing), most + history.most, dtype=torch.float64)
        for place, subspace in subspaces.items():
            if subspace is not None:
                group = refreshing[place][1]
                found[place] = subspace, self._alone(group)
                captured = self._matrix(group[0]).captured_at_candidates(subspace)
                energies[place, : len(captured)] = torch.tensor(captured, dtype=torch.float64)
        for place, (_, group) in enumerate(refreshing if history.most else []):
            missing = history.missing(self._matrix(group[0]))
            energies[place, most:] = torch.tensor(missing, dtype=torch.float64)
        if self.collectives.world > 1:
            device = self.low_rank[0].weight.device
            pinned = energies.pin_memory() if device.type == "cuda" else energies
            energies = pinned.to(device, non_blocking=True)
            self.collectives.all_reduce(energies)
        sums = energies.cpu().tolist()
        return found, [row[:most] for row in sums], [row[most:] for row in sums]

    def _has_gradient(self, group: Sequence[int]) -> bool:
        """Whether this rank is a group's owner and any backward has reached it."""
        is_owner = self._gradient(group[0]).owner == self.collectives.rank
        return is_owner and any(self._gradient(i).full is not None for i in group)

    def _search(self, index: int, group: Sequence[int], policy: RankPolicy, step: int) -> Search:
        """Begin to find the dominant subspace of a group's stacked full gradients, at their owner."""
        first, sought = policy.first_width(index), policy.sought_energy(index)
        older = self.bases.old.recall(self.low_rank[group[0]])

        def stacked() -> Tensor:  # copies of a group's are not held until it is its turn
            parts, leader = [self._gradient(i).full for i in group], self._matrix(group[0])
            gradient = stacked_gradient([self._matrix(i) for i in group], parts)
            assert gradient is not None
            return gradient.unflatten(0, (leader.count, -1)) if leader.own_bases else gradient

        return self._matrix(group[0]).search_basis(stacked, step, first, sought, older)

    def _alone(self, group: Sequence[int]) -> Tensor:
        """The full gradient for a core, which is alone; any member's of a group."""
        parts = (self._gradient(i).full for i in group)
        return next(part for part in parts if part is not None)

    def _change_basis(
        self,
        group: Sequence[int],
        rank: int,
        found: tuple[Subspace, Tensor] | None,
        missing: Sequence[float],
    ) -> None:
        """Give a group the basis that its owner has found, and carry its moments over."""
        basis = self._broadcast_basis(group, rank, found)
        members = [self.low_rank[i] for i in group]
        if members[0].gradient.owner == self.collectives.rank:
            self.bases.old.remember(members[0], rank)
        recalled = self.bases.history.recall(members, basis, missing)
        self.bases.history.remember(members)
        self.adopt(group, basis, recalled)

    def _matrix(self, index: int) -> ProjectedMatrix:
        matrix = self.low_rank[index].matrix
        assert isinstance(matrix, ProjectedMatrix)
        return matrix

    def _gradient(self, index: int) -> Gradient:
        return self.low_rank[index].gradient

    def _column_energies(
        self, refreshing: Sequence[tuple[int, Sequence[int]]], policy: RankPolicy
    ) -> dict[int, Tensor]:
        """Column energies summed over all holders, of the groups whose policy reads them; one reduction for all."""
        found: dict[int, Tensor] = {}
        for index, group in refreshing:
            if policy.reads_columns(index):
                counted = [self.low_rank[i].counted for i in group]
                energies = column_energies([self._matrix(i) for i in group], counted)
                if energies is not None:
                    found[index] = energies
        if found and self.sharded:
            sums = torch.cat(list(found.values()))
            self.collectives.all_reduce(sums)
            parts = sums.split([len(energies) for energies in found.values()])
            found = dict(zip(found, parts, strict=True))
        return found

    def _broadcast_basis(
        self, group: Sequence[int], rank: int, found: tuple[Subspace, Tensor] | None
    ) -> Tensor | None:
        """The owner's basis on every rank; None for full rank."""
        leader = self._matrix(group[0])
        if leader.is_full_at(rank):
            return None
        if found is None:
            shape = (*leader.basis_rows, rank)
            basis = torch.empty(shape, dtype=leader.dtype, device=leader.device)
        else:
            basis = leader.basis_of(found[0], rank, found[1]).contiguous()
        self.collectives.broadcast(basis, self._gradient(group[0]).owner)
        return basis

    def adopt(
        self,
        group: Sequence[int],
        basis: Tensor | None,
        recalled: Sequence[Sequence[Recalled]] | None = None,
    ) -> None:
        """Carry the moments of a group over to a basis that every rank has.

        Args:
            group: places in ``low_rank``. basis: n x r; None for full rank.
            recalled: by matrix what it recalls of previous bases; None for nothing.
        """
        matrices, sums = [self._matrix(i) for i in group], []
        for index, matrix in zip(group, matrices, strict=True):
            overlap = matrix.overlap_sum(basis, self.low_rank[index].counted)
            if overlap is not None and self.sharded:
                self.collectives.all_reduce(overlap)
            sums.append(overlap)
        adopt_together(matrices, basis, sums, recalled)

    def _project_full(self, group: Sequence[int], step: int, refreshed: bool) -> None:
        """Turn the owner's full gradients into every rank's rows of what the rules take."""
        for index in group:
            self._matrix(index).prepare(step, refreshed)
            self._matrix(index).draw_probes(step)
        for index in group:
            matrix, gradient = self._matrix(index), self._gradient(index)
            columns, full = matrix.projection, gradient.full
            if full is None:
                reduced = torch.zeros(gradient.shards.m, matrix.width, device=matrix.device)
            elif columns is None:
                reduced = full.float().contiguous()
            else:
                reduced = gradient.project(full, columns)
            self.collectives.broadcast(reduced, gradient.owner)
            own = reduced[slice(*gradient.shards.rows(self.low_rank[index].weight.rank))]
            room = None if gradient.room is None else gradient.room()
            if room is not None and (room.shape, room.dtype) == (own.shape, self._dtype):
                own = room.copy_(own)
            else:  # of shards not a view, which would hold all rows
                own = own.to(self._dtype, copy=self.sharded)
            gradient.reduced, gradient.full = own, None


def _is_overflow(value: Tensor) -> bool:
    """Waits where it is on the device."""
    return bool(value.item())
