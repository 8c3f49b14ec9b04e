"""One basis for the linears that read the same input: who shares, what it saves, whose basis it is."""

import copy

import pytest
import torch
from block_runs import KV, Block, D, block_batches, loss_of, train_block
from hmt_runs import PAPERS_RULE, assert_same_state, assert_same_weights, refreshes, through_a_file
from low_rank_adamw import low_rank_adamw
from torch import nn

from hmt_deepspeed.optim.rules.low_rank import LowRankMatrix

RANK, PROBES = 4, 8
GROUPS = [["q.weight", "k.weight", "v.weight"], ["gate.weight", "up.weight"]]
OPTIONS = {"lr": 1e-2, "rank": RANK, "update_interval": 5, "share_basis": True}


def columns_of(optimizer, *names):
    return {id(optimizer.matrices[f"{name}.weight"].columns) for name in names}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"rank": "auto", "rank_candidates": (2, 4, 8, 24)},
        {"second_moment": "factored"},
    ],
)
def test_readers_of_one_input_share_one_columns_object(fields):
    model = Block()
    optimizer = low_rank_adamw(model, **{**OPTIONS, **fields})
    train_block(model, optimizer, block_batches(12))
    assert optimizer.state_dict()["hmt"]["groups"] == GROUPS
    assert len(columns_of(optimizer, "q", "k", "v")) == 1
    assert len(columns_of(optimizer, "gate", "up")) == 1
    assert len(columns_of(optimizer, "q", "gate", "o", "down")) == 4
    ranks = {name: m.rank for name, m in optimizer.matrices.items()}
    assert ranks["q.weight"] == ranks["k.weight"] == ranks["v.weight"]
    for name, matrix in optimizer.matrices.items():
        assert matrix.moments.exp_avg.shape == (matrix.shape[0], matrix.rank), name
        assert matrix.measured


def test_bytes_saved_are_those_of_the_bases_not_kept():
    sizes = {}
    for share in (True, False):
        model = Block()
        optimizer = low_rank_adamw(model, **{**OPTIONS, "share_basis": share})
        train_block(model, optimizer, block_batches(4))
        sizes[share] = sum(row.state_bytes for row in optimizer.describe())
    # Two of q, k, v and one of gate, up keep no n x r basis of their own.
    assert sizes[False] - sizes[True] == 3 * D * RANK * 4


def saved_products(model, x):
    """Bytes of saved tensors that are as wide as a projection, each storage once."""
    kept = {}

    def pack(tensor):
        if tensor.dim() == 2 and tensor.shape[1] == RANK + PROBES:
            storage = tensor.untyped_storage()
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = model(x)
    del out
    return sum(size for size, _ in kept.values())


def test_one_product_is_saved_per_group():
    saved, (x, _) = {}, next(block_batches(1, 64))
    for share in (True, False):
        model = Block()
        optimizer = low_rank_adamw(
            model, **{**OPTIONS, "share_basis": share, "update_interval": 100}
        )
        train_block(model, optimizer, block_batches(12))
        assert all(site.active for site in optimizer._patches.projected.values())
        saved[share] = saved_products(model, x)
    one = 64 * (RANK + PROBES) * 4
    assert saved[True] == 4 * one  # q k v, o, gate up, down
    assert saved[False] == 7 * one


def test_the_basis_is_that_of_the_stacked_gradient():
    model = Block()
    optimizer = low_rank_adamw(
        model, **{**OPTIONS, "max_full_gradient_bytes": 10**6, "range_finder": "svd", "rank": 3}
    )
    first, second = block_batches(2)
    train_block(model, optimizer, [first])  # shows who shares; all refresh in the next step
    twin = copy.deepcopy(model)
    loss_of(twin, *second).backward()
    train_block(model, optimizer, [second])
    for group in (*GROUPS, ["o.weight"], ["down.weight"]):
        stacked = torch.cat([twin.get_parameter(name).grad for name in group])
        _, _, right = torch.linalg.svd(stacked)
        exact = right[:3].t()
        for name in group:
            basis = optimizer.matrices[name].basis
            torch.testing.assert_close(basis @ basis.t(), exact @ exact.t(), atol=1e-3, rtol=0)
    alone = torch.linalg.svd(twin.k.weight.grad)[2][:3].t()
    shared = optimizer.matrices["k.weight"].basis
    assert (alone @ alone.t() - shared @ shared.t()).abs().max() > 0.05


