"""Bytes of optimizer states, masters, gradients and bases: the plan against what the optimizer holds."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from low_rank_adamw import LOW_RANK_ADAMW, low_rank_adamw
from problems import ADAMW, linear_shapes
from real_models import config, fresh, run

from hmt_deepspeed.config.components import PAPER_POLICY
from hmt_deepspeed.kernels.low_rank_factors import low_rank_product
from hmt_deepspeed.optim.backward.int8_linear import encoded_weight
from hmt_deepspeed.optim.rules.build import build_matrix
from hmt_deepspeed.optim.settings.assign import assign_rules, linear_weights
from hmt_deepspeed.optim.settings.options import complete_options, matrix_settings
from hmt_deepspeed.planner.hardware import named_machine
from hmt_deepspeed.planner.model.families import shape_of_config
from hmt_deepspeed.planner.model.shapes import parameters
from hmt_deepspeed.planner.model.workload import build_workload
from hmt_deepspeed.planner.run.memory import (
    OptimizerMode,
    Sharding,
    model_states,
)
from hmt_deepspeed.planner.run.offloaded import offloaded_states
from hmt_deepspeed.planner.run.problem import RunSetup, make_problem
from hmt_deepspeed.planner.solve.cost import estimate
from hmt_deepspeed.planner.solve.plan import regrouped, uniform_plan
from hmt_deepspeed.zero.planning import facts as plan_inputs
from hmt_deepspeed.zero.sharding.shards import RowShards

KEEP = dict.fromkeys(PAPER_POLICY, "keep") | {"projected_inputs": "project"}
MODES = {
    "adamw": {"method": "adamw"},
    "adamw int8": {"method": "adamw", "state_dtype": "int8"},
    "adamw bf16": {"method": "adamw", "state_dtype": "bf16"},
    "right": {"rank": 16},
    "left": {"rank": 16, "projection": "left"},
    "auto side": {"rank": 16, "projection": "auto"},
    "two-sided": {"rank": 16, "projection": "two_sided"},
    "bf16 states": {"rank": 16, "state_dtype": "bf16"},
    # k and v have 32 rows: a rank of 32, and like others moments too few for 8 bits
    "int8 states": {"rank": 40, "state_dtype": "int8"},
    "full residual": {"rank": 16, "residual": "full"},
    "no residual": {"rank": 40, "residual": "none"},
    "no probes": {"rank": 16, "residual": "none", "probes": 0},
    "targets": {
        "rank": 16,
        "target_modules": ("mlp",),
        "module_rules": {r"down|mlp\.c_proj": {"method": "adamw"}},
    },
    "random basis": {"rank": 16, "range_finder": "random"},
    "factored": {"rank": 16, "projection": "auto", "second_moment": "factored"},
    "factored and int8": {
        "rank": 40,
        "state_dtype": "int8",
        "second_moment": "factored",
    },
    "narrow cores": {"rank": 100, "projection": "two_sided", "state_dtype": "int8"},
    "int8 weights": {"rank": 16, "weight_dtype": "int8"},
    "apollo": {"method": "apollo", "rank": 16},
    "apollo int8": {"method": "apollo", "rank": 16, "state_dtype": "int8"},
    "apollo mini": {"method": "apollo_mini"},
    "no masters": {"rank": 16, "master_weights": "none"},
    "muon": {"method": "muon", "rank": 16},
    "muon, whole": {"method": "muon", "rank": "full", "state_dtype": "int8"},
}


def planned_mode(fields):
    mode = dict(fields)
    mode["adamw_modules"] = tuple(mode.pop("module_rules", ()))
    return (
        OptimizerMode(**{**LOW_RANK_ADAMW, **mode}, redrawn=True)
        if mode.pop("range_finder", None)
        else OptimizerMode(**{**LOW_RANK_ADAMW, **mode})
    )


@pytest.mark.parametrize(
    ("name", "mode"),
    # a Conv1D has no INT8 weight
    [("llama", mode) for mode in MODES]
    + [("gpt2", mode) for mode in MODES if mode != "int8 weights"],
)
def test_states_are_those_that_the_optimizer_reports(name, mode):
    optimizer = low_rank_adamw(fresh(name, torch.bfloat16), lr=1e-3, **MODES[mode])
    reported = sum(row.state_bytes for row in optimizer.describe())
    planned = model_states(shape_of_config(config(name)), planned_mode(MODES[mode]))
    assert planned.optimizer == reported


CHOSEN = {
    "right": {},
    "auto side": {"projection": "auto"},
    "int8": {"state_dtype": "int8"},
    "factored": {"second_moment": "factored"},
    "list": {"rank_candidates": (8, 40)},
    "apollo": {"method": "apollo"},
    "apollo, a share": {"method": "apollo", "rank": 0.3},
    "share": {"rank": 0.2},
    "all matrices": {"rank": 0.125, "target_modules": "all"},
}


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("case", CHOSEN)
def test_ranks_that_are_chosen_are_planned_as_the_largest_candidates(name, case):
    """Shares of each matrix's smaller side, where the candidates are: as many bytes as the optimizer then has."""
    optimizer = low_rank_adamw(fresh(name, torch.bfloat16), lr=1e-3, **CHOSEN[case])
    optimizer.describe()
    for matrix in optimizer.matrices.values():
        if matrix.rank < matrix.candidates[-1]:
            matrix.adopt(matrix.seeded_basis(matrix.candidates[-1], 1))
    reported = sum(row.state_bytes for row in optimizer.describe())
    mode = plan_inputs.optimizer_mode(optimizer.options)
    assert model_states(shape_of_config(config(name)), mode).optimizer == reported
    kind = {"list": int, "apollo": type(None)}.get(case, float)
    assert isinstance(mode.rank, kind)


