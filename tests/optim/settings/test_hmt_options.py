"""HMT's construction: what it allocates, patches, tells and refuses."""

import gc

import pytest
import torch
from hmt_runs import OPTIONS, batches, network, train
from low_rank_adamw import low_rank_adamw
from torch import nn

from hmt_deepspeed.config import HMTConfig
from hmt_deepspeed.config.removed import REMOVED
from hmt_deepspeed.optim.hmt import HMT
from hmt_deepspeed.optim.rules.build import build_matrix
from hmt_deepspeed.optim.rules.low_rank import LowRankMatrix
from hmt_deepspeed.optim.settings.options import complete_options, matrix_settings

# -- construction ---------------------------------------------------------------------------------


def test_construction_with_tensors_allocates_nothing(monkeypatch):
    monkeypatch.setattr(LowRankMatrix, "__init__", lambda *a: pytest.fail("allocated"))
    model = network()
    optimizer = HMT(model.named_parameters(), projected_backward=True)
    assert not optimizer.state
    assert optimizer.options["rank"] == "auto"
    assert "forward" not in vars(model[0])


def test_options_and_settings():
    settings = matrix_settings(low_rank_adamw([nn.Parameter(torch.ones(2))]).options)
    assert (settings.rank, settings.probes, settings.scale) == (None, None, None)
    matrix = build_matrix("w", (8, 8), (0, 8), settings, torch.float32, torch.device("cpu"))
    assert matrix.scale == 1.0  # AdamW's own step, of a basis that spans all columns
    options = HMT([nn.Parameter(torch.ones(2))], probes=3).options
    assert matrix_settings(options).probes == 3


@pytest.mark.parametrize(
    ("field", "value", "legal"),
    [
        ("lr", -1.0, ">= 0"),
        ("betas", (0.9, 1.0), "< 1"),
        ("eps", float("nan"), ">= 0"),
        ("weight_decay", -0.1, ">= 0"),
    ],
)
def test_values_out_of_range(field, value, legal):
    with pytest.raises(ValueError) as caught:
        HMT([nn.Parameter(torch.ones(4, 4))], **{field: value})
    message = str(caught.value)
    assert field in message
    assert repr(value) in message
    assert legal in message


VALUES = [
    {"rank": 0},
    {"rank": "full", "seed": -1},
    {"rank_candidates": [64, 32]},
    {"share_basis": 1},
    {"target_modules": ["2", "("]},
    {"module_rules": "q"},
    {"module_rules": {"q": {"rank": 2.5}}},
]
UNREAD = [
    {"method": "adamw", "rank": 4},
    {"method": "apollo", "residual": "none"},
    {"method": "apollo", "probes": 4},
    {"residual": "full", "probes": 4},
    {"rank": 8, "energy_threshold": 0.95},
    {"rank": 8, "energy_estimate": "out_of_sample"},
    {"update_interval": 1, "energy_estimate": "out_of_sample"},
    {"probes": 0, "residual": "none", "energy_estimate": "out_of_sample"},
    {"range_finder": "random", "rank": 2, "max_full_gradient_bytes": 1000000},
    {"second_moment": "factored", "method": "apollo"},
    {"second_moment": "factored"},
    {"rank_budget": 0.5, "rank": 8},
    {"rank_budget": 0.5, "method": "apollo"},
    {"full_rank_budget": 0.5, "rank_budget": 0.5},
    {"full_rank_budget": 0.5, "projection": "two_sided"},
]
CONTRADICTIONS = [
    {"method": "apollo", "projected_backward": True},
    {"method": "apollo_mini", "projected_backward": True},
    {"residual": "full", "projected_backward": True},
    {"probes": 0, "residual": "probe"},
    {"method": "apollo_mini", "rank": 2},
    {"share_basis": True, "projection": "left"},
    {"share_basis": True, "residual": "full"},
    {"share_basis": True, "range_finder": "random", "rank": 2},
    {"share_basis": True, "projected_backward": False},
    {"residual": "full", "projection": "two_sided"},
    {"second_moment": "factored", "projection": "two_sided"},
    {"range_finder": "random"},
]


@pytest.mark.parametrize("options", [*VALUES, *UNREAD, *CONTRADICTIONS])
def test_what_the_block_refuses_is_refused_in_its_words(options):
    with pytest.raises(ValueError) as block:
        HMTConfig.from_block({"optimizer": options})
    lines = [line.removeprefix("  - ") for line in str(block.value).splitlines()[1:]]
    for params in (network(), [nn.Parameter(torch.ones(8, 8))]):
        with pytest.raises(ValueError) as caught:
            HMT(params, **options)
        assert str(caught.value).splitlines() == lines
        assert lines[0].startswith("hmt.optimizer.")


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ("rnk", 'did you mean "hmt.optimizer.rank"?'),
        ("lerning_rate", "Legal: method, projection, rank"),
        ("rank_stabilized", f"removed: {REMOVED['hmt.optimizer.rank_stabilized']}"),
    ],
)
def test_an_unknown_field_is_a_type_error_that_says_what_to_do(field, words):
    with pytest.raises(TypeError) as caught:
        HMT(network(), **{field: 1})
    assert f"HMT() got an unexpected field '{field}'" in str(caught.value)
    assert words in str(caught.value)


def test_what_a_module_rule_reads_is_accepted():
    rules = {"2": {"method": "lowrank_adamw"}}
    options = {"rank_candidates": [2, 4], "residual": "none", "projection": "left"}
    for method in ("adamw", "apollo"):
        optimizer = HMT(network(), method=method, module_rules=rules, **options)
        settings = optimizer.matrices["2.weight"].settings
        assert (settings.rank_candidates, settings.residual) == ((2, 4), "none")
        assert settings.projection == "left"


