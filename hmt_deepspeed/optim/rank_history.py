"""What past refreshes say about the next: rank history, priors by layer type, prediction, staleness.

HMT paper, dynamic rank: "rank prediction from the gradient norm", "rank prior by layer type", and the rank
history that the basis cache keeps. Everything here is plain numbers, for checkpoints and for any rank of
the process group: equal inputs give equal ranks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import log, nan
from statistics import median
from typing import Any

from torch import Tensor

from hmt_deepspeed.optim.rank import HYSTERESIS

__all__ = [
    "RankHistory",
    "RankRecord",
    "StalenessTrigger",
    "layer_type",
    "predict_rank",
    "prior_rank",
]

# A number that is a whole part of a dotted name: the index of a layer, an expert, a stage.
_INDEX = re.compile(r"(?<![^.])\d+(?![^.])")
# Share of the energy lost since the last refresh that a new basis of the same rank is taken to win back.
REGAINED = 0.5
# Growth of the gradient norm, as a logarithm, from which a falling energy asks for a larger rank.
GROWING = log(1.25)


@dataclass(frozen=True)
class RankRecord:
    """One refresh: its step, the rank chosen, and E at the candidates that were sketched, from the first."""

    step: int
    rank: int
    captured: tuple[float, ...]


class RankHistory:
    """The latest refreshes of one matrix, oldest first, at most ``limit``."""

    def __init__(self, limit: int = 16) -> None:
        self.limit = limit
        self.records: list[RankRecord] = []

    @property
    def latest(self) -> RankRecord | None:
        return self.records[-1] if self.records else None

    def add(self, step: int, rank: int, captured: Sequence[float]) -> None:
        """Note a refresh; ``captured[i]`` belongs to the i-th candidate. The oldest record may go."""
        self.records.append(RankRecord(step, rank, tuple(captured)))
        del self.records[: -self.limit]

    def to_list(self) -> list[list[Any]]:
        """``[[step, rank, [E, ...]], ...]``: plain numbers for a checkpoint."""
        return [[record.step, record.rank, list(record.captured)] for record in self.records]

    @classmethod
    def from_list(cls, saved: Iterable[Sequence[Any]], limit: int = 16) -> RankHistory:
        """Undo :meth:`to_list`."""
        history = cls(limit)
        for step, rank, captured in saved:
            history.add(int(step), int(rank), [float(energy) for energy in captured])
        return history


def layer_type(name: str) -> str:
    """A parameter name without its indices: ``model.layers.7.mlp.up.weight`` is ``model.layers.*.mlp.up.weight``."""
    return _INDEX.sub("*", name)


def prior_rank(
    kind: str, histories: Mapping[str, RankHistory], candidates: Sequence[int]
) -> int | None:
    """Rank to start a matrix with that was not measured yet: the median of its type's latest ranks.

    Args:
        kind: its :func:`layer_type`. histories: by parameter name, of any type.
        candidates: of the matrix; the median is raised to the next of them.

    Returns:
        None when no matrix of the type was measured.
    """
    latest = [h.latest for name, h in histories.items() if layer_type(name) == kind]
    ranks = [record.rank for record in latest if record is not None]
    if not ranks:
        return None
    return next((r for r in candidates if r >= median(ranks)), candidates[-1])


def predict_rank(
    candidates: Sequence[int],
    history: RankHistory,
    smoothed_energy: float,
    norm_trend: float,
    threshold: float,
) -> int:
    """Candidate at which the next range finding starts; widening corrects a guess that is too low.

    The rule, with E the last spectrum curve, r the last rank, ``lost = E(r) - smoothed_energy`` (never
    below 0) and margin the hysteresis of :func:`hmt_deepspeed.optim.rank.select_rank`:

    1. No history: the smallest candidate.
    2. ``smoothed_energy >= threshold``: even the old basis holds enough. The smallest candidate with
       ``E >= threshold + margin``, and at most r.
    3. Else a new basis wins back REGAINED of what was lost; the rest must come from rank: the smallest
       candidate from r up with ``E >= threshold + (1 - REGAINED) lost``. Beyond the last sketch the
       residual ``1 - E`` goes on as a power of the rank.
    4. While energy is lost and the gradient norm grows by more than GROWING, one candidate more.

    Args:
        smoothed_energy: the probes' captured energy, an average over recent steps, in [0, 1].
        norm_trend: log of the gradient norm now over that at the last refresh.
    """
    last = history.latest
    if last is None:
        return candidates[0]
    margin = HYSTERESIS * (1.0 - threshold)
    curve = extend_curve(candidates, last.captured)
    place = max((i for i, r in enumerate(candidates) if r <= last.rank), default=0)
    lost = max(0.0, curve[place] - smoothed_energy)
    if smoothed_energy >= threshold:
        lower = (i for i in range(place) if curve[i] >= threshold + margin)
        return candidates[next(lower, place)]
    wanted = threshold + (1.0 - REGAINED) * lost
    higher = (i for i in range(place, len(candidates)) if curve[i] >= wanted)
    start = next(higher, len(candidates) - 1)
    if lost > margin and norm_trend > GROWING:
        start = min(start + 1, len(candidates) - 1)
    return candidates[start]


def extend_curve(candidates: Sequence[int], captured: Sequence[float]) -> list[float]:
    """E at all candidates: the residual 1 - E beyond the last known goes on as a power of the rank.

    The exponent is that of the last two known points, or 1 where only one is known.
    """
    curve = [min(max(energy, 0.0), 1.0) for energy in captured[: len(candidates)]]
    known, power = len(curve), 1.0
    residuals = [max(1.0 - energy, 1e-9) for energy in curve]
    if known >= 2:
        wider = log(candidates[known - 1] / candidates[known - 2])
        power = max(0.0, log(residuals[-2] / residuals[-1]) / wider)
    for rank in candidates[known:]:
        curve.append(1.0 - residuals[-1] * (candidates[known - 1] / rank) ** power)
    return curve


class StalenessTrigger:
    """Which matrices should refresh early, because their basis holds much less than when it was new.

    The smoothed energies live on the device. :meth:`read` takes them as one (num_matrices,) tensor and
    looks at it every ``check_every`` steps only, so it costs one host sync in ``check_every`` steps; the
    decision itself is made on plain numbers. All ranks must pass the same (reduced) energies.

    A matrix fires when two readings in a row are below ``fraction`` of its reference, which is its first
    reading ``min_steps`` or more after the refresh: not the energy that the range finder reports, since
    a basis fits the gradient that it was made from better than the next ones. Having fired it is silent
    until it is refreshed, or until a reading is back above ``rearm`` of the reference (hysteresis).

    Args:
        num_matrices: length of the energies. fraction: in (0, 1). rearm: in [fraction, 1].
        min_steps: since the refresh, the horizon over which energies are smoothed or more.
        check_every: steps between two readings.
    """

    def __init__(
        self,
        num_matrices: int,
        fraction: float = 0.85,
        rearm: float = 0.95,
        min_steps: int = 20,
        check_every: int = 10,
    ) -> None:
        if not 0 < fraction <= rearm <= 1:
            raise ValueError(
                f"fraction is {fraction} and rearm {rearm}; legal: 0 < fraction <= rearm <= 1"
            )
        if min_steps < 1 or check_every < 1:
            raise ValueError(
                f"min_steps is {min_steps} and check_every {check_every}; legal: integers >= 1"
            )
        self.fraction, self.rearm = fraction, rearm
        self.min_steps, self.check_every = min_steps, check_every
        self.refreshed_at = [0] * num_matrices
        self.reference = [nan] * num_matrices
        self.low_readings = [0] * num_matrices
        self.armed = [True] * num_matrices

    def refreshed(self, index: int, step: int) -> None:
        """Note that matrix ``index`` has a new basis from ``step`` on."""
        self.refreshed_at[index], self.reference[index] = step, nan
        self.low_readings[index], self.armed[index] = 0, True

    def read(self, step: int, smoothed: Tensor) -> list[int]:
        """Indices that fire at ``step``, given the smoothed captured energies (num_matrices,)."""
        if step % self.check_every:
            return []
        return [i for i, energy in enumerate(smoothed.tolist()) if self._fires(i, step, energy)]

    def _fires(self, index: int, step: int, energy: float) -> bool:
        if step - self.refreshed_at[index] < self.min_steps:
            return False
        reference = self.reference[index]
        if reference != reference:  # nan: the first reading of this basis
            self.reference[index] = energy
            return False
        self.armed[index] |= energy > self.rearm * reference
        low = energy < self.fraction * reference
        self.low_readings[index] = self.low_readings[index] + 1 if low else 0
        if self.armed[index] and self.low_readings[index] >= 2:
            self.armed[index] = False
            return True
        return False

    def to_list(self) -> list[list[float]]:
        """``[refreshed_at, reference, low_readings, armed]`` of every matrix: plain numbers."""
        columns = (self.refreshed_at, self.reference, self.low_readings, self.armed)
        return [[float(value) for value in row] for row in zip(*columns, strict=True)]

    def load_list(self, saved: Sequence[Sequence[float]]) -> None:
        """Undo :meth:`to_list`, for as many matrices."""
        if len(saved) != len(self.reference):
            raise ValueError(f"{len(saved)} saved matrices; this trigger has {len(self.reference)}")
        self.refreshed_at = [int(row[0]) for row in saved]
        self.reference = [row[1] for row in saved]
        self.low_readings = [int(row[2]) for row in saved]
        self.armed = [bool(row[3]) for row in saved]
