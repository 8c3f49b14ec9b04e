"""Predicts the energy of later gradients that a basis of each rank will capture.

A gradient of few tokens has low-rank noise of its own, and its basis captures that too: bases that capture 95 % of
the gradient that made them capture 52 to 65 % of later ones, for the queries and keys of a 3M-parameter Llama
at an eighth of its hidden size. A refresh window, the steps from one basis to the next, shows the energy of later
gradients: probe columns give the total, Adam's second moments, or Muon's momentum, give the part along each direction. The first
directions are the basis of a smaller rank, so their parts are known too. Beyond the rank in force the missed
energy is assumed to fall exponentially, as it does within the bases of that Llama.

A matrix without such a curve has a power instead: the share that a basis misses of later gradients is about a fixed
power of the share that it misses of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import exp, log

from hmt_deepspeed.optim.decisions.rank_history import RankRecord

__all__ = [
    "USUAL_EXPONENT",
    "exponent_of",
    "fading_of",
    "later_curve",
    "later_energies",
    "own_energy",
]

_LEAST_MISSED = 1e-6  # fp32 energies say no more
_LEAST_EXPONENT = 0.02
# Before any window is seen: what steps of 2,048 tokens show (0.52 to 0.65 of later gradients where a basis holds 0.95
# of its own is 0.25 to 0.35). A step of many tokens is taken for one of few until its first window ends, which costs
# bytes; taking few for many costs loss.
USUAL_EXPONENT = 0.3


def _missed(energy: float) -> float:
    return min(max(1.0 - energy, _LEAST_MISSED), 1.0)


def fading_of(half: float, whole: float, columns: int) -> float:
    """Rate at which the missed energy falls at a basis's last columns: fall of its logarithm by a column, >= 0.

    Args:
        half, whole: E of later gradients without the last ``columns`` (>= 1) and with them.
    """
    return max(log(_missed(half) / _missed(whole)) / columns, 0.0)


def later_curve(
    records: Sequence[RankRecord], candidates: Sequence[int], columns: int | None = None
) -> list[float] | None:
    """E to expect of later gradients at every candidate, from the last window that was seen; None of none.

    Args:
        records: of one matrix, oldest first. columns: of it, where a basis of so many misses nothing:
            any directions hold their share, so that the missed energy falls at least linearly to there.
    """
    last = next((record for record in reversed(records) if record.later), None)
    if last is None or last.later is None:
        return None
    known = len(last.later)
    curve, rank, missed = list(last.later), candidates[known - 1], _missed(last.later[-1])
    for candidate in candidates[known:]:
        left = exp(-last.fading * (candidate - rank))
        if columns is not None:
            left = min(left, (columns - candidate) / (columns - rank))
        curve.append(1.0 - missed * left)
    return list(accumulate(curve, max))


def exponent_of(own: float, later: float) -> float:
    """k of ``1 - later = (1 - own)^k``, in [0.02, 1]: later gradients are never held better than the own one.

    Args:
        own: E, in [0, 1], of the gradient that the basis was made from. later: E of those that followed.
    """
    missed, missed_later = _missed(own), _missed(later)
    if missed == 1.0:
        return 1.0
    return min(max(log(missed_later) / log(missed), _LEAST_EXPONENT), 1.0)


def later_energies(own: Sequence[float], exponent: float) -> list[float]:
    """E to expect of later gradients at the ranks of a spectrum: never less than at a smaller rank."""
    return list(accumulate((1.0 - _missed(e) ** exponent for e in own), max))


def own_energy(later: float, exponent: float) -> float:
    """E of its own gradient at which a basis is expected to hold ``later`` of those after."""
    return 1.0 - (1.0 - later) ** (1.0 / exponent)
