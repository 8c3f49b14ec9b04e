"""Rank decisions in a run: budget, full-rank fallback, and their resume."""

from itertools import pairwise

import pytest
import torch
from hmt_runs import (
    PAPERS_RULE,
    assert_same_state,
    assert_same_weights,
    policy_like,
    refreshes,
    settings_of,
    through_a_file,
)
from low_rank_adamw import low_rank_adamw
from rank_sources import (
    CANDIDATES,
    SHAPE,
    Source,
    captured,
    construct,
    heterogeneous,
    moment_and_basis_bytes,
    train,
)
from torch import nn

from hmt_deepspeed.optim.bases.rank_budget import allocate_ranks, total_captured
from hmt_deepspeed.optim.decisions.policy import RankPolicy
from hmt_deepspeed.optim.rules.low_rank import LowRankMatrix

# -- budget ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("share", "projection"),
    [
        *((share, "right") for share in (0.12, 0.2, 0.35, 1.0)),
        (0.12, "two_sided"),
        (0.35, "two_sided"),
    ],
)
def test_budget_is_never_exceeded(share, projection):
    sources = heterogeneous()
    weights, optimizer = construct(
        sources, rank_budget=share, update_interval=4, projection=projection
    )
    budget = share * sum(8 * w.numel() for w in weights)
    used = []
    for step, _ in enumerate(train(weights, optimizer, sources, 24)):
        if step == 12:  # the spectra change places: ranks must be taken back and given elsewhere
            sources[:] = sources[::-1]
        used.append(moment_and_basis_bytes(optimizer))
        assert used[-1] <= budget
        assert used[-1] == sum(
            policy_like(optimizer).bytes_at(i, m.rank)
            for i, m in enumerate(optimizer.matrices.values())
        )
    if projection == "right" and share < 1:
        assert used[-1] > 0.6 * budget  # and it is spent


def test_budget_captures_more_than_the_threshold_at_equal_bytes():
    """Large matrices of noise that no rank captures, and small ones of many directions."""
    shapes = [(96, 128)] * 2 + [(32, 40)] * 4
    kinds = [(3, 0.7)] * 2 + [(30, 0.02)] * 4
    results = {}
    for budget in (False, True):
        sources = [
            Source(*kind, shape, seed)
            for seed, (kind, shape) in enumerate(zip(kinds, shapes, strict=True))
        ]
        options = {"energy_threshold": 0.7}
        if budget:
            options = {"rank_budget": results[False][1] / sum(8 * m * n for m, n in shapes)}
        weights, optimizer = construct(sources, update_interval=5, **options)
        for _ in train(weights, optimizer, sources, 25):
            pass
        ranks = [m.rank for m in optimizer.matrices.values()]
        results[budget] = captured(optimizer, sources), moment_and_basis_bytes(optimizer), ranks
    assert results[False][2][:2] == [32, 32]  # bytes that capture little
    assert results[True][1] <= results[False][1]
    assert results[True][0] > results[False][0] + 0.5
    assert sum(results[True][2][2:]) > sum(results[False][2][2:]) + 32


def test_budget_where_the_largest_candidate_is_the_whole_side():
    """Full-rank AdamW has no basis: rank 40 takes fewer bytes than rank 36."""
    sources = [Source(d, 0.02, (40, 40), i) for i, d in enumerate((30, 4, 30))]
    weights, optimizer = construct(
        sources, rank_candidates=(8, 36, 64), rank_budget=0.8, update_interval=3
    )
    for _ in train(weights, optimizer, sources, 20):
        assert moment_and_basis_bytes(optimizer) <= 0.8 * 3 * 8 * 1600
    assert [m.rank for m in optimizer.matrices.values()] == [40, 8, 40]


STEEP, FLAT, LATE = (0.3, 0.5, 0.7, 0.85), (0.62, 0.65, 0.68, 0.71), (0.1, 0.2, 0.4, 0.8)


