"""Mixtures whose experts are 3-D weights: an engine on any number of ranks, at any stage, trains as the bare optimizer."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    set_z3_leaf_modules,
)
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from harness import Ranks
from torch import Tensor, nn
from training import (
    GLOBAL_BATCH,
    LOSS,
    NORM,
    WEIGHT,
    ds_config,
    furthest,
    global_batch,
    loss_of,
    make_engine,
    micro_batches,
    model_weights,
    train_step,
)

from hmt_deepspeed.optim.hmt import HMT
from hmt_deepspeed.planner.model.shapes import Parameter
from hmt_deepspeed.planner.run.modes import OptimizerMode
from hmt_deepspeed.planner.run.states import held_rows
from hmt_deepspeed.sites import ExpertWeight
from hmt_deepspeed.zero.sharding.shards import ExpertShards, RowShards

EXPERTS = 6
WIDTHS: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 12,
    "num_experts_per_tok": 2,
    "num_local_experts": EXPERTS,
    "use_cache": False,
}
# gpt-oss stores its experts transposed, and has biases
FAMILIES = {"Mixtral": {}, "GptOss": {"layer_types": ["full_attention"] * 2}}
OPTIONS: dict[str, Any] = {
    "rank": 6,
    "update_interval": 3,
    "max_full_gradient_bytes": 10**7,
    "scale": 1.0,
    "expert_basis": "shared",
}
STEPS = 5  # the fourth refreshes all bases again


def mixture(family: str, experts: int = EXPERTS, **widths: int) -> nn.Module:
    """In the first layer none but the first four experts are chosen, if there are more: two of them have a higher logit."""
    config = getattr(transformers, f"{family}Config")(
        **{**WIDTHS, **FAMILIES[family], "num_local_experts": experts, **widths}
    )
    torch.manual_seed(0)
    model: nn.Module = getattr(transformers, f"{family}ForCausalLM")(config)
    for name, param in model.named_parameters():
        if experts > 4 and "layers.0.mlp." in name and ("router" in name or "gate." in name):
            with torch.no_grad():
                param[1], param[3], param[4:] = -param[0], -param[2], 0.0
                param.requires_grad_(False)
    return model


def with_defaults(options: dict[str, Any]) -> dict[str, Any]:
    """None for those of OPTIONS that are not to be given."""
    return {key: value for key, value in {**OPTIONS, **options}.items() if value is not None}


def is_expert(name: str) -> bool:
    return "experts" in name and "bias" not in name


def bare(family: str, options: dict[str, Any], experts: int = EXPERTS) -> dict[str, Any]:
    """The optimizer without an engine, on all sequences of a step at once."""
    model = mixture(family, experts)
    optimizer = HMT(model, lr=3e-3, betas=(0.9, 0.99), weight_decay=0.1, **options)
    losses, norms = [], []
    for step in range(STEPS):
        tokens = global_batch(step)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        losses.append(float(loss.detach()))
        norms.append(float(optimizer.clip_grad_norm_(0.5)))
        optimizer.step()
        optimizer.zero_grad()
    weights = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    own = {name: m.own_bases for name, m in optimizer.matrices.items() if is_expert(name)}
    return {"losses": losses, "norms": norms, "weights": weights, "own": own}


def engine_of(
    family: str,
    stage: int,
    options: dict[str, Any],
    gas: int = 1,
    experts: int = EXPERTS,
    widths: dict[str, int] | None = None,
    **changes: Any,
) -> Any:
    config = ds_config(stage, with_defaults(options), gas, **changes)
    return make_engine(config, mixture(family, experts, **(widths or {})))


def train(engine: Any, steps: range) -> dict[str, Any]:
    losses, norms = [], []
    for step in steps:
        losses.append(train_step(engine, step))
        norms.append(float(engine.get_global_grad_norm()))
    return {"losses": losses, "norms": norms, "weights": model_weights(engine)}


def run(family: str, stage: int, options: dict[str, Any], **keyword: Any) -> dict[str, Any]:
    engine = engine_of(family, stage, options, **keyword)
    states = [p for p in engine.optimizer.zero.param_states if is_expert(p.name)]
    assert all(p.matrix is not None and p.gradient.linear is not None for p in states)
    found = train(engine, range(STEPS))
    found["states"] = {p.name: p.matrix.moments.exp_avg.data.shape for p in states}
    found["own"] = {p.name: p.matrix.own_bases for p in states}
    before = dict(mixture(family, keyword.get("experts", EXPERTS)).named_parameters())
    idle = [name for name in before if "layers.0" in name and is_expert(name)]
    found["idle"] = [(found["weights"][n][4:], before[n].detach()[4:]) for n in idle]
    engine.destroy()
    return found


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one["losses"] == pytest.approx(other["losses"], rel=LOSS)
    assert one["norms"] == pytest.approx(other["norms"], rel=NORM)
    assert furthest(one["weights"], other["weights"]) < WEIGHT


def assert_all_same(parts: list[dict[str, Any]], one: dict[str, Any]) -> None:
    for part in parts:
        assert_same(part, one)
        assert furthest(part["weights"], parts[0]["weights"]) == 0
        for now, before in part.get("idle", ()):
            assert torch.equal(now, before)  # nor do they decay


@pytest.fixture(scope="module")
def alone() -> Any:
    known: dict[Any, dict[str, Any]] = {}

    def of(family: str, experts: int = EXPERTS, **options: Any) -> dict[str, Any]:
        key = family, experts, repr(options)
        if key not in known:
            known[key] = bare(family, with_defaults(options), experts)
        return known[key]

    return of


@pytest.mark.parametrize("basis", ["shared", "own"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("stage", "world", "experts"), [(0, 1, 6), (0, 2, 6), (1, 2, 6), (2, 3, 5), (3, 2, 6)]
)
def test_ranks_are_the_bare_optimizer(
    ranks: Ranks, alone: Any, family: str, basis: str, stage: int, world: int, experts: int
) -> None:
    """Three ranks do not divide five experts, nor a part's elements their rows."""
    one = alone(family, experts, expert_basis=basis)
    assert one["norms"][0] > 0.5  # clipping is active
    parts = ranks.run(run, world, family, stage, {"expert_basis": basis}, experts=experts)
    assert_all_same(parts, one)
    held = [{shape[0] for shape in part["states"].values()} for part in parts]
    assert held == (
        [{experts}] * world if not stage else [{1}, {2}, {2}] if experts == 5 else [{3}] * 2
    )


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("stage", "world"), [(1, 3), (2, 4), (3, 4)])
def test_more_ranks_than_experts(
    ranks: Ranks, alone: Any, family: str, stage: int, world: int
) -> None:
    """Two experts over three ranks, one of which has an expert alone, or by two ranks each."""
    one = alone(family, 2, expert_basis="shared")
    assert_all_same(ranks.run(run, world, family, stage, {}, experts=2), one)


