"""The default rank rule: candidates by side, energies of later gradients, a budget of bytes that ends at the threshold."""

import random
from itertools import pairwise, product

import pytest
import torch
from block_runs import Block, block_batches, train_block
from hmt_runs import policy_like, settings_of
from low_rank_adamw import low_rank_adamw
from rank_sources import SHAPE, BatchNoise, Source, Turned, moment_and_basis_bytes, train
from torch import nn

from hmt_deepspeed.optim.bases.rank import (
    SIDE_SHARES,
    candidates_of_side,
    legal_candidates,
    select_rank,
)
from hmt_deepspeed.optim.decisions.policy import LEAST_GAIN, USUAL_BUDGET, RankPolicy
from hmt_deepspeed.optim.rules.low_rank import LowRankMatrix

# -- candidates -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("side", "expected"),
    [
        (1, (1,)),
        (7, (7,)),
        (8, (8,)),
        (20, (8, 16)),
        (64, (8, 16, 24, 32)),
        (77, (16, 24, 32, 40)),
        (100, (16, 24, 32, 40, 56)),
        (4096, (512, 768, 1024, 1536, 2048)),
    ],
)
def test_candidates_of_a_side(side, expected):
    assert candidates_of_side(side) == expected
    assert (
        legal_candidates(None, side, side + 3) == legal_candidates(None, 2 * side, side) == expected
    )


def test_candidates_of_any_side_are_shares_of_it_in_multiples_of_8():
    for side in range(1, 600):
        ranks = candidates_of_side(side)
        assert all(a < b for a, b in pairwise(ranks))
        assert all(rank % 8 == 0 or rank == side for rank in ranks)
        assert all(
            min(side, share * side) <= rank < share * side + 8
            for share, rank in (
                (share, min(r for r in ranks if r >= share * side)) for share in SIDE_SHARES
            )
        )


# -- the budget ends at the threshold ----------------------------------------------------------------

CANDIDATES = (2, 4, 8, 16)


def policy_of(count, budget, thresholds):
    groups = []
    for i, threshold in zip(range(count), thresholds, strict=True):
        settings = settings_of(rank_candidates=CANDIDATES, energy_threshold=threshold)
        shape = (48, 32) if i % 2 else (32, 24)
        matrix = LowRankMatrix(
            f"{i}.w", shape, (0, shape[0]), settings, torch.float32, torch.device("cpu")
        )
        groups.append([matrix])
    return RankPolicy(groups, budget, 0)


def refreshed(policy, curves, rounds):
    """Ranks after rounds in which every matrix refreshes."""
    for step in range(rounds):
        for i, (group, curve) in enumerate(zip(policy.groups, curves, strict=True)):
            rank = policy.choose(i, curve, step)
            group[0].adopt(group[0].seeded_basis(rank, 1))
    return [group[0].rank for group in policy.groups]


def brute_force(policy, curves, budget):
    """The most that any ranks capture within the budget, none above the one that reaches its threshold."""
    legal = []
    for group, curve in zip(policy.groups, curves, strict=True):
        enough = select_rank(curve, CANDIDATES, group[0].settings.energy_threshold)
        legal.append([place for place, rank in enumerate(CANDIDATES) if rank <= enough])
    best = 0.0
    for places in product(*legal):
        taken = sum(policy.bytes_at(i, CANDIDATES[place]) for i, place in enumerate(places))
        if taken <= budget:
            best = max(best, sum(curve[place] for curve, place in zip(curves, places, strict=True)))
    return best


def test_a_budget_goes_no_further_than_the_thresholds():
    draw, ended_early = random.Random(0), 0
    for _ in range(60):
        count = draw.randint(2, 4)
        curves = [sorted(draw.random() for _ in CANDIDATES) for _ in range(count)]
        policy = policy_of(count, 0, [draw.choice((0.5, 0.7, 0.9)) for _ in range(count)])
        most = sum(policy.bytes_at(i, CANDIDATES[-1]) for i in range(count))
        budget = policy.rank_budget = draw.randint(policy.least_bytes(), most)
        ranks = refreshed(policy, curves, rounds=6)
        assert policy.taken_bytes() <= budget
        energies = []
        for group, curve, rank in zip(policy.groups, curves, ranks, strict=True):
            assert rank <= select_rank(curve, CANDIDATES, group[0].settings.energy_threshold)
            energies.append(curve[CANDIDATES.index(rank)])
        best = brute_force(policy, curves, budget)
        largest_step = max(b - a for curve in curves for a, b in pairwise(curve))
        assert best + 1e-9 >= sum(energies) >= best - largest_step - LEAST_GAIN * count
        next_step = [
            policy.bytes_at(i, CANDIDATES[CANDIDATES.index(rank) + 1]) - policy.bytes_at(i, rank)
            for i, rank in enumerate(ranks)
            if rank < CANDIDATES[-1]
        ]
        ended_early += bool(next_step) and policy.taken_bytes() + min(next_step) <= budget
    assert ended_early > 10  # bytes were left that could have been spent


