"""Rank budget: against brute force, against the threshold rule at equal bytes, limits and speed."""

import random
import time
from itertools import pairwise, product

import pytest

from hmt_deepspeed.optim.bases.rank_budget import Spectrum, allocate_ranks, total_captured


def random_spectra(draw, concave):
    """2 to 4 matrices of 2 to 4 candidates with unequal bytes; energies rise by uneven steps."""
    spectra = []
    for _ in range(draw.randint(2, 4)):
        count = draw.randint(2, 4)
        ranks = sorted(draw.sample(range(1, 30), count))
        steps = [draw.random() ** 3 for _ in range(count)]
        if concave:
            steps.sort(reverse=True)
        captured = [sum(steps[: i + 1]) / sum(steps) for i in range(count)]
        per_rank = draw.choice([1, 3, 7, 20])
        spectra.append(Spectrum(tuple(ranks), tuple(captured), tuple(per_rank * r for r in ranks)))
    return spectra


def brute_force(spectra, budget):
    plans = (total_captured(spectra, ranks) for ranks in product(*(s.candidates for s in spectra)))
    return max(energy for energy, size in plans if size <= budget)


@pytest.mark.parametrize("concave", [True, False])
def test_within_one_step_of_brute_force(concave):
    draw, optimal, cases = random.Random(0), 0, 300
    for _ in range(cases):
        spectra = random_spectra(draw, concave)
        least, most = (sum(s.bytes[i] for s in spectra) for i in (0, -1))
        budget = draw.randint(least, most)
        energy, size = total_captured(spectra, allocate_ranks(spectra, budget))
        assert size <= budget
        best = brute_force(spectra, budget)
        largest_step = max(b - a for s in spectra for a, b in pairwise(s.captured))
        assert energy <= best + 1e-9
        assert energy >= best - largest_step - 1e-9
        optimal += energy >= best - 1e-9
    assert optimal >= 0.9 * cases  # greedy alone, without the exchange: see the next test


def test_exchange_finds_what_greedy_misses():
    """Gain per byte prefers the small step, which leaves no room for the large one."""
    small = Spectrum((1, 2), (0.0, 0.3), (0, 10))
    large = Spectrum((1, 2), (0.0, 0.9), (0, 50))
    assert allocate_ranks([small, large], 50) == [1, 2]
    assert allocate_ranks([small, large], 60) == [2, 2]
    assert allocate_ranks([small, large], 49) == [2, 1]


def test_looks_past_a_step_that_gains_nothing():
    """The energy of rank 2 is that of rank 1; only rank 4 is worth its bytes."""
    late = Spectrum((1, 2, 4), (0.1, 0.1, 0.9), (10, 20, 40))
    early = Spectrum((1, 2, 4), (0.5, 0.6, 0.65), (10, 20, 40))
    assert allocate_ranks([late, early], 50) == [4, 1]


def heterogeneous(count):
    """Power-law spectra of exponents .3 to 2, of two sizes."""
    spectra = []
    for i in range(count):
        decay = 0.3 + 1.7 * i / (count - 1)
        energies = [j ** (-2 * decay) for j in range(1, 513)]
        candidates = (16, 32, 64, 128, 192, 256)
        captured = tuple(sum(energies[:r]) / sum(energies) for r in candidates)
        side = 1000 if i % 2 else 3000
        spectra.append(Spectrum(candidates, captured, tuple(8 * side * r for r in candidates)))
    return spectra


def threshold_rule(spectrum, threshold):
    reached = (
        r for r, e in zip(spectrum.candidates, spectrum.captured, strict=True) if e >= threshold
    )
    return next(reached, spectrum.candidates[-1])


@pytest.mark.parametrize(("threshold", "gain"), [(0.7, 0.01), (0.8, 0.005), (0.9, 0.002)])
def test_more_energy_than_the_threshold_rule_at_equal_bytes(threshold, gain):
    """``gain``: mean share of the gradients' energy captured in addition, for no byte more."""
    spectra = heterogeneous(24)
    energy, size = total_captured(spectra, [threshold_rule(s, threshold) for s in spectra])
    ours, used = total_captured(spectra, allocate_ranks(spectra, size))
    assert used <= size
    assert (ours - energy) / len(spectra) > gain


def test_what_does_not_fit_is_refused():
    spectra = [Spectrum((4, 8), (0.5, 0.9), (40, 80)), Spectrum((4, 8), (0.5, 0.9), (60, 120))]
    assert allocate_ranks(spectra, 100) == [4, 4]
    with pytest.raises(ValueError, match=r"is 99 bytes; legal: at least 100"):
        allocate_ranks(spectra, 99)
    assert allocate_ranks([], 0) == []
    for curve in (
        ((4, 8), (0.5,), (1, 2)),
        ((8, 4), (0.5, 0.6), (1, 2)),
        ((4, 8), (0.5, 0.6), (2, 2)),
        ((), (), ()),
    ):
        with pytest.raises(ValueError, match="legal"):
            Spectrum(*curve)


def test_three_hundred_matrices_in_milliseconds():
    spectra, took = heterogeneous(300), []
    least, most = (sum(s.bytes[i] for s in spectra) for i in (0, -1))
    for share in (0.1, 0.4, 0.8):
        begin = time.thread_time()  # not the seconds of other processes
        allocate_ranks(spectra, int(least + share * (most - least)))
        took.append(time.thread_time() - begin)
    assert min(took) < 0.2  # 50 ms on a quiet machine