def refresh_by_curve(curves, rounds, jitter=0.0, share=0.3):
    """Refresh matrices of known captured energies in turn; their ranks after every round."""
    optimizer = construct([Source(4, 0.1) for _ in curves], rank_budget=share)[1]
    optimizer.describe()
    draw, policy, found = torch.Generator().manual_seed(0), policy_like(optimizer), []
    for step in range(rounds):
        for i, (matrix, curve) in enumerate(zip(optimizer.matrices.values(), curves, strict=True)):
            noise = jitter * (2 * torch.rand(len(curve), generator=draw) - 1)
            energies = (torch.tensor(curve) + noise).sort().values.tolist()
            rank = policy.choose(i, energies, step)
            matrix.adopt(matrix.seeded_basis(rank, 1))
        found.append([m.rank for m in optimizer.matrices.values()])
    return found, [policy._spectrum(i, curve) for i, curve in enumerate(curves)], policy.rank_budget


@pytest.mark.parametrize(
    "curves",
    [[STEEP] * 4, [FLAT] * 28, [LATE] * 28, [STEEP, FLAT, LATE, LATE] * 5],
    ids=["steep", "flat", "late", "mixed"],
)
def test_refreshes_arrive_at_the_best_plan_and_stay_there(curves):
    """Also where nothing tells the matrices apart, so that each could leave the bytes to another."""
    found, spectra, budget = refresh_by_curve(curves, rounds=8)
    reached, _ = total_captured(spectra, found[-1])
    best, _ = total_captured(spectra, allocate_ranks(spectra, budget))
    assert reached == pytest.approx(best, abs=1e-9)
    assert found[-3] == found[-2] == found[-1]


def test_ranks_under_a_budget_do_not_follow_the_noise():
    """Spectra of single batches differ by a percent: a twentieth of all refreshes may change a rank."""
    found, *_ = refresh_by_curve([STEEP, FLAT] * 10, rounds=10, jitter=0.01)
    changes = sum(a != b for old, new in pairwise(found[3:]) for a, b in zip(old, new, strict=True))
    assert changes <= 6 * 20 / 20


@pytest.mark.parametrize("curve", [STEEP, LATE])
def test_the_first_to_refresh_leaves_room_for_the_others(curve):
    """They are taken to be like it: the first round of refreshes arrives at the best plan already."""
    found, spectra, budget = refresh_by_curve([curve] * 6, rounds=1)
    reached, _ = total_captured(spectra, found[0])
    assert reached == pytest.approx(total_captured(spectra, allocate_ranks(spectra, budget))[0])


def test_budget_below_the_smallest_candidates_is_refused():
    sources = heterogeneous()
    weights, optimizer = construct(sources, rank_budget=0.05)
    weights[0].grad = sources[0]()
    with pytest.raises(ValueError, match=r"rank_budget is 0\.05.*legal: at least 0\.1"):
        optimizer.step()


# -- full rank ------------------------------------------------------------------------------------


def test_full_rank_is_adamw_across_refreshes_and_comes_back():
    """Noise in all directions, of entries of very different size; then three directions."""
    noise, thin = Source(48, 0.9), Source(3, 0.0)
    size = torch.logspace(0, -4, 64)
    hyper = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
    torch.manual_seed(0)
    start = torch.randn(SHAPE)
    ours, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    optimizer = low_rank_adamw(
        [ours],
        full_rank_budget=1.0,
        rank_candidates=CANDIDATES[:2],
        update_interval=4,
        scale=1.0,
        **{**PAPERS_RULE, "energy_threshold": 0.999},
        **hyper,
    )
    adamw = torch.optim.AdamW([theirs], **hyper)
    for _ in range(14):
        gradient = noise() * size
        ours.grad, theirs.grad = gradient.clone(), gradient.clone()
        optimizer.step()
        adamw.step()
    assert refreshes(optimizer)["param_0"] == 4
    assert (ours - start).abs().max() > 0.05
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    matrix = optimizer.matrices["param_0"]
    assert matrix.full_rank
    assert matrix.basis is None
    assert matrix.state_bytes() == 4 * (2 * ours.numel() + 64 + 1)
    for _ in range(4):
        ours.grad = thin()
        optimizer.step()
    assert (matrix.rank, matrix.full_rank) == (4, False)
    assert matrix.moments.exp_avg.shape == (48, 4)
    for _ in range(4):
        ours.grad = noise()
        optimizer.step()
    assert matrix.full_rank
    assert ours.isfinite().all()


