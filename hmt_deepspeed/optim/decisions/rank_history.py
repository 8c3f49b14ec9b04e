"""Predicts the next rank from past refreshes: rank history, priors by layer type.

HMT paper, dynamic rank: "rank prediction from the gradient norm", "rank prior by layer type", and the rank
history that the basis cache keeps. Everything here is plain numbers, for checkpoints and for any rank of
the process group: equal inputs give equal ranks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, log
from statistics import median
from typing import Any

__all__ = [
    "RankHistory",
    "RankRecord",
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
_LEAST_RESIDUAL = 1e-9  # rounding may leave less, or less than nothing


@dataclass(frozen=True)
class RankRecord:
    """One refresh and its result.

    step: of the refresh. rank: that was chosen. captured: E at the candidates that were sketched, from the
    first, of the gradient that made the basis. later: E of the gradients since, at the candidates up to the
    rank; None where nobody has looked. fading: see :func:`hmt_deepspeed.optim.decisions.later_energy.fading_of`.
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
    whose energy the hysteresis of :func:`hmt_deepspeed.optim.bases.rank.select_rank` asks for.

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