def test_every_default_may_be_written():
    options = complete_options({})
    assert HMT(network(), **options).options == options == HMT(network()).options


def test_share_basis_of_bare_parameters_is_refused():
    with pytest.raises(ValueError, match="share_basis is True, but HMT was given parameters"):
        HMT([nn.Parameter(torch.ones(8, 8))], share_basis=True)


@pytest.mark.parametrize(
    ("parameter", "options", "words"),
    [
        (torch.ones(4, 4), {"max_full_gradient_bytes": 63}, "64 bytes"),
        (torch.ones(4, 4), {"projected_backward": True}, "pass the module"),
        (torch.ones(4, 4), {"target_modules": ["nothing"]}, "matches no trainable"),
        (torch.ones(4, 4).half(), {"master_weights": "none"}, "float16"),
        (torch.ones(4, 4).double(), {}, "float64"),
    ],
)
def test_what_cannot_work_is_refused_at_first_use(parameter, options, words):
    parameter = nn.Parameter(parameter)
    optimizer = HMT([parameter], **options)
    parameter.grad = torch.ones_like(parameter)
    with pytest.raises(ValueError, match=words):
        optimizer.step()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"target_modules": ["2", "bias"]}, r"'bias' decides nothing: 0\.bias .*\(not a matrix\)"),
        (
            {"target_modules": ["2", "^0"], "module_rules": {"0": {"method": "adamw"}}},
            r"'\^0' decides nothing: 0\.weight .*\(module_rules decide it\)",
        ),
    ],
)
def test_patterns_that_leave_nothing_to_the_method(options, words):
    with pytest.raises(ValueError, match=words):
        HMT(network(), **options)
    HMT(network(), target_modules=["2"], module_rules={"0": {"method": "adamw"}})


def test_modules_that_cannot_be_patched():
    class Doubled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    model = nn.Sequential(nn.Linear(8, 8), Doubled(8, 8))
    with pytest.raises(ValueError, match="Doubled"):
        HMT(model, rank=2, projected_backward=True)
    optimizer = HMT(model, rank=2)  # auto: what cannot be patched projects p.grad
    before = model[1].weight.clone()
    model(torch.randn(3, 8)).sum().backward()
    optimizer.step()
    assert not torch.equal(model[1].weight, before)
    parallel = type("DistributedDataParallel", (nn.Module,), {})()
    with pytest.raises(ValueError, match="DistributedDataParallel"):
        HMT(parallel)


@pytest.mark.parametrize(
    ("key", "value", "field", "by_module"),
    [
        ("rank", 16, "rank", True),
        ("scale", 0.25, "scale", True),
        ("proj_type", "std", "projection", True),
        ("proj", "random", "range_finder", True),
        ("update_proj_gap", 3, "update_interval", False),
        ("share_basis", True, "share_basis", False),
    ],
)
def test_fields_in_a_group_are_refused(key, value, field, by_module):
    """GaLore and APOLLO take them there; here they would be ignored."""
    weight, other = (nn.Parameter(torch.ones(4, 4)) for _ in range(2))
    with pytest.raises(ValueError, match=f"has '{key}': {value!r}") as refusal:
        HMT([{"params": [weight], key: value}], rank=2)
    assert f"hmt.optimizer.{field} " in str(refusal.value)
    assert ("module_rules" in str(refusal.value)) == by_module
    optimizer = HMT([{"params": [weight], "name": "a", "initial_lr": 1e-3, "lr_mult": 2}], rank=2)
    with pytest.raises(ValueError, match=key):
        optimizer.add_param_group({"params": [other], key: value})
    assert len(optimizer.param_groups) == 1


def test_sparse_gradients_are_refused():
    model = nn.Embedding(10, 4, sparse=True)
    optimizer = HMT(model)
    model(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match="sparse=False"):
        optimizer.step()


def ordinary(model):
    model.zero_grad()
    x, y = next(iter(batches(1)))
    (model(x) - y).square().mean().backward()
    return all(p.grad is not None for p in model.parameters())


def test_close_and_garbage_collection_unpatch():
    model = network()
    optimizer = HMT(model, **OPTIONS)
    assert not ordinary(model)
    train(model, optimizer, batches(3))
    optimizer.close()
    assert ordinary(model)
    train(model, optimizer, batches(3))  # goes on with p.grad
    optimizer = HMT(model, **OPTIONS)
    assert not ordinary(model)
    del optimizer
    gc.collect()
    assert ordinary(model)


def test_a_second_optimizer_takes_over():
    model = network()
    first = HMT(model, **OPTIONS)
    second = HMT(model, **OPTIONS)
    first.close()
    before = model[2].weight.clone()
    train(model, second, batches(1))
    assert not ordinary(model)
    assert not torch.equal(model[2].weight, before)


def test_describe():
    model = nn.ModuleDict({"embed": nn.Embedding(50, 16), "up": nn.Linear(16, 40)})
    rows = {row.name: row for row in low_rank_adamw(model.to(torch.bfloat16), rank=4).describe()}
    assert rows["embed.weight"][1:4] == ("adamw", "'embed' is left to AdamW", None)
    assert rows["embed.weight"].state_bytes == 50 * 16 * 12
    assert rows["up.weight"][1:4] == ("lowrank_adamw", "", 4)
    # Two fp32 moments, evidence, bf16 basis, fp32 master.
    assert rows["up.weight"].state_bytes == 2 * 40 * 4 * 4 + 5 * 4 + 16 * 4 * 2 + 40 * 16 * 4
    plain = low_rank_adamw(model, rank=4, master_weights="none")
    rows = {row.name: row for row in plain.describe()}
    assert rows["embed.weight"].state_bytes == 50 * 16 * 8
