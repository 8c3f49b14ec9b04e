"""Ranks by what bases hold of the gradients that follow them."""

from math import log

import pytest
import torch
from test_policy import SHAPE, Source, captured, construct, orthonormal, train
from torch import nn

from hmt_deepspeed.optim.hmt import HMT
from hmt_deepspeed.optim.later_energy import (
    Exponents,
    exponent_of,
    later_energies,
    own_energy,
)
from hmt_deepspeed.optim.low_rank import LowRankMatrix
from hmt_deepspeed.optim.policy import RankPolicy
from hmt_deepspeed.optim.rank_history import RankHistory, RankRecord
from hmt_deepspeed.optim.settings import MatrixSettings


class BatchNoise(Source):
    """A share of every gradient lies in a few directions of its own, which the next one does not have."""

    def __init__(self, directions, share, noisy, shape=SHAPE, seed=0):
        super().__init__(directions, 0.0, shape, seed)
        self.share, self.noisy, self.draws = share, noisy, 0

    def __call__(self):
        self.draws += 1
        (m, n), k = self.shape, self.noisy
        right = orthonormal(n, k, 1000 * self.draws + self.draws)
        left = torch.randn(m, k, generator=self.generator) / (m * k) ** 0.5
        return (1 - self.share) ** 0.5 * super().__call__() + self.share**0.5 * left @ right.t()


class Turned:
    """The gradients of a source, transposed: what lasts is on the left."""

    def __init__(self, source):
        self.source, self.shape = source, source.shape[::-1]

    def __call__(self):
        return self.source().t()


# -- the law ----------------------------------------------------------------------------------------


def history(*records):
    found = RankHistory()
    for step, (rank, own, later) in enumerate(records):
        found.add(step, rank, [own], own)
        if later is not None:
            found.note_later(later)
    return found


def test_the_expected_energy_is_the_measured_one_at_the_rank_in_force_and_rises_with_rank():
    own = [0.5, 0.8, 0.95, 0.999]
    exponent = exponent_of(own[1], 0.45)
    assert exponent == pytest.approx(log(0.55) / log(0.2))
    expected = later_energies(own, [exponent] * 4)
    assert expected[1] == pytest.approx(0.45)
    assert expected == sorted(expected)
    assert all(e <= o for e, o in zip(expected, own, strict=True))


def test_a_rank_that_was_seen_to_capture_little_is_not_expected_to():
    """What one window shows of rank 8 does not become more by a look at rank 4."""
    exponents = Exponents({"w": history((8, 0.9, 0.2), (4, 0.6, 0.15))}).at("w", (4, 8, 16))
    expected = later_energies([0.6, 0.9, 1.0], exponents)
    assert expected[:2] == pytest.approx([0.15, 0.2])
    assert expected[2] < 0.8
    assert later_energies([0.6, 0.4], [1.0, 1.0]) == [0.6, 0.6]


@pytest.mark.parametrize("exponent", [1.0, 0.3])
@pytest.mark.parametrize("wanted", [0.05, 0.7, 0.95])
def test_the_own_energy_is_where_the_expected_one_is_reached(exponent, wanted):
    own = own_energy(wanted, [1.0, exponent])
    assert later_energies([own], [exponent])[0] == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("own", "later", "exponent"),
    [(0.5, 0.5, 1.0), (0.5, 0.6, 1.0), (0.9, 0.0, 0.02), (0.0, 0.0, 1.0), (1.0, 1.0, 1.0)],
)
def test_exponents_stay_in_range(own, later, exponent):
    assert exponent_of(own, later) == exponent


def test_a_matrix_that_was_not_measured_is_taken_for_one_of_its_type():
    histories = {name: RankHistory() for name in ("0.q", "1.q", "2.q", "0.v", "0.up")}
    assert Exponents(histories).at("0.q", (4, 8)) == [1.0, 1.0]
    histories["0.q"] = history((4, 0.9, 0.4), (4, 0.9, None))
    histories["1.q"] = history((8, 0.9, 0.1), (8, 0.9, 0.6))
    histories["0.v"] = history((4, 0.9, 0.8))
    q, other, v = (exponent_of(0.9, later) for later in (0.4, 0.6, 0.8))
    assert Exponents(histories).at("0.q", (4, 8)) == [q, q]
    assert Exponents(histories).at("2.q", (4, 8)) == [(q + other) / 2] * 2
    assert Exponents(histories).at("0.up", (4, 8)) == [sorted((q, other, v))[1]] * 2


def test_histories_keep_what_was_seen_and_read_those_that_have_not():
    kept = history((4, 0.9, 0.4), (4, 0.9, None))
    assert RankHistory.from_list(kept.to_list()).records == kept.records
    old = RankHistory.from_list([[3, 4, [0.5, 0.7]]])
    assert old.latest == RankRecord(3, 4, (0.5, 0.7))


# -- in a run ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("projection", ["right", "left"])
@pytest.mark.parametrize("finder", ["randomized", "svd"])
def test_a_basis_of_noise_does_not_pass_for_one_that_captures(projection, finder):
    """Rank 4 holds half of its own gradient, most of it noise, and a tenth or so of the next ones."""
    ranks, shares = {}, {}
    for estimate in ("in_sample", "out_of_sample"):
        sources = [BatchNoise(12, 0.4, 2)]
        sources = [Turned(s) for s in sources] if projection == "left" else sources
        weights, optimizer = construct(
            sources,
            projection=projection,
            range_finder=finder,
            energy_threshold=0.4,
            energy_estimate=estimate,
            update_interval=12,
        )
        for _ in train(weights, optimizer, sources, 40):
            pass
        matrix = optimizer.matrices["param_0"]
        ranks[estimate] = matrix.rank
        shares[estimate] = matrix.smoothed_energy().item()
    assert ranks == {"in_sample": 4, "out_of_sample": 16}
    assert shares["in_sample"] < 0.3
    assert shares["out_of_sample"] > 0.4