DRAWN = {"max_full_gradient_bytes": None}  # no gradient makes the basis
WAYS: dict[str, dict[str, Any]] = {
    "whole gradients": {"projected_backward": False},
    "apollo": {"method": "apollo", **DRAWN, "expert_basis": None},
    "apollo_mini": {"method": "apollo_mini", **DRAWN, "expert_basis": None, "rank": None},
    "factored": {"second_moment": "factored"},
    "full residual": {"residual": "full", "expert_basis": "own"},
    "random bases": {"range_finder": "random", "expert_basis": "own", **DRAWN},
    "full rank": {"rank": 20, "expert_basis": "own"},
    "chosen ranks": {"rank": None, "rank_candidates": [4, 8], "energy_threshold": 0.6},
}


@pytest.mark.parametrize(("stage", "world"), [(2, 2), (3, 4)])
@pytest.mark.parametrize("way", WAYS)
def test_ways_of_low_rank(ranks: Ranks, alone: Any, way: str, stage: int, world: int) -> None:
    """Experts are those of a rank, or some ranks have two of six."""
    one = alone("GptOss", **WAYS[way])
    assert_all_same(ranks.run(ran, world, "GptOss", stage, WAYS[way]), one)


def ran(family: str, stage: int, options: dict[str, Any], **keyword: Any) -> dict[str, Any]:
    engine = engine_of(family, stage, options, **keyword)
    found = train(engine, range(STEPS))
    engine.destroy()
    return found


@pytest.mark.parametrize("stage", [1, 2])
def test_micro_batches_add_up(ranks: Ranks, alone: Any, stage: int) -> None:
    one = alone("Mixtral", expert_basis="shared")
    assert_all_same(ranks.run(run, 2, "Mixtral", stage, {"expert_basis": "shared"}, gas=3), one)


OFFLOAD: dict[str, dict[str, Any]] = {
    "states on the host": {"offload_optimizer": {"device": "cpu"}},
    "states on an SSD": {"offload_optimizer": {"device": "nvme"}},
    "parameters on the host": {"offload_param": {"device": "cpu"}},
}