def test_columns_are_filled_once_for_all_that_share_them(monkeypatch):
    model, filled, install = Block(), [], LowRankMatrix._install
    optimizer = low_rank_adamw(model, **{**OPTIONS, "max_full_gradient_bytes": 10**6})
    train_block(model, optimizer, block_batches(1))

    def noted(matrix, basis):
        filled.append(matrix.name)
        install(matrix, basis)

    monkeypatch.setattr(LowRankMatrix, "_install", noted)
    train_block(model, optimizer, block_batches(1))
    assert filled == ["q.weight", "o.weight", "gate.weight", "down.weight"]


def test_a_group_refreshes_together_under_a_budget_of_its_size():
    model = Block()
    optimizer = low_rank_adamw(model, **OPTIONS)
    formed = []
    for x, y in block_batches(14):
        optimizer.zero_grad()
        loss_of(model, x, y).backward()
        formed.append(
            {n for n, p in model.named_parameters() if p.dim() == 2 and p.grad is not None}
        )
        optimizer.step()
    assert not formed[0]  # nobody knows yet who shares
    for names in formed:
        for group in GROUPS:
            assert set(group) <= names or not set(group) & names
    assert set().union(*formed[1:5]) == set(optimizer.matrices)


def test_trains():
    model = Block()
    optimizer = low_rank_adamw(model, **{**OPTIONS, "lr": 2e-2, "scale": 1.0, "rank": 8})
    losses = train_block(model, optimizer, block_batches(150, 64))
    assert sum(losses[-10:]) < 0.3 * sum(losses[:10])


@pytest.mark.parametrize("after", [1, 2, 8])
def test_resume_is_bit_exact(after):
    data = list(block_batches(16))
    options = {**OPTIONS, "rank": "auto", "rank_candidates": (2, 4, 8)}
    straight, resumed = Block(), Block(seed=1)
    optimizer = low_rank_adamw(straight, **options)
    train_block(straight, optimizer, data[:after])
    saved = through_a_file(optimizer.state_dict())
    resumed.load_state_dict(straight.state_dict())
    train_block(straight, optimizer, data[after:])
    fresh = low_rank_adamw(resumed, **options)
    fresh.load_state_dict(saved)
    assert len(columns_of(fresh, "q", "k", "v")) == 1
    train_block(resumed, fresh, data[after:])
    assert_same_weights(straight, resumed)
    ours, theirs = optimizer.state_dict(), fresh.state_dict()
    for index, state in ours["state"].items():
        assert_same_state(state, theirs["state"][index])


def test_resume_of_a_model_in_which_nobody_shares():
    """Its bases refresh on time: the window that shows who shares is not observed twice."""

    def model(seed):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D))

    data = list(block_batches(12))
    straight, resumed = model(0), model(1)
    optimizer = low_rank_adamw(straight, **{**OPTIONS, "update_interval": 2})
    train_block(straight, optimizer, data[:5])
    saved = through_a_file(optimizer.state_dict())
    resumed.load_state_dict(straight.state_dict())
    train_block(straight, optimizer, data[5:])
    fresh = low_rank_adamw(resumed, **{**OPTIONS, "update_interval": 2})
    fresh.load_state_dict(saved)
    train_block(resumed, fresh, data[5:])
    assert_same_weights(straight, resumed)


def test_only_matrices_of_equal_rules_share():
    model = Block()
    rules = {r"^k\.": {"rank": 2}, r"^up\.": {"projection": "two_sided"}}
    optimizer = low_rank_adamw(model, module_rules=rules, **{**OPTIONS, "lr": 2e-2, "scale": 1.0})
    losses = train_block(model, optimizer, block_batches(60))
    assert len(columns_of(optimizer, "q", "v")) == 1
    assert len(columns_of(optimizer, "q", "k", "gate", "up")) == 4
    assert [optimizer.matrices[f"{n}.weight"].rank for n in "qkv"] == [RANK, 2, RANK]
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])


