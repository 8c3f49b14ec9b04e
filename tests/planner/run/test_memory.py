"""Bytes by kind: against the papers' tables and real peaks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from low_rank_adamw import LOW_RANK_ADAMW, low_rank_adamw
from problems import ADAMW, linear_shapes, small_problem
from real_models import Alive, config, fresh, model, run, tokens

from hmt_deepspeed.config import HMTConfig
from hmt_deepspeed.config.components import PAPER_POLICY
from hmt_deepspeed.config.full_gradients import auto_full_gradient_bytes
from hmt_deepspeed.optim.decisions.schedule import RefreshSchedule
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
from hmt_deepspeed.planner.run.problem import RunSetup
from hmt_deepspeed.planner.run.refresh import worst_refresh
from hmt_deepspeed.zero.planning import facts as plan_inputs

GIB, GB = 2**30, 10**9
REPLICATED = Sharding()

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
    policy = PAPER_POLICY | {"layer_input": "swap_host", "mlp_intermediate": "swap_ssd"}
    held = activation_bytes(lohan_13b, choices_of(lohan_13b, policy))
    stream = 32 * 1024 * 5120 * 2
    assert held.host == 40 * stream
    assert held.ssd == 40 * 4 * stream
    assert held.device < activation_bytes(lohan_13b, choices_of(lohan_13b, PAPER_POLICY)).device


def test_no_checkpointing_is_what_autograd_saves(lohan_13b):
    assert activation_bytes(lohan_13b, None).device == lohan_13b.saved_bytes


def test_recompute_of_the_residual_keeps_what_enters_a_layer(lohan_13b):
    choices = choices_of(lohan_13b, PAPER_POLICY | {"residual": "recompute"})
    of = {site.name: choice for site, choice in choices.items()}
    assert of["layer_input"] == "keep"
    assert of["residual"] == "recompute"
    with pytest.raises(ValueError, match=r"layer_input.*legal"):
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
    optimizer = low_rank_adamw(network, lr=1e-4, **fields)
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
    shape, mode = shape_of_config(config("llama")), OptimizerMode(**{**LOW_RANK_ADAMW, **fields})
    sizes = {"micro_batch": 8, "seq_length": 64, "itemsize": dtype.itemsize}
    work = build_workload(shape, **sizes, projected=mode.backward())
    moments = temporary_bytes(work, mode)
    inputs = sum(s.count * s.nbytes for s in work.sites if s.name == "layer_input")
    every = inputs + work.shared_bytes + moments.layer + moments.weight_gradient
    low_rank = sum(m * n for m, n in linear_shapes(shape)) * dtype.itemsize
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
        mode = OptimizerMode("lowrank_adamw", rank=8, max_full_gradient_bytes=budget)
        every = sizes * shape.layers
        auto = auto_full_gradient_bytes(every)
        schedule, most = RefreshSchedule(every, 1000, budget or auto), 0
        for step in range(len(every)):
            due = schedule.due(step)
            most = max(most, sum(every[i] - columns[i % len(columns)] for i in due))
            for index in due:
                schedule.refreshed(index, step)
        assert worst_refresh(shape, mode, 2).full_gradients == most
    assert (
        worst_refresh(shape, OptimizerMode("lowrank_adamw", residual="full"), 2).full_gradients == 0
    )
    assert worst_refresh(shape, ADAMW, 2) == worst_refresh(
        shape, OptimizerMode("lowrank_adamw", redrawn=True), 2
    )
    shared = worst_refresh(shape, OptimizerMode("lowrank_adamw", rank=8, share_basis=True), 2)
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
    projected = temporary_bytes(
        work, OptimizerMode("lowrank_adamw", rank=8), Sharding(3, 2), bucket_elements=1000
    )
    assert projected.buckets == (1000 + 128 * 64) * 2  # the embedding's
    wide = temporary_bytes(work, ADAMW, Sharding(3, 2), bucket_elements=11000)
    assert wide.buckets == 2 * 11000 * 2
    in_backward = split.layer + split.weight_gradient + split.buckets
    assert split.peak == split.gathered + max(split.logits, in_backward)
    low_rank = temporary_bytes(work, OptimizerMode("lowrank_adamw", rank=8))
    # down's, beside which no other fits into an eighth of all
    assert low_rank.full_gradient == 2 * 64 * (160 - (8 + 8))
    mode = OptimizerMode("lowrank_adamw", rank=8)
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
        (lambda: OptimizerMode("lowrank_adamw", state_dtype="fp8"), "state_dtype is 'fp8'"),
        (lambda: OptimizerMode("lowrank_adamw", rank=0), "rank is 0"),
    ],
)
def test_limits_name_field_value_and_legal_values(call, text):
    with pytest.raises(ValueError, match=f"{text}.*legal"):
        call()
