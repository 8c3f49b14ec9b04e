"""Mixtures whose experts are 3-D weights: an engine on any number of ranks, at any stage, trains as the bare optimizer."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Ranks
from low_rank_adamw import low_rank_adamw
from mixture_runs import STEPS, alone, assert_all_same, engine_of, ran, train
from torch import Tensor, nn
from training import GLOBAL_BATCH, WEIGHT, ds_config, furthest, make_engine, model_weights

from hmt_deepspeed.planner.model.shapes import Parameter
from hmt_deepspeed.planner.run.modes import OptimizerMode
from hmt_deepspeed.planner.run.states import held_rows
from hmt_deepspeed.sites import ExpertWeight
from hmt_deepspeed.zero.sharding.shards import ExpertShards, RowShards

# Stage, ranks, experts -> experts that each rank holds. Three ranks do not divide five experts, nor a part's elements
# their rows. Two experts are over three ranks, one of which has an expert alone, or by two ranks each.
LAYOUTS = {
    (0, 1, 6): [6],
    (0, 2, 6): [6, 6],
    (1, 2, 6): [3, 3],
    (2, 3, 5): [1, 2, 2],
    (3, 2, 6): [3, 3],
    (3, 3, 5): [1, 2, 2],
    (1, 3, 2): [1, 1, 1],
    (2, 4, 2): [1, 1, 1, 1],
    (3, 3, 2): [1, 1, 1],
}
# Layout, family, basis, micro-batches. With a shared basis one of an expert's weights is projected on its rows and one
# on its columns; with bases of their own all of a family's are stored as they are projected, or all transposed. "auto"
# is the second for down projections, whose states then are of the other side.
ROWS = [
    ((0, 1, 6), "GptOss", "own", 1),
    ((0, 2, 6), "Mixtral", "shared", 1),
    ((1, 2, 6), "Mixtral", "own", 3),
    ((1, 2, 6), "GptOss", "auto", 1),
    ((2, 3, 5), "GptOss", "shared", 2),
    ((2, 3, 5), "Mixtral", "own", 1),
    ((3, 2, 6), "GptOss", "own", 1),
    ((3, 3, 5), "Mixtral", "auto", 1),
    ((1, 3, 2), "GptOss", "own", 1),
    ((2, 4, 2), "GptOss", "auto", 1),
    ((3, 3, 2), "Mixtral", "shared", 1),
]
EVERY = itertools.product(LAYOUTS, ("Mixtral", "GptOss"), ("shared", "own"), (1,))


@pytest.mark.parametrize(
    ("layout", "family", "basis", "micro_batches"),
    [*ROWS, *(pytest.param(*row, marks=pytest.mark.slow) for row in EVERY if row not in ROWS)],
    ids=str,
)
def test_ranks_are_the_bare_optimizer(
    ranks: Ranks, layout: tuple[int, int, int], family: str, basis: str, micro_batches: int
) -> None:
    stage, world, experts = layout
    options = {"expert_basis": basis}
    one = alone(family, experts, **options)
    assert one["norms"][0] > 0.5  # clipping is active
    assert any(one["own"].values()) == (basis != "shared")
    parts = ranks.run(ran, world, family, stage, options, experts=experts, gas=micro_batches)
    assert_all_same(parts, one)
    for part, held in zip(parts, LAYOUTS[layout], strict=True):
        assert part["projected"] == [True] * 4
        assert part["own"] == one["own"]
        assert {len(state["exp_avg"]) for state in part["states"].values()} == {held}


DRAWN = {"max_full_gradient_bytes": None}  # no gradient makes the basis
WHOLE = {**DRAWN, "update_interval": None, "expert_basis": None}  # nothing has a basis
WAYS: dict[str, dict[str, Any]] = {
    "whole gradients": {"projected_backward": False},
    "apollo": {"method": "apollo", **DRAWN, "expert_basis": None},
    "apollo_mini": {"method": "apollo_mini", **DRAWN, "expert_basis": None, "rank": None},
    "factored": {"second_moment": "factored"},
    "muon": {"method": "muon"},
    "muon, own bases": {"method": "muon", "expert_basis": "own", "residual": "full"},
    "muon, full rank": {"method": "muon", "rank": "full", **WHOLE},
    "full residual": {"residual": "full", "expert_basis": "own"},
    "random bases": {"range_finder": "random", "expert_basis": "own", **DRAWN},
    "full rank": {"rank": 20, "expert_basis": "own"},
    "chosen ranks": {"rank": None, "rank_candidates": [4, 8], "energy_threshold": 0.6},
}
# Whole updates take other ways to the weights where each rank steps its own experts (2 of 6) and where it does not (2 of
# 5). What is summed over an expert's rows is summed over ranks where these share an expert (3 of 2).
WAYS_AT = [
    ("whole gradients", 2, 2, 6),
    ("whole gradients", 3, 2, 5),
    ("apollo", 3, 2, 5),
    ("apollo_mini", 2, 3, 2),
    ("factored", 2, 3, 2),
    ("muon", 2, 3, 2),
    ("muon", 3, 2, 5),
    ("muon, own bases", 2, 2, 5),
    ("muon, full rank", 2, 3, 2),
    ("muon, full rank", 3, 2, 5),
    ("full residual", 2, 2, 5),
    ("full residual", 3, 2, 6),
    ("random bases", 2, 2, 5),
    ("full rank", 2, 2, 6),
    ("full rank", 3, 2, 5),
    ("chosen ranks", 3, 2, 5),
]


@pytest.mark.parametrize(
    ("way", "stage", "world", "experts"),
    WAYS_AT
    + [
        pytest.param(way, *at, marks=pytest.mark.slow)
        for way in WAYS
        for at in ((2, 2, 6), (3, 4, 6))
        if (way, *at) not in WAYS_AT
    ],
)
def test_ways_of_low_rank(ranks: Ranks, way: str, stage: int, world: int, experts: int) -> None:
    one = alone("GptOss", experts, **WAYS[way])
    parts = ranks.run(ran, world, "GptOss", stage, WAYS[way], experts=experts)
    assert_all_same(parts, one)


OFFLOAD: dict[str, tuple[int, int, int, dict[str, str]]] = {
    "states on the host": (2, 2, 5, {"offload_optimizer": "cpu"}),
    "states on an SSD": (3, 2, 5, {"offload_optimizer": "nvme"}),
    "all on the host": (3, 2, 6, {"offload_optimizer": "cpu", "offload_param": "cpu"}),
    "parameters on the host": (3, 2, 5, {"offload_param": "cpu"}),
}


@pytest.mark.parametrize("offload", OFFLOAD)
def test_offload(ranks: Ranks, offload: str, tmp_path: Path) -> None:
    stage, world, experts, devices = OFFLOAD[offload]
    zero = {key: {"device": to, "nvme_path": str(tmp_path)} for key, to in devices.items()}
    found = ranks.run(ran, world, "GptOss", stage, {}, zero_optimization=zero, experts=experts)
    assert_all_same(found, alone("GptOss", experts))


# -- with other parts of an engine ------------------------------------------------------------------------


def test_leaf_modules(ranks: Ranks) -> None:
    """Of ZeRO-3: a mixture is gathered at once, and watched by nobody inside. Mixtral's are such by themselves."""
    options = {"expert_basis": "auto"}
    one = alone("GptOss", **options)
    assert 0 < sum(one["own"].values()) < 4
    assert_all_same(ranks.run(ran, 2, "GptOss", 3, options, is_leaf=True), one)


