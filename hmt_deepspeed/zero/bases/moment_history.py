"""Keeps moments of matrices' previous bases in each rank's basis cache, for when a basis turns back.

A basis change carries over what the basis in force has seen, and a direction that it has not starts as new
(:meth:`hmt_deepspeed.optim.rules.moments.Moments.rotate`). Where gradients come back to a subspace that an earlier
basis spanned, its second moments are still there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from hmt_deepspeed.memory.basis_cache import BasisCache
from hmt_deepspeed.optim.rules.moments import Moments, PreviousMoments, Recalled
from hmt_deepspeed.optim.rules.projected import ProjectedMatrix, overlap_of
from hmt_deepspeed.zero.parameters.param_state import ParamState
from hmt_deepspeed.zero.sharding.collectives import Collectives

__all__ = ["MomentHistory", "SavedHistory"]


class SavedHistory(Protocol):
    """The history in a checkpoint, see :class:`~hmt_deepspeed.zero.saving.saved_state.SavedState`."""

    def previous_moments(self, rows: Mapping[str, tuple[int, int]]) -> list[dict[str, Any]]: ...
    def order_of_use(self, rank: int) -> list[str]: ...


@dataclass(frozen=True)
class _Previous:
    """A previous basis.

    Attributes:
        steps: Adam steps after which it was replaced. columns: its width.
        members: its moments by matrix; tensors are in the cache and here only described (meta).
        has_basis: whether this rank keeps the basis too.
    """

    key: str
    steps: int
    columns: int
    members: dict[str, PreviousMoments]
    has_basis: bool

    def split(self, tensors: Sequence[Tensor]) -> tuple[Tensor | None, dict[str, PreviousMoments]]:
        """The basis and the moments, of the tensors that were kept together."""
        basis, rest, found = None, list(tensors), {}
        if self.has_basis:
            basis, *rest = rest
        for name, moments in self.members.items():
            number = len(moments.tensors())
            found[name], rest = moments.holding(rest[:number]), rest[number:]
        return basis, found


class MomentHistory:
    """Moments of the previous bases of each matrix, as far as the cache has room for them.

    All ranks remember at the same time, each the rows of the moments that it holds; the basis is kept by the rank
    that finds the matrix's bases. A previous basis counts only where every rank still has its part. Matrices that
    share a basis have one, under the name of the basis's owner.

    Args:
        collectives: of the data-parallel group. cache: of host memory, or None. most: bases of a matrix, 0 for none.

    Attributes:
        hits, misses: previous bases that a refresh asked for and found, or that had made room on some rank.
    """

    def __init__(self, collectives: Collectives, cache: BasisCache | None, most: int) -> None:
        self.collectives, self.most = collectives, 0 if cache is None else most
        self._cache = cache
        self._previous: dict[str, list[_Previous]] = defaultdict(
            list
        )  # newest first, the same on all ranks
        self.hits = self.misses = 0

    @property
    def cache(self) -> BasisCache:
        assert self._cache is not None
        return self._cache

    @property
    def nbytes(self) -> int:
        """Bytes kept on this rank."""
        return sum(self.cache.kept_bytes(previous.key) for _, previous in self._kept())

    def forget(self) -> None:
        """Forget everything: the bases belong to other groups now."""
        for kept in self._previous.values():
            for previous in kept:
                self.cache.discard(previous.key)
        self._previous.clear()

    # -- at a refresh ---------------------------------------------------------------------------

    def missing(self, matrix: ProjectedMatrix) -> list[float]:
        """Which previous bases of a matrix this rank has dropped; to be summed over ranks.

        Those that are kept stay until :meth:`release`.

        Returns:
            ``most`` numbers, newest basis first: 1 for one that has made room, else 0.
        """
        found = [0.0] * self.most
        for place, previous in enumerate(self._previous[matrix.columns.owner] if self.most else ()):
            if self.cache.has_kept(previous.key):
                self.cache.held.add(previous.key)
            else:
                found[place] = 1.0
        return found

    def expect(self, matrix: ProjectedMatrix) -> None:
        """Start the copies of what :meth:`recall` will ask for, as far as this rank knows, if not yet begun."""
        for previous in self._previous[matrix.columns.owner] if self.most else ():
            if self.cache.has_kept(previous.key):
                self.cache.expect(previous.key)

    def recall(
        self, group: Sequence[ParamState], basis: Tensor | None, missing: Sequence[float]
    ) -> list[list[Recalled]]:
        """Previous moments of each matrix of a group that takes ``basis``. A collective.

        Args:
            group: matrices that share a basis. basis: n x r, the coming one; None for full rank.
            missing: :meth:`missing`, summed over ranks.

        Returns:
            For each matrix its previous moments with the overlap of their basis and the coming one.
        """
        leader, recalled = _matrix(group[0]), [list[Recalled]() for _ in group]
        if not self.most:
            return recalled
        kept = self._previous[leader.columns.owner]
        for previous, num_ranks in list(zip(kept, missing, strict=False)):
            if num_ranks:
                self._drop(kept, previous)
                self.misses += 1
        if not kept:
            return recalled
        self.hits += len(kept)
        parts = [previous.split(self.cache.kept(previous.key)) for previous in kept]
        overlaps = self._overlaps(kept, [old for old, _ in parts], leader, basis, group[0])
        for previous, (_, members), overlap in zip(kept, parts, overlaps, strict=True):
            self.cache.touch(previous.key)
            for param_state, found in zip(group, recalled, strict=True):
                decay = param_state.group["betas"][1] ** (leader.steps - previous.steps)
                found.append(Recalled(members[param_state.name], overlap, decay))
        return recalled

    def _overlaps(
        self,
        kept: Sequence[_Previous],
        old: Sequence[Tensor | None],
        leader: ProjectedMatrix,
        basis: Tensor | None,
        param_state: ParamState,
    ) -> Sequence[Tensor]:
        """``Q_old^T Q_new`` of each previous basis, computed where the old bases are."""
        columns = [previous.columns for previous in kept]
        width = leader.shape[1] if basis is None else basis.shape[1]
        stacked = torch.empty(sum(columns), width, device=leader.device)
        known = [one for one in old if one is not None]
        if known:
            torch.cat([overlap_of(one, basis) for one in known], out=stacked)
        self.collectives.broadcast(stacked, param_state.gradient.owner)
        return stacked.split(columns)

    def remember(self, group: Sequence[ParamState]) -> None:
        """Keep the basis that a group is about to leave, and the moments in it."""
        leader = _matrix(group[0])
        basis = leader.basis
        if not (self.most and leader.recalls_moments and leader.measured and leader.steps):
            return
        if basis is None:  # whatever comes after full rank is spanned by it
            return
        finds = group[0].gradient.owner == self.collectives.rank
        members = {p.name: _moments(p).as_previous() for p in group}
        self._add(
            leader.columns.owner, leader.steps, basis.shape[1], members, basis if finds else None
        )

    def _add(
        self,
        owner: str,
        steps: int,
        columns: int,
        members: Mapping[str, PreviousMoments],
        basis: Tensor | None,
    ) -> None:
        kept = self._previous[owner]
        for oldest in kept[self.most - 1 :]:
            self._drop(kept, oldest)
        described = {
            name: previous.holding([torch.empty_like(t, device="meta") for t in previous.tensors()])
            for name, previous in members.items()
        }
        key = f"moments of {owner} after {steps} steps"
        kept.insert(0, _Previous(key, steps, columns, described, basis is not None))
        tensors = [tensor for previous in members.values() for tensor in previous.tensors()]
        self.cache.keep(key, tensors if basis is None else [basis, *tensors])

    def _drop(self, kept: list[_Previous], previous: _Previous) -> None:
        kept.remove(previous)
        self.cache.held.discard(previous.key)
        self.cache.discard(previous.key)

    def release(self) -> None:
        """End of the refreshes of a step."""
        if self.most:
            self.cache.held.clear()

    # -- checkpoint -----------------------------------------------------------------------------

    def state(
        self, param_states: Iterable[ParamState], take: Callable[[Any], Any], holds_rows: bool
    ) -> dict[str, Any]:
        """State dict of this rank's part, oldest first: plain tensors, numbers and strings.

        Args:
            take: is given each tensor. holds_rows: whether this rank saves its rows of the moments.
        """
        if not self.most:
            return {}
        matrices = {p.name: p.matrix for p in param_states if isinstance(p.matrix, ProjectedMatrix)}
        saved = []
        for owner, previous in self._kept():
            basis, members = previous.split(self.cache.kept(previous.key))
            saved.append(
                {
                    "owner": owner,
                    "steps": previous.steps,
                    "columns": previous.columns,
                    "basis": None if basis is None else take(basis),
                    "members": {
                        name: {
                            "rows": list(matrices[name].rows),
                            "height": matrices[name].shape[0],
                            **{key: take(value) for key, value in moments.state_dict().items()},
                        }
                        for name, moments in members.items()
                        if holds_rows
                    },
                }
            )
        return {"entries": saved, "order": self.cache.kept_keys()}

    def load(
        self, groups: Iterable[tuple[Sequence[ParamState], bool]], saved: SavedHistory
    ) -> None:
        """Take over what any number of ranks saved; what one of them lacked is gone.

        Args:
            groups: of matrices, and whether this rank finds their bases.
        """
        if not self.most:
            return
        self.forget()
        by_owner = {
            group[0].matrix.columns.owner: (group, finds)
            for group, finds in groups
            if isinstance(group[0].matrix, ProjectedMatrix)
        }
        rows = {p.name: _matrix(p).rows for group, _ in by_owner.values() for p in group}
        for entry in saved.previous_moments(rows):
            group, finds = by_owner.get(entry["owner"], ((), False))
            if [p.name for p in group] != list(entry["members"]):
                continue  # other matrices share a basis now
            members = {
                p.name: PreviousMoments.restored(
                    entry["members"][p.name], _moments(p).dtype, _matrix(p).device
                )
                for p in group
            }
            basis = None
            if finds:
                basis = entry["basis"].to(_matrix(group[0]).device)
            self._add(entry["owner"], entry["steps"], entry["columns"], members, basis)
        for key in saved.order_of_use(self.collectives.rank):
            if self.cache.has_kept(key):
                self.cache.touch(key)

    def _kept(self) -> Iterator[tuple[str, _Previous]]:
        """Previous bases on this rank with their owners, oldest first."""
        for owner, kept in self._previous.items():
            for previous in reversed(kept):
                if self.cache.has_kept(previous.key):
                    yield owner, previous


def _moments(param_state: ParamState) -> Moments:
    moments = _matrix(param_state).moments
    assert isinstance(moments, Moments)  # what a rule recalls is Adam's
    return moments


def _matrix(param_state: ParamState) -> ProjectedMatrix:
    assert isinstance(param_state.matrix, ProjectedMatrix)
    return param_state.matrix
