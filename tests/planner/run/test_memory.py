"""Bytes by kind: against the optimizer's own report, real peaks, and the papers' tables."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from problems import small_problem
from real_models import Alive, config, model, run, tokens

from hmt_deepspeed.config import HMTConfig
from hmt_deepspeed.config.components import PAPER_POLICY
from hmt_deepspeed.config.full_gradients import auto_full_gradient_bytes
from hmt_deepspeed.kernels.low_rank_update import low_rank_product
from hmt_deepspeed.optim.backward.int8_linear import encoded_weight
from hmt_deepspeed.optim.decisions.schedule import RefreshSchedule
from hmt_deepspeed.optim.hmt import HMT
from hmt_deepspeed.optim.rules.build import build_matrix
from hmt_deepspeed.optim.settings.assign import assign_rules, linear_weights
from hmt_deepspeed.optim.settings.options import complete_options, matrix_settings
from hmt_deepspeed.planner.hardware import named_machine
from hmt_deepspeed.planner.model.families import shape_of_config
from hmt_deepspeed.planner.model.shapes import num_parameters, parameters, plain_shape
from hmt_deepspeed.planner.model.workload import build_workload
from hmt_deepspeed.planner.run.loads import static_bytes
from hmt_deepspeed.planner.run.memory import (
    MemoryBudget,
    OptimizerMode,
    Sharding,
    activation_bytes,
    choices_of,
    communication_volume,
    model_states,
    temporary_bytes,
)
from hmt_deepspeed.planner.run.offloaded import offloaded_states
from hmt_deepspeed.planner.run.problem import RunSetup, make_problem
from hmt_deepspeed.planner.run.refresh import worst_refresh
from hmt_deepspeed.planner.solve.cost import estimate
from hmt_deepspeed.planner.solve.plan import regrouped, uniform_plan
from hmt_deepspeed.zero.planning import facts as plan_inputs
from hmt_deepspeed.zero.sharding.shards import RowShards

GIB, GB = 2**30, 10**9
ADAMW = OptimizerMode(method="adamw")
KEEP = dict.fromkeys(PAPER_POLICY, "keep") | {"projected_inputs": "project"}
REPLICATED = Sharding()

# -- optimizer states ---------------------------------------------------------------------------------

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
}


def planned_mode(fields):
    mode = dict(fields)
    mode["adamw_modules"] = tuple(mode.pop("module_rules", ()))
    return (
        OptimizerMode(**mode, redrawn=True)
        if mode.pop("range_finder", None)
        else OptimizerMode(**mode)
    )


def fresh(name, dtype):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(config(name), dtype=dtype)


@pytest.mark.parametrize(
    ("name", "mode"),
    # a Conv1D has no INT8 weight
    [("llama", mode) for mode in MODES]
    + [("gpt2", mode) for mode in MODES if mode != "int8 weights"],
)
def test_states_are_those_that_the_optimizer_reports(name, mode):
    optimizer = HMT(fresh(name, torch.bfloat16), lr=1e-3, **MODES[mode])
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
    optimizer = HMT(fresh(name, torch.bfloat16), lr=1e-3, **CHOSEN[case])
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
    optimizer = HMT(network, lr=1e-3, rank=8, share_basis=True, max_full_gradient_bytes=2**30)
    for _ in range(2):
        run(network).backward()
        optimizer.step()
        optimizer.zero_grad()
    reported = sum(row.state_bytes for row in optimizer.describe())
    mode = OptimizerMode(rank=8, share_basis=True)
    assert model_states(shape_of_config(config(name)), mode).optimizer == reported


def test_int8_weights_are_those_that_the_optimizer_holds():
    network = fresh("llama", torch.bfloat16)
    optimizer = HMT(network, lr=1e-3, rank=16, weight_dtype="int8")
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
@pytest.mark.parametrize("mode", ["right", "left", "two-sided", "apollo", "int8 states"])
def test_sharded_moments_are_those_of_the_rows_that_a_rank_touches(mode, world):
    """The rank that holds most, with sizes that the world size does not divide."""
    network = fresh("llama", torch.bfloat16)
    fields = {k: v for k, v in MODES[mode].items() if k != "target_modules"}
    assigned = assign_rules(
        [(name, tuple(p.shape)) for name, p in network.named_parameters()],
        settings=matrix_settings(complete_options(fields)),
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
    shape, mode = shape_of_config(config("llama")), OptimizerMode(rank=16)
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
        rank=16, projection="left"
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
    wide, narrow = OptimizerMode(rank=32), OptimizerMode(rank=16)
    every = OptimizerMode(rank=32, ranks=tuple((name, 16) for name in names))
    one = OptimizerMode(rank=32, ranks=((next(n for n in names if "q_proj" in n), 16),))
    assert model_states(shape, every) == model_states(shape, narrow)
    built = [
        build_workload(shape, **sizes, projected=mode.backward()).layers
        for mode in (wide, one, every, narrow)
    ]
    assert built[2] == built[3]
    columns = 32 + 16 - (16 + 8)  # r + k of the one matrix, whose k is half of r
    assert built[0][1].projected_bytes - built[1][1].projected_bytes == columns * 2 * 16 * 2
    moments = [model_states(shape, mode).moments for mode in (wide, one)]
    rows = next(p for p in parameters(shape) if "q_proj" in p.name).shape[0]
    # fp32 moments of the rows, and the evidence of each direction
    assert moments[0] - moments[1] == shape.layers * (2 * rows + 1) * 16 * 4


def test_what_is_full_in_some_layers_only_is_priced_so():
    """Not as the mean rank: plain AdamW has whole gradients, no basis, and a backward as ever."""
    shape, sizes = shape_of_config(config("llama")), {"micro_batch": 2, "seq_length": 16}
    down = next(p for p in parameters(shape) if "down_proj" in p.name)
    m, n = down.shape
    low = OptimizerMode(rank=8)
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
    assert groups[1,].backward_flops == layers[every].layers[1].backward_flops
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
    shape, mode = shape_of_config(config("llama")), OptimizerMode(rank=8, host_is_ours=True)
    elements = sum(m * n for m, n in _linear_shapes(shape))
    for dtype, update_itemsize in ((torch.bfloat16, None), (torch.float16, 4)):
        product = low_rank_product(torch.ones(4, 2), torch.ones(3, 2, dtype=dtype))
        states = offloaded_states(shape, mode, update_itemsize=update_itemsize)
        assert states.whole("low_rank").sent == elements * product.element_size()


def test_gradients_of_low_rank_matrices_are_projected():
    shape = shape_of_config(config("llama"))
    whole = model_states(shape, ADAMW, itemsize=4).gradients
    projected = model_states(shape, OptimizerMode(rank=16), itemsize=4).gradients
    linears = sum(m * n for m, n in _linear_shapes(shape))
    assert whole - projected == 4 * (linears - sum(m * (16 + 8) for m, _ in _linear_shapes(shape)))


def _linear_shapes(shape):
    return [p.shape for p in parameters(shape) if p.kind == "linear" for _ in range(p.count)]


# -- the papers' tables -------------------------------------------------------------------------------


def per_parameter(mode, sharding=REPLICATED, **sizes):
    shape = plain_shape(layers=36, hidden=4096, heads=32, vocab=50257)
    return model_states(shape, mode, sharding, **sizes).total / num_parameters(shape)


@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 120.0), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_zero_states_of_7_5b_on_64_ranks(stage, gigabytes):
    # ZeRO, figure 1. What the parts are rounded up by is less than 1e-5.
    planned = 7.5 * per_parameter(ADAMW, Sharding(stage, 64))
    assert planned == pytest.approx(gigabytes, abs=0.05)


@pytest.mark.parametrize(("billions", "gigabytes"), [(1, 16), (7, 112), (70, 1120), (405, 6480)])
def test_playbook_states(billions, gigabytes):
    for itemsize in (2, 4):  # fp32 alone, or bf16 with masters
        assert billions * per_parameter(ADAMW, itemsize=itemsize) == gigabytes


def test_playbook_states_with_fp32_gradients():
    # The playbook's 20 bytes have the bf16 gradients beside the fp32 sums. Ours adds each to the sum and frees
    # it: 18, and of the bf16 ones no more than one matrix at a time (temporary_bytes).
    assert per_parameter(ADAMW, gradient_itemsize=4) + 2 == 20


@pytest.mark.parametrize(("stage", "volume"), [(0, 2), (1, 2), (2, 2), (3, 3)])
def test_zero_communication_volume(stage, volume):
    shape = plain_shape(layers=4, hidden=64, heads=4, vocab=100)
    assert communication_volume(shape, Sharding(stage, 64)) == volume * num_parameters(shape)
    assert communication_volume(shape, Sharding(stage, 1)) == 0


@pytest.fixture(scope="module")
def lohan_13b():
    shape = plain_shape(layers=40, hidden=5120, heads=40, vocab=50257)
    return build_workload(shape, micro_batch=32, seq_length=1024)


def test_lohan_13b_activations(lohan_13b):
    inputs = sum(s.count * s.nbytes for s in lohan_13b.sites if s.name == "layer_input")
    assert inputs / GIB == 12.5
    everything = sum(layer.count * layer.saved_bytes for layer in lohan_13b.layers)
    formula = 34 * 1024 * 32 * 5120 * 40
    assert formula / GIB == 212.5
    # beyond the formula: log-sum-exp and the norms' statistics, fp32: 4 (heads + 4) bytes per token and layer
    assert everything - formula == 4 * (40 + 4) * 1024 * 32 * 40
    assert everything / formula < 1.002


def test_playbook_activations_with_eager_attention(lohan_13b):
    # L s b h (34 + 5 heads s / h), the scores' softmax, its dropout mask and what dropout gives
    work = build_workload(lohan_13b.shape, micro_batch=1, seq_length=2048, attention="eager")
    planned = sum(layer.count * layer.saved_bytes for layer in work.layers)
    formula = 40 * 2048 * 5120 * (34 + 5 * 40 * 2048 / 5120)
    assert planned == formula + 4 * 4 * 2048 * 40  # the norms' statistics again


def test_partitioned_checkpoints_of_100b():
    # ZeRO, section 6.1: 33 GB of checkpoints, 2 GB over 16 ranks; 100B parameters as 31 layers of 16384
    shape = plain_shape(layers=31, hidden=16384, heads=128, vocab=50257)
    assert num_parameters(shape) == pytest.approx(100e9, rel=0.01)
    work = build_workload(shape, micro_batch=32, seq_length=1024)
    checkpoints = {site: "keep" for site in work.sites if site.name == "layer_input"}
    whole = activation_bytes(work, checkpoints).device
    parts = activation_bytes(work, checkpoints, partition=16).device
    assert whole / GB == pytest.approx(33, abs=0.5)
    assert parts / GB == pytest.approx(2, abs=0.1)


# -- activations and peaks ----------------------------------------------------------------------------


def test_policy_becomes_choices_of_sites(lohan_13b):
    choices = choices_of(lohan_13b, PAPER_POLICY)
    assert set(choices) == set(lohan_13b.sites)
    held = activation_bytes(lohan_13b, choices)
    per_token = {
        "inputs": 2 * 5120,
        "attention": 5120 + 2 * 5120 / 256 + 4 * 40,
        "residual": 2 * 5120,
        "mlp": 4 * 5120 * (1 + 2 / 256),
    }
    ends = 2 * 2 * 5120  # final norm and head
    assert held.device == 32 * 1024 * (40 * sum(per_token.values()) + ends) + lohan_13b.shared_bytes
    assert (held.host, held.ssd) == (0, 0)


def test_swapped_bytes_are_counted_where_they_go(lohan_13b):
    policy = PAPER_POLICY | {"residual": "swap_host", "mlp_intermediate": "swap_ssd"}
    held = activation_bytes(lohan_13b, choices_of(lohan_13b, policy))
    stream = 32 * 1024 * 5120 * 2
    assert held.host == (39 + 40) * stream  # what enters layers 1..39, what attention adds in 0..39
    assert held.ssd == 40 * 4 * stream
    assert held.device < activation_bytes(lohan_13b, choices_of(lohan_13b, PAPER_POLICY)).device


def test_no_checkpointing_is_what_autograd_saves(lohan_13b):
    assert activation_bytes(lohan_13b, None).device == lohan_13b.saved_bytes


def test_recompute_of_the_residual_keeps_what_enters_a_layer(lohan_13b):
    choices = choices_of(lohan_13b, PAPER_POLICY | {"residual": "recompute"})
    of = {(site.name, site.layers[0]): choice for site, choice in choices.items()}
    assert of["layer_input", 1] == "keep"
    assert of["residual", 1] == "recompute"
    with pytest.raises(ValueError, match=r"embedding.*legal"):
        choices_of(lohan_13b, {"residual": "keep"})


# A norm's weight gradient, positions and the like are not planned; with real sizes they vanish.
PEAK = 0.05


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("llama", torch.bfloat16),
        ("llama", torch.float32),
        ("gemma3", torch.bfloat16),
        ("phi", torch.float32),
        ("gpt2", torch.float32),
        ("gpt_neox", torch.bfloat16),
        ("opt", torch.float32),
    ],
)
def test_peak_of_a_checkpointed_backward(name, dtype):
    network, ids = model(name, dtype=dtype), tokens(8, 64)
    for parameter in network.parameters():
        parameter.grad = torch.zeros_like(parameter)
    network.activation_checkpointing_enable({"use_reentrant": False})
    try:
        with Alive() as alive:
            alive.leave_out(network)
            loss = run(network, ids)
            alive.peak = 0
            loss.backward()
    finally:
        network.activation_checkpointing_disable()
        network.zero_grad()
    shape = shape_of_config(config(name))
    work = build_workload(shape, micro_batch=8, seq_length=64, itemsize=dtype.itemsize)
    inputs = sum(s.count * s.nbytes for s in work.sites if s.name == "layer_input")
    moments = temporary_bytes(work, ADAMW)
    planned = inputs + work.shared_bytes + moments.layer + moments.weight_gradient
    assert planned == pytest.approx(alive.peak, rel=PEAK)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_peak_of_a_backward_in_which_every_matrix_refreshes(dtype):
    """It forms full gradients and keeps linears' inputs; the next one projects."""
    network, ids = fresh("llama", dtype).train(), tokens(8, 64)
    fields = {"rank": 8, "max_full_gradient_bytes": 2**30}
    optimizer = HMT(network, lr=1e-4, **fields)
    network.activation_checkpointing_enable({"use_reentrant": False})
    peaks = []
    for _ in range(2):
        for parameter in network.parameters():
            parameter.grad = torch.zeros_like(parameter)
        with Alive() as alive:
            alive.leave_out(network)
            loss = run(network, ids)
            alive.peak = 0
            loss.backward()
        peaks.append(alive.peak)
        optimizer.step()
        optimizer.zero_grad()
    shape, mode = shape_of_config(config("llama")), OptimizerMode(**fields)
    sizes = {"micro_batch": 8, "seq_length": 64, "itemsize": dtype.itemsize}
    work = build_workload(shape, **sizes, projected=mode.backward())
    moments = temporary_bytes(work, mode)
    inputs = sum(s.count * s.nbytes for s in work.sites if s.name == "layer_input")
    every = inputs + work.shared_bytes + moments.layer + moments.weight_gradient
    low_rank = sum(m * n for m, n in _linear_shapes(shape)) * dtype.itemsize
    projected = low_rank - moments.full_gradient
    # sums of full gradients were there before and not counted, those of projected ones are made in backward
    assert every + moments.refreshed_inputs == pytest.approx(peaks[0], rel=PEAK)
    assert every + projected == pytest.approx(peaks[1], rel=PEAK)
    assert moments.refreshed_inputs > PEAK * peaks[0]


