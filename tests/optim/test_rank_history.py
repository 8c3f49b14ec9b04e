"""Rank history, priors, prediction and early refresh: the rules, and what each saves."""

import itertools
from math import log
from statistics import mean

import pytest
import torch

from hmt_deepspeed.conflicts import LEAST_STEPS_TO_EARLY
from hmt_deepspeed.optim.basis import find_subspace_to_energy, keyed_generator, random_basis
from hmt_deepspeed.optim.policy import RankPolicy
from hmt_deepspeed.optim.rank import select_rank
from hmt_deepspeed.optim.rank_history import (
    RankHistory,
    StalenessTrigger,
    layer_type,
    needed_rank,
    predict_rank,
    prior_rank,
)
from hmt_deepspeed.optim.settings import MatrixSettings

CPU = torch.device("cpu")
CANDIDATES = (8, 16, 32, 64)


def generator(*labels):
    return keyed_generator(CPU, 0, *labels)


def orthonormal(n, r, *labels):
    return random_basis(n, r, generator(*labels))


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


# -- staleness ----------------------------------------------------------------------------------------


class Layer:
    """A gradient with a dominant subspace, its basis, and the probes' noisy, smoothed energy."""

    def __init__(self, *labels):
        self.signal = orthonormal(64, 8, *labels, "signal")
        self.basis, self.smoothed = self.signal, 0.9
        self.noise = generator(*labels, "noise")

    def observe(self):
        """Captured energy of this step (a tenth of it is noise that no basis holds), smoothed like matrix.py's."""
        held = 0.9 * (self.signal.t() @ self.basis).square().sum().item() / 8
        seen = held + 0.05 * torch.randn((), generator=self.noise).item()
        self.smoothed += 0.1 * (seen - self.smoothed)
        return held


def mean_energy(early, steps=400, interval=200, change_at=57):
    """Energy held over a run in which layer 0 changes abruptly; the steps at which a trigger fired."""
    layers, trigger, fired = [Layer("a"), Layer("b")], StalenessTrigger(2), []
    held = []
    for step in range(steps):
        if step == change_at:
            layers[0].signal = orthonormal(64, 8, "changed")
        held.append(layers[0].observe())
        layers[1].observe()
        due = [0, 1] if step and step % interval == 0 else []
        found = trigger.read(step, torch.tensor([layer.smoothed for layer in layers]))
        fired += [(step, index) for index in found]
        for index in due + (found if early else []):
            layers[index].basis = layers[index].signal
            trigger.refreshed(index, step)
    return mean(held), fired


def test_early_refresh_regains_energy_after_an_abrupt_change():
    waiting, _ = mean_energy(early=False)
    early, fired = mean_energy(early=True)
    assert [index for _, index in fired] == [0]  # the layer that changed, once
    assert 57 < fired[0][0] <= 90
    # .8 of energy missed for the 143 steps up to the interval's end, or for those until it fires.
    assert early - waiting > 0.8 * (200 - fired[0][0]) / 400 - 0.05
    assert early > waiting + 0.2


@pytest.mark.parametrize(("fraction", "fires"), [(0.5, False), (0.85, True)])
def test_a_basis_that_fades_slowly_is_left_until_it_holds_less_than_the_fraction(fraction, fires):
    """Three tenths of the energy lost in 200 steps."""
    trigger = StalenessTrigger(1, fraction)
    fired = [s for s in range(200) if trigger.read(s, torch.tensor([0.8 * 0.5 ** (s / 400)]))]
    assert bool(fired) == fires


def test_no_firing_on_stationary_noise():
    """1,000 steps, 50 layers, readings smoothed over ten steps with noise of 5 %: nothing fires."""
    draw, energies, trigger = (
        torch.Generator().manual_seed(0),
        torch.full((50,), 0.7),
        StalenessTrigger(50),
    )
    for step in range(1000):
        energies += 0.1 * (0.7 + 0.05 * torch.randn(50, generator=draw) - energies)
        if step and step % 200 == 0:
            for index in range(50):
                trigger.refreshed(index, step)
        assert trigger.read(step, energies) == []


def test_trigger_is_silent_until_refreshed_or_recovered():
    trigger = StalenessTrigger(1, fraction=0.8, min_steps=2, check_every=1)
    values = [0.1, 0.1, 1.0, 0.7, 0.9, 0.7, 0.7, 0.7, 0.9, 0.7, 0.7, 0.95, 0.7, 0.7]
    fired = [s for s, v in enumerate(values) if trigger.read(s, torch.tensor([v]))]
    # Steps 0, 1 are too early, 2 is the reference; a single low reading (3) is not enough; 6 fires;
    # .9 does not re-arm, .95 does.
    assert fired == [6, 13]
    trigger.refreshed(0, 14)
    assert [
        s for s in range(14, 20) if trigger.read(s, torch.tensor([0.5]))
    ] == []  # a new reference
    assert trigger.reference == [0.5]
    assert [s for s in range(20, 30) if trigger.read(s, torch.tensor([float("nan")]))] == []


def test_the_trigger_fires_no_earlier_than_the_least_interval_that_leaves_it_something_to_do():
    trigger = StalenessTrigger(1)
    trigger.refreshed(0, 0)
    energies = {20: 1.0}  # the reference, and nothing afterwards
    fired = [s for s in range(60) if trigger.read(s, torch.tensor([energies.get(s, 0.0)]))]
    assert fired == [LEAST_STEPS_TO_EARLY]


def test_trigger_reads_the_device_once_per_interval():
    class Counted:
        reads = 0

        def tolist(self):
            self.reads += 1
            return [0.5]

    energies, trigger = Counted(), StalenessTrigger(1, check_every=10)
    for step in range(100):
        trigger.read(step, energies)
    assert energies.reads == 10


def test_matrices_on_several_devices_are_read_together():
    class Matrix:
        redraws, settings = False, MatrixSettings()

        def __init__(self, device):
            self.name, self.device = device, device

        def smoothed_energy(self):
            return torch.zeros((), device=self.device)

    class Trigger:
        check_every = 1

        def read(self, step, smoothed):
            assert smoothed.device.type == "meta"
            return [1]

    policy = RankPolicy([[Matrix("meta")], [Matrix("cpu")]], None, 0, early=True)
    policy.trigger = Trigger()
    assert policy.stale(1) == [1]


def test_trigger_state_survives_a_round_trip():
    def halves(resume):
        trigger = StalenessTrigger(2, min_steps=5, check_every=5)
        trigger.refreshed(1, 8)
        fired = []
        for step in range(60):
            if resume and step == 37:
                saved, trigger = trigger.to_list(), StalenessTrigger(2, min_steps=5, check_every=5)
                trigger.load_list(saved)
            level = 0.9 if step < 33 else 0.4
            fired += [(step, i) for i in trigger.read(step, torch.tensor([level, 0.9]))]
        return fired, trigger.to_list()

    assert halves(resume=True) == halves(resume=False)
    assert halves(resume=True)[0] == [(40, 0)]
    with pytest.raises(ValueError, match="3 saved"):
        StalenessTrigger(2).load_list([[0.0] * 4] * 3)


@pytest.mark.parametrize(
    "wrong",
    [{"fraction": 0.0}, {"fraction": 1.0}, {"min_steps": 0}, {"check_every": 0}],
)
def test_trigger_settings_out_of_range(wrong):
    with pytest.raises(ValueError, match="legal"):
        StalenessTrigger(1, **wrong)
