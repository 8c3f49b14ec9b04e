"""A low-rank change of weights of one shape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from hmt_deepspeed.kernels.low_rank_factors import ScaledRows, low_rank_product
from hmt_deepspeed.kernels.low_rank_update import low_rank_updates_
from hmt_deepspeed.kernels.noise import Key

__all__ = ["LowRankChange"]


@dataclass
class LowRankChange:
    """``W_b <- (1 - lr wd) W_b - lr ((U_b o scale_b) P_b^T + beside_b)`` of B weights of one shape.

    Attributes:
        update: U, B x rows x w, or of the other factor's rows where ``transposed``: ``P_b U_b^T``.
        projections: P of each. rank, scale: B x 2 fp32, factor on the first r columns and on the others; where it is
            zero a weight stays as it is.
        beside: rows of whole gradients, or None; their transpose where ``transposed``.
        keys: of stochastic rounding, B x 2 int32, where there is any. host_key: that of a weight alone.
    """

    update: Tensor
    projections: Sequence[Tensor]
    rank: int
    scale: Tensor
    keys: Tensor | None
    host_key: Key
    transposed: bool
    lr: float | Tensor
    weight_decay: float
    beside: ScaledRows | None = None

    def apply(
        self, weights: Sequence[Tensor], offset: int = 0, copies: Sequence[Tensor] | None = None
    ) -> None:
        """On matrices of rows, see :func:`low_rank_updates_`."""
        low_rank_updates_(
            weights,
            self.update,
            self.projections,
            self.lr,
            self.weight_decay,
            rank=self.rank,
            column_scale=self.scale,
            keys=self.keys,
            offset=offset,
            copies=copies,
            transposed=self.transposed,
            beside=self.beside,
        )

    def factors(self) -> tuple[Tensor, Tensor]:
        """Left and right factor of a weight :attr:`~hmt_deepspeed.zero.weights.weight.Weight.alone`."""
        factors = self.projections[0], self.update[0]
        return factors if self.transposed else factors[::-1]

    def whole(self) -> Tensor:
        """Of a weight alone, fp32 or the factors' dtype: all that is subtracted, without the learning rate."""
        found = low_rank_product(*self.factors())
        if self.beside is None:
            return found
        rows = self.beside.whole(0)
        return rows.t() + found if self.transposed else rows + found
