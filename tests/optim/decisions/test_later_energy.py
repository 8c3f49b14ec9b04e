"""Ranks by what bases hold of the gradients that follow them."""

from itertools import pairwise
from math import log

import pytest
import torch
from hmt_runs import policy_like, settings_of
from low_rank_adamw import low_rank_adamw
from rank_sources import SHAPE, BatchNoise, Turned, captured, construct, train
from torch import nn

from hmt_deepspeed.optim.bases.search import SubspaceSearch
from hmt_deepspeed.optim.decisions.later_energy import (
    USUAL_EXPONENT,
    exponent_of,
    fading_of,
    later_curve,
    later_energies,
    own_energy,
)
from hmt_deepspeed.optim.decisions.policy import RankPolicy
from hmt_deepspeed.optim.decisions.rank_history import RankHistory, RankRecord
from hmt_deepspeed.optim.decisions.windows import Windows
from hmt_deepspeed.optim.rules.low_rank import LowRankMatrix


class Falling(BatchNoise):
    """The lasting directions' energies fall, each by a fifth of the one before."""

    def turn(self, seed):
        super().turn(seed)
        self.right = self.right * (0.8 ** torch.arange(self.directions).float()).sqrt()


# -- what is expected -------------------------------------------------------------------------------

CURVE = [
    1 - 0.9 * 2 ** (-rank / 16) for rank in range(65)
]  # what is missed halves with every 16 columns