def test_a_budget_goes_to_what_later_gradients_have():
    """Equal spectra of single gradients: one of lasting directions, one of the noise of each."""
    shares = {}
    for estimate in ("in_sample", "out_of_sample"):
        sources = [BatchNoise(12, 0.0, 1, seed=i) for i in range(3)]
        sources += [BatchNoise(1, 0.95, 12, seed=i) for i in range(3, 6)]
        weights, optimizer = construct(
            sources, rank_budget=0.27, energy_estimate=estimate, update_interval=12
        )
        for _ in train(weights, optimizer, sources, 100):
            pass
        shares[estimate] = captured(optimizer, sources)
    assert shares["out_of_sample"] > shares["in_sample"] + 0.5


@pytest.mark.parametrize("interval", [2, 4])
def test_the_gradient_that_made_a_basis_is_no_later_one(interval):
    """Of independent noise a basis of 8 in 64 columns holds an eighth, and of the own gradient a third."""
    generator, weight = torch.Generator().manual_seed(0), nn.Parameter(torch.zeros(64, 64))
    optimizer = HMT(
        [("w", weight)],
        rank_candidates=(8, 16),
        energy_threshold=0.1,
        energy_estimate="out_of_sample",
        update_interval=interval,
        probes=40,
    )
    for _ in range(24 * interval):
        weight.grad = torch.randn(64, 64, generator=generator)
        optimizer.step()
    records = [r for r in optimizer._policy.histories["w"].records if r.later is not None]
    later = sum(r.later for r in records) / len(records)
    assert len(records) >= 12
    assert all(r.rank == 8 and r.own > 0.3 for r in records)
    # 512 of 4096 squared normals each: 0.008 standard deviation, and the probes' error is as small
    assert later == pytest.approx(8 / 64, abs=0.012)


def test_a_window_without_a_later_gradient_says_nothing():
    sources = [BatchNoise(12, 0.4, 2)]
    weights, optimizer = construct(
        sources, update_interval=3, energy_estimate="out_of_sample", early_refresh=False
    )
    for step in range(9):
        weights[0].grad = sources[0]() if step % 3 == 0 else None
        optimizer.step()
    records = optimizer._policy.histories["param_0"].records
    assert len(records) == 3
    assert all(record.later is None for record in records)
    assert optimizer.matrices["param_0"].smoothed_energy() > 0.1  # what is reported meanwhile


def test_members_that_share_a_basis_count_by_their_energy():
    settings, device = MatrixSettings(rank_candidates=(4, 8)), torch.device("cpu")
    large, small = (
        LowRankMatrix(name, SHAPE, (0, SHAPE[0]), settings, torch.float32, device)
        for name in ("a", "b")
    )
    policy = RankPolicy([[large, small]], None, 0, early=False, out_of_sample=True)
    policy.close_windows([0])  # nothing is known yet
    policy.choose(0, [0.96, 0.99], step=0)
    for matrix, inside, total in ((large, 6.0, 12.0), (small, 1.0, 4.0)):
        matrix.follow(torch.tensor(inside), torch.tensor(total), 1.0)
    policy.close_windows([0])
    latest = policy.histories["a"].latest
    assert latest.own == 0.96
    assert latest.later == pytest.approx(7 / 16)


def test_a_shared_basis_is_left_when_it_fails_any_member_that_weighs():
    """The leader's energy stays; nearly all of the group's gradient is another member's."""
    settings, device = MatrixSettings(rank=8), torch.device("cpu")
    group = [
        LowRankMatrix(name, SHAPE, (0, SHAPE[0]), settings, torch.float32, device) for name in "ab"
    ]
    policy, fired = RankPolicy([group], None, 0, early=True), []
    policy.choose(0, [0.9], step=0)
    for step in range(1, 120):
        for matrix, inside in zip(group, (0.9, 0.9 if step < 50 else 0.1), strict=True):
            weight = 1.0 if matrix is group[0] else 9.0
            matrix.follow(torch.tensor(inside * weight), torch.tensor(weight), 1.0)
        fired += [step] * len(policy.stale(step))
    assert len(fired) == 1
    assert 60 <= fired[0] <= 80


def test_the_norm_of_a_group_is_of_all_its_gradients():
    """What grows is the second member; a wider sketch is predicted from the group's norm."""
    settings, device = MatrixSettings(rank_candidates=(4, 8)), torch.device("cpu")
    group = [
        LowRankMatrix(name, SHAPE, (0, SHAPE[0]), settings, torch.float32, device) for name in "ab"
    ]
    for matrix, total in zip(group, (9.0, 16.0), strict=True):
        matrix.follow(torch.tensor(1.0), torch.tensor(total), 1.0)
    policy = RankPolicy([group], None, 0, early=False)
    policy.choose(0, [0.96, 0.99], step=0)
    assert policy.log_norms["a"] == pytest.approx(log(5.0))
