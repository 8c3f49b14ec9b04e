"""Low-rank AdamW whose second moment is kept as its row and column means (Adafactor, 1804.04235, section 3).

``V`` (m x r) is the running mean of ``A o A``. Only its row means ``R``, its column means ``C`` and its total mean
are stored, in fp32, and ``v_ij = (R_i / mean) C_j`` replaces it: m + r numbers instead of m r. A column's mean
holds the energy that its direction of the basis captures. With ``exp_avg`` in 8 bits both moments
together take an eighth of fp32's bytes at the same rank.

``C`` travels to a new basis as a second moment of one row does; ``R / mean`` says how a row compares with the
others and stays.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hmt_deepspeed.kernels.factored_moment_update import factored_direction_
from hmt_deepspeed.optim.rules.low_rank import LowRankMatrix
from hmt_deepspeed.optim.rules.moments import COLUMN_MEANS, Moments, PreviousMoments
from hmt_deepspeed.optim.rules.state import StateTensor, restored_state

__all__ = ["FactoredMatrix", "FactoredMoments"]

ROW_MEANS, MEAN = "exp_avg_sq_row", "exp_avg_sq_mean"
_TINY = torch.finfo(torch.float32).tiny


class FactoredMoments(Moments):
    """:class:`Moments` with a factored second one.

    Attributes:
        exp_avg_sq: the column means over all rows, 1 x r. row_means: of the rows held here, rows x 1.
        mean: of everything, 0-dim. All are fp32 running means, uncorrected.
        column_squares: ``mean_i A_ij^2`` over all rows of the coming step, (r,) fp32; the caller's to give.
    """

    column_squares: Tensor

    def __init__(
        self, shape: tuple[int, int], dtype: str, device: torch.device, name: str, seed: int
    ) -> None:
        super().__init__(shape, dtype, device, name, seed)
        self.row_means, self.mean = self._means(shape[0], 1), self._means()

    def _allocate(self, shape: tuple[int, int]) -> None:
        super()._allocate(shape)
        self.exp_avg_sq = self._means(1, shape[1])

    def _means(self, *shape: int) -> StateTensor:
        return StateTensor(shape, "fp32", False, self.device)

    def states(self) -> dict[str, StateTensor]:
        first, columns = self.exp_avg, self.exp_avg_sq
        return {
            "exp_avg": first,
            ROW_MEANS: self.row_means,
            COLUMN_MEANS: columns,
            MEAN: self.mean,
        }

    @property
    def nbytes(self) -> int:
        return super().nbytes + self.row_means.nbytes + self.mean.nbytes

    def advance(self, projected: Tensor, *, betas: tuple[float, float], eps: float) -> Tensor:
        self._count(betas)
        first, columns, total = self.exp_avg.read(), self.exp_avg_sq.data, self.mean.data
        columns.lerp_(self.column_squares.unsqueeze(0), 1 - betas[1])
        total.lerp_(self.column_squares.mean(), 1 - betas[1])
        roots = (columns / self.evidence).div_(total.clamp_min(_TINY)).sqrt_()
        direction = factored_direction_(
            projected,
            first,
            self.row_means.data.view(-1),
            roots.view(-1),
            self.first_evidence,
            *betas,
            eps,
        )
        self._write(first, columns)
        return direction

    def column_energies(self, counted: slice) -> Tensor:
        held = len(range(*counted.indices(self.exp_avg.shape[0])))
        return (self.exp_avg_sq.data / self.evidence).squeeze(0) * held

    # -- change of basis ------------------------------------------------------------------------

    def as_previous(self) -> PreviousMoments:
        return PreviousMoments(
            None, self.exp_avg_sq, self.evidence, self.first_evidence, self.steps
        )

    # -- checkpoint -----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        means = {key: state.read() for key, state in self.states().items()}
        return {**super().state_dict(), **means}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.exp_avg = restored_state(state["exp_avg"], self.dtype, True, self.device)
        self.row_means, self.mean = (
            restored_state(state[key], "fp32", False, self.device) for key in (ROW_MEANS, MEAN)
        )


class FactoredMatrix(LowRankMatrix):
    """A one-sided projection with :class:`FactoredMoments`.

    The column means are over all rows, so the sums of :meth:`measure` hold the columns' squares too, and their
    holders see one second moment.
    """

    moments: FactoredMoments

    def _new_states(self) -> FactoredMoments:
        shape = (self.num_rows, self.rank)
        return FactoredMoments(shape, self.state_dtype, self.device, self.name, self.settings.seed)

    def measure(self, gradient: Tensor, counted: slice) -> Tensor:
        """Squared norms of ``A`` and of the rest, then of each column of ``A``."""
        own = gradient[counted].float()
        inside = self._inside(own)
        columns = inside.square().sum(dim=0)
        inside_square = columns.sum()
        rest = self._rest_square(own, inside, inside_square)
        return torch.cat((torch.stack((inside_square, rest)), columns))

    def observe(self, sums: Tensor, scale: Tensor | float = 1.0) -> Tensor:
        self._column_squares = self.named(sums, early=True)["columns"] / self.shape[0]
        return super().observe(sums, scale)

    def advance(
        self,
        gradient: Tensor,
        factor: Tensor | float,
        *,
        betas: tuple[float, float],
        eps: float,
        counted: slice = slice(None),
    ) -> tuple[Tensor, Tensor]:
        self.moments.column_squares = self._column_squares * factor**2
        return super().advance(gradient, factor, betas=betas, eps=eps, counted=counted)
