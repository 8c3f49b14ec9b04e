"""HMT's states: 16-bit weights with and without masters, checkpoint and resume."""

import numpy as np
import pytest
import torch
from hmt_runs import (
    OPTIONS,
    PAPERS_RULE,
    assert_same_state,
    assert_same_weights,
    batches,
    network,
    through_a_file,
    train,
)
from low_rank_adamw import low_rank_adamw
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

# -- 16-bit weights -------------------------------------------------------------------------------


def test_master_keeps_updates_below_the_spacing():
    weight = nn.Parameter(torch.ones(8, 8, dtype=torch.bfloat16))
    optimizer = low_rank_adamw([weight], lr=1e-4, method="adamw")
    for _ in range(100):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    torch.testing.assert_close(weight.float(), torch.full((8, 8), 0.99), atol=2e-3, rtol=0)
    assert optimizer.state[weight]["master"].dtype == torch.float32


@pytest.mark.parametrize("method", ["lowrank_adamw", "adamw"])
def test_none_mode_drifts_as_fp32_does(method):
    """Steps far below bf16's spacing of 1/128: rounding to nearest would never move."""
    m, n, steps = 64, 48, 100
    gradient = torch.randn(m, 1, generator=torch.Generator().manual_seed(0)) @ torch.ones(1, n)
    moved = {}
    for dtype, masters in ((torch.float32, "fp32"), (torch.bfloat16, "none")):
        weight = nn.Parameter(torch.full((m, n), 1.5, dtype=dtype))
        rule = {} if method == "adamw" else {"rank": 1, "residual": "none", "scale": 7.0}
        optimizer = low_rank_adamw([weight], lr=2e-4, method=method, master_weights=masters, **rule)
        for _ in range(steps):
            weight.grad = gradient.to(dtype)
            optimizer.step()
        assert set(optimizer.state[weight]) <= {"exp_avg", "exp_avg_sq", "step"}
        moved[dtype] = weight.detach().float() - 1.5
    exact, rounded = moved[torch.float32], moved[torch.bfloat16]
    assert exact.abs().max() > 1e-4
    # A step rounds to a neighbour 1/128 away with the right probability: a row's mean of 48 elements
    # after 100 steps has a deviation of sqrt(|move| / 128 / 48), at most 2e-3.
    torch.testing.assert_close(rounded.mean(1), exact.mean(1), atol=8e-3, rtol=0)
    slope = (rounded * exact).sum() / exact.square().sum()
    assert 0.9 < slope < 1.1


@pytest.mark.parametrize(("masters", "contiguous"), [("fp32", True), ("none", False)])
def test_bf16_learns(masters, contiguous):
    model = network(dtype=torch.bfloat16)
    if not contiguous:
        model[2].weight = nn.Parameter(model[2].weight.detach().t().contiguous().t())
    optimizer = low_rank_adamw(
        model, lr=1e-2, rank=8, update_interval=10, scale=1.0, master_weights=masters
    )
    losses = train(model, optimizer, batches(150, size=64, dtype=torch.bfloat16))
    assert sum(losses[-10:]) < 0.3 * sum(losses[:10])