def window(rank, candidates=(8, 16, 32, 48), step=0, curve=CURVE):
    seen = tuple(curve[c] for c in candidates if c <= rank)
    return RankRecord(
        step, rank, (), seen, fading_of(curve[rank // 2], curve[rank], rank - rank // 2)
    )


@pytest.mark.parametrize("rank", [8, 16, 32, 48])
def test_a_curve_is_what_was_seen_and_goes_on_as_it_fell(rank):
    expected = later_curve([window(rank)], (8, 16, 32, 48))
    assert expected == pytest.approx([CURVE[c] for c in (8, 16, 32, 48)])


def test_the_last_window_counts():
    """What a wider basis held when training began does not say what it would hold now."""
    early = window(48, curve=[0.3 * (1 - 2 ** (-rank / 16)) for rank in range(65)])
    expected = later_curve([early, window(16)], (8, 16, 32, 48))
    assert expected == pytest.approx([CURVE[c] for c in (8, 16, 32, 48)])


def test_a_whole_side_misses_nothing_and_half_of_the_rest_at_most_half():
    flat = RankRecord(0, 8, (), (0.2,), 0.0)
    assert later_curve([flat], (8, 16, 32)) == pytest.approx([0.2, 0.2, 0.2])
    assert later_curve([flat], (8, 36, 64), 64) == pytest.approx([0.2, 0.6, 1.0])


def test_there_is_no_curve_without_a_window():
    assert later_curve([], (4, 8)) is None
    assert later_curve([RankRecord(0, 4, (0.9, 0.95))], (4, 8)) is None
    assert later_curve([window(8), RankRecord(9, 64, (0.9,))], (8, 16)) is not None


def test_the_energy_of_a_spectrum_by_its_power_is_the_measured_one_and_rises_with_rank():
    own = [0.5, 0.8, 0.95, 0.999]
    exponent = exponent_of(own[1], 0.45)
    assert exponent == pytest.approx(log(0.55) / log(0.2))
    expected = later_energies(own, exponent)
    assert expected[1] == pytest.approx(0.45)
    assert expected == sorted(expected)
    assert all(e <= o for e, o in zip(expected, own, strict=True))
    assert later_energies([0.6, 0.4], 1.0) == [0.6, 0.6]


@pytest.mark.parametrize("exponent", [1.0, 0.3])
@pytest.mark.parametrize("wanted", [0.05, 0.7, 0.95])
def test_the_own_energy_is_where_the_expected_one_is_reached(exponent, wanted):
    own = own_energy(wanted, exponent)
    assert later_energies([own], exponent)[0] == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("own", "later", "exponent"),
    [(0.5, 0.5, 1.0), (0.5, 0.6, 1.0), (0.9, 0.0, 0.02), (0.0, 0.0, 1.0), (1.0, 1.0, 1.0)],
)
def test_exponents_stay_in_range(own, later, exponent):
    assert exponent_of(own, later) == exponent


def matrix_named(name, **settings):
    chosen = settings_of(rank_candidates=(4, 8, 16), **settings)
    device = torch.device("cpu")
    return LowRankMatrix(name, SHAPE, (0, SHAPE[0]), chosen, torch.float32, device)


def follow(matrix, inside, total):
    """Let a window's gradient have these squared norms, in the basis and as a whole."""
    stack = matrix.STACK([matrix])
    stack.follow(torch.tensor([inside]), torch.tensor([total]), 1.0, None)


def windows_of(*names):
    groups = [[matrix_named(name)] for name in names]
    histories = {name: RankHistory() for name in names}
    return Windows({i: group[0] for i, group in enumerate(groups)}, groups, histories)


def test_a_matrix_that_was_not_measured_is_taken_for_one_of_its_type():
    windows = windows_of("0.q", "1.q", "2.q", "0.up")
    windows.close({})
    q, unseen, up = (windows.leaders[i] for i in (0, 2, 3))
    assert windows.curve(q) is windows.curve(unseen) is None
    assert windows.exponent(q) == windows.exponent(up) == USUAL_EXPONENT
    for name, later in (("0.q", (0.2, 0.4)), ("1.q", (0.4, 0.8))):
        windows.histories[name].add(0, 8, [0.8, 0.9, 0.95])
        windows.histories[name].note_later(later, 0.1)
    windows.close({})
    assert windows.curve(q)[:2] == [0.2, 0.4]
    assert windows.curve(unseen)[:2] == pytest.approx([0.3, 0.6])
    assert windows.curve(up) is None
    powers = exponent_of(0.9, 0.4), exponent_of(0.9, 0.8)
    assert windows.exponent(q) == powers[0]
    assert windows.exponent(up) == sum(powers) / 2
    windows.histories["0.q"].add(
        200, 8, [0.8, 0.9, 0.95]
    )  # a curve stays until another window is seen
    windows.close({})
    assert windows.curve(q)[:2] == [0.2, 0.4]
    windows.histories["0.q"].note_later((0.3, 0.6), 0.1)
    windows.close({})
    assert windows.curve(q)[:2] == [0.3, 0.6]


def test_histories_keep_what_was_seen_and_read_those_that_have_not():
    kept = RankHistory()
    kept.add(0, 8, [0.8, 0.9, 0.95])
    kept.note_later([0.2, 0.4], 0.05)
    kept.add(50, 4, [0.8])
    assert RankHistory.from_list(kept.to_list()).records == kept.records
    old = RankHistory.from_list([[3, 4, [0.5, 0.7]], [5, 8, [0.5, 0.7], 0.7, 0.3]])
    assert old.records == [RankRecord(3, 4, (0.5, 0.7)), RankRecord(5, 8, (0.5, 0.7))]


def held(matrix, source, rank):
    """Share of fresh gradients in the first columns of the basis, of a core by its first r x r."""
    basis, shares = matrix.basis.float()[:, :rank], []
    for _ in range(20):
        gradient = source()
        gradient = gradient.t() if matrix.transposed else gradient
        inside = gradient @ basis
        if matrix.settings.projection == "two_sided":
            inside = matrix.left_basis.float().t() @ inside
        shares.append((inside.square().sum() / gradient.square().sum()).item())
    return sum(shares) / len(shares)


# -- in a run ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["lowrank_adamw", "muon"])
@pytest.mark.parametrize("projection", ["right", "left"])
@pytest.mark.parametrize("finder", ["randomized", "svd"])
def test_a_basis_of_noise_does_not_pass_for_one_that_captures(projection, finder, method):
    """Of its own gradient rank 4 holds more than half, most of it noise; of the next ones it holds less than a fifth
    and rank 8 less than two fifths."""
    ranks, shares = {}, {}
    for estimate in ("in_sample", "out_of_sample"):
        sources = [BatchNoise(12, 0.4, 2)]
        sources = [Turned(s) for s in sources] if projection == "left" else sources
        weights, optimizer = construct(
            sources,
            method=method,
            projection=projection,
            range_finder=finder,
            energy_threshold=0.5,
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
    assert shares["out_of_sample"] > 0.5


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
    optimizer = low_rank_adamw(
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
    records = [r for r in policy_like(optimizer).histories["w"].records if r.later is not None]
    later = sum(r.later[0] for r in records) / len(records)
    assert len(records) >= 12
    assert all(r.rank == 8 and r.captured[0] > 0.3 for r in records)
    # 512 of 4096 squared normals each: 0.008 standard deviation, and the probes' error is as small
    assert later == pytest.approx(8 / 64, abs=0.012)


def test_a_window_without_a_later_gradient_says_nothing():
    sources = [BatchNoise(12, 0.4, 2)]
    weights, optimizer = construct(sources, update_interval=3, energy_estimate="out_of_sample")
    for step in range(9):
        weights[0].grad = sources[0]() if step % 3 == 0 else None
        optimizer.step()
    records = policy_like(optimizer).histories["param_0"].records
    assert len(records) == 3
    assert all(record.later is None for record in records)
    assert optimizer.matrices["param_0"].smoothed_energy() > 0.1  # what is reported meanwhile


def test_members_that_share_a_basis_count_by_their_energy():
    large, small = matrix_named("a"), matrix_named("b")
    policy = RankPolicy([[large, small]], None, 0, out_of_sample=True)
    policy.close_windows({})  # nothing is known yet
    policy.choose(0, [0.96, 0.99], step=0)
    for matrix, inside, total in ((large, 6.0, 12.0), (small, 1.0, 4.0)):
        follow(matrix, inside, total)
    policy.close_windows({0: torch.tensor([4.0, 2.0, 1.0, 1.0])})
    latest = policy.histories["a"].latest
    assert latest.later == pytest.approx([7 / 16])
    assert latest.fading == pytest.approx(log((1 - 7 / 16 * 0.75) / (9 / 16)) / 2)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"projection": "left"},
        {"state_dtype": "bf16"},
        {"second_moment": "factored"},
        {"residual": "full"},
        {"projection": "two_sided"},
        {"method": "muon"},
    ],
    ids=str,
)
def test_a_window_shows_what_bases_of_smaller_ranks_hold(options):
    """Of gradients from directions of falling energy, in noise of their own: what was seen of the first columns is
    what the same gradients have there."""
    source = Falling(16, 0.5, 4)
    sources = [Turned(source)] if options.get("projection") == "left" else [source]
    weights, optimizer = construct(
        sources,
        rank_candidates=(2, 4, 8, 16),
        energy_threshold=0.99,  # the largest
        energy_estimate="out_of_sample",
        update_interval=100,
        **({} if "residual" in options else {"probes": 40}),
        **options,
    )
    truth = []
    for step, _ in enumerate(train(weights, optimizer, sources, 401)):
        matrix = optimizer.matrices["param_0"]
        if step % 100 == 60:
            truth.append([held(matrix, sources[0], rank) for rank in (2, 4, 8, 16)])
    seen = [r.later for r in policy_like(optimizer).histories["param_0"].records[1:] if r.later]
    assert len(seen) == 3
    for found, true in zip(seen, truth[1:], strict=True):
        # of a core only that of its columns is known; the rest is the smoothing of eight gradients at the end, and of some
        # thirty in a momentum, where what they have in common by chance counts
        within = 0.1 if "two_sided" in options.values() else 0.06 if "method" in options else 0.04
        assert found == pytest.approx(true, abs=within)
    assert all(a < b for a, b in pairwise(truth[-1]))


