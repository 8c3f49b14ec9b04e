"""Low-rank AdamW whose second moment is kept as its row and column means (Adafactor, 1804.04235, section 3).

``V`` (m x r) is the running mean of ``A o A``. Only its row means ``R``, its column means ``C`` and its total mean
are stored, in fp32, and ``v_ij = (R_i / mean) C_j`` replaces it: m + r numbers instead of m r. A column's mean
holds the energy that its direction of the basis captures. With ``exp_avg`` in 8 bits both moments
together take an eighth of fp32's bytes at the same rank.

``C`` travels to a new basis as a second moment of one row does; ``R / mean`` says how a row compares with the
others and stays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from hmt_deepspeed.kernels.factored_moment_update import factored_moment_update_
from hmt_deepspeed.optim.rules.low_rank import LowRankMatrix, LowRankStack
from hmt_deepspeed.optim.rules.moments import (
    COLUMN_MEANS,
    LEAST_EVIDENCE,
    Moments,
    PreviousMoments,
)
from hmt_deepspeed.optim.rules.side_by_side import joined
from hmt_deepspeed.optim.rules.stack import Gradients, Stack
from hmt_deepspeed.optim.rules.state import StateTensor, restored_state

__all__ = ["FactoredMatrix", "FactoredMoments", "FactoredStack"]

ROW_MEANS, MEAN = "exp_avg_sq_row", "exp_avg_sq_mean"
_TINY = torch.finfo(torch.float32).tiny


class FactoredMoments(Moments):
    """:class:`Moments` with a factored second one.

    Attributes:
        exp_avg_sq: the column means over all rows, 1 x r. row_means: of the rows held here, rows x 1.
        mean: of everything, 0-dim. All are fp32 running means, uncorrected.
    """

    STATES: ClassVar[Mapping[str, str]] = {
        "exp_avg": "exp_avg",
        ROW_MEANS: "row_means",
        COLUMN_MEANS: "exp_avg_sq",
        MEAN: "mean",
    }

    def __init__(
        self,
        shape: tuple[int, int],
        dtype: str,
        device: torch.device,
        names: Sequence[str],
        seed: int,
        several: tuple[int, ...] = (),
    ) -> None:
        super().__init__(shape, dtype, device, names, seed, several=several)
        self.row_means, self.mean = self._means(shape[0], 1), self._means()

    def _allocate(self, shape: tuple[int, int]) -> None:
        super()._allocate(shape)
        self.exp_avg_sq = self._means(1, shape[1])

    def _means(self, *shape: int) -> StateTensor:
        return StateTensor(shape, "fp32", False, self.device, self.several)

    @property
    def nbytes(self) -> int:
        return super().nbytes + self.row_means.nbytes + self.mean.nbytes

    def column_energies(self, counted: slice) -> Tensor:
        held = len(range(*counted.indices(self.exp_avg.shape[0])))
        weight = self.evidence.clamp_min(LEAST_EVIDENCE)
        return (self.exp_avg_sq.data.squeeze(-2) / weight).view(-1, weight.shape[-1]).sum(0) * held

    # -- change of basis ------------------------------------------------------------------------

    def _now(self) -> PreviousMoments:
        return PreviousMoments(
            None, self.exp_avg_sq, self.evidence, self.first_evidence, self.steps
        )

    # -- checkpoint -----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        means = {key: state.read() for key, state in self.states().items()}
        return {**super().state_dict(), **means}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.exp_avg = restored_state(state["exp_avg"], self.dtype, True, self.device, self.several)
        self.row_means, self.mean = (
            restored_state(state[key], "fp32", False, self.device, self.several)
            for key in (ROW_MEANS, MEAN)
        )


class FactoredStack(LowRankStack):
    """Steps of matrices alike under :class:`FactoredMatrix`.

    The column means are over all rows, so the sums of :meth:`measure` hold the columns' squares too, and their
    holders see one second moment.
    """

    def measure(
        self, parts: Sequence[Stack], gradients: Sequence[Gradients], counted: slice
    ) -> Tensor:
        """Squared norms of ``A`` and of the rest, then of each column of ``A``."""
        if self.reads_whole_rows:
            found = [
                self._images(g, part, counted) for part, g in zip(parts, gradients, strict=True)
            ]
            images, outside = [one for one, _ in found], joined([rest for _, rest in found])
        else:
            _, outside = self.seen(parts, gradients, counted)
            given = [gradient for gradient in gradients if isinstance(gradient, Tensor)]
            images = [one[:, counted, : self.rank] for one in given]
        norms = [torch.linalg.vector_norm(one, dim=1, dtype=torch.float32) for one in images]
        columns = joined(norms).square_()
        return torch.cat((torch.stack((columns.sum(dim=1), outside), dim=1), columns), dim=1)

    def observe(
        self, sums: Tensor, scale: Tensor | float = 1.0, taken: Tensor | None = None
    ) -> None:
        columns = self.named(self.of_held(sums), "gradient")["columns"]
        self._column_squares = columns / self.shape[0]
        super().observe(sums, scale, taken)

    def once(self, step: Tensor) -> dict[str, Tensor]:
        """As of every low-rank rule; the second moment's columns, and their roots for the parts."""
        shared, each = super().once(step), self.factor.unsqueeze(1)
        squares = torch.where(each != 0, self._column_squares * each.square(), 0.0)
        share = shared["taken"].unsqueeze(1) * (1 - self.betas[1])
        columns, total = self[f"{COLUMN_MEANS}.data"].squeeze(1), self[f"{MEAN}.data"]
        columns.lerp_(squares, share)
        total.lerp_(squares.mean(dim=1), share.squeeze(1))
        roots = (columns / self["evidence"]).div_(total.clamp_min(_TINY).unsqueeze(1)).sqrt_()
        return {**shared, "roots": roots}

    def direct(self, gradient: Tensor, factor: Tensor) -> Tensor:
        keys = partial(self.shared, "exp_avg")
        return factored_moment_update_(
            gradient,
            self.state("exp_avg").stored(gradient.shape[1], keys),
            self[f"{ROW_MEANS}.data"].squeeze(2),
            self.shared("roots"),
            self["first_evidence"],
            *self.betas,
            self.eps,
            factor=factor,
            residual_scale=self.shared("residual_scale"),
        )


class FactoredMatrix(LowRankMatrix):
    """A one-sided projection with :class:`FactoredMoments`."""

    STACK = FactoredStack
    moments: FactoredMoments

    def _new_states(self) -> FactoredMoments:
        shape = (self.num_rows, self.rank)
        names, seed = self.held_names, self.settings.seed
        return FactoredMoments(shape, self.state_dtype, self.device, names, seed, self.several)