# -- checkpoint -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "dtype", "masters"),
    [
        ("module", torch.float32, "fp32"),
        ("module", torch.bfloat16, "fp32"),
        ("module", torch.bfloat16, "none"),
        ("named", torch.bfloat16, "fp32"),
        ("named", torch.bfloat16, "none"),
        ("tensors", torch.float32, "fp32"),
        ("tensors", torch.bfloat16, "none"),
    ],
)
def test_resume_is_bit_exact(given, dtype, masters):
    def construct(model):
        params = {"module": model, "named": model.named_parameters(), "tensors": model.parameters()}
        return low_rank_adamw(
            params[given],
            lr=1e-2,
            weight_decay=0.1,
            rank_candidates=(2, 4, 8),
            update_interval=4,
            master_weights=masters,
        )

    data = list(batches(16, dtype=dtype))
    straight = network(dtype=dtype)
    optimizer = construct(straight)
    train(straight, optimizer, data[:7], max_norm=1.0)
    optimizer.param_groups[0]["lr"] = 5e-3
    saved = through_a_file({"model": straight.state_dict(), "optimizer": optimizer.state_dict()})
    train(straight, optimizer, data[7:], max_norm=1.0)

    resumed = network(seed=1, dtype=dtype)
    resumed.load_state_dict(saved["model"])
    fresh = construct(resumed)
    fresh.load_state_dict(saved["optimizer"])
    assert fresh.param_groups[0]["lr"] == 5e-3
    train(resumed, fresh, data[7:], max_norm=1.0)
    assert_same_weights(straight, resumed)
    ours, theirs = optimizer.state_dict(), fresh.state_dict()
    assert ours["hmt"] == theirs["hmt"]
    assert ours["state"].keys() == theirs["state"].keys()
    for index, state in ours["state"].items():
        assert_same_state(state, theirs["state"][index])


MODES = {
    "left": {"projection": "left", "rank": 8},
    "auto": {"projection": "auto"},
    "two sided": {"projection": "two_sided"},
    "two sided, random": {"projection": "two_sided", "range_finder": "random", "rank": 4},
    "apollo": {"method": "apollo"},
    "apollo mini": {"method": "apollo_mini"},
    "full residual": {"residual": "full"},
    "full residual, left": {"residual": "full", "projection": "left", "rank": 8},
    "no residual": {"residual": "none"},
    "random": {"range_finder": "random", "rank": 4},
    "one power step": {"range_finder": "subspace"},
    "svd": {"range_finder": "svd"},
    "share": {"share_basis": True},
    "budget": {"rank_budget": 0.4},
    "full rank": {**PAPERS_RULE, "full_rank_budget": 0.5},
    "bf16 states": {"state_dtype": "bf16"},
    "factored": {"second_moment": "factored", "projection": "auto"},
    "factored, full residual": {"second_moment": "factored", "residual": "full"},
    "factored, full rank": {**PAPERS_RULE, "second_moment": "factored", "full_rank_budget": 0.5},
    "factored, bf16": {"second_moment": "factored", "state_dtype": "bf16"},
    "factored, some": {
        "second_moment": "factored",
        "module_rules": {r"^0\.": {"method": "apollo"}, r"^2\.": {"projection": "left"}},
    },
    "adamw": {"method": "adamw"},
    "rules": {
        "module_rules": {
            r"^0\.": {"projection": "left", "rank": 4},
            r"^2\.": {"method": "apollo"},
            r"^4\.": {"projection": "two_sided"},
        }
    },
}


# Modules, whose backward is projected, midway; parameters by name before the first step and midway, in turns.
MIDWAY = 5
RESUMED = [
    *((mode, MIDWAY, "module") for mode in MODES),
    *(
        (mode, (0, MIDWAY)[place % 2], "named")
        for place, mode in enumerate(MODES)
        if mode != "share"  # refused: tested with the options
    ),
    ("share", 0, "module"),
]


@pytest.mark.parametrize(("mode", "after", "given"), RESUMED)
def test_every_mode_resumes_bit_exactly(mode, after, given):
    def construct(model):
        params = model if given == "module" else model.named_parameters()
        fields = {"rank_candidates": (2, 4, 8), "update_interval": 3, **MODES[mode]}
        if "rank" in fields or "method" in fields:
            del fields["rank_candidates"]
        if fields.get("method") == "adamw":
            del fields["update_interval"]
        return low_rank_adamw(params, lr=1e-2, weight_decay=0.1, **fields)

    data = list(batches(10))
    straight, resumed = network(), network(seed=1)
    optimizer = construct(straight)
    train(straight, optimizer, data[:after], max_norm=1.0)
    saved = through_a_file({"model": straight.state_dict(), "optimizer": optimizer.state_dict()})
    train(straight, optimizer, data[after:], max_norm=1.0)
    resumed.load_state_dict(saved["model"])
    fresh = construct(resumed)
    fresh.load_state_dict(saved["optimizer"])
    train(resumed, fresh, data[after:], max_norm=1.0)
    assert_same_weights(straight, resumed)
    ours, theirs = optimizer.state_dict(), fresh.state_dict()
    assert str(ours["hmt"]) == str(theirs["hmt"])  # as text: a nan equals itself
    assert ours["state"].keys() == theirs["state"].keys()
    for index, state in ours["state"].items():
        assert_same_state(state, theirs["state"][index])
    assert any("exp_avg" in state for state in ours["state"].values())


