"""A low-rank change of weights of one shape."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import Tensor

from hmt_deepspeed.kernels.launching import matrices_in
from hmt_deepspeed.kernels.low_rank_factors import ScaledRows, low_rank_product
from hmt_deepspeed.kernels.low_rank_update import low_rank_updates_
from hmt_deepspeed.kernels.noise import Key

__all__ = ["Experts", "LowRankChange"]


class Experts(NamedTuple):
    """What a change is of, in weights of E matrices a x b as they are stored.

    Attributes:
        shape: (a, b). first, number: of the matrices. row: the first of each's rows.
    """

    shape: tuple[int, int]
    first: int
    number: int
    row: int = 0

    def pieces(self, begin: int, end: int) -> Iterator[tuple[slice, slice]]:
        """Rows [begin, end) of all matrices one below the other, as experts and the rows of each: at most three."""
        height = self.shape[0]
        while begin < end:
            expert, row = divmod(begin, height)
            if row or end - begin < height:
                last = min(height, row + end - begin)
                yield slice(expert, expert + 1), slice(row, last)
                begin += last - row
            else:
                yield slice(expert, end // height), slice(0, height)
                begin = end // height * height


@dataclass
class LowRankChange:
    """``W_b <- (1 - lr wd) W_b - lr ((U_b o scale_b) P_b^T + beside_b)`` of B weights of one shape. Of weights of several
    matrices it has the entries of each ``experts.number`` times, projections in one tensor of a weight.

    Attributes:
        update: U, B x rows x w, or of the other factor's rows where ``transposed``: ``P_b U_b^T``.
        projections: P of each. rank, scale: B x 2 fp32, factor on the first r columns and on the others; where it is
            zero a weight stays as it is.
        beside: rows of whole gradients, or None; their transpose where ``transposed``.
        keys: of stochastic rounding, B x 2 int32, where there is any. host_key: that of a weight in host memory.
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
    experts: Experts | None = None

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

    def apply_to_rows(
        self, flats: Sequence[Tensor], first: int, copies: Sequence[Tensor] | None = None
    ) -> None:
        """On rows of the experts one below the other, as they are stored.

        Args:
            flats: of each weight whole rows from row ``first`` on, flat. copies: as of :func:`low_rank_updates_`.
        """
        assert self.experts is not None
        b = self.experts.shape[1]
        begin = 0
        for experts, rows in self.experts.pieces(first, first + flats[0].numel() // b):
            shape = experts.stop - experts.start, rows.stop - rows.start, b
            end = begin + shape[0] * shape[1] * b
            own, *copied = (
                None if tensors is None else [flat[begin:end].view(shape) for flat in tensors]
                for tensors in (flats, copies)
            )
            assert own is not None
            self.of_experts(experts, rows).apply(own, rows.start * b, *copied)
            begin = end

    def of_experts(self, experts: slice, rows: slice) -> LowRankChange:
        """Of some rows of some experts.

        Args:
            experts, rows: by their numbers in the weight, as they are stored.
        """
        assert self.experts is not None
        shape, first, number, row = self.experts
        own = slice(experts.start - first, experts.stop - first)
        part = slice(rows.start - row, rows.stop - row)
        if own == slice(0, number) and part.start == 0 and part.stop == self._stored_rows:
            return self
        at = [b * number + e for b in range(len(self.projections)) for e in range(number)[own]]

        def some(of_all: Tensor) -> Tensor:
            return of_all.unflatten(0, (-1, number))[:, own].flatten(0, 1).contiguous()

        update, projections, beside = some(self.update), [p[own] for p in self.projections], None
        if self.beside is not None:
            matrices, scale = matrices_in(self.beside.matrices), some(self.beside.scale)
            side = (slice(None), part) if self.transposed else (part,)
            scale = scale if self.transposed else scale[:, part].contiguous()
            beside = ScaledRows([matrices[place][side] for place in at], scale)
        if self.transposed:
            projections = [p[:, part] for p in projections]
        else:
            update = update[:, part]
        return replace(
            self,
            update=update,
            projections=projections,
            scale=some(self.scale),
            keys=None if self.keys is None else some(self.keys),
            beside=beside,
            experts=Experts(shape, experts.start, experts.stop - experts.start, rows.start),
        )

    @property
    def _stored_rows(self) -> int:
        return self.projections[0].shape[-2] if self.transposed else self.update.shape[1]

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
