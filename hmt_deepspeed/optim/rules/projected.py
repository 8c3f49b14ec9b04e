"""A matrix whose gradient is projected: one basis, where it lies, and the probe columns beside it.

What Adam then does in that space is :class:`~hmt_deepspeed.optim.rules.low_rank.LowRankMatrix`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from hmt_deepspeed.config.probes import auto_probes
from hmt_deepspeed.kernels.low_rank_projection import project
from hmt_deepspeed.optim.bases.basis import (
    Subspace,
    find_subspace_to_energy,
    keyed_generator,
    probe_columns,
    random_basis,
    widened,
)
from hmt_deepspeed.optim.rules.formulas import estimated_square_norm
from hmt_deepspeed.optim.rules.matrix import MatrixRule

__all__ = ["Columns", "ProjectedMatrix"]


@dataclass(eq=False)
class Columns:
    """``[Q | P]`` of one matrix, or of several that share a basis.

    whole: n x (r + k), None where whole gradient rows are taken. basis: its first r columns, or all
    there is; None where it is redrawn from a seed, and for full rank. owner: name of the matrix whose bytes
    it counts as. parked: this process's rows while the whole is dropped (ZeRO stage 3, a basis cache); a meta
    tensor while they are in host memory. fetch: brings the whole from there, where no other process has a
    part of it.
    """

    owner: str
    whole: Tensor | None = None
    basis: Tensor | None = None
    parked: Tensor | None = None
    fetch: Callable[[], Tensor] | None = None

    def move(self, place: Callable[[Tensor], Tensor]) -> None:
        """Take what ``place`` gives for what is on the device: the same elsewhere."""
        if self.parked is not None:
            self.parked = self.parked if self.parked.is_meta else place(self.parked)
        elif self.whole is not None:
            width = 0 if self.basis is None else self.basis.shape[1]
            self.whole = place(self.whole)
            self.basis = self.whole[:, :width]
        elif self.basis is not None:
            self.basis = place(self.basis)


class ProjectedMatrix(MatrixRule):
    """Gradient rows handed in are ``[A | S] = G [Q | P]``, or ``G`` itself with the full residual and
    while the matrix is full-rank (its basis is the identity, its step plain AdamW).

    Attributes:
        basis: n x r; None while full-rank. num_probes: k.
        measured: the basis came from a gradient (or is one of a seeded sequence).
        columns: where the projection lives; the leader's where a basis is shared, and its name seeds
            bases and probes.
        candidates: legal ranks. draw: number of the basis of the ``random`` range finder.
    """

    SHARES: ClassVar[bool] = True  # whether matrices that read the same input can have one basis

    def _start(self) -> None:
        self.candidates = self.settings.ranks(*self.shape)
        self.columns = Columns(self.name)
        self.measured = False
        self.full_rank = False
        self.draw = 0
        self._window = 0  # step of the window: seeds the probes
        self._install(self.seeded_basis(self.candidates[0], 0))

    # -- shapes ---------------------------------------------------------------------------------

    def probes_for(self, rank: int) -> int:
        """k at a rank: as wanted, never more than the complement has."""
        if self.settings.residual == "full":
            return 0
        wanted = self.settings.probes
        if wanted is None:
            wanted = auto_probes(rank, self.settings.residual)
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

    def basis_bytes_at(self, rank: int) -> int:
        """Bytes of the whole basis at a rank; full-rank AdamW has none."""
        n = self.shape[1]
        return 0 if self.is_full_at(rank) or self.redraws else n * rank * self.dtype.itemsize

    def is_full_at(self, rank: int) -> bool:
        """Whether a basis of that rank would span everything: plain AdamW then takes its place."""
        return rank == self.shape[1]

    # -- basis ----------------------------------------------------------------------------------

    @property
    def projection(self) -> Tensor | None:
        """``[Q | P]`` of the coming step."""
        if self.takes_whole:
            return None
        if not self.redraws:
            return self.columns.whole if self.columns.fetch is None else self.columns.fetch()
        basis = self._drawn_basis()
        return torch.cat((basis, self._probes(basis)), dim=1)

    def make_projection(self) -> Tensor:
        """:attr:`projection` of a rule that redraws."""
        made = self.projection
        assert made is not None
        return made

    @property
    def basis(self) -> Tensor | None:
        """Q, n x r: a view of the projection where there is one; made anew by a rule that redraws."""
        if self.redraws:
            return self._drawn_basis()
        return self.columns.basis

    def _drawn_basis(self) -> Tensor:
        return self._seeded_right(self.rank, self.draw).to(self.dtype)

    def _probes(self, basis: Tensor) -> Tensor:
        seed, owner = self.settings.seed, self.columns.owner
        generator = keyed_generator(self.device, seed, owner, "probes", self._window)
        return probe_columns(basis, self.num_probes, generator).to(self.dtype)

    @property
    def redraws(self) -> bool:
        return self.settings.range_finder == "random"

    def seeded_basis(self, rank: int, number: int) -> Tensor:
        """Random orthonormal basis ``number`` of this matrix, fp32, as :meth:`adopt` takes it."""
        return self._seeded_right(rank, number)

    def _seeded_right(self, rank: int, number: int) -> Tensor:
        generator = keyed_generator(
            self.device,
            self.settings.seed,
            self.columns.owner,
            "basis",
            *([number] if number else []),
        )
        return random_basis(self.shape[1], rank, generator)

    def prepare(self, step: int, refreshed: bool = False) -> None:
        """Redraw the probe columns of ``projection`` for the coming step."""
        self._window, self._made_basis = step, refreshed
        basis, whole = self.columns.basis, self.columns.whole
        owns = self.columns.owner == self.name and self.num_probes > 0
        if owns and whole is not None and basis is not None:
            whole[:, self.rank :] = self._probes(basis)

    def find_basis(
        self,
        gradient: Tensor,
        step: int,
        first: int,
        sought: float,
        older: Tensor | None = None,
    ) -> Subspace | None:
        """Dominant subspace of the mean full gradient (m x n), of ``first`` columns or, by candidates,
        as many more as it takes to capture ``sought`` of its energy.

        ``older`` is a wider basis of before, n x r_old: where the rank rises again, the columns that the
        present one lacks start from it.

        None when the gradient is not finite or is zero: the old basis stays and the matrix stays due.
        """
        largest = torch.linalg.vector_norm(gradient, ord=float("inf"), dtype=torch.float32).item()
        if not 0 < largest < float("inf"):
            return None
        generator = keyed_generator(
            self.device, self.settings.seed, self.columns.owner, "sketch", step
        )
        start = self.basis if self.measured else None
        if start is not None and older is not None and older.shape[1] > start.shape[1]:
            start = widened(start, older)
        return find_subspace_to_energy(
            self.settings.range_finder,
            gradient,
            self.candidates,
            sought,
            generator,
            start,
            first=first,
        )

    def captured_at_candidates(self, found: Subspace) -> list[float]:
        """E(r) of the candidate ranks that were sketched; reading it waits for the device."""
        captured = found.captured().tolist()
        return [captured[r - 1] for r in self.candidates if r <= len(captured)]

    @property
    def basis_rows(self) -> int:
        """Rows of what :meth:`basis_of` gives."""
        return self.shape[1]

    def basis_of(self, found: Subspace, rank: int, gradient: Tensor) -> Tensor:
        """What :meth:`adopt` takes for a rank <= that of ``found``, in the basis dtype."""
        return found.basis[:, :rank].to(self.dtype)

    def _resize(self, basis: Tensor | None) -> None:
        self.full_rank = basis is None
        self.rank = self.shape[1] if basis is None else basis.shape[1]
        self.num_probes = 0 if basis is None else self.probes_for(self.rank)

    def _install(self, basis: Tensor | None) -> None:
        self._resize(basis)
        self.columns.whole, self.columns.basis = None, None
        if basis is None or self.redraws:
            return
        if self.settings.residual == "full":
            self.columns.basis = basis.to(dtype=self.dtype, device=self.device, copy=True)
            return
        n = self.shape[1]
        columns = torch.zeros(n, self.rank + self.num_probes, dtype=self.dtype, device=self.device)
        columns[:, : self.rank].copy_(basis)
        self.columns.whole, self.columns.basis = columns, columns[:, : self.rank]

    # -- gradient -------------------------------------------------------------------------------

    def measure(self, gradient: Tensor, counted: slice) -> Tensor:
        """Squared norms of ``A`` and ``S``; of ``A`` and the rest of ``G`` with whole gradient rows."""
        own = gradient[counted].float()
        inside = self._inside(own)
        inside_square = inside.square().sum()
        return torch.stack((inside_square, self._rest_square(own, inside, inside_square)))

    def _inside(self, gradient: Tensor) -> Tensor:
        """``A`` of gradient rows."""
        if not self.takes_whole:
            return gradient[:, : self.rank]
        basis = None if self.full_rank else self.basis
        return gradient if basis is None else project(gradient, basis)

    def _rest_square(self, gradient: Tensor, inside: Tensor, inside_square: Tensor) -> Tensor:
        """Squared norm of ``S``, or of the rest of ``G``."""
        if not self.takes_whole:
            return gradient[:, self.rank :].square().sum()
        if inside is gradient:
            return torch.zeros_like(inside_square)
        return (gradient.square().sum() - inside_square).clamp_min(0)

    def square_norm(self, sums: Tensor) -> Tensor:
        if self.takes_whole:
            return sums[0] + sums[1]
        n, rank = self.shape[1], self.rank
        return estimated_square_norm(sums[0], sums[1], n, rank, self.num_probes)

    def observe(self, sums: Tensor, scale: Tensor | float = 1.0) -> Tensor:
        total = self.square_norm(sums)
        self.follow(sums[0], total, scale)
        return total

    # -- checkpoint -----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        state = {**super().state_dict(), "measured": self.measured, "draw": self.draw}
        state["basis_owner"] = self.columns.owner
        if self.columns.basis is not None:
            state["basis"] = self.columns.basis.clone()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As of :class:`MatrixRule`; afterwards no other matrix has these columns, whoever owned the basis."""
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
