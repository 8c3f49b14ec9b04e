"""Candidate ranks of a matrix, and its rank from the spectrum of its gradient."""

from __future__ import annotations

from collections.abc import Sequence

from hmt_deepspeed.rules import rank_at

__all__ = [
    "HYSTERESIS",
    "SIDE_SHARES",
    "candidates_of_side",
    "legal_candidates",
    "misses_threshold",
    "select_rank",
]

# A rank changes only when its energy passes the threshold by this share of what the threshold leaves out.
HYSTERESIS = 0.1
# Candidates of "rank_candidates": "auto", as shares of a matrix's smaller side. Ranks of one share hold about the
# same energy at any width; from two thirds of it on, moments and basis of a square matrix take as much as AdamW's.
SIDE_SHARES = (1 / 8, 3 / 16, 1 / 4, 3 / 8, 1 / 2)


def candidates_of_side(side: int) -> tuple[int, ...]:
    """Candidates of a matrix by its smaller side: :data:`SIDE_SHARES` of it."""
    return tuple(sorted({rank_at(share, side, side) for share in SIDE_SHARES}))


def legal_candidates(candidates: Sequence[int] | None, m: int, n: int) -> tuple[int, ...]:
    """Candidates of an m x n matrix: those above its smaller side are lowered to it; None: of its side."""
    if candidates is None:
        return candidates_of_side(min(m, n))
    return tuple(sorted({min(candidate, m, n) for candidate in candidates}))


def select_rank(
    energies: Sequence[float],
    candidates: Sequence[int],
    threshold: float,
    current: int | None = None,
) -> int:
    """Smallest candidate whose captured energy reaches the threshold, else the largest.

    HMT paper, "rank selection rule". ``current`` adds hysteresis: the rank falls only to a candidate
    that clears the threshold by a margin, and grows only when the present one misses it by the margin,
    so that a layer at the threshold does not change its shapes at every refresh. Candidates beyond the
    energies known (a range finder that stopped early) are out of reach, the present rank too.

    Args:
        energies: E(r) in [0, 1] of the first candidates, as far as was sketched; at least one.
        candidates: strictly increasing ranks.
        threshold: in (0, 1].
        current: present rank, or None when the matrix has not been measured before.
    """
    captured = dict(zip(candidates, energies, strict=False))
    margin = HYSTERESIS * (1.0 - threshold)

    def smallest(level: float) -> int:
        return next((r for r, energy in captured.items() if energy >= level), max(captured))

    chosen = smallest(threshold)
    if current is None or current not in captured or chosen == current:
        return chosen
    if chosen < current:
        return min(smallest(threshold + margin), current)
    return current if captured[current] >= threshold - margin else chosen


def misses_threshold(energy: float, threshold: float, is_full: bool | None) -> bool:
    """Whether the largest candidate captures too little, so that a matrix asks for full rank.

    With the hysteresis of :func:`select_rank`: one of full rank stays so until the candidate clears the
    threshold by the margin, another until it misses it by as much; ``is_full`` None: not measured before.
    """
    margin = HYSTERESIS * (1.0 - threshold)
    if is_full is None:
        return energy < threshold
    return energy < threshold + margin if is_full else energy < threshold - margin
