"""Wider bases that narrower ones have replaced: range finders start from them once the rank rises again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor

from hmt_deepspeed.memory.basis_cache import BasisCache
from hmt_deepspeed.optim.rules.projected import ProjectedMatrix
from hmt_deepspeed.zero.parameters.param_state import ParamState

__all__ = ["OldBases"]


class OldBases:
    """Those of a cache.

    Args:
        cache: in host memory, or None. most: previous bases of each matrix to remember; none are kept where it is 0.
    """

    def __init__(self, cache: BasisCache | None, most: int) -> None:
        self._cache, self._most = cache, most

    def _keeps(self, matrix: ProjectedMatrix) -> bool:
        """Whether a basis that a narrower one replaces is kept: a full SVD has no use for it."""
        can_widen = matrix.settings.range_finder != "svd" and not matrix.own_bases
        return self._most > 0 and can_widen

    def remember(self, param_state: ParamState, rank: int) -> None:
        """Call before a new basis replaces the matrix's: keeps the present one if it is wider, and forgets an older
        one that is no wider than the new.

        Args:
            param_state: of the matrix. rank: of the new basis.
        """
        matrix = param_state.matrix
        assert isinstance(matrix, ProjectedMatrix)
        if self._cache is None or not self._keeps(matrix):
            return
        name = matrix.columns.owner
        kept = self._cache.old_width(name)
        if matrix.basis is not None and matrix.measured and max(matrix.rank, kept) > rank:
            if matrix.rank >= kept:
                self._cache.remember(name, matrix.basis)
        else:
            self._cache.forget(name)

    def recall(self, param_state: ParamState) -> Tensor | None:
        """The matrix's old basis, n x r with a larger r than the present one, or None."""
        matrix = param_state.matrix
        assert isinstance(matrix, ProjectedMatrix)
        if self._cache is None or not self._keeps(matrix):
            return None
        return self._cache.recall(matrix.columns.owner)

    def state(self) -> dict[str, Tensor]:
        """For a checkpoint: n x r on the host, by name of the matrix."""
        if self._cache is None:
            return {}
        return {name: self._cache.old(name).cpu() for name in self._cache.old_names()}

    def load(self, param_states: Iterable[ParamState], saved: Mapping[str, Tensor]) -> None:
        """Restore what :meth:`state` gave, for the matrices whose bases this rank finds.

        Args:
            param_states: those matrices. saved: n x r on the host, by name of the matrix.
        """
        if self._cache is None:
            return
        matrices = [p.matrix for p in param_states if isinstance(p.matrix, ProjectedMatrix)]
        for matrix in filter(self._keeps, matrices):
            name = matrix.columns.owner
            self._cache.forget(name)
            if name in saved:
                self._cache.remember(name, saved[name].to(matrix.device))
