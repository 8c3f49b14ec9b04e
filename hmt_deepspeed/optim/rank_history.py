"""What past refreshes say about the next: rank history, priors by layer type, prediction, staleness.

HMT paper, dynamic rank: "rank prediction from the gradient norm", "rank prior by layer type", and the rank
history that the basis cache keeps. Everything here is plain numbers, for checkpoints and for any rank of
the process group: equal inputs give equal ranks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, log, nan
from statistics import median
from typing import Any

from torch import Tensor

__all__ = [
    "FADED",
    "RankHistory",
    "RankRecord",
    "StalenessTrigger",
    "layer_type",
    "needed_rank",
    "predict_rank",
    "prior_rank",
]

# A number that is a whole part of a dotted name: the index of a layer, an expert, a stage.
_INDEX = re.compile(r"(?<![^.])\d+(?![^.])")
# Share of a gradient's energy below which its growth is taken for noise: batches move even a smoothed norm by
# some per cent.
LEAST_ARRIVAL = 0.05
FADED = 0.5  # share of what a basis captured when it was new, below which it is replaced early
_LEAST_RESIDUAL = 1e-9  # rounding may leave less, or less than nothing


@dataclass(frozen=True)
class RankRecord:
    """One refresh, and what came of it.

    step: of the refresh. rank: that was chosen. captured: E at the candidates that were sketched, from the
    first, of the gradient that made the basis. later: E of the gradients since, at the candidates up to the
    rank; None where nobody has looked. fading: see :func:`hmt_deepspeed.optim.later_energy.fading_of`.
    """

    step: int
    rank: int
    captured: tuple[float, ...]
    later: tuple[float, ...] | None = None
    fading: float = 0.0


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

    def note_later(self, energies: Sequence[float], fading: float) -> None:
        """Note what the first columns of the latest basis have captured of the gradients since its refresh."""
        self.records[-1] = replace(self.records[-1], later=tuple(energies), fading=fading)

    def to_list(self) -> list[list[Any]]:
        """``[[step, rank, [E, ...], [later E, ...], fading], ...]``: plain numbers for a checkpoint."""
        return [
            [r.step, r.rank, list(r.captured), r.later and list(r.later), r.fading]
            for r in self.records
        ]

    @classmethod
    def from_list(cls, saved: Iterable[Sequence[Any]], limit: int = 16) -> RankHistory:
        """Undo :meth:`to_list`."""
        history = cls(limit)
        for step, rank, captured, *seen in saved:
            record = RankRecord(int(step), int(rank), tuple(float(energy) for energy in captured))
            if seen and isinstance(seen[0], list):  # an older checkpoint has none, or one number
                record = replace(record, later=tuple(seen[0]), fading=float(seen[1]))
            history.records.append(record)
        del history.records[:-limit]
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
    lost: float,
    norm_trend: float,
    threshold: float,
) -> int:
    """Candidate at which the next range finding starts; widening corrects a guess that is too low.

    Energy leaves a basis because its directions turn, which a new basis of the same rank wins back, or
    because new directions arrive beside them. Only these make the gradient grow: the share of its
    energy that has arrived is at most ``1 - exp(-2 norm_trend)``, and at most what was lost, for a
    gradient that grows as a whole loses none; less than LEAST_ARRIVAL is none. Directions as strong as
    the old ones then need ``1 / (1 - arrived)`` times the rank. The guess is never below the last rank,
    whose energy the hysteresis of :func:`hmt_deepspeed.optim.rank.select_rank` asks for.

    Args:
        history: of the matrix; without any, the smallest candidate.
        lost: captured energy when the basis was new, less that of recent steps.
        norm_trend: log of the gradient norm now over that at the last refresh.
    """
    last = history.latest
    if last is None:
        return candidates[0]
    arrived = min(lost, 1.0 - exp(-2.0 * norm_trend))
    arrived = arrived if arrived >= LEAST_ARRIVAL else 0.0
    needed = needed_rank(candidates, last.captured, threshold)
    wanted = max(min(needed, last.rank) / max(1.0 - arrived, 1e-9), last.rank)
    return next((rank for rank in candidates if rank >= wanted), candidates[-1])


def needed_rank(candidates: Sequence[int], captured: Sequence[float], threshold: float) -> float:
    """Rank at which a spectrum reaches the threshold, between the candidates.

    The residual ``1 - E`` is taken to fall as a power of the rank from one candidate to the next, and as
    its inverse below the first. The last candidate that was sketched where none reaches the threshold.
    """
    allowed = max(1.0 - threshold, _LEAST_RESIDUAL)
    before: tuple[int, float] | None = None
    for rank, energy in zip(candidates, captured, strict=False):
        residual = max(1.0 - energy, _LEAST_RESIDUAL)
        if residual <= allowed:
            if before is None:
                return rank * residual / allowed
            power = log(before[1] / residual) / log(rank / before[0])
            return rank * (residual / allowed) ** (1.0 / power)
        before = rank, residual
    return candidates[len(captured) - 1]


class StalenessTrigger:
    """Which matrices should refresh early, because their basis holds much less than when it was new.

    The smoothed energies live on the device. :meth:`read` takes them as one (num_matrices,) tensor and
    looks at it every ``check_every`` steps only, so it costs one host sync in ``check_every`` steps; the
    decision itself is made on plain numbers. All ranks must pass the same (reduced) energies.

    A matrix fires when two readings in a row are below ``fraction`` of its reference, which is its first
    reading ``min_steps`` or more after the refresh: not the energy that the range finder reports, since
    a basis fits the gradient that it was made from better than the next ones. Having fired it is silent
    until it is refreshed, or until a reading has regained two thirds of what ``fraction`` leaves out
    (hysteresis).

    A new basis costs moments, and drift alone takes some of what a basis captures, so the usual
    ``fraction`` is what only a change of the data leaves.

    Args:
        num_matrices: length of the energies. fraction: in (0, 1).
        min_steps: since the refresh, the horizon over which energies are smoothed or more.
        check_every: steps between two readings.
    """

    def __init__(
        self,
        num_matrices: int,
        fraction: float = FADED,
        min_steps: int = 20,
        check_every: int = 10,
    ) -> None:
        if not 0 < fraction < 1:
            raise ValueError(f"fraction is {fraction}; legal: above 0 and below 1")
        if min_steps < 1 or check_every < 1:
            raise ValueError(
                f"min_steps is {min_steps} and check_every {check_every}; legal: integers >= 1"
            )
        self.fraction, self.rearm = fraction, 1 - (1 - fraction) / 3
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