@pytest.mark.parametrize(("world", "experts"), [(2, 6), (3, 5)])
@pytest.mark.parametrize("offload", OFFLOAD)
def test_offload(
    ranks: Ranks, alone: Any, offload: str, world: int, experts: int, tmp_path: Path
) -> None:
    one = alone("GptOss", experts, expert_basis="shared")
    zero = {key: {**where, "nvme_path": str(tmp_path)} for key, where in OFFLOAD[offload].items()}
    found = ranks.run(run, world, "GptOss", 3, {}, zero_optimization=zero, experts=experts)
    assert_all_same(found, one)


@pytest.mark.parametrize(
    ("family", "stage", "world", "experts"),
    [("GptOss", 1, 2, 6), ("GptOss", 3, 3, 5), ("GptOss", 2, 4, 2), ("Mixtral", 3, 3, 5)],
)
def test_experts_decide_alike(
    ranks: Ranks, alone: Any, family: str, stage: int, world: int, experts: int
) -> None:
    """Whether down projections have bases of their own, which these take: of the other side."""
    one = alone(family, experts, expert_basis="auto")
    parts = ranks.run(run, world, family, stage, {"expert_basis": "auto"}, experts=experts)
    assert_all_same(parts, one)
    assert parts[0]["own"] == one["own"]
    assert any(parts[0]["own"].values())


# -- checkpoints ----------------------------------------------------------------------------------------


def saved(
    family: str, stage: int, options: dict[str, Any], folder: str, after: int = 2, **keyword: Any
) -> Any:
    engine = engine_of(family, stage, options, **keyword)
    train(engine, range(after))
    engine.save_checkpoint(folder)
    found = train(engine, range(after, STEPS))
    engine.destroy()
    return found


def resumed(
    family: str, stage: int, options: dict[str, Any], folder: str, after: int = 2, **keyword: Any
) -> Any:
    engine = engine_of(family, stage, options, **keyword)
    engine.load_checkpoint(folder)
    found = train(engine, range(after, STEPS))
    engine.destroy()
    return found


AUTO, OWN = {"expert_basis": "auto"}, {"expert_basis": "own", "second_moment": "factored"}


@pytest.mark.parametrize(
    ("options", "after"), [(AUTO, 1), (AUTO, 2), (OWN, 2)], ids=["undecided", "decided", "own"]
)
def test_checkpoints_load_on_other_ranks(
    ranks: Ranks, options: dict[str, Any], after: int, tmp_path: Path
) -> None:
    """Bit for bit on the same ones, up to rounding at another stage and on others: with the same experts, some or all."""
    how = "GptOss", 2, options, str(tmp_path), after
    before = ranks.run(saved, 4, *how)
    again = ranks.run(resumed, 4, *how)
    for one, other in zip(before, again, strict=True):
        assert one["losses"] == other["losses"]
        assert furthest(one["weights"], other["weights"]) == 0
    for stage, world in ((3, 2), (0, 1)):
        how = "GptOss", stage, options, str(tmp_path), after
        assert_all_same(ranks.run(resumed, world, *how), before[0])


def loaded_too_late(folder: str) -> str:
    engine = engine_of("GptOss", 1, AUTO)
    train(engine, range(1))
    engine.save_checkpoint(folder)
    train(engine, range(1, 2))
    with pytest.raises(ValueError, match="load it into a new engine") as refused:
        engine.load_checkpoint(folder)
    return str(refused.value)


def test_who_has_decided_loads_nothing_undecided(ranks: Ranks, tmp_path: Path) -> None:
    assert all("experts.down_proj" in text for text in ranks.run(loaded_too_late, 2, str(tmp_path)))


@pytest.mark.parametrize(("stage", "world", "experts"), [(1, 2, 6), (2, 4, 6), (3, 3, 4)])
def test_bf16_resumes_bit_for_bit(
    ranks: Ranks, stage: int, world: int, experts: int, tmp_path: Path
) -> None:
    """Without masters, in 8-bit states; and ranks see the same weights. Three parts of four experts end inside a row."""
    options = {"master_weights": "none", "state_dtype": "int8"}
    how = {"bf16": {"enabled": True}, "experts": experts}
    how["widths"] = {"hidden_size": 40, "head_dim": 20, "intermediate_size": 24}
    before = ranks.run(saved, world, "Mixtral", stage, options, str(tmp_path), **how)
    again = ranks.run(resumed, world, "Mixtral", stage, options, str(tmp_path), **how)
    for one, other in zip(before, again, strict=True):
        assert one["losses"] == other["losses"]
        assert furthest(one["weights"], other["weights"]) == 0
        assert furthest(one["weights"], before[0]["weights"]) == 0


