"""Rank selection: a table, and hysteresis at the threshold."""

import pytest

from hmt_deepspeed.optim.bases.rank import HYSTERESIS, legal_candidates, select_rank

CANDIDATES = (2, 4, 8)


def captured(at_2, at_4, at_8):
    """E at the candidates."""
    return [at_2, at_4, at_8]


@pytest.mark.parametrize(
    ("energies", "threshold", "expected"),
    [
        ((0.96, 0.98, 1.0), 0.95, 2),  # the smallest that reaches it
        ((0.95, 0.98, 1.0), 0.95, 2),  # reaching is enough
        ((0.90, 0.96, 1.0), 0.95, 4),
        ((0.50, 0.80, 0.95), 0.95, 8),
        ((0.10, 0.20, 0.30), 0.95, 8),  # none reaches it: the largest
        ((0.10, 0.20, 1.0), 1.0, 8),
    ],
)
def test_smallest_candidate_that_reaches_the_threshold(energies, threshold, expected):
    assert select_rank(captured(*energies), CANDIDATES, threshold) == expected


MARGIN = HYSTERESIS * 0.05


@pytest.mark.parametrize(
    ("at_4", "current", "expected"),
    [
        (0.95 + MARGIN / 2, 4, 4),
        (0.95 - MARGIN / 2, 4, 4),  # just missed: stays
        (0.95 - MARGIN * 2, 4, 8),  # clearly missed: grows
        (0.95 + MARGIN / 2, 8, 8),  # just reached: stays
        (0.95 + MARGIN * 2, 8, 4),  # clearly reached: falls
        (0.95 + MARGIN / 2, 3, 4),  # a rank that is no candidate has no hysteresis
        (0.95 + MARGIN / 2, None, 4),
    ],
)
def test_hysteresis(at_4, current, expected):
    assert select_rank(captured(0.5, at_4, 0.999), CANDIDATES, 0.95, current) == expected


def test_rank_does_not_flip_at_the_threshold():
    rank, seen = 4, set()
    for i in range(20):
        rank = select_rank(
            captured(0.5, 0.95 + (-1) ** i * MARGIN / 2, 0.999), CANDIDATES, 0.95, rank
        )
        seen.add(rank)
    assert seen == {4}


@pytest.mark.parametrize(
    ("known", "current", "expected"),
    [
        (2, None, 4),  # none of those sketched reaches it: the largest of them
        (1, None, 2),
        (2, 8, 4),  # the present rank was not sketched: it cannot be kept
        (2, 2, 4),
    ],
)
def test_a_sketch_that_stopped_early_bounds_the_rank(known, current, expected):
    energies = captured(0.5, 0.9, 0.99)[:known]
    assert select_rank(energies, CANDIDATES, 0.95, current) == expected


@pytest.mark.parametrize(
    ("shape", "expected"),
    [((512, 512), (32, 64, 128)), ((512, 100), (32, 64, 100)), ((16, 900), (16,))],
)
def test_candidates_are_lowered_to_the_smaller_side(shape, expected):
    assert legal_candidates((32, 64, 128), *shape) == expected