@pytest.mark.parametrize(("share", "expected"), [(0.0, 0), (0.3, 1), (0.5, 2), (0.74, 2), (1.0, 4)])
def test_full_rank_stays_within_its_bytes(share, expected):
    sources = [Source(48, 0.9, seed=i) for i in range(4)]
    weights, optimizer = construct(sources, full_rank_budget=share, update_interval=3)
    for _ in train(weights, optimizer, sources, 12):
        full = [m for m in optimizer.matrices.values() if m.full_rank]
        taken = sum(m.state_bytes() - m.moments.evidence.nbytes - 4 for m in full)
        assert taken <= share * sum(8 * w.numel() for w in weights)
    assert len(full) == expected


def test_a_whole_side_among_the_candidates_is_no_fallback():
    """It takes nothing of the bytes that fallbacks may."""
    sources = [Source(16, 0.9, shape=(16, 16)), Source(48, 0.9)]
    share = 48 * 64 / (48 * 64 + 16 * 16)
    options = {"rank_candidates": (8, 16), "full_rank_budget": share, "update_interval": 3}
    weights, optimizer = construct(sources, energy_threshold=0.999, **options)
    for _ in train(weights, optimizer, sources, 12):
        pass
    small, large = optimizer.matrices.values()
    assert (small.rank, small.full_rank) == (16, True)
    assert large.full_rank


def test_energies_of_other_candidates_are_forgotten():
    options = {"rank_budget": 0.6, "update_interval": 3}
    sources = heterogeneous()
    weights, optimizer = construct(sources, **options)
    for _ in train(weights, optimizer, sources, 4):
        pass
    saved = optimizer.state_dict()
    measured = sum(matrix.measured for matrix in optimizer.matrices.values())
    assert measured
    for candidates, known in ((CANDIDATES, measured), (CANDIDATES[1:], 0)):
        fresh = construct(sources, **{**options, "rank_candidates": candidates})[1]
        fresh.load_state_dict(saved)
        histories = policy_like(fresh).histories.values()
        assert sum(history.latest is not None for history in histories) == known


def test_full_rank_does_not_flip_at_the_threshold():
    optimizer = construct([Source(4, 0.1)], full_rank_budget=1.0, energy_threshold=0.9)[1]
    optimizer.describe()
    (matrix,) = optimizer.matrices.values()
    policy = policy_like(optimizer)

    def rank_at(energy):
        rank = policy.choose(0, [0.2, 0.4, 0.6, energy], 0)
        matrix.adopt(None if rank == 64 else matrix.seeded_basis(rank, 1))
        return rank

    assert rank_at(0.901) == 32  # not measured before: the threshold itself
    assert [rank_at(e) for e in (0.899, 0.901, 0.895, 0.901)] == [32] * 4
    assert rank_at(0.885) == 64
    assert [rank_at(e) for e in (0.899, 0.905, 0.901)] == [64] * 3
    assert rank_at(0.915) == 32


def test_a_single_candidate_may_fall_back_to_full_rank_too():
    sources = [Source(48, 0.9)]
    for share, expected in ((1.0, 64), (0.0, 8)):
        weights, optimizer = construct(sources, rank_candidates=(8,), full_rank_budget=share)
        for _ in train(weights, optimizer, sources, 2):
            pass
        assert next(iter(optimizer.matrices.values())).rank == expected


def test_the_step_keeps_a_given_scale_at_full_rank():
    steps = {}
    for share in (0.0, 1.0):
        weight = nn.Parameter(torch.zeros(256, 64))
        options = {**PAPERS_RULE, "energy_threshold": 0.999}
        options |= {"rank_candidates": (60,), "full_rank_budget": share}
        optimizer = low_rank_adamw([weight], lr=1e-2, scale=0.25, residual="none", **options)
        draw = torch.Generator().manual_seed(0)
        for _ in range(4):
            before = weight.detach().clone()
            weight.grad = torch.randn(256, 64, generator=draw)
            optimizer.step()
        steps[share] = (weight.detach() - before).norm().item()
        assert next(iter(optimizer.matrices.values())).full_rank == bool(share)
    ratio = (64 / 60) ** 0.5  # every direction moves as far
    assert steps[1.0] == pytest.approx(ratio * steps[0.0], rel=0.05)


# -- resume ---------------------------------------------------------------------------------------