def snapshot(stage: int, folder: str, writes: bool) -> dict[str, Any]:
    config = ds_config(stage, with_defaults({}))
    if writes:
        config["hmt"]["snapshot"] = {"path": folder, "interval": 2}
    engine = make_engine(config, mixture("GptOss", 5))
    if writes:
        train(engine, range(2))
        engine.hmt_snapshots.finish()
    else:
        engine.load_checkpoint(folder, tag="step00000002")
    found = train(engine, range(2, STEPS))
    engine.destroy()
    return found


def test_snapshots_resume_bit_for_bit(ranks: Ranks, tmp_path: Path) -> None:
    before = ranks.run(snapshot, 3, 2, str(tmp_path), True)
    again = ranks.run(snapshot, 3, 2, str(tmp_path), False)
    for one, other in zip(before, again, strict=True):
        assert one["losses"] == other["losses"]
        assert furthest(one["weights"], other["weights"]) == 0


# -- leaf modules, skipped steps, tools -------------------------------------------------------------------


def leaves(stage: int, options: dict[str, Any]) -> dict[str, Any]:
    """Of ZeRO-3: the mixture is gathered at once, and watched by nobody inside."""
    model = mixture("Mixtral")
    block = type(model.model.layers[0].mlp)
    set_z3_leaf_modules(model, [block])
    engine = make_engine(ds_config(stage, with_defaults(options)), model)
    assert any(p.gradient.leaf is not None for p in engine.optimizer.zero.low_rank)
    found = train(engine, range(STEPS))
    engine.destroy()
    return found


@pytest.mark.parametrize("basis", ["shared", "own"])
def test_leaf_modules(ranks: Ranks, alone: Any, basis: str) -> None:
    one = alone("Mixtral", expert_basis=basis)
    assert_all_same(ranks.run(leaves, 2, 3, {"expert_basis": basis}), one)


def poisoned(stage: int, **changes: Any) -> dict[str, Any]:
    """The last rank's gradients are not finite in the second step."""
    engine = engine_of("GptOss", stage, {}, **changes)
    train(engine, range(1))
    before = model_weights(engine)
    if dist.get_rank() == dist.get_world_size() - 1:
        experts = engine.module.model.layers[1].mlp.experts
        hook = experts.register_full_backward_pre_hook(lambda _, grads: (grads[0] * math.nan,))
    train(engine, range(1, 2))
    if dist.get_rank() == dist.get_world_size() - 1:
        hook.remove()
    moved = furthest(before, model_weights(engine))
    found = train(engine, range(2, 4))
    skipped = engine.skipped_steps
    engine.destroy()
    return {**found, "moved": moved, "skipped": skipped}


@pytest.mark.parametrize(("stage", "world"), [(1, 2), (3, 4)])
def test_what_is_not_finite_moves_nothing(ranks: Ranks, stage: int, world: int) -> None:
    for part in ranks.run(poisoned, world, stage):
        assert part["moved"] == 0
        assert part["skipped"] == 1
        assert all(0 < norm < 100 for norm in part["norms"])


def tools(stage: int, options: dict[str, Any], folder: str) -> dict[str, Any]:
    """What DeepSpeed's tools read of experts and write to them, in the middle of a run."""
    engine = engine_of(
        "GptOss",
        stage,
        options,
        zero_optimization={"stage3_gather_16bit_weights_on_model_save": True},
    )
    found: dict[str, Any] = train(engine, range(2))
    name, weight = next((n, p) for n, p in engine.module.named_parameters() if is_expert(n))
    found["table"] = engine.optimizer.describe()
    found["moment"] = safe_get_full_optimizer_state(weight, "exp_avg")
    found["master"] = safe_get_full_fp32_param(weight)
    for tokens in micro_batches(engine, 2):
        engine.backward(loss_of(engine, tokens))
    found["gradient"] = safe_get_full_grad(weight)
    engine.zero_grad()
    engine.offload_states()
    engine.reload_states()
    state = engine.optimizer.state_access
    state.set_full_hp_param(found["moment"] * 2, weight, "exp_avg")
    found["doubled"] = safe_get_full_optimizer_state(weight, "exp_avg")
    state.set_full_hp_param(found["moment"], weight, "exp_avg")
    engine.save_checkpoint(folder)
    engine.save_16bit_model(folder)
    if dist.get_rank() == 0:
        found["consolidated"] = get_fp32_state_dict_from_zero_checkpoint(folder)[name].clone()
        found["saved"] = torch.load(f"{folder}/pytorch_model.bin", weights_only=True)[name]
    found["losses"] += train(engine, range(2, STEPS))["losses"]
    found["weights"] = model_weights(engine)
    engine.destroy()
    return found