def test_goes_on_refreshing_without_patched_modules():
    class Scaled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    model = nn.Sequential(Scaled(D, D), nn.Tanh(), Scaled(D, D))
    optimizer = low_rank_adamw(model, **OPTIONS)
    train_block(model, optimizer, block_batches(6))
    assert min(refreshes(optimizer).values()) >= 1
    model = Block()
    optimizer = low_rank_adamw(model, **OPTIONS)
    train_block(model, optimizer, block_batches(8))
    before = refreshes(optimizer)
    optimizer.close()
    train_block(model, optimizer, block_batches(8))
    after = refreshes(optimizer)
    assert all(after[name] > number for name, number in before.items())
    assert len(columns_of(optimizer, "q", "k", "v")) == 1


@pytest.mark.parametrize("second_moment", ["full", "factored"])
def test_own_bases_of_a_checkpoint_are_left_for_the_shared_one(second_moment):
    """``m <- m Q^T Q_leader``, of matrices that had ranks of their own."""
    model = Block()
    own = {**PAPERS_RULE, "rank": "auto", "rank_candidates": (2, 4, 8), "energy_threshold": 0.7}
    own |= {"second_moment": second_moment, "lr": 2e-2, "scale": 1.0}
    alone = low_rank_adamw(model, **{**OPTIONS, **own, "share_basis": False})
    train_block(model, alone, block_batches(8))
    before = {n: (m.basis.clone(), m.moments.exp_avg.read()) for n, m in alone.matrices.items()}
    assert len({before[name][0].shape[1] for name in GROUPS[0]}) > 1
    shared = low_rank_adamw(model, **{**OPTIONS, **own})
    shared.load_state_dict(through_a_file(alone.state_dict()))
    for group in GROUPS:
        assert torch.equal(shared.matrices[group[0]].basis, before[group[0]][0])
        assert len({id(shared.matrices[name].columns) for name in group}) == 1
        for name in group[1:]:
            basis, mean = before[name]
            turned = mean @ (basis.t() @ before[group[0]][0])
            found = shared.matrices[name].moments.exp_avg.read()
            torch.testing.assert_close(found, turned)
    losses = train_block(model, shared, block_batches(30))
    assert sum(losses[-5:]) < sum(losses[:5])


def test_a_shared_basis_of_a_checkpoint_becomes_each_ones_own():
    model = Block()
    shared = low_rank_adamw(model, **OPTIONS)
    train_block(model, shared, block_batches(8))
    alone = low_rank_adamw(model, **{**OPTIONS, "share_basis": False})
    alone.load_state_dict(through_a_file(shared.state_dict()))
    assert len({id(m.columns) for m in alone.matrices.values()}) == len(alone.matrices)
    for name, matrix in alone.matrices.items():
        assert matrix.columns.owner == name
        assert torch.equal(matrix.basis, shared.matrices[name].basis)
        assert torch.equal(
            matrix.moments.exp_avg.read(), shared.matrices[name].moments.exp_avg.read()
        )
    train_block(model, alone, block_batches(8))
    assert not torch.equal(alone.matrices["q.weight"].basis, alone.matrices["k.weight"].basis)


def test_a_basis_drawn_from_a_seed_is_not_shared():
    model = Block()
    rules = {r"^(q|k|v)\.": {"rank": RANK, "range_finder": "random"}}
    optimizer = low_rank_adamw(model, module_rules=rules, **OPTIONS)
    train_block(model, optimizer, block_batches(4))
    assert len(columns_of(optimizer, "q", "k", "v")) == 3
    assert len(columns_of(optimizer, "gate", "up")) == 1


def test_a_group_above_a_fixed_budget_keeps_its_own_bases():
    model, budget = Block(), (D + 2 * KV) * D * 4  # q, k, v together, and less than gate and up
    optimizer = low_rank_adamw(model, **{**OPTIONS, "max_full_gradient_bytes": budget})
    said = f"max_full_gradient_bytes is {budget}, but .* gate.weight, up.weight .* at least 12288"
    with pytest.warns(UserWarning, match=said):
        losses = train_block(model, optimizer, block_batches(8))
    assert len(losses) == 8
    assert len(columns_of(optimizer, "q", "k", "v")) == 1
    assert len(columns_of(optimizer, "q", "gate", "up")) == 3
    assert all(matrix.measured for matrix in optimizer.matrices.values())