def test_bytes_for_all_thresholds_give_every_matrix_its_own():
    draw = random.Random(1)
    for _ in range(30):
        curves = [sorted(draw.random() for _ in CANDIDATES) for _ in range(3)]
        thresholds = [draw.choice((0.5, 0.7, 0.9)) for _ in curves]
        policy = policy_of(3, 10**9, thresholds)
        # a step that gains less than LEAST_GAIN is not made
        curves = [[round(e / 0.03) * 0.03 + 0.03 * i for i, e in enumerate(c)] for c in curves]
        expected = [select_rank(c, CANDIDATES, t) for c, t in zip(curves, thresholds, strict=True)]
        assert refreshed(policy, curves, rounds=2) == expected


def test_full_rank_that_takes_fewer_bytes_is_not_passed_over_for_the_threshold():
    """Rank 28 of 32 columns reaches the threshold, and takes more than AdamW without a basis."""
    settings = settings_of(rank_candidates=(8, 28, 32), energy_threshold=0.7)
    matrix = LowRankMatrix("w", (32, 32), (0, 32), settings, torch.float32, torch.device("cpu"))
    policy = RankPolicy([[matrix]], 8 * 32 * 32, 0)
    assert policy.bytes_at(0, 28) > policy.bytes_at(0, 32)
    assert policy.choose(0, [0.3, 0.9, 1.0], 0) == 32


# -- the usual budget in a run -----------------------------------------------------------------------


def stacked(**options):
    """Matrices of unequal shapes and spectra, trained on gradients that no candidate holds."""
    shapes = [(128, 128), (192, 128), (128, 192), (96, 77)]
    sources = [
        Source(d, 0.3, shape, i)
        for i, (d, shape) in enumerate(zip((90, 20, 60, 5), shapes, strict=True))
    ]
    weights = [nn.Parameter(torch.zeros(s.shape)) for s in sources]
    optimizer = low_rank_adamw(
        weights, lr=1e-3, update_interval=4, energy_threshold=0.95, **options
    )
    for step, _ in enumerate(train(weights, optimizer, sources, 25)):
        if step == 12:
            sources[:] = [
                Source(d, 0.3, s.shape, 9) for d, s in zip((5, 60, 20, 70), sources, strict=True)
            ]
        yield optimizer


def sharing():
    model = Block()
    options = {"lr": 1e-2, "update_interval": 3, "share_basis": True, "energy_threshold": 0.99}
    optimizer = low_rank_adamw(model, **options)
    for batch in block_batches(20):
        train_block(model, optimizer, [batch])
        yield optimizer


RUNS = {
    "right": stacked,
    "auto side": lambda: stacked(projection="auto"),
    "two sides": lambda: stacked(projection="two_sided"),
    "factored": lambda: stacked(second_moment="factored"),
    "bf16": lambda: stacked(state_dtype="bf16"),
    "int8": lambda: stacked(state_dtype="int8"),
    "in sample": lambda: stacked(energy_estimate="in_sample"),
    "sharing": sharing,
}


@pytest.mark.parametrize("run", RUNS)
def test_moments_and_bases_never_take_more_than_the_usual_share_of_adamws(run):
    used, ranks = [], set()
    for optimizer in RUNS[run]():
        matrices = optimizer.matrices.values()
        adamw = sum(2 * 4 * m.shape[0] * m.shape[1] for m in matrices)
        used.append(moment_and_basis_bytes(optimizer) / adamw)
        assert used[-1] <= USUAL_BUDGET
        ranks.add(tuple(m.rank for m in matrices))
    assert len(ranks) > 1
    if run in ("right", "auto side", "two sides", "in sample", "sharing"):
        assert max(used) > 0.75 * USUAL_BUDGET  # and it is what ends them
    else:  # of small states the largest candidates take less
        assert any(m.rank == m.candidates[-1] for m in matrices)