@pytest.mark.parametrize(("basis", "stage"), [("auto", 2), ("own", 3)])
def test_bases_in_host_memory(ranks: Ranks, basis: str, stage: int) -> None:
    options = {"expert_basis": basis}
    parts = ranks.run(ran, 2, "GptOss", stage, options, block={"basis_cache": {}})
    assert_all_same(parts, alone("GptOss", **options))


def test_bases_in_host_memory_with_moments_of_old_ones(ranks: Ranks) -> None:
    """Of which experts keep none."""
    block = {"basis_cache": {"history": 2}}
    first, second = ranks.run(ran, 2, "GptOss", 2, {"expert_basis": "auto"}, block=block)
    assert first["losses"] == second["losses"]
    assert furthest(first["weights"], second["weights"]) == 0


@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_outputs_of_experts_are_computed_again(ranks: Ranks, stage: int) -> None:
    kinds = ("attention_qkv", "attention_output", "mlp_intermediate", "residual")
    policy = {**dict.fromkeys(kinds, "keep"), "experts": "recompute"}
    parts = ranks.run(ran, 2, "Mixtral", stage, {}, block={"activations": {"policy": policy}})
    assert_all_same(parts, alone("Mixtral"))


def poisoned(stage: int) -> dict[str, Any]:
    """The last rank's gradients are not finite in the second step."""
    engine = engine_of("GptOss", stage, {})
    train(engine, range(1))
    before = model_weights(engine)
    if dist.get_rank() == dist.get_world_size() - 1:
        experts = engine.module.model.layers[1].mlp.experts
        hook = experts.register_full_backward_pre_hook(lambda _, grads: (grads[0] * math.nan,))
    train(engine, range(1, 2))
    if dist.get_rank() == dist.get_world_size() - 1:
        hook.remove()
    moved = furthest(before, model_weights(engine))
    found = train(engine, range(2, STEPS))
    skipped = engine.skipped_steps
    engine.destroy()
    return {**found, "moved": moved, "skipped": skipped}


@pytest.mark.parametrize(("stage", "world"), [(1, 3), (3, 2)])
def test_what_is_not_finite_moves_nothing(ranks: Ranks, stage: int, world: int) -> None:
    for part in ranks.run(poisoned, world, stage):
        assert part["moved"] == 0
        assert part["skipped"] == 1
        assert all(0 < norm < 100 for norm in part["norms"])


def test_bf16_weights_with_masters(ranks: Ranks) -> None:
    """As one rank, up to roundings of gradients and of updates that travel where three ranks hold parts of four experts."""
    how: dict[str, Any] = {"bf16": {"enabled": True}, "experts": 4}
    how["widths"] = {"hidden_size": 40, "head_dim": 20, "intermediate_size": 24}
    (one,) = ranks.run(ran, 1, "Mixtral", 0, {}, **how)
    for stage, world in ((2, 3), (3, 2)):
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


READS = {"rank": 4, "target_modules": ["^weight"], "update_interval": 2, "scale": 1.0}


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


@pytest.mark.parametrize(("side", "stage", "world"), [("right", 2, 3), ("left", 3, 2)])
def test_weights_that_other_code_reads(ranks: Ranks, side: str, stage: int, world: int) -> None:
    torch.manual_seed(0)
    model = Einsum()
    fields = {**READS, "projection": side, "max_full_gradient_bytes": 10**6}
    optimizer = low_rank_adamw(model, lr=3e-3, betas=(0.9, 0.99), weight_decay=0.1, **fields)
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
        assert float((part["weight"] - before).abs().max()) > 4 * WEIGHT


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
    mode = OptimizerMode("lowrank_adamw", rank=2, expert_basis="shared")
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
