"""Draws the probe columns of a step."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import NamedTuple

from torch import Tensor

from hmt_deepspeed.kernels.noise import Stream, base_keys, step_keys
from hmt_deepspeed.optim.bases.basis import HeldRows, probe_columns
from hmt_deepspeed.optim.rules.columns import Columns
from hmt_deepspeed.optim.rules.matrix import MatrixRule
from hmt_deepspeed.optim.rules.projected import ProjectedMatrix
from hmt_deepspeed.optim.rules.side_by_side import Stacked

__all__ = ["ProbeDraws"]


class _Draw(NamedTuple):
    """Matrices whose columns are of one kind: the first, the columns, these side by side, :func:`base_keys`, and which
    rows the columns have, None for all."""

    first: ProjectedMatrix
    columns: list[Columns]
    stacked: Stacked
    keys: Tensor
    held: HeldRows | None


class ProbeDraws:
    """Draws the probe columns of many matrices at once; those of equal shape lie side by side in memory.

    Args:
        held: which rows of a basis of n those are that matrices have as ``local``; None where they have none.
    """

    def __init__(self, held: Callable[[int], HeldRows] | None = None) -> None:
        self._held = held
        self._of: list[tuple[Hashable, Columns]] = []
        self._known: dict[Hashable, _Draw] = {}

    def draw(self, matrices: Iterable[MatrixRule]) -> None:
        """Draw those of the step that they are prepared for in place, keyed by the name of the basis's owner.

        Args:
            matrices: of one step; those that are no owners, are redrawn, have no probes or are not here are passed over.
        """
        projected = [matrix for matrix in matrices if isinstance(matrix, ProjectedMatrix)]
        of = [(matrix.alike, matrix.columns) for matrix in projected]
        if of != self._of:
            self._of = of
            self._form(projected)
        for first, _, stacked, base, held in self._known.values():
            stacked.gather()
            whole, rank, keys = (
                stacked.whole,
                first.rank,
                step_keys(base, first.window, Stream.PROBES),
            )
            if first.own_bases:
                whole = whole.flatten(0, 1)
            if held is not None:
                whole = whole[:, : max(0, held.n - held.begin)]  # the last rows may be padding
            whole[..., rank:] = probe_columns(whole[..., :rank], first.num_probes, keys, held)

    def forget(self) -> None:
        """Hold no memory any more: the columns have moved elsewhere."""
        self._known, self._of = {}, []

    def _form(self, matrices: Iterable[ProjectedMatrix]) -> None:
        """Put the matrices whose columns are of one kind together; those that were so before keep their memory."""
        together: dict[Hashable, list[ProjectedMatrix]] = {}
        for matrix in matrices:
            own, is_owner = matrix.columns, matrix.columns.owner == matrix.name
            there = own.whole if own.local is None else own.local
            if matrix.num_probes and is_owner and there is not None and len(there):
                kind: tuple[Hashable, ...] = (
                    own.local is None,
                    matrix.shape[1],
                    there.shape,
                    there.dtype,
                )
                kind += (there.device, matrix.rank, matrix.own_bases, matrix.settings.seed)
                together.setdefault(kind, []).append(matrix)
        known, self._known = self._known, {}
        for key, owners in together.items():
            found, columns = known.pop(key, None), [matrix.columns for matrix in owners]
            if found is None or found.columns != columns:
                names = [name for matrix in owners for name in matrix.basis_names]
                keys = base_keys(owners[0].settings.seed, names, owners[0].device)
                place, held = "whole", None
                if columns[0].local is not None:
                    assert self._held is not None
                    place, held = "local", self._held(owners[0].shape[1])
                found = _Draw(owners[0], columns, Stacked(columns, place), keys, held)
            self._known[key] = found
