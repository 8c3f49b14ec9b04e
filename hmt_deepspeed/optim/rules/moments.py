"""Adam's two moments of a projected gradient: stored in a state dtype, carried across a basis change."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from hmt_deepspeed.optim.bases.basis import transfer_second_moment
from hmt_deepspeed.optim.rules.state import KeptStates, StateTensor, restored_state

__all__ = ["COLUMN_MEANS", "LEAST_EVIDENCE", "Moments", "PreviousMoments", "Recalled"]

COLUMN_MEANS = "exp_avg_sq_col"  # Adafactor's name
LEAST_EVIDENCE = 1e-8
_CARRIED = 1 << 24  # elements of several matrices that are carried to another basis at once


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
    first_evidence: Tensor
    steps: int

    @classmethod
    def restored(
        cls,
        state: Mapping[str, Any],
        dtype: str,
        device: torch.device,
        several: tuple[int, ...] = (),
    ) -> PreviousMoments:
        """Restore from :meth:`state_dict`; 8- and 16-bit values come back exactly."""
        columns = COLUMN_MEANS in state
        first = None if columns else restored_state(state["exp_avg"], dtype, True, device, several)
        key, kind = (COLUMN_MEANS, "fp32") if columns else ("exp_avg_sq", dtype)
        second = restored_state(state[key], kind, False, device, several)
        own = (torch.as_tensor(state[key]) for key in ("evidence", "first_evidence"))
        evidence, early = (e.to(device=device, dtype=torch.float32, copy=True) for e in own)
        return cls(first, second, evidence, early, int(state["steps"]))

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
        own = [self.evidence, self.first_evidence]
        return [*own, *self.exp_avg_sq.tensors(), *first]

    def holding(self, tensors: Sequence[Tensor]) -> PreviousMoments:
        """The same with others in the place of :meth:`tensors`, in their order."""
        evidence, early, *stored = tensors
        place = len(self.exp_avg_sq.tensors())
        second = self.exp_avg_sq.holding(stored[:place])
        first = None if self.exp_avg is None else self.exp_avg.holding(stored[place:])
        return replace(
            self, exp_avg=first, exp_avg_sq=second, evidence=evidence, first_evidence=early
        )

    def part(self, some: slice) -> PreviousMoments:
        """Of some of several matrices: views."""
        return replace(
            self,
            exp_avg=None if self.exp_avg is None else self.exp_avg.part(some),
            exp_avg_sq=self.exp_avg_sq.part(some),
            evidence=self.evidence[some],
            first_evidence=self.first_evidence[some],
        )

    def second_in(
        self, overlap: Tensor, left_overlap: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """``(v^, w)``: the bias-corrected second moment in another basis, and its evidence there.

        A new direction has the evidence of the old ones it came from: rho w when all had weight w.

        Args:
            overlap: r_old x r_new, ``Q_old^T Q_new``; E of them where each expert has a basis of its own.
            left_overlap: of a two-sided core, ``P_old^T P_new``.
        """
        second = self.exp_avg_sq.read()
        second = second / _over_rows(self.evidence, second).clamp_min(LEAST_EVIDENCE)
        mean = torch.zeros_like(second)
        if self.exp_avg is not None:
            early = self.first_evidence.clamp_min(LEAST_EVIDENCE)
            mean = self.exp_avg.read() / early[..., None, None]
        moved = transfer_second_moment(mean, second, overlap, left_overlap)
        if overlap.dim() == 3:
            weight = torch.einsum("ei,eij->ej", self.evidence, overlap.square())
        else:
            weight = self.evidence @ overlap.square()
        if left_overlap is not None:
            weight = left_overlap.square().t() @ weight
        return moved, weight


def _carried(
    mean: Tensor,
    moments: PreviousMoments,
    overlap: Tensor,
    left_overlap: Tensor | None,
    recalled: Sequence[Recalled],
) -> tuple[Tensor, Tensor, Tensor]:
    """Evidence, first and second moment in a new basis, uncorrected; see :meth:`Moments.rotate`."""
    moved, weight = moments.second_in(overlap, left_overlap)
    mean = mean @ overlap
    if left_overlap is not None:
        mean = left_overlap.t() @ mean
    for older in recalled:
        second, evidence = older.moments.second_in(older.overlap)
        evidence *= older.decay
        moved = torch.where(_over_rows(evidence > weight, moved), second, moved)
        weight = torch.maximum(weight, evidence)
    weight = weight.clamp(LEAST_EVIDENCE, 1.0)
    return weight, mean, moved * _over_rows(weight, moved)


def _over_rows(values: Tensor, matrix: Tensor) -> Tensor:
    """What there is of each column, or of each element, for all rows."""
    return values.unsqueeze(-2) if values.dim() < matrix.dim() else values


class Recalled(NamedTuple):
    """Moments of a previous basis, for the basis that comes now.

    Attributes:
        overlap: r_old x r_new, ``Q_old^T Q_new``. decay: factor on their evidence, ``beta_2^(steps since)``.
    """

    moments: PreviousMoments
    overlap: Tensor
    decay: float

    def part(self, some: slice) -> Recalled:
        """Of some of several matrices."""
        overlap = self.overlap[some] if self.overlap.dim() == 3 else self.overlap
        return Recalled(self.moments.part(some), overlap, self.decay)


class Moments(KeptStates):
    """Running means of ``A`` and ``A o A`` with the weight of evidence in each.

    Adam's bias correction ``1 - beta^t`` is the weight of evidence in a running mean. It is carried
    explicitly, per direction for the second moment, because a basis change removes evidence.

    Args:
        shape: rows x r of a one-sided projection (rows held here), r x r of a two-sided core.
        dtype: storage, see :class:`StateTensor`. device: where everything lives.
        names, seed: key the stochastic rounding: of the matrix, or of each of several.
        two_sided: evidence per entry of the core instead of per column.
        several: (E,) of several matrices, which all tensors have as leading dimension; () of one.

    Attributes:
        exp_avg, exp_avg_sq: the stored means, uncorrected. evidence: of the second moment, (r,) or
        r x r fp32. first_evidence: of the first, 0-dim fp32. steps: steps begun, those that the device skipped included.
    """

    STATES: ClassVar[Mapping[str, str]] = {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
    EVIDENCE = ("evidence", "first_evidence")

    def __init__(
        self,
        shape: tuple[int, int],
        dtype: str,
        device: torch.device,
        names: Sequence[str],
        seed: int,
        two_sided: bool = False,
        several: tuple[int, ...] = (),
    ) -> None:
        super().__init__(device, names, seed, several)
        self.dtype, self.two_sided = dtype, two_sided
        self.first_evidence = torch.zeros(self.several, device=device)
        self._allocate(shape)

    def _allocate(self, shape: tuple[int, int]) -> None:
        self.exp_avg, self.exp_avg_sq = (
            StateTensor(shape, self.dtype, signed, self.device, self.several)
            for signed in (True, False)
        )
        columns = shape if self.two_sided else shape[1:]
        self.evidence = torch.zeros(*self.several, *columns, device=self.device)

    @property
    def nbytes(self) -> int:
        """Bytes of moments and evidence."""
        stored = self.exp_avg, self.exp_avg_sq, self.evidence, self.first_evidence
        return sum(state.nbytes for state in stored)

    def column_energies(self, counted: slice) -> Tensor:
        """Bias-corrected second moment of each direction, summed over the ``counted`` rows of those held, of all
        matrices; over all of a core: (r,) fp32."""
        rows = slice(None) if self.two_sided else counted
        second = self.exp_avg_sq.read()[..., rows, :]
        weight = _over_rows(self.evidence, second).clamp_min(LEAST_EVIDENCE)
        return second.div(weight).flatten(0, -2).sum(0)

    # -- change of basis ------------------------------------------------------------------------

    def as_previous(self) -> PreviousMoments:
        """A copy, which stays as it is, of what another basis starts from."""
        now = self._now()
        return now.holding([tensor.clone() for tensor in now.tensors()])

    def _now(self) -> PreviousMoments:
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
        old, first, keys = self._now(), self.exp_avg, [self.rounding_key(which) for which in (0, 1)]
        rows = first.shape[0] if left_overlap is None else left_overlap.shape[1]
        self._allocate((rows, overlap.shape[-1]))
        if not self.several:
            given = first.read(), old, overlap, left_overlap, recalled
            self.evidence, *values = _carried(*given)
            for state, value, key in zip(
                (self.exp_avg, self.exp_avg_sq), values, keys, strict=True
            ):
                state.write(value, key)
            return
        for some in self._parts(max(first.shape.numel(), self.exp_avg.shape.numel())):
            own = overlap[some] if overlap.dim() == 3 else overlap
            earlier = [recall.part(some) for recall in recalled]
            given = first.part(some).read(), old.part(some), own, None, earlier
            self.evidence[some], *values = _carried(*given)
            for state, value, key in zip(
                (self.exp_avg, self.exp_avg_sq), values, keys, strict=True
            ):
                assert isinstance(key, Tensor)
                state.part(some).write(value, key[some])

    def _parts(self, elements: int) -> Iterator[slice]:
        """Some of several matrices of so many elements at a time, or one."""
        each = max(1, _CARRIED // elements)
        for begin in range(0, len(self.names), each):
            yield slice(begin, begin + each)

    # -- checkpoint -----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Plain fp32 tensors and numbers."""
        return self._now().state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore values of :meth:`state_dict`; values that were 8- or 16-bit come back exactly."""
        found = PreviousMoments.restored(state, self.dtype, self.device, self.several)
        if found.exp_avg is not None:
            self.exp_avg = found.exp_avg
        self.exp_avg_sq = found.exp_avg_sq
        self.evidence, self.first_evidence, self.steps = (
            found.evidence,
            found.first_evidence,
            found.steps,
        )