def test_matrices_refresh_in_the_models_order_as_far_as_the_bytes_go():
    """The schedule's own first steps: q, k, v, o, gate, up and down of one layer after the other."""
    shape = shape_of_config(config("llama"))
    sizes = [m * n * 2 for m, n in [p.shape for p in parameters(shape) if p.kind == "linear"]]
    columns = [p.shape[0] * (8 + 8) * 2 for p in parameters(shape) if p.kind == "linear"]
    for budget in (None, 30_000, 50_000, 10**6):
        mode = OptimizerMode(rank=8, max_full_gradient_bytes=budget)
        every = sizes * shape.layers
        auto = auto_full_gradient_bytes(every)
        schedule, most = RefreshSchedule(every, 1000, budget or auto), 0
        for step in range(len(every)):
            due = schedule.due(step)
            most = max(most, sum(every[i] - columns[i % len(columns)] for i in due))
            for index in due:
                schedule.refreshed(index, step)
        assert worst_refresh(shape, mode, 2).full_gradients == most
    assert worst_refresh(shape, OptimizerMode(residual="full"), 2).full_gradients == 0
    assert worst_refresh(shape, ADAMW, 2) == worst_refresh(shape, OptimizerMode(redrawn=True), 2)
    shared = worst_refresh(shape, OptimizerMode(rank=8, share_basis=True), 2)
    # gate and up are the largest group; beside q, k and v there is room for o
    assert {frozenset({"qkv", "out"}), frozenset({"up"})} < shared.inputs
    assert not any({"up", "down"} <= roles for roles in shared.inputs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_peak_at_the_loss(dtype):
    from transformers.loss.loss_utils import ForCausalLMLoss

    vocab, count = 4096, 64
    shape = plain_shape(layers=1, hidden=8, heads=1, vocab=vocab)
    work = build_workload(shape, micro_batch=1, seq_length=count, itemsize=dtype.itemsize)
    hidden = torch.randn(1, count, 8, dtype=dtype, requires_grad=True)
    head = torch.nn.Linear(8, vocab, bias=False, dtype=dtype)
    head.weight.grad = torch.zeros_like(head.weight)
    with Alive() as alive:
        alive.leave_out(head)
        logits = head(hidden)
        loss = ForCausalLMLoss(logits, torch.zeros(1, count, dtype=torch.int64), vocab)
        loss.backward()  # the logits are held meanwhile, as an HF model's output holds them
    assert alive.peak == pytest.approx(work.head.logits_bytes, rel=0.01)


def test_temporary_bytes_of_several_ranks():
    shape = shape_of_config(config("llama"))
    work = build_workload(shape, micro_batch=2, seq_length=32)
    alone = temporary_bytes(work, ADAMW)
    assert (alone.gathered, alone.buckets, alone.full_gradient) == (0, 0, 0)
    split = temporary_bytes(work, ADAMW, Sharding(3, 2), bucket_elements=1000)
    layer = (
        num_parameters(shape) - 2 * 128 * 64 - 64
    )  # without embedding, head and final norm: two layers
    assert split.gathered == layer * 2  # one computed, one prefetched
    assert split.buckets == (1000 + 160 * 64) * 2  # one bucket, and a linear's of the MLP by itself
    projected = temporary_bytes(work, OptimizerMode(rank=8), Sharding(3, 2), bucket_elements=1000)
    assert projected.buckets == (1000 + 128 * 64) * 2  # the embedding's
    wide = temporary_bytes(work, ADAMW, Sharding(3, 2), bucket_elements=11000)
    assert wide.buckets == 2 * 11000 * 2
    in_backward = split.layer + split.weight_gradient + split.buckets
    assert split.peak == split.gathered + max(split.logits, in_backward)
    low_rank = temporary_bytes(work, OptimizerMode(rank=8))
    # down's, beside which no other fits into an eighth of all
    assert low_rank.full_gradient == 2 * 64 * (160 - (8 + 8))
    mode = OptimizerMode(rank=8)
    projected = build_workload(shape, micro_batch=2, seq_length=32, projected=mode.backward())
    kept = temporary_bytes(projected, mode).refreshed_inputs
    assert kept == 2 * 32 * 64 * 2  # q's, k's and v's, or gate's
    assert alone.peak == max(alone.logits, alone.layer + alone.weight_gradient)


# -- limits -------------------------------------------------------------------------------------------


def test_budget_of_a_machine_is_that_of_one_rank():
    machine = named_machine("rtx4090", num_gpus=4, host_memory=768 * GIB, num_ssds=12)
    budget = MemoryBudget.of(machine)
    assert budget == MemoryBudget(22 * GIB, 192 * GIB, 12 * 3840 * GB // 4)


def test_activations_get_what_the_second_slots_of_states_leave_of_an_ssd(monkeypatch, tmp_path):
    setup = RunSetup(zero_stage=2, offload_optimizer="nvme", overlap="none")
    problem = small_problem(setup=setup)
    both = static_bytes(problem)["ssd"]["optimizer states"]  # two slots of each piece
    free = int(3 * both)
    monkeypatch.setattr(plan_inputs.shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    activations = {"policy": "plan", "nvme_path": str(tmp_path)}
    hmt = HMTConfig.from_block({"activations": activations})
    before, after = (
        plan_inputs.memory_budget(problem, hmt, 0, 2**40, on_ssd) for on_ssd in (both / 2, both)
    )
    assert before.ssd - both == free - both / 2  # the first step will write the second slot of each
    assert after.ssd - both == free
    without = HMTConfig.from_block({"activations": {"policy": "plan"}})
    assert plan_inputs.memory_budget(problem, without, 0, 2**40, both).ssd == both


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: MemoryBudget(0, 1, 1), "gpu is 0"),
        (lambda: MemoryBudget(1, -1, 1), "host is -1"),
        (lambda: MemoryBudget.of(named_machine("rtx4080"), reserve=16 * GIB), "gpu is 0"),
        (lambda: Sharding(4, 1), "stage is 4"),
        (lambda: Sharding(1, 0), "world_size is 0"),
        (lambda: OptimizerMode(method="sgd"), "method is 'sgd'"),
        (lambda: OptimizerMode(state_dtype="fp8"), "state_dtype is 'fp8'"),
        (lambda: OptimizerMode(rank=0), "rank is 0"),
    ],
)
def test_limits_name_field_value_and_legal_values(call, text):
    with pytest.raises(ValueError, match=f"{text}.*legal"):
        call()
