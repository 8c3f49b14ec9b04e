"""Draws the probe columns of a step."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

from torch import Tensor

from hmt_deepspeed.kernels.noise import Stream, base_keys, step_keys
from hmt_deepspeed.optim.bases.basis import probe_columns
from hmt_deepspeed.optim.rules.columns import Columns
from hmt_deepspeed.optim.rules.matrix import MatrixRule
from hmt_deepspeed.optim.rules.projected import ProjectedMatrix
from hmt_deepspeed.optim.rules.stack import Stacked

__all__ = ["ProbeDraws"]


class ProbeDraws:
    """Draws the probe columns of many matrices at once; those of equal shape lie side by side in memory."""

    def __init__(self) -> None:
        self._known: dict[Hashable, tuple[list[Columns], Stacked, Tensor]] = {}

    def draw(self, matrices: Iterable[MatrixRule], step: Tensor | int) -> None:
        """Draw those of a step in place, keyed by the name of the basis's owner.

        Args:
            matrices: those that are no owners, are redrawn, have no probes or are not here are passed over.
        """
        alike: dict[Hashable, list[ProjectedMatrix]] = {}
        for matrix in matrices:
            if not isinstance(matrix, ProjectedMatrix) or not matrix.num_probes:
                continue
            whole = matrix.columns.whole
            if matrix.columns.owner == matrix.name and whole is not None and len(whole):
                seed, kind = matrix.settings.seed, (whole.dtype, whole.device)
                alike.setdefault((whole.shape, matrix.rank, kind, seed), []).append(matrix)
        known, self._known = self._known, {}
        for key, owners in alike.items():
            columns, rank = [matrix.columns for matrix in owners], owners[0].rank
            places = [(one, "whole") for one in columns]
            found = known.pop(key, None)
            if found is None or found[0] != columns:
                names = [matrix.name for matrix in owners]
                keys = base_keys(owners[0].settings.seed, names, owners[0].device)
                found = columns, Stacked(places), keys
            else:
                found[1].gather(places)
            self._known[key] = found
            whole = found[1].whole
            drawn = step_keys(found[2], step, Stream.PROBES)
            whole[..., rank:] = probe_columns(whole[..., :rank], owners[0].num_probes, drawn)