class Sharing(nn.Module):
    """Three linears that read one input."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v = (nn.Linear(24, 16) for _ in range(3))

    def forward(self, x):
        return self.q(x) * torch.tanh(self.k(x)) + self.v(x)


def test_resume_keeps_who_shares_a_product():
    """One wide product and three narrow ones may differ in the last bit."""
    data = list(batches(12))
    straight, resumed = Sharing(), Sharing()
    optimizer = low_rank_adamw(straight, **OPTIONS)
    train(straight, optimizer, data[:6])
    saved = through_a_file(optimizer.state_dict())
    assert saved["hmt"]["groups"] == [["q.weight", "k.weight", "v.weight"]]
    resumed.load_state_dict(straight.state_dict())
    train(straight, optimizer, data[6:])
    fresh = low_rank_adamw(resumed, **OPTIONS)
    fresh.load_state_dict(saved)
    assert fresh.state_dict()["hmt"]["groups"] == saved["hmt"]["groups"]
    train(resumed, fresh, data[6:])
    assert_same_weights(straight, resumed)


def test_saving_does_not_disturb():
    first, second = network(), network()
    optimizers = [low_rank_adamw(model, **OPTIONS) for model in (first, second)]
    for batch in batches(8):
        train(first, optimizers[0], [batch])
        train(second, optimizers[1], [batch])
        optimizers[1].state_dict()
    assert_same_weights(first, second)
    assert all("basis" not in state for state in optimizers[1].state.values())


def test_loading_before_the_first_and_after_some_steps():
    model = network()
    optimizer = low_rank_adamw(model.named_parameters(), **OPTIONS)
    start = through_a_file(optimizer.state_dict())
    train(model, optimizer, batches(5))
    again = network()
    optimizer_again = low_rank_adamw(again.named_parameters(), **OPTIONS)
    train(again, optimizer_again, batches(5))
    for m, o in ((model, optimizer), (again, optimizer_again)):
        m.load_state_dict(network().state_dict())
        o.load_state_dict(start)
        train(m, o, batches(5))
    fresh = network()
    train(fresh, low_rank_adamw(fresh.named_parameters(), **OPTIONS), batches(5))
    assert_same_weights(model, fresh)
    assert_same_weights(again, fresh)


def test_a_numpy_schedule_leaves_the_state_plain():
    model = network()
    optimizer = low_rank_adamw(model.named_parameters(), **OPTIONS)
    schedule = LambdaLR(optimizer, lambda step: np.cos(step / 10))
    train(model, optimizer, batches(2))
    schedule.step()
    saved = through_a_file(optimizer.state_dict())
    assert saved["param_groups"][0]["lr"] == optimizer.param_groups[0]["lr"]


def test_foreign_states_are_refused():
    model = network()
    optimizer = low_rank_adamw(model.named_parameters(), **OPTIONS)
    with pytest.raises(ValueError, match="no 'hmt' entry"):
        optimizer.load_state_dict(torch.optim.AdamW(model.parameters()).state_dict())
    train(model, optimizer, batches(1))
    with pytest.raises(ValueError, match="param_0"):
        low_rank_adamw(network().parameters(), **OPTIONS).load_state_dict(optimizer.state_dict())
    dense = low_rank_adamw(network().named_parameters(), method="adamw")
    with pytest.raises(ValueError, match=r"0\.weight: the state dict has lowrank_adamw"):
        dense.load_state_dict(optimizer.state_dict())
