"""Rank history, priors, prediction and early refresh: the rules, and what each saves."""

import itertools
from math import log

import pytest
import torch
from draws import basis_of

from hmt_deepspeed.optim.bases.basis import keyed_generator
from hmt_deepspeed.optim.bases.rank import select_rank
from hmt_deepspeed.optim.bases.search import find_subspace_to_energy
from hmt_deepspeed.optim.decisions.rank_history import (
    RankHistory,
    layer_type,
    needed_rank,
    predict_rank,
    prior_rank,
)

CPU = torch.device("cpu")
CANDIDATES = (8, 16, 32, 64)


def generator(*labels):
    return keyed_generator(CPU, 0, *labels)


def orthonormal(n, r, *labels):
    return basis_of(n, r, *labels)


def gradient_of(left, right, count, noise, *labels):
    """Equal singular values on the first ``count`` directions, and a share ``noise`` of energy elsewhere."""
    m, n = left.shape[0], right.shape[0]
    signal = left[:, :count] @ right[:, :count].t() * ((1 - noise) / count) ** 0.5
    return signal + (noise / (m * n)) ** 0.5 * torch.randn(m, n, generator=generator(*labels))


def history_of(rank, captured, step=0):
    history = RankHistory()
    history.add(step, rank, captured)
    return history


# -- history and prior --------------------------------------------------------------------------------


def test_history_is_bounded_and_survives_a_round_trip():
    history = RankHistory(limit=3)
    assert history.latest is None
    for step in range(5):
        history.add(10 * step, 8 * (step + 1), torch.tensor([0.5, 0.75]).tolist())
    saved = history.to_list()
    assert saved == [[10 * s, 8 * (s + 1), [0.5, 0.75], None, 0.0] for s in (2, 3, 4)]
    again = RankHistory.from_list(saved, limit=3)
    assert again.records == history.records
    assert (again.latest.step, again.latest.rank) == (40, 40)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("model.layers.7.self_attn.q_proj.weight", "model.layers.*.self_attn.q_proj.weight"),
        ("layers.1.experts.12.up.weight", "layers.*.experts.*.up.weight"),
        ("0.weight", "*.weight"),
        ("h.3.mlp.fc1.weight", "h.*.mlp.fc1.weight"),  # the digit of fc1 is no index
        ("lm_head.weight", "lm_head.weight"),
    ],
)
def test_layer_type(name, kind):
    assert layer_type(name) == kind


def test_prior_is_the_median_of_the_type():
    histories = {f"l.{i}.q": history_of(r, [0.9]) for i, r in enumerate((8, 16, 64))}
    histories["l.0.up"] = history_of(64, [0.9])
    histories["l.3.q"] = RankHistory()
    assert prior_rank("l.*.q", histories, CANDIDATES) == 16
    assert prior_rank("l.*.q", histories, (10, 20)) == 20  # raised to a candidate of this matrix
    assert prior_rank("l.*.q", histories, (4, 10)) == 10
    assert prior_rank("l.*.down", histories, CANDIDATES) is None


def test_prior_saves_sketching_at_the_first_refresh():
    """From the prior's rank one width is enough; from the smallest candidate it takes three."""
    gradient = gradient_of(orthonormal(96, 48, "l"), orthonormal(112, 48, "r"), 28, 0.02, "noise")
    histories = {"l.0.q": history_of(32, [0.3, 0.6, 0.98])}
    products = {}
    for first in (prior_rank("l.*.q", histories, CANDIDATES), CANDIDATES[0]):
        found = find_subspace_to_energy(
            "randomized", gradient, CANDIDATES, 0.95, generator("s"), first=first
        )
        assert found.basis.shape[1] == 32
        products[first] = found.products
    assert products[32] < 0.85 * products[8]


# -- prediction ---------------------------------------------------------------------------------------

CURVE = (0.5, 0.8, 0.96, 0.99)
DOUBLED = log(2) / 2  # of the norm, when the gradient's energy doubles


@pytest.mark.parametrize(
    ("rank", "captured", "lost", "trend", "expected"),
    [
        (32, CURVE, 0.0, 0.0, 32),
        (32, CURVE, 0.5, 0.0, 32),  # turned directions: the same rank holds the new ones
        (32, CURVE, -0.1, DOUBLED, 32),  # a gradient that grows as a whole
        (32, CURVE, 0.5, -DOUBLED, 32),
        (32, CURVE, 0.5, DOUBLED, 64),  # half of the energy has arrived: 2 x 29
        (16, (0.5, 0.96), 0.5, DOUBLED, 32),  # 2 x 15
        (16, (0.5, 0.96), 0.05, DOUBLED, 16),  # 15 / .95
        (16, (0.5, 0.96), 0.1, DOUBLED, 32),  # 15 / .9
        (16, (0.5, 0.96), 0.5, log(1.05), 32),  # of which a tenth may be arrivals
        (16, (0.5, 0.96), 0.5, log(1.02), 16),
        (8, (0.96,), 0.5, DOUBLED, 16),  # .8 of 8 are needed
        (64, CURVE, 0.9, 1.0, 64),  # there is no more than the largest
        (112, (0.1, 0.2, 0.3, 0.4), 0.0, 0.0, 64),  # full rank: to be measured at the largest
        (64, (0.1, 0.2, 0.3, 0.4), 0.0, 0.0, 64),  # out of reach
        (32, (0.5, 0.8, 0.92), 0.0, 0.0, 32),  # held by the hysteresis
        (32, (0.5, 0.8, 0.92), 0.04, 0.04, 32),  # noise does not move it
    ],
)
def test_prediction(rank, captured, lost, trend, expected):
    history = history_of(rank, captured)
    assert predict_rank(CANDIDATES, history, lost, trend, 0.95) == expected