@pytest.mark.parametrize("name", ["llama", "phi"])
def test_shared_bases_are_held_once(name):
    """Who shares shows in the first forward: q, k and v; gate and up, but not Phi's fc1 after its dense."""
    network = fresh(name, torch.bfloat16).train()
    optimizer = low_rank_adamw(
        network, lr=1e-3, rank=8, share_basis=True, max_full_gradient_bytes=2**30
    )
    for _ in range(2):
        run(network).backward()
        optimizer.step()
        optimizer.zero_grad()
    reported = sum(row.state_bytes for row in optimizer.describe())
    mode = OptimizerMode("lowrank_adamw", rank=8, share_basis=True)
    assert model_states(shape_of_config(config(name)), mode).optimizer == reported


def test_int8_weights_are_those_that_the_optimizer_holds():
    network = fresh("llama", torch.bfloat16)
    optimizer = low_rank_adamw(network, lr=1e-3, rank=16, weight_dtype="int8")
    encoded = (encoded_weight(module) for module in network.modules())
    held = sum(weight.nbytes for weight in encoded if weight is not None)
    # an encoded weight's Parameter is one NaN, expanded
    held += sum(p.nbytes for p in network.parameters() if p.stride() != (0, 0))
    mode = planned_mode(MODES["int8 weights"])
    assert model_states(shape_of_config(config("llama")), mode).weights == held
    del optimizer  # codes last as long as it does
    with pytest.raises(ValueError, match="int8' at ZeRO stage 3; legal"):
        model_states(shape_of_config(config("llama")), mode, Sharding(3, 2))


