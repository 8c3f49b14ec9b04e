"""Adam's two moments of a projected gradient: stored in a state dtype, carried across a basis change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hmt_deepspeed.kernels.moment_update import moment_direction_
from hmt_deepspeed.optim.bases.basis import keyed_seed, transfer_second_moment
from hmt_deepspeed.optim.rules.state import KeptStates, StateTensor, restored_state

__all__ = ["COLUMN_MEANS", "Moments", "PreviousMoments", "Recalled"]

COLUMN_MEANS = "exp_avg_sq_col"  # Adafactor's name
_LEAST_EVIDENCE = 1e-8


@dataclass(frozen=True)
class PreviousMoments:
    """Moments of the previous basis, as they were when it was replaced; nothing writes to them any more.

    Attributes:
        exp_avg, exp_avg_sq, evidence, first_evidence, steps: as of :class:`Moments`. ``exp_avg`` is None
            where the second moment is one of whole columns (1 x r): no row's mean tells it anything.
    """

    exp_avg: StateTensor | None
    exp_avg_sq: StateTensor
    evidence: Tensor
    first_evidence: float
    steps: int

    @classmethod
    def restored(
        cls, state: Mapping[str, Any], dtype: str, device: torch.device
    ) -> PreviousMoments:
        """Restore from :meth:`state_dict`; 8- and 16-bit values come back exactly."""
        columns = COLUMN_MEANS in state
        first = None if columns else restored_state(state["exp_avg"], dtype, True, device)
        key, kind = (COLUMN_MEANS, "fp32") if columns else ("exp_avg_sq", dtype)
        second = restored_state(state[key], kind, False, device)
        evidence = torch.as_tensor(state["evidence"])
        evidence = evidence.to(device=device, dtype=torch.float32, copy=True)
        return cls(first, second, evidence, float(state["first_evidence"]), int(state["steps"]))

    def state_dict(self) -> dict[str, Any]:
        """Plain fp32 tensors and numbers."""
        first = {} if self.exp_avg is None else {"exp_avg": self.exp_avg.read()}
        return {
            **first,
            "exp_avg_sq" if first else COLUMN_MEANS: self.exp_avg_sq.read(),
            "evidence": self.evidence,
            "steps": self.steps,
            "first_evidence": self.first_evidence,
        }

    def tensors(self) -> list[Tensor]:
        """All that it consists of, as stored."""
        first = [] if self.exp_avg is None else self.exp_avg.tensors()
        return [self.evidence, *self.exp_avg_sq.tensors(), *first]

    def holding(self, tensors: Sequence[Tensor]) -> PreviousMoments:
        """The same with others in the place of :meth:`tensors`, in their order."""
        evidence, *stored = tensors
        place = len(self.exp_avg_sq.tensors())
        second = self.exp_avg_sq.holding(stored[:place])
        first = None if self.exp_avg is None else self.exp_avg.holding(stored[place:])
        return replace(self, exp_avg=first, exp_avg_sq=second, evidence=evidence)

    def second_in(
        self, overlap: Tensor, left_overlap: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """``(v^, w)``: the bias-corrected second moment in another basis, and its evidence there.

        A new direction has the evidence of the old ones it came from: rho w when all had weight w.

        Args:
            overlap: r_old x r_new, ``Q_old^T Q_new``. left_overlap: of a two-sided core, ``P_old^T P_new``.
        """
        second = self.exp_avg_sq.read() / self.evidence
        mean = torch.zeros_like(second)
        if self.exp_avg is not None:
            mean = self.exp_avg.read() / self.first_evidence
        moved = transfer_second_moment(mean, second, overlap, left_overlap)
        weight = self.evidence @ overlap.square()
        if left_overlap is not None:
            weight = left_overlap.square().t() @ weight
        return moved, weight


class Recalled(NamedTuple):
    """Moments of a previous basis, for the basis that comes now.

    Attributes:
        overlap: r_old x r_new, ``Q_old^T Q_new``. decay: factor on their evidence, ``beta_2^(steps since)``.
    """

    moments: PreviousMoments
    overlap: Tensor
    decay: float


class Moments(KeptStates):
    """Running means of ``A`` and ``A o A`` with the weight of evidence in each.

    Adam's bias correction ``1 - beta^t`` is the weight of evidence in a running mean. It is carried
    explicitly, per direction for the second moment, because a basis change removes evidence.

    Args:
        shape: rows x r of a one-sided projection (rows held here), r x r of a two-sided core.
        dtype: storage, see :class:`StateTensor`. device: where everything lives.
        name, seed: key the stochastic rounding.
        two_sided: evidence per entry of the core instead of per column.

    Attributes:
        exp_avg, exp_avg_sq: the stored means, uncorrected. evidence: of the second moment, (r,) or
        r x r fp32. first_evidence: of the first. steps: Adam steps taken.
    """

    def __init__(
        self,
        shape: tuple[int, int],
        dtype: str,
        device: torch.device,
        name: str,
        seed: int,
        two_sided: bool = False,
    ) -> None:
        self.dtype, self.device, self.name, self.seed = dtype, device, name, seed
        self.two_sided = two_sided
        self.steps = 0
        self.first_evidence = 0.0
        self._allocate(shape)

    def _allocate(self, shape: tuple[int, int]) -> None:
        self.exp_avg = StateTensor(shape, self.dtype, True, self.device)
        self.exp_avg_sq = StateTensor(shape, self.dtype, False, self.device)
        self.evidence = torch.zeros(shape if self.two_sided else shape[1:], device=self.device)

    def states(self) -> dict[str, StateTensor]:
        """The stored means by Adam's names."""
        return {"exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}

    @property
    def nbytes(self) -> int:
        """Bytes of moments and evidence."""
        return self.exp_avg.nbytes + self.exp_avg_sq.nbytes + self.evidence.nbytes

    def advance(self, projected: Tensor, *, betas: tuple[float, float], eps: float) -> Tensor:
        """One Adam step on ``projected`` (fp32, of the moments' shape); the direction ``U``."""
        self._count(betas)
        mean, second = self.exp_avg.read(), self.exp_avg_sq.read()
        shape = (1, -1) if self.two_sided else projected.shape  # evidence is per column of a row
        direction = moment_direction_(
            projected.view(shape),
            mean.view(shape),
            second.view(shape),
            self.evidence.view(-1),
            self.first_evidence,
            *betas,
            eps,
        )
        self._write(mean, second)
        return direction.view_as(projected)

    def _count(self, betas: tuple[float, float]) -> None:
        self.steps += 1
        self.first_evidence += (1 - betas[0]) * (1 - self.first_evidence)
        self.evidence.lerp_(torch.ones_like(self.evidence), 1 - betas[1])

    def column_energies(self, counted: slice) -> Tensor:
        """Bias-corrected second moment of each direction, summed over the ``counted`` rows of those held; over all
        of a core: (r,) fp32."""
        rows = slice(None) if self.two_sided else counted
        return self.exp_avg_sq.read()[rows].div(self.evidence).sum(0)

    # -- change of basis ------------------------------------------------------------------------

    def as_previous(self) -> PreviousMoments:
        """Moments that another basis starts from: a change of basis makes new tensors, so these stay as they are."""
        states = self.exp_avg, self.exp_avg_sq
        return PreviousMoments(*states, self.evidence, self.first_evidence, self.steps)

    def rotate(
        self,
        overlap: Tensor,
        left_overlap: Tensor | None = None,
        recalled: Sequence[Recalled] = (),
    ) -> None:
        """Carry the moments to a new basis: ``R = Q_old^T Q_new`` and, two-sided, ``R_P``.

        A new direction of which a ``recalled`` basis had more evidence than the one in force, though it is old,
        takes its second moment from there. The first has forgotten what it knew since.
        """
        moved, weight = self.as_previous().second_in(overlap, left_overlap)
        mean = self.exp_avg.read() @ overlap
        if left_overlap is not None:
            mean = left_overlap.t() @ mean
        for older in recalled:
            second, evidence = older.moments.second_in(older.overlap)
            evidence *= older.decay
            moved = torch.where(evidence > weight, second, moved)
            weight = torch.maximum(weight, evidence)
        self._replace(mean, moved, weight)

    def _replace(self, mean: Tensor, corrected_second: Tensor, weight: Tensor) -> None:
        weight = weight.clamp(_LEAST_EVIDENCE, 1.0)
        self._allocate((mean.shape[0], mean.shape[1]))
        self.evidence = weight
        self._write(mean, corrected_second * weight)

    def _write(self, mean: Tensor, second: Tensor) -> None:
        for state, value, which in ((self.exp_avg, mean, 0), (self.exp_avg_sq, second, 1)):
            state.write(value, keyed_seed(self.seed, self.name, "state", which, self.steps))

    # -- checkpoint -----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Plain fp32 tensors and numbers."""
        return self.as_previous().state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore values of :meth:`state_dict`; values that were 8- or 16-bit come back exactly."""
        found = PreviousMoments.restored(state, self.dtype, self.device)
        if found.exp_avg is not None:
            self.exp_avg = found.exp_avg
        self.exp_avg_sq = found.exp_avg_sq
        self.evidence, self.first_evidence, self.steps = (
            found.evidence,
            found.first_evidence,
            found.steps,
        )