@pytest.mark.parametrize("options", [{}, {"expert_basis": "own"}], ids=str)
@pytest.mark.parametrize(("stage", "world"), [(2, 2), (3, 4)])
def test_tools(
    ranks: Ranks, alone: Any, options: dict[str, Any], stage: int, world: int, tmp_path: Path
) -> None:
    known = alone("GptOss", **options)
    (one,) = ranks.run(tools, 1, 0, options, str(tmp_path / "one"))
    parts = ranks.run(tools, world, stage, options, str(tmp_path / "many"))
    assert one["losses"] == pytest.approx(known["losses"], rel=LOSS)
    assert one["moment"].shape == (EXPERTS, 40, 6)
    assert torch.equal(parts[0]["saved"], parts[0]["master"])
    assert torch.equal(parts[0]["consolidated"], parts[0]["master"])
    for part in parts:
        assert part["losses"] == pytest.approx(one["losses"], rel=LOSS)
        for key in ("moment", "master", "gradient"):
            assert part[key].shape == one[key].shape
            assert furthest({key: part[key]}, {key: one[key]}) < WEIGHT * float(
                one[key].abs().max()
            )
        assert torch.equal(part["doubled"], 2 * part["moment"])
        assert f"experts {EXPERTS}x24x40" in part["table"]
        kind = "a basis of each expert" if options else "one basis of all experts"
        assert kind in part["table"].replace("\n    ", " ")


def cached(stage: int, options: dict[str, Any], cache: dict[str, Any]) -> dict[str, Any]:
    config = ds_config(stage, with_defaults(options))
    config["hmt"]["basis_cache"] = cache
    engine = make_engine(config, mixture("GptOss"))
    found = train(engine, range(STEPS))
    engine.destroy()
    return found


@pytest.mark.parametrize("basis", ["shared", "own", "auto"])
@pytest.mark.parametrize("stage", [2, 3])
def test_bases_in_host_memory(ranks: Ranks, alone: Any, basis: str, stage: int) -> None:
    """With moments of old ones, of which experts keep none."""
    one = alone("GptOss", expert_basis=basis)
    parts = ranks.run(cached, 2, stage, {"expert_basis": basis}, {})
    assert_all_same(parts, one)
    assert len(ranks.run(cached, 2, stage, {"expert_basis": basis}, {"history": 2})) == 2


# -- other dtypes, other readers, other parts of an engine ------------------------------------------------


@pytest.mark.parametrize(("stage", "world", "experts"), [(2, 2, 6), (3, 3, 4)])
def test_bf16_weights_with_masters(ranks: Ranks, stage: int, world: int, experts: int) -> None:
    """As one rank, up to roundings of gradients and of updates that travel."""
    how: dict[str, Any] = {"bf16": {"enabled": True}, "experts": experts}
    how["widths"] = {"hidden_size": 40, "head_dim": 20, "intermediate_size": 24}
    (one,) = ranks.run(ran, 1, "Mixtral", 0, {}, **how)
    for part in (parts := ranks.run(ran, world, "Mixtral", stage, {}, **how)):
        assert part["losses"] == pytest.approx(one["losses"], rel=5e-3)
        assert furthest(part["weights"], parts[0]["weights"]) == 0


class Einsum(nn.Module):
    """A 3-D weight of the user's own code, of which nobody knows how it is read."""

    def __init__(self) -> None:
        super().__init__()
        self.below, self.out = nn.Linear(16, 16), nn.Linear(12, 1)
        self.weight = nn.Parameter(torch.randn(5, 12, 16) / 4)

    def forward(self, x: Tensor) -> Tensor:
        each = torch.einsum("eij,nj->nei", self.weight, torch.tanh(self.below(x)))
        each = each * torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0])[:, None]  # the last gets no gradient
        return (self.out(torch.tanh(each).sum(1)) - 1).square().mean()