def test_ranks_that_are_given_take_nothing_of_what_others_choose_within():
    sources = [Source(64, 0.5, (64, 64), seed=i) for i in range(3)]
    weights = {name: nn.Parameter(torch.zeros(64, 64)) for name in "abc"}
    options = {"rank": 40, "module_rules": {"c": {"rank": "auto", "energy_threshold": 0.99}}}
    optimizer = low_rank_adamw(list(weights.items()), lr=1e-3, update_interval=3, **options)
    for _ in train(weights.values(), optimizer, sources, 8):
        pass
    policy, chosen = policy_like(optimizer), optimizer.matrices["c"]
    dense = 8 * 64 * 64
    assert policy.rank_budget == 2 * policy.bytes_at(0, 40) + int(USUAL_BUDGET * dense)
    assert chosen.rank > chosen.candidates[0]
    assert chosen.state_bytes() - chosen.moments.evidence.nbytes <= USUAL_BUDGET * dense


def test_where_no_rank_is_chosen_there_is_no_budget():
    for options in ({"rank": 8}, {"method": "apollo"}):
        optimizer = low_rank_adamw([nn.Parameter(torch.zeros(SHAPE))], **options)
        optimizer.describe()
        assert policy_like(optimizer).rank_budget is None


def test_matrices_too_narrow_for_the_usual_share_have_what_the_smallest_candidates_take():
    optimizer = low_rank_adamw([nn.Parameter(torch.zeros(6, 6)), nn.Parameter(torch.zeros(12, 10))])
    optimizer.describe()
    policy = policy_like(optimizer)
    assert policy.rank_budget == policy.taken_bytes() == policy.least_bytes()


# -- before a window is seen -----------------------------------------------------------------------


def held_by(basis, source):
    shares = [
        ((g @ basis).square().sum() / g.square().sum()).item()
        for g in (source() for _ in range(20))
    ]
    return sum(shares) / len(shares)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    ("kind", "threshold", "candidates"),
    [
        ((20, 0.2, 4), 0.7, "auto"),
        ((12, 0.4, 2), 0.35, (4, 8, 16)),
    ],
)
def test_steps_of_few_tokens_are_not_taken_at_their_first_gradients_word(
    kind, threshold, candidates, transposed
):
    """A batch's own noise is of low rank, and its basis holds it; the ranks that later gradients ask for are larger."""
    for seed in range(3):
        first = {}
        for estimate in ("in_sample", "out_of_sample"):
            source = BatchNoise(*kind, seed=seed)
            source = Turned(source) if transposed else source
            weight = nn.Parameter(torch.zeros(source.shape))
            options = {"energy_threshold": threshold, "rank_candidates": candidates}
            if estimate == "in_sample":
                options |= {"energy_estimate": "in_sample"}
            optimizer = low_rank_adamw(
                [weight],
                lr=1e-3,
                projection="left" if transposed else "right",
                rank_budget=None,
                **options,
            )
            gradient = weight.grad = source()
            optimizer.step()
            matrix = optimizer.matrices["param_0"]
            first[estimate] = matrix.rank
        oriented = gradient.t() if transposed else gradient
        later = BatchNoise(*kind, seed=seed)
        directions = torch.linalg.svd(oriented, full_matrices=False).Vh.t()
        energies = [held_by(directions[:, :rank], later) for rank in matrix.candidates]
        asked_for = select_rank(energies, matrix.candidates, threshold)
        assert first["in_sample"] < asked_for == first["out_of_sample"], (first, energies)


@pytest.mark.parametrize(("rank", "side", "found"), [(0.25, 64, 16), (0.1, 64, 8), (0.5, 20, 16)])
@pytest.mark.parametrize("method", ["lowrank_adamw", "apollo"])
def test_a_rank_may_be_a_share_of_the_smaller_side(method, rank, side, found):
    model = nn.Linear(side, 3 * side, bias=False)
    optimizer = low_rank_adamw(model, lr=1e-3, method=method, rank=rank)
    (matrix,) = optimizer.matrices.values()
    assert matrix.candidates == (found,)


@pytest.mark.parametrize("rank", [1.0, 0.0, -0.5, True, "half"])
def test_another_share_is_refused(rank):
    with pytest.raises(ValueError, match=r"hmt\.optimizer\.rank: got .*a number > 0 and < 1"):
        low_rank_adamw(nn.Linear(8, 8), lr=1e-3, rank=rank)


def test_all_matrices_are_embeddings_and_heads_too_but_not_adapters():
    model = nn.ModuleDict(
        {"embed": nn.Embedding(40, 16), "lora_A": nn.Linear(16, 16), "lm_head": nn.Linear(16, 40)}
    )
    rows = {
        row.name: row
        for row in low_rank_adamw(model, lr=1e-3, rank=0.5, target_modules="all").describe()
    }
    low = {name for name, row in rows.items() if row.rule == "lowrank_adamw"}
    assert low == {"embed.weight", "lm_head.weight"}
    assert "lora_" in rows["lora_A.weight"].reason
