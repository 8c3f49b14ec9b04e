"""A matrix whose gradient is projected: its basis, the probe columns beside it, and the change to the next basis.

A subclass works in that space: :class:`~hmt_deepspeed.optim.rules.low_rank.LowRankMatrix` runs Adam.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from hmt_deepspeed.config.own_rank import own_rank
from hmt_deepspeed.config.probes import auto_probes
from hmt_deepspeed.kernels.noise import Stream, base_keys, step_keys
from hmt_deepspeed.kernels.precision import fp32_products
from hmt_deepspeed.optim.bases.basis import (
    keyed_generator,
    probe_columns,
    random_basis,
    widened,
)
from hmt_deepspeed.optim.bases.expert_search import ExpertSearch
from hmt_deepspeed.optim.bases.range_finder import Subspace
from hmt_deepspeed.optim.bases.search import Search, SubspaceSearch
from hmt_deepspeed.optim.rules.columns import Columns
from hmt_deepspeed.optim.rules.matrix import MatrixRule
from hmt_deepspeed.optim.rules.moments import Recalled
from hmt_deepspeed.optim.rules.state import KeptStates

__all__ = [
    "ProjectedMatrix",
    "adopt_together",
    "overlap_of",
    "stored_projection",
    "with_probes",
]


class ProjectedMatrix(MatrixRule):
    """Gradient rows handed in are ``[A | S] = G [Q | P]``, or ``G`` itself with the full residual and
    while the matrix is full-rank (its basis is the identity).

    Attributes:
        basis: n x r; None while full-rank. num_probes: k.
        measured: the basis came from a gradient (or is one of a seeded sequence).
        columns: where the projection lives; the leader's where a basis is shared, and its name seeds
            bases and probes.
        candidates: legal ranks. draw: number of the basis of the ``random`` range finder.
        window: step of the accumulation window, which keys the probes.
        undecided: experts share a basis until a gradient says whether they have bases of their own.
        proposed: these, until then, E x m x r; None where there are none yet.
    """

    SHARES: ClassVar[bool] = True  # whether matrices that read the same input can have one basis

    def _start(self) -> None:
        self.candidates = self.settings.ranks(*self.shape)
        self.columns = Columns(self.name)
        self.measured = not self.takes_bases
        self.full_rank = False
        self.draw = 0
        self.window: Tensor | int = 0
        decides = self.settings.expert_basis is None and self.count > 1
        self.undecided = decides and self.finds_bases
        self.proposed: Tensor | None = None
        self._base_keys: dict[tuple[str, ...], Tensor] = {}
        self._install(self.seeded_basis(self.candidates[0], 0) if self.takes_bases else None)
        self.moments = self._new_states()

    @abstractmethod
    def _new_states(self) -> KeptStates:
        """Empty ones at the present rank."""

    # -- shapes ---------------------------------------------------------------------------------

    def probes_for(self, rank: int) -> int:
        """k at a rank: as wanted, never more than the complement has."""
        if self.settings.residual == "full":
            return 0
        wanted = self.settings.probes
        if wanted is None:
            wanted = auto_probes(rank, self.settings.residual, self.device.type == "cuda")
        return min(wanted, self.shape[1] - rank)

    @property
    def width(self) -> int:
        return self.shape[1] if self.takes_whole else self.rank + self.num_probes

    @property
    def takes_whole(self) -> bool:
        return self.full_rank or self.settings.residual == "full"

    @property
    def measures_energy(self) -> bool:
        """Whether what lies outside the basis is seen between refreshes; without probes nobody knows E."""
        return self.takes_whole or self.num_probes > 0 or self.rank == self.shape[1]

    def column_energies(self, counted: slice) -> Tensor | None:
        """Energy of past gradients along each direction of the basis, summed over the ``counted`` rows of those held:
        (r,) fp32; None of a rule whose states do not tell."""
        return None

    # -- bytes ----------------------------------------------------------------------------------

    def state_bytes(self) -> int:
        local, basis = self.columns.local, self.columns.basis
        if self.columns.owner != self.name or basis is None:
            return self.moments.nbytes
        held = basis if local is None else local[..., : self.rank]
        return self.moments.nbytes + held.nbytes

    def moment_bytes_at(self, rank: int) -> int:
        """Bytes at a rank of the states of all rows that a budget counts."""
        counted = (s for s in self.settings.rule.states if s.in_budget and s.stored != "model")
        each = sum(state.nbytes(*self.shape, rank, self.state_dtype) for state in counted)
        return self.count * each

    def basis_bytes_at(self, rank: int) -> int:
        """Bytes of the whole basis at a rank; at full rank there is none."""
        if self.is_full_at(rank) or self.redraws:
            return 0
        itemsize = self.dtype.itemsize
        more = (s for s in self.settings.rule.states if s.stored == "model")
        beside = sum(state.nbytes(*self.shape, rank, "fp32", itemsize) for state in more)
        bases = self.count if self.own_bases else 1
        return bases * self.shape[1] * rank * itemsize + beside

    # -- experts that decide --------------------------------------------------------------------

    def own_rank(self, rank: int) -> int:
        """Rank of bases of the experts' own, on the other side, that take with their moments at most the bytes of one
        shared basis of ``rank`` with its; at least 1."""
        stored = self.state_dtype, self.dtype.itemsize
        return own_rank(self.settings.rule, rank, *self.shape, self.count, *stored)

    def decide(self, own_bases: bool, held_rows: tuple[int, int] | None = None) -> None:
        """Keep one basis, or have each expert start anew with one of its own, on the other side, at the bytes that the
        shared one would take.

        Args:
            held_rows: of the other side, whose states live here then; None for all.
        """
        self.undecided, self.proposed = False, None
        if not own_bases:
            return
        self.candidates = tuple(sorted({self.own_rank(rank) for rank in self.candidates}))
        rows, columns = reversed(self.shape)
        self.shape, self.transposed = (rows, columns), not self.transposed
        self.rows = held_rows or (0, rows)
        self.own_bases, self.columns, self.measured = True, Columns(self.name), False
        self._install(self.seeded_basis(self.candidates[0], self.draw))
        self.moments = self._new_states()
        self.limited_norm = torch.zeros_like(self.limited_norm)
        self.forget_energy()

    # -- basis ----------------------------------------------------------------------------------

    @property
    def projection(self) -> Tensor | None:
        """``[Q | P]`` of the coming step."""
        if self.takes_whole:
            return None
        if not self.redraws:
            return self.columns.whole if self.columns.fetch is None else self.columns.fetch()
        keys = self._keys(self.basis_names, self.window, Stream.PROBES)
        return self._of_all(with_probes(self._each(self._drawn_basis()), self.num_probes, keys))

    def make_projection(self) -> Tensor:
        """:attr:`projection` of a rule that redraws."""
        made = self.projection
        assert made is not None
        return made

    @property
    def basis(self) -> Tensor | None:
        """Q, n x r, E x n x r of experts with bases of their own: a view of the projection where there is one; made anew
        by a rule that redraws."""
        if self.redraws:
            return self._drawn_basis()
        return self.columns.basis

    def _drawn_basis(self) -> Tensor:
        return self._seeded_right(self.rank, self.draw).to(self.dtype)

    @property
    def basis_names(self) -> list[str]:
        """What seeds the basis, or each expert's."""
        return self.names if self.own_bases else [self.columns.owner]

    def _each(self, columns: Tensor) -> Tensor:
        """Columns n x w, or E of them, with a leading dimension."""
        return columns if self.own_bases else columns[None]

    def _of_all(self, columns: Tensor) -> Tensor:
        """Undo :meth:`_each`."""
        return columns if self.own_bases else columns[0]

    def _keys(self, names: Sequence[str], number: Tensor | int, stream: Stream) -> Tensor:
        """The keys of each name's draw ``number``: N x 2."""
        known = tuple(names)
        if known not in self._base_keys:  # else a copy to the device for every draw
            self._base_keys[known] = base_keys(self.settings.seed, names, self.device)
        return step_keys(self._base_keys[known], number, stream)

    @property
    def redraws(self) -> bool:
        return self.takes_bases and self.settings.range_finder == "random"

    def seeded_basis(self, rank: int, number: int) -> Tensor:
        """Random orthonormal basis ``number`` of this matrix, fp32, as :meth:`adopt` takes it: before the first
        refresh, or of a rule that redraws."""
        return self._seeded_right(rank, number)

    def _seeded_right(self, rank: int, number: int) -> Tensor:
        keys = self._keys(self.basis_names, number, Stream.BASIS)
        return self._of_all(random_basis(self.shape[1], rank, keys))

    def prepare(self, step: Tensor | int, refreshed: bool = False) -> None:
        """Note the coming step; :class:`ProbeDraws` draws."""
        self.window, self.made_basis = step, refreshed

    def draw_probes(self, step: int) -> None:
        """Draw the probe columns of a step alone, as :class:`ProbeDraws` does of many; nothing without a basis of its own
        or without probes."""
        whole = self.columns.whole
        if whole is None or not self.num_probes or self.columns.owner != self.name:
            return
        keys, basis = self._keys(self.basis_names, step, Stream.PROBES), whole[..., : self.rank]
        probes = probe_columns(self._each(basis), self.num_probes, keys)
        whole[..., self.rank :] = self._of_all(probes)

    def search_basis(
        self,
        gradient: Callable[[], Tensor],
        step: int,
        first: int,
        sought: float,
        older: Tensor | None = None,
    ) -> Search:
        """Begin to search the dominant subspace of the mean full gradient (m x n; E x m x n of experts with bases of their
        own), of ``first`` columns or, by candidates, as many more as it takes to capture ``sought`` of its energy.

        ``older`` is a wider basis of before, n x r_old: where the rank rises again, the columns that the
        present one lacks start from it.

        Where it finds none the gradient is not finite or is zero: the old basis stays and the matrix stays due.
        """
        generator = keyed_generator(
            self.device, self.settings.seed, self.columns.owner, "sketch", step
        )
        finder, kept = self.settings.range_finder, self.basis
        if self.own_bases:
            if kept is None:  # of a full-rank matrix
                kept = torch.zeros(self.count, self.shape[1], 0, device=self.device)
            known = kept, self.measured
            ranks = self.candidates
            return ExpertSearch(finder, gradient, ranks, sought, generator, *known, first=first)
        start = kept if self.measured else None
        if start is not None and older is not None and older.shape[1] > start.shape[1]:
            start = widened(start, older)
        return SubspaceSearch(
            finder, gradient, self.candidates, sought, generator, start, first=first
        )

    def captured_at_candidates(self, found: Subspace) -> list[float]:
        """E(r) of the candidate ranks that were sketched."""
        captured = found.captured().tolist()
        return [captured[r - 1] for r in self.candidates if r <= len(captured)]

    def searched(self, gradient: Tensor) -> Tensor:
        """The gradient as :meth:`search_basis` takes it: of experts that share a basis one below the other."""
        shared = self.count > 1 and not self.own_bases
        return gradient.flatten(0, 1) if shared else gradient

    @property
    def basis_rows(self) -> tuple[int, ...]:
        """Shape of what :meth:`basis_of` gives but for its columns."""
        return (self.count, self.shape[1]) if self.own_bases else (self.shape[1],)

    def basis_of(self, found: Subspace, rank: int, gradient: Tensor) -> Tensor:
        """The basis for :meth:`adopt`, of a rank <= that of ``found``, in the basis dtype."""
        return found.basis[..., :rank].to(self.dtype)

    def _resize(self, basis: Tensor | None) -> None:
        self.full_rank = basis is None
        self.rank = self.shape[1] if basis is None else basis.shape[-1]
        self.num_probes = 0 if basis is None else self.probes_for(self.rank)
        self._resized()

    def _install(self, basis: Tensor | None) -> None:
        self._resize(basis)
        self.columns.whole, self.columns.rank, self.columns.directions = None, self.rank, None
        if basis is None or self.redraws:
            return
        if self.own_bases:
            self.columns.directions = (basis != 0).any(dim=-2).sum(dim=-1, dtype=torch.float32)
        size = (*basis.shape[:-1], self.rank + self.num_probes)
        columns = torch.zeros(size, dtype=self.dtype, device=self.device)
        columns[..., : self.rank].copy_(basis)
        self.columns.whole = columns

    # -- from one basis to the next --------------------------------------------------------------

    @property
    def recalls_moments(self) -> bool:
        """Whether the states of a basis that was left can be carried into a later one; those of experts are not."""
        recalled = any(s.recalled for s in self.settings.rule.states)
        return recalled and not self.redraws and self.count == 1

    def overlap_sum(self, basis: Tensor | None, counted: slice) -> Tensor | None:
        """Terms to be summed over all rows before :meth:`adopt`; None where there are none."""
        return None

    def adopt(self, basis: Tensor | None, overlap_sum: Tensor | None = None) -> None:
        """Replace the basis by ``basis`` (n x r'), None for full rank, and carry the moments over."""
        adopt_together([self], basis, [overlap_sum])

    def share(self, leader: ProjectedMatrix) -> None:
        """Take over the leader's basis, now and from now on."""
        if self.columns.owner != leader.name:
            self.adopt(leader.basis)  # else a checkpoint gave it a copy of the leader's
        self.measured, self.columns = leader.measured, leader.columns
        self.candidates = leader.candidates

    def unshare(self) -> None:
        """Have the basis as its own, which no other matrix replaces."""
        if self.columns.owner != self.name:
            basis, self.columns = self.basis, Columns(self.name)
            self.candidates = self.settings.ranks(*self.shape)
            self._install(basis)

    def _transfer_moments(
        self, basis: Tensor | None, overlap_sum: Tensor | None, recalled: Sequence[Recalled]
    ) -> None:
        assert not recalled
        self.moments.rotate(self._overlap(basis))

    def _overlap(self, basis: Tensor | None) -> Tensor:
        """``Q_old^T Q_new``; the basis of a full-rank matrix, which is not left for another such, is the
        identity. Of experts with bases of their own of those held here."""
        old = self.basis
        if self.own_bases:
            old, basis = (None if q is None else q[self.held] for q in (old, basis))
        if old is None:
            assert basis is not None
            return basis.float()
        return overlap_of(old, basis)

    # -- checkpoint -----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        state = {**super().state_dict(), "measured": self.measured, "draw": self.draw}
        state["basis_owner"] = self.columns.owner
        if self.count > 1:
            state |= {"own_bases": self.own_bases, "undecided": self.undecided}
        if self.proposed is not None:
            state["proposed"] = self.proposed
        if self.columns.basis is not None:
            state["basis"] = self.columns.basis.clone()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As of :class:`MatrixRule`; afterwards no other matrix has these columns, whoever owned the basis."""
        if self.undecided and not state["undecided"]:
            self.decide(state["own_bases"])
        if "proposed" in state:
            self.proposed = torch.as_tensor(state["proposed"]).to(
                self.device, self.dtype, copy=True
            )
        self.columns = Columns(state.get("basis_owner", self.name))
        rank, self.draw = int(state["rank"]), int(state["draw"])
        if "basis" in state:
            self._install(self._basis_in(state).to(self.device))
        elif self.redraws:
            self._install(self.seeded_basis(rank, self.draw))
        else:
            self._install(None)
        self.measured = bool(state["measured"])
        super().load_state_dict(state)

    def _basis_in(self, state: Mapping[str, Any]) -> Tensor:
        return torch.as_tensor(state["basis"])


def with_probes(bases: Tensor, num_probes: int, keys: Tensor) -> Tensor:
    """``[Q | P]`` of bases B x n x r, in their dtype."""
    probes = probe_columns(bases, num_probes, keys).to(bases.dtype)
    return torch.cat((bases, probes), dim=2)


def overlap_of(old: Tensor, new: Tensor | None) -> Tensor:
    """``Q_old^T Q_new`` in fp32, of each expert with a basis of its own; None is the identity, the basis of a full-rank
    matrix."""
    return old.float().mT if new is None else old.float().mT @ new.float()


@fp32_products()
def adopt_together(
    members: Sequence[ProjectedMatrix],
    basis: Tensor | None,
    overlap_sums: Sequence[Tensor | None],
    recalled: Sequence[Sequence[Recalled]] | None = None,
) -> None:
    """:meth:`ProjectedMatrix.adopt` of matrices that share a basis: all leave the old one at once.

    ``recalled``: what each of them remembers of bases before, see :meth:`Moments.rotate`.
    """
    known = [()] * len(members) if recalled is None else recalled
    for matrix, overlap_sum, older in zip(members, overlap_sums, known, strict=True):
        stays_full = matrix.full_rank and basis is None
        if matrix.steps and not stays_full:
            matrix._transfer_moments(basis, overlap_sum, older)
    members[0]._install(basis)  # the columns are everyone's
    for matrix in members:
        matrix._resize(basis)
        if not matrix.steps:
            matrix.moments = matrix._new_states()
        matrix.measured = True
        matrix.forget_energy()


def stored_projection(matrix: MatrixRule) -> Tensor | Callable[[], Tensor] | None:
    """What the linear of a matrix projects on: its columns (this process's rows while the whole is dropped), or
    how to make them; None where it takes whole gradients."""
    if not isinstance(matrix, ProjectedMatrix) or matrix.takes_whole:
        return None
    if matrix.redraws:
        return matrix.make_projection
    columns = matrix.columns
    return columns.whole if columns.local is None else columns.local
