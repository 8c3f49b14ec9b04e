"""What a basis will hold of the gradients that follow the one it was made from.

A gradient of few tokens has noise of its own, of low rank, and its basis holds that too: bases that hold 95 %
of the gradient that made them hold 52 to 65 % of later ones, for the queries and keys of a 3M-parameter Llama
at an eighth of its hidden size. Every window of steps shows the latter for one rank, through the probe columns.
Between ranks, the share that a basis misses of later gradients is about a fixed power of the share that it
misses of its own: the power of a rank is the one last seen there, else at the nearest rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from math import log
from statistics import median

from hmt_deepspeed.optim.rank_history import RankHistory, layer_type

__all__ = ["Exponents", "exponent_of", "later_energies", "own_energy"]

_LEAST_MISSED = 1e-6  # fp32 energies say no more
_LEAST_EXPONENT = 0.02


def exponent_of(own: float, later: float) -> float:
    """k of ``1 - later = (1 - own)^k``, in [0.02, 1]: later gradients are never held better than the own one.

    Args:
        own: E, in [0, 1], of the gradient that the basis was made from. later: E of those that followed.
    """
    missed, missed_later = (min(max(1.0 - e, _LEAST_MISSED), 1.0) for e in (own, later))
    if missed == 1.0:
        return 1.0
    return min(max(log(missed_later) / log(missed), _LEAST_EXPONENT), 1.0)


class Exponents:
    """The exponent of every matrix and rank, as far as the windows of steps have shown.

    Args:
        histories: by parameter name, see :class:`RankHistory`; read once.
    """

    def __init__(self, histories: Mapping[str, RankHistory]) -> None:
        self._of_matrix: dict[str, dict[int, float]] = {}
        self._of_type: dict[str, list[dict[int, float]]] = {}
        for name, history in histories.items():
            if known := _measured(history):
                self._of_matrix[name] = known
                self._of_type.setdefault(layer_type(name), []).append(known)

    def at(self, name: str, candidates: Sequence[int]) -> list[float]:
        """Of a matrix's candidate ranks; of one that no window has measured yet, the median of its layer
        type, or of all; 1 before there is any: then its own energy is all that is known."""
        if name in self._of_matrix:
            seen = [self._of_matrix[name]]
        else:
            seen = self._of_type.get(layer_type(name), [*self._of_matrix.values()])
        if not seen:
            return [1.0] * len(candidates)
        return [median(_nearest(known, rank) for known in seen) for rank in candidates]


def _measured(history: RankHistory) -> dict[int, float]:
    """Exponents by rank, the latest of each."""
    return {
        record.rank: exponent_of(record.own, record.later)
        for record in history.records
        if record.own is not None and record.later is not None
    }


def _nearest(known: Mapping[int, float], rank: int) -> float:
    return known[min(known, key=lambda other: abs(log(other / rank)))]


def later_energies(own: Sequence[float], exponents: Sequence[float]) -> list[float]:
    """E to expect of later gradients at the ranks of a spectrum: never less than at a smaller rank."""
    expected = (
        1.0 - max(1.0 - e, _LEAST_MISSED) ** k for e, k in zip(own, exponents, strict=False)
    )
    return list(accumulate(expected, max))


def own_energy(later: float, exponents: Iterable[float]) -> float:
    """E of its own gradient from which on a basis of any rank is expected to hold ``later`` of those after."""
    return 1.0 - (1.0 - later) ** (1.0 / min(exponents))