def test_who_gives_bytes_back_refreshes_first():
    """One refresh of both arrives at the plan, though the one whose rank rises comes first by its place."""
    rising, falling = matrix_named("a"), matrix_named("b")
    for matrix in (rising, falling):
        matrix.adopt(matrix.seeded_basis(8, 1))
    groups = [[rising], [falling]]
    budget = rising.moment_bytes_at(20) + rising.basis_bytes_at(20)
    policy = RankPolicy(groups, budget, 0, out_of_sample=True)
    assert policy.ordered([0, 1]) == [0, 1]  # nothing is known yet
    for index, (later, fading) in enumerate((((0.1, 0.2), 0.05), ((0.8, 0.81), 0.001))):
        policy.choose(index, [0.8, 0.9, 0.95], step=0)
        policy.histories["ab"[index]].note_later(later, fading)
    policy.close_windows({})
    assert policy.ordered([0, 1]) == [1, 0]
    for index in policy.ordered([0, 1]):
        width = policy.first_width(index)
        rank = policy.choose(index, [0.8, 0.9, 0.95][: (4, 8, 16).index(width) + 1], step=50)
        groups[index][0].adopt(rising.seeded_basis(rank, 2))
    assert (rising.rank, falling.rank) == (16, 4)


def test_known_energies_save_the_sketching_of_what_is_not_chosen(monkeypatch):
    """A budget must know all candidates' energies: where windows have shown them no wider basis is found."""
    widths = {}
    for estimate in ("in_sample", "out_of_sample"):
        found = widths[estimate] = []
        finish = SubspaceSearch.finish

        def counting(search, numbers, found=found, finish=finish):
            subspace = finish(search, numbers)
            found.append(subspace.basis.shape[1])
            return subspace

        monkeypatch.setattr(SubspaceSearch, "finish", counting)
        sources = [BatchNoise(4, 0.3, 2, seed=i) for i in range(3)]
        weights, optimizer = construct(
            sources, rank_budget=0.2, energy_estimate=estimate, update_interval=12
        )
        for _ in train(weights, optimizer, sources, 60):
            pass
        monkeypatch.undo()
    assert sum(widths["in_sample"][3:]) > 2 * sum(widths["out_of_sample"][3:])


def test_the_norm_of_a_group_is_of_all_its_gradients():
    """What grows is the second member; a wider sketch is predicted from the group's norm."""
    settings, device = settings_of(rank_candidates=(4, 8)), torch.device("cpu")
    group = [
        LowRankMatrix(name, SHAPE, (0, SHAPE[0]), settings, torch.float32, device) for name in "ab"
    ]
    for matrix, total in zip(group, (9.0, 16.0), strict=True):
        follow(matrix, 1.0, total)
    policy = RankPolicy([group], None, 0)
    policy.choose(0, [0.96, 0.99], step=0)
    assert policy.log_norms["a"] == pytest.approx(log(5.0))