MODES = {
    "threshold": {},
    "budget": {"rank_budget": 0.3},
    "out of sample": {"energy_estimate": "out_of_sample", "energy_threshold": 0.6},
    "budget, out of sample": {"energy_estimate": "out_of_sample", "rank_budget": 0.3},
    "full rank": {"full_rank_budget": 0.5},
    "default": {"rank_candidates": "auto", "energy_threshold": 0.7, "rank_budget": "auto"}
    | {"energy_estimate": "out_of_sample"},
    "fixed": {"rank": 8},
}


@pytest.mark.parametrize("mode", MODES)
def test_decisions_resume_bit_exactly(mode):
    """The saved steps lie before and after a change of the data, between and beside refreshes."""

    def stream():
        sources = [Source(12, 0.05, seed=1), Source(4, 0.2, seed=2), Source(40, 0.5, seed=3)]
        for step in range(60):
            if step == 22:
                sources[0].turn(seed=50)
            yield [source() for source in sources]

    def run(weights, optimizer, gradients):
        for step in gradients:
            for weight, gradient in zip(weights, step, strict=True):
                weight.grad = gradient.clone()
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()

    def fresh():
        rule = {**PAPERS_RULE, "rank_candidates": CANDIDATES}
        options = {"update_interval": 25, **({} if mode == "fixed" else rule), **MODES[mode]}
        weights = [nn.Parameter(torch.zeros(SHAPE)) for _ in range(3)]
        return weights, low_rank_adamw(weights, lr=1e-2, **options)

    data = list(stream())
    weights, optimizer = fresh()
    saved, done = {}, 0
    for after in (9, 33, 41):
        run(weights, optimizer, data[done:after])
        state = {"weights": [w.detach() for w in weights], **optimizer.state_dict()}
        saved[after], done = through_a_file(state), after
    run(weights, optimizer, data[done:])
    assert max(refreshes(optimizer).values()) >= 3
    ours = optimizer.state_dict()
    for after, state in saved.items():
        again, resumed = fresh()
        for weight, value in zip(again, state.pop("weights"), strict=True):
            weight.data.copy_(value)
        resumed.load_state_dict(state)
        run(again, resumed, data[after:])
        assert_same_weights(nn.ParameterList(weights), nn.ParameterList(again))
        theirs = resumed.state_dict()
        assert ours["hmt"] == theirs["hmt"]
        for index, known in ours["state"].items():
            assert_same_state(known, theirs["state"][index])


def test_adding_a_group_keeps_what_is_known_of_the_others():
    sources = [Source(14, 0.01)]
    weights, optimizer = construct(sources)
    for _ in train(weights, optimizer, sources, 3):
        pass
    before = optimizer.state_dict()["hmt"]["policy"]["histories"]["param_0"]
    assert before
    late = nn.Parameter(torch.zeros(SHAPE))
    optimizer.add_param_group({"params": [late]})
    for _ in train([*weights, late], optimizer, [*sources, sources[0]], 1):
        pass
    assert optimizer.state_dict()["hmt"]["policy"]["histories"]["param_0"] == before


def test_equal_matrices_do_not_swap_ranks_for_noise():
    """A budget for one large and one small rank: whoever has the large one keeps it."""
    settings = settings_of(rank_candidates=(4, 8), probes=0, residual="none")
    groups = []
    for name in ("a", "b"):
        shape, device = (64, 32), torch.device("cpu")
        groups.append([LowRankMatrix(name, shape, (0, 64), settings, torch.float32, device)])
    sizes = [2 * 64 * rank * 4 + 32 * rank * 4 for rank in (4, 8)]
    policy = RankPolicy(groups, sum(sizes), 0)

    def refresh(index, energies, step):
        rank = policy.choose(index, energies, step)
        groups[index][0].adopt(torch.eye(32)[:, :rank])
        return rank

    assert refresh(0, [0.5, 0.7], 0) == 8
    assert refresh(1, [0.5, 0.7], 1) == 4
    for step in range(2, 20, 2):  # b seems better by a hair
        assert refresh(1, [0.5, 0.702], step) == 4
        assert refresh(0, [0.5, 0.7], step + 1) == 8
    refresh(1, [0.2, 0.9], 20)  # a real difference
    assert refresh(0, [0.69, 0.7], 21) == 4
    assert refresh(1, [0.2, 0.9], 22) == 8