@pytest.mark.parametrize("world", [2, 3, 7])
@pytest.mark.parametrize(
    "mode", ["right", "left", "two-sided", "apollo", "int8 states", "muon, whole"]
)
def test_sharded_moments_are_those_of_the_rows_that_a_rank_touches(mode, world):
    """The rank that holds most, with sizes that the world size does not divide."""
    network = fresh("llama", torch.bfloat16)
    fields = {k: v for k, v in MODES[mode].items() if k != "target_modules"}
    assigned = assign_rules(
        [(name, tuple(p.shape)) for name, p in network.named_parameters()],
        settings=matrix_settings(complete_options({**LOW_RANK_ADAMW, **fields})),
        target_modules=MODES[mode].get("target_modules"),
        linear_names=linear_weights(network),
    )
    most = 0
    for assignment in assigned:
        if assignment.settings is None:
            dtype = fields.get("state_dtype", "fp32")
            part = -(-torch.Size(assignment.shape).numel() // world)
            whole = torch.Size(assignment.shape).numel()
            scales = 4 * -(-part // 256)
            most += 2 * (part + scales if dtype == "int8" and whole >= 4096 else 4 * part)
            continue
        shape = assignment.settings.oriented(*assignment.shape)
        shards = RowShards(*shape, world)
        made = (
            build_matrix(
                assignment.name,
                assignment.shape,
                shards.rows(rank),
                assignment.settings,
                torch.bfloat16,
                torch.device("cpu"),
            )
            for rank in range(world)
        )
        most += max(matrix.moments.nbytes for matrix in made)
    shape = shape_of_config(config("llama"))
    assert model_states(shape, planned_mode(MODES[mode]), Sharding(2, world)).moments == most


def test_each_stage_divides_what_it_says():
    shape, mode = shape_of_config(config("llama")), OptimizerMode("lowrank_adamw", rank=16)
    at = {stage: model_states(shape, mode, Sharding(stage, 4)) for stage in range(4)}
    assert at[1].weights == at[0].weights
    assert at[1].gradients == at[0].gradients
    assert at[1].moments < at[0].moments / 3.5  # evidence is whole on every rank
    assert at[1].masters == at[0].masters / 4
    assert at[2].gradients == at[1].gradients / 4
    assert at[2].bases == at[0].bases
    assert at[3].weights == at[0].weights / 4
    assert at[3].bases == at[0].bases / 4
    assert at[3].probes == at[0].probes / 4
    left = OptimizerMode(
        "lowrank_adamw", rank=16, projection="left"
    )  # backward itself reads its bases: whole everywhere
    whole = model_states(shape, left).bases
    assert model_states(shape, left, Sharding(3, 4)).bases == whole


@pytest.mark.parametrize("method", ["lowrank_adamw", "apollo"])
def test_a_rank_above_a_matrix_smaller_side_is_lowered(method):
    shape = shape_of_config(config("llama"))
    high, low = (
        model_states(shape, OptimizerMode(method=method, rank=rank, target_modules=("k_proj",)))
        for rank in (4096, 32)
    )
    assert high == low


def test_single_matrices_have_ranks_of_their_own():
    shape, sizes = shape_of_config(config("llama")), {"micro_batch": 2, "seq_length": 16}
    names = [p.name for p in parameters(shape) if p.kind == "linear"]
    wide, narrow = OptimizerMode("lowrank_adamw", rank=32), OptimizerMode("lowrank_adamw", rank=16)
    every = OptimizerMode("lowrank_adamw", rank=32, ranks=tuple((name, 16) for name in names))
    one = OptimizerMode(
        "lowrank_adamw", rank=32, ranks=((next(n for n in names if "q_proj" in n), 16),)
    )
    assert model_states(shape, every) == model_states(shape, narrow)
    built = [
        build_workload(shape, **sizes, projected=mode.backward()).layers
        for mode in (wide, one, every, narrow)
    ]
    assert built[2] == built[3]
    columns = (
        48 - 32
    )  # r + k of the one matrix, whose k is half of r, and more for a multiple of 16
    assert built[0][0].projected_bytes - built[1][0].projected_bytes == columns * 2 * 16 * 2
    moments = [model_states(shape, mode).moments for mode in (wide, one)]
    rows = next(p for p in parameters(shape) if "q_proj" in p.name).shape[0]
    # fp32 moments of the rows, and the evidence of each direction
    assert moments[0] - moments[1] == shape.layers * (2 * rows + 1) * 16 * 4


def test_what_is_full_in_some_layers_only_is_priced_so():
    """Not as the mean rank: plain AdamW has whole gradients, no basis, and a backward as ever."""
    shape, sizes = shape_of_config(config("llama")), {"micro_batch": 2, "seq_length": 16}
    down = next(p for p in parameters(shape) if "down_proj" in p.name)
    m, n = down.shape
    low = OptimizerMode("lowrank_adamw", rank=8)
    mixed = replace(low, ranks=((down.name.replace("*", "1"), n),))
    every = replace(low, ranks=((down.name, n),))
    states = {mode: model_states(shape, mode) for mode in (low, mixed, every)}
    for kind in ("gradients", "moments", "bases", "probes"):
        of_low, of_mixed, of_every = (getattr(found, kind) for found in states.values())
        assert (of_mixed - of_low) * shape.layers == of_every - of_low, kind
    assert states[mixed].bases == states[low].bases - 2 * n * 8
    moved = [offloaded_states(shape, replace(mode, host_is_ours=True)) for mode in states]
    sent = [found.whole("low_rank").sent for found in moved]
    assert sent[1] - sent[0] == pytest.approx((4 - 2) * m * n)  # formed whole, in fp32
    layers = {mode: build_workload(shape, **sizes, projected=mode.backward()) for mode in states}
    groups = {layer.layers: layer for layer in layers[mixed].layers}
    assert groups[0,].backward_flops == layers[low].layers[0].backward_flops
    assert (1,) in groups
    assert groups[1,].backward_flops == layers[every].layers[0].backward_flops
    assert groups[1,].projected_bytes < groups[0,].projected_bytes
    problem = partial(make_problem, machine=named_machine("rtx4090"), setup=RunSetup())
    plan = uniform_plan(layers[low], named_machine("rtx4090"), KEEP)
    found = [
        estimate(problem(work, mode=mode), regrouped(plan, work)).hardware_flops
        for mode, work in layers.items()
    ]
    assert (found[1] - found[0]) * shape.layers == pytest.approx(found[2] - found[0])


def test_updates_are_sent_in_the_dtype_of_their_product():
    """bf16 factors are multiplied in bf16, fp16 ones in fp32 (`as_factors`)."""
    shape, mode = (
        shape_of_config(config("llama")),
        OptimizerMode("lowrank_adamw", rank=8, host_is_ours=True),
    )
    elements = sum(m * n for m, n in linear_shapes(shape))
    for dtype, update_itemsize in ((torch.bfloat16, None), (torch.float16, 4)):
        product = low_rank_product(torch.ones(4, 2), torch.ones(3, 2, dtype=dtype))
        states = offloaded_states(shape, mode, update_itemsize=update_itemsize)
        assert states.whole("low_rank").sent == elements * product.element_size()


def test_muon_of_whole_matrices_has_their_gradients_and_an_ordinary_backward():
    shape = shape_of_config(config("llama"))
    mode = OptimizerMode(method="muon", rank="full", state_dtype="fp32")
    held, adamw = model_states(shape, mode), model_states(shape, ADAMW)
    assert held.gradients == adamw.gradients
    assert adamw.moments - held.moments == 4 * sum(m * n for m, n in linear_shapes(shape))
    assert held.bases == held.probes == 0
    assert mode.backward() is None
    encoded = replace(mode, state_dtype="auto", weight_dtype="int8")
    optimizer = low_rank_adamw(
        fresh("llama", torch.bfloat16), method="muon", rank="full", weight_dtype="int8"
    )
    reported = sum(row.state_bytes for row in optimizer.describe())
    assert model_states(shape, encoded).optimizer == reported
    assert model_states(shape, encoded).weights < held.weights


def test_gradients_of_low_rank_matrices_are_projected():
    shape = shape_of_config(config("llama"))
    whole = model_states(shape, ADAMW, itemsize=4).gradients
    linears = sum(m * n for m, n in linear_shapes(shape))
    for on_gpu, probes in ((False, 8), (True, 16)):
        mode = OptimizerMode("lowrank_adamw", rank=16, on_gpu=on_gpu)
        projected = model_states(shape, mode, itemsize=4).gradients
        columns = sum(m * (16 + probes) for m, _ in linear_shapes(shape))
        assert whole - projected == 4 * (linears - columns)
    optimizer = low_rank_adamw(fresh("llama", torch.bfloat16), lr=1e-3, rank=16)
    assert {matrix.width for matrix in optimizer.matrices.values()} == {16 + 8}