def inputs(step: int) -> Tensor:
    return torch.randn(GLOBAL_BATCH, 16, generator=torch.Generator().manual_seed(step))


READS = {"rank": 4, "target_modules": ["^weight"], "update_interval": 3, "scale": 1.0}


def read_by_others(stage: int, side: str) -> dict[str, Tensor]:
    torch.manual_seed(0)
    config = ds_config(stage, {**READS, "projection": side, "max_full_gradient_bytes": 10**6})
    engine = make_engine(config, Einsum())
    assert "full gradient" in engine.optimizer.describe()
    for step in range(STEPS):
        own = inputs(step).chunk(dist.get_world_size())[dist.get_rank()]
        engine.backward(engine(own))
        engine.step()
    found = model_weights(engine)
    engine.destroy()
    return found


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize(("stage", "world"), [(2, 3), (3, 2)])
def test_weights_that_other_code_reads(ranks: Ranks, side: str, stage: int, world: int) -> None:
    torch.manual_seed(0)
    model = Einsum()
    fields = {**READS, "projection": side, "max_full_gradient_bytes": 10**6}
    optimizer = HMT(model, lr=3e-3, betas=(0.9, 0.99), weight_decay=0.1, **fields)
    before = model.weight.detach().clone()
    for step in range(STEPS):
        optimizer.zero_grad()
        model(inputs(step)).backward()
        optimizer.clip_grad_norm_(0.5)
        optimizer.step()
    one = {name: weight.detach() for name, weight in model.named_parameters()}
    for part in ranks.run(read_by_others, world, stage, side):
        assert furthest(part, one) < WEIGHT
        assert torch.equal(part["weight"][4], before[4])
        assert float((part["weight"] - before).abs().max()) > 5 * WEIGHT


def with_block(stage: int, block: dict[str, Any]) -> dict[str, Any]:
    config = ds_config(stage, with_defaults({}))
    config["hmt"] |= block
    engine = make_engine(config, mixture("Mixtral"))
    found = train(engine, range(STEPS))
    engine.destroy()
    return found


@pytest.mark.parametrize("stage", [2, 3])
def test_outputs_of_experts_are_computed_again(ranks: Ranks, alone: Any, stage: int) -> None:
    kinds = ("attention_qkv", "attention_output", "mlp_intermediate", "residual")
    policy = {**dict.fromkeys(kinds, "keep"), "experts": "recompute"}
    one = alone("Mixtral", expert_basis="shared")
    assert_all_same(ranks.run(with_block, 2, stage, {"activations": {"policy": policy}}), one)


# -- who holds what -------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [1, 2, 3, 4, 5, 7, 12])
@pytest.mark.parametrize("count", [2, 3, 6])
def test_every_row_of_every_expert_has_one_holder(count: int, world: int) -> None:
    height, width = 10, 4
    shards = ExpertShards(count * height, width, world, count)
    found = []
    for rank in range(world):
        (first, last), (begin, end) = shards.experts(rank), shards.rows_of_each(rank)
        own = [expert * height + row for expert in range(first, last) for row in range(begin, end)]
        assert own == list(range(*shards.rows(rank)))  # one block
        assert shards.counted(rank) == slice(0, end - begin)
        found += own
    assert found == list(range(count * height))
    assert sum(map(shards.owns_experts, range(world))) == min(count, world)
    tall = torch.randn(count * height, 3)
    packed, back = torch.zeros(world, shards.max_rows, 3), torch.zeros_like(tall)
    shards.pack(tall, packed)
    shards.unpack(packed, back)
    assert torch.equal(back, tall)
    kind = ExpertWeight("up", count, width, height, False, True)
    planned = Parameter("up", (count, height, width), "experts", experts=kind)
    mode = OptimizerMode(rank=2, expert_basis="shared")
    assert math.prod(held_rows(planned, mode, world)) == shards.max_rows


@pytest.mark.parametrize(
    ("count", "world", "transposed", "are"),
    [(6, 3, True, True), (6, 4, False, False), (2, 4, False, True), (2, 4, True, False), (2, 3, False, False)],
)  # fmt: skip
def test_which_parts_of_weights_are_those_of_the_states(
    count: int, world: int, transposed: bool, are: bool
) -> None:
    shards, weights = ExpertShards(count * 8, 6, world, count), RowShards(count * 8, 6, world)
    if transposed:
        weights = RowShards(count * 6, 8, world)
    assert shards.are_weights(weights, transposed) is are