def test_prediction_without_history_starts_small():
    assert predict_rank(CANDIDATES, RankHistory(), 0.0, 0.0, 0.95) == 8


def test_needed_rank_lies_between_the_candidates():
    energies = [1 - 2.0 * r**-0.5 for r in CANDIDATES]
    assert needed_rank(CANDIDATES, energies, 1 - 2.0 * 20**-0.5) == pytest.approx(20)
    assert needed_rank(CANDIDATES, energies, energies[1]) == pytest.approx(16)
    assert needed_rank(CANDIDATES, [0.96], 0.92) == pytest.approx(4)
    assert needed_rank(CANDIDATES, energies[:2], 0.99) == 16  # missed as far as was sketched
    assert needed_rank(CANDIDATES, [0.5, 1.0 + 1e-7], 1.0) == pytest.approx(16)


def arrivals(step):
    """Directions come and go beside the old ones, and with them their energy."""
    need = 14 if step < 60 or 180 <= step < 260 else 28
    return need, (need / 14) ** 0.5, 0.001 * step


def turning(step):
    """The same number of directions, other ones after every interval."""
    return 14, 1.0, 0.03 * step


def swelling(step):
    """The same directions, twice the norm after every interval."""
    return 14, 2 ** (step / 40), 0.001 * step


def sketched(scenario, guess):
    """Columns multiplied in 340 steps with a refresh every 40; the ranks chosen, the energies reached.

    ``guess(history, lost, norm_trend)`` gives the first width. Energy and square norm are smoothed over
    some ten steps; a batch's noise moves the norm by a tenth.
    """
    m, n, threshold = 96, 112, 0.9
    left, right, turn = (orthonormal(s, 48, w) for s, w in ((m, "l"), (n, "r"), (n, "t")))
    products, ranks, reached, history, jitter = 0, [], [], RankHistory(), generator("jitter")
    basis, energy, first_energy, square, norm = None, 0.0, 0.0, 0.0, 0.0
    for step in range(341):
        need, scale, angle = scenario(step)
        angle = torch.tensor(angle)
        turned = torch.linalg.qr(right * angle.cos() + turn * angle.sin()).Q
        gradient = gradient_of(left, turned, need, 0.05, "noise", step)
        gradient = gradient * scale * (1 + 0.1 * torch.randn((), generator=jitter))
        total = gradient.square().sum().item()
        square += (0.1 if step else 1.0) * (total - square)
        now = log(square) / 2
        if basis is not None:
            energy += 0.1 * ((gradient @ basis).square().sum().item() / total - energy)
        if step % 40:
            continue
        # as in a run, the first refresh knows no norm
        trend = now - norm if step > 40 else 0.0
        first = guess(history, first_energy - energy, trend) if step else CANDIDATES[0]
        found = find_subspace_to_energy(
            "randomized",
            gradient,
            CANDIDATES,
            threshold,
            generator("sketch", step),
            basis,
            first=first,
        )
        captured = found.captured().tolist()
        energies = [captured[r - 1] for r in CANDIDATES if r <= len(captured)]
        current = history.latest.rank if history.latest else None
        rank = select_rank(energies, CANDIDATES, threshold, current)
        history.add(step, rank, energies)
        basis, norm = found.basis[:, :rank], now
        energy = first_energy = captured[rank - 1]
        if step:  # the first has nothing to predict from
            products += found.products
        ranks.append(rank)
        reached.append(energy >= threshold)
    assert all(reached)
    return products, ranks


def predicted(history, lost, trend):
    return predict_rank(CANDIDATES, history, lost, trend, 0.9)


def last_rank(history, lost, trend):
    return history.latest.rank


def by_energy_alone(history, lost, trend):
    return predict_rank(CANDIDATES, history, lost, 100.0, 0.9)


def by_norm_alone(history, lost, trend):
    return predict_rank(CANDIDATES, history, 1.0, trend, 0.9)


def test_prediction_saves_columns_where_directions_arrive():
    """Against starting at the last rank: twice in 8 refreshes the wider sketch is made at once."""
    columns, ranks = sketched(arrivals, predicted)
    from_last, same_ranks = sketched(arrivals, last_rank)
    assert ranks == same_ranks
    assert sum(a < b for a, b in itertools.pairwise(ranks)) == 2
    # 56 columns a rise: the narrow basis once more for its image, and 8 of oversampling five times
    assert from_last - columns == 2 * 56, (columns, from_last)


@pytest.mark.parametrize(
    ("scenario", "without"), [(turning, by_energy_alone), (swelling, by_norm_alone)]
)
def test_norm_and_energy_each_save_columns(scenario, without):
    """Lost energy of turned directions is told by the norm, growth of the whole by the energy."""
    columns, ranks = sketched(scenario, predicted)
    more, same_ranks = sketched(scenario, without)
    assert ranks == same_ranks
    assert columns == sketched(scenario, last_rank)[0]
    assert columns < 0.6 * more, (columns, more)  # 72 of 152 where the width is doubled in vain
