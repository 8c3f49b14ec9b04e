"""The closed form: times by resource, memory by kind, and the errors of LoHan's model that it mends."""

from __future__ import annotations

from dataclasses import replace

import pytest
from problems import ADAMW, MACHINE, ON_SSD, small_problem

from hmt_deepspeed.config.components import PAPER_POLICY, Choice, Component
from hmt_deepspeed.planner.hardware import MACHINES, named_machine
from hmt_deepspeed.planner.model.models import model_shape
from hmt_deepspeed.planner.model.workload import build_workload
from hmt_deepspeed.planner.run.host import EngineMemory
from hmt_deepspeed.planner.run.loads import amounts, layer_load, static_bytes
from hmt_deepspeed.planner.run.memory import MemoryBudget, OptimizerMode, Sharding, model_states
from hmt_deepspeed.planner.run.problem import Problem, RunSetup, make_problem
from hmt_deepspeed.planner.solve.cost import RESOURCES, Estimate, PhaseTime, estimate, rates
from hmt_deepspeed.planner.solve.plan import uniform_plan
from hmt_deepspeed.planner.timeline.simulate import simulate

KEEP: dict[Component, Choice] = dict.fromkeys(PAPER_POLICY, "keep") | {
    "projected_inputs": "project"
}
RECOMPUTE: dict[Component, Choice] = {
    **dict.fromkeys(PAPER_POLICY, "recompute"),
    "layer_input": "keep",
    "layernorm": "keep",
    "lm_head": "keep",
}
SWAP: dict[Component, Choice] = {
    **dict.fromkeys(PAPER_POLICY, "swap_host"),
    "layernorm": "keep",
    "lm_head": "keep",
}
SPILL: dict[Component, Choice] = {c: "swap_ssd" if x == "swap_host" else x for c, x in SWAP.items()}


def found_for(problem: Problem, policy: dict[Component, Choice]) -> Estimate:
    return estimate(problem, uniform_plan(problem.workload, problem.machine, policy))


def phase(found: Estimate, name: str) -> PhaseTime:
    return next(p for p in found.phases if p.name == name)


def test_times_of_each_resource_by_hand() -> None:
    """Everything on SSD, nothing kept: LoHan's equations 2 and 5 with this machine's rates."""
    problem = small_problem()
    p, workload = problem.workload.parameters, problem.workload
    found = found_for(problem, SPILL)
    moved = sum(layer.count * site.nbytes for layer in workload.layers for site in layer.sites)
    forward, backward = (
        phase(found, "forward").by_resource,
        phase(found, "last backward").by_resource,
    )
    saved = workload.head.saved_bytes + sum(x.count * x.saved_bytes for x in workload.layers)
    assert forward["gpu"] == pytest.approx(workload.forward_flops / 1e14 + 2 * saved / 1e12)
    assert backward["gpu"] == pytest.approx(workload.backward_flops / 1e14 + 5 * saved / 1e12)
    # both directions at once move 3e10 of 4e10 bytes/s, three quarters: a third of the other's time on top
    assert forward["gpu_to_host"] == pytest.approx((moved + 2 * p / 3) / 2e10)
    assert forward["host_to_gpu"] == pytest.approx((2 * p + moved / 3) / 2e10)
    # four SSDs, mixed as fast as taking turns: 2 / (1/6 + 1/3) = 4
    assert forward["ssd_reading"] == pytest.approx(2 * p / 24e9 + moved / 12e9)
    assert backward["gpu_to_host"] == pytest.approx((2 * p + (2 * p + moved) / 3) / 2e10)
    assert backward["host_to_gpu"] == pytest.approx((2 * p + moved + 2 * p / 3) / 2e10)
    assert backward["ssd_reading"] == pytest.approx((14 * p + moved) / 24e9 + 14 * p / 12e9)
    assert backward["cpu"] == pytest.approx(0.3e-9 * p)
    assert found.ssd_written == pytest.approx(moved + 14 * p)
    assert found.seconds == pytest.approx(
        sum(max(x.by_resource.values()) + x.fill for x in found.phases)
    )


def test_error_5_recompute_follows_the_graph() -> None:
    """Equation 7 adds up: holding attention's output spares attention, but not from lossy queries, keys and values."""
    layer = small_problem().workload.layers[-1]
    flops = {site.name: site.flops for site in layer.sites}

    def again(**choices: Choice) -> float:
        return layer_load(layer, {**RECOMPUTE, **choices}, ON_SSD).recomputed  # type: ignore[dict-item]

    everything = sum(flops.values())
    assert again() == everything
    # additive: what is saved by holding an output is its own FLOPs, its inputs are made again all the same
    assert again(attention_output="swap_host") == everything - flops["attention_output"]
    assert again(mlp_intermediate="keep") == everything - flops["mlp_intermediate"]
    # not additive: the input held in 8 bits makes other queries, and attention with them
    lossy = again(layer_input="int8", attention_output="swap_host")
    assert lossy == everything
    assert (
        again(layer_input="int8", attention_output="swap_host", attention_qkv="swap_host")
        == flops["residual"] + flops["mlp_intermediate"]
    )


def test_error_6_cpu_adam_is_a_resource() -> None:
    """Equation 5 has no term for it: with states in host memory, or a slow CPU, the update is the bottleneck."""
    in_ram = RunSetup(zero_stage=3, offload_param="cpu", offload_optimizer="cpu")
    problem = small_problem(setup=in_ram, cpu_adam_ns=16.0)
    found = found_for(problem, RECOMPUTE)
    assert found.bottleneck == "cpu"
    assert found.seconds > 16e-9 * problem.workload.parameters
    fast = found_for(small_problem(setup=in_ram, cpu_adam_ns=0.01), RECOMPUTE)
    assert fast.bottleneck != "cpu"
    assert fast.seconds < found.seconds / 5


def test_error_7_fill_and_drain_are_longest_with_few_layers() -> None:
    """Equations 2 and 5 take the maximum: the phases of a pipeline of L layers take (sum - max) / L longer than the maximum."""
    for layers in (2, 32):
        problem = small_problem(layers=layers)
        backward = phase(found_for(problem, RECOMPUTE), "last backward")
        stages = [
            backward.by_resource[r]
            for r in ("gpu_to_host", "host_to_gpu", "ssd_reading", "cpu", "network")
        ]
        bare = problem.workload.backward_flops / 1e14 + 5e-12 * (
            problem.workload.head.saved_bytes
            + sum(x.count * x.saved_bytes for x in problem.workload.layers)
        )
        total = [*stages, bare]
        assert backward.fill == pytest.approx((sum(total) - max(total)) / layers)
        assert backward.seconds == pytest.approx(max(backward.by_resource.values()) + backward.fill)


def test_error_8_accumulation_moves_weights_each_time_and_states_once() -> None:
    """Equation 1 has one forward and one backward: n micro-steps take n forwards and backwards, and one pass of the optimizer."""
    once = found_for(small_problem(), RECOMPUTE)
    setup = replace(ON_SSD, accumulation=5)
    found = found_for(small_problem(setup=setup), RECOMPUTE)
    assert [(p.name, p.weight) for p in found.phases] == [
        ("forward", 5),
        ("backward", 4),
        ("last backward", 1),
    ]
    assert phase(found, "last backward").seconds == pytest.approx(
        phase(once, "last backward").seconds
    )
    assert phase(found, "backward").by_resource["ssd_reading"] == pytest.approx(
        2 * small_problem().workload.parameters / 24e9
    )
    assert found.tokens == 5 * once.tokens
    assert found.ssd_written == pytest.approx(once.ssd_written)


def test_error_8_several_gpus_share_links_ssds_cpu_and_host_memory() -> None:
    """Equations 2 to 5 know one GPU: four GPUs, two to a link: each has half a link and a quarter of the rest; weights are gathered."""
    setup = replace(ON_SSD, ranks=4)
    one = found_for(small_problem(), SWAP)
    four = found_for(small_problem(setup=setup, num_gpus=4, gpus_per_link=2), SWAP)
    alone, shared = (
        phase(one, "last backward").by_resource,
        phase(four, "last backward").by_resource,
    )
    p = small_problem().workload.parameters
    assert shared["cpu"] == pytest.approx(
        alone["cpu"]
    )  # a quarter of the states, a quarter of the CPU
    assert shared["ssd_reading"] == pytest.approx(alone["ssd_reading"])
    moved = sum(x.count * s.nbytes for x in small_problem().workload.layers for s in x.sites)
    assert shared["gpu_to_host"] == pytest.approx(2 * (2 * p / 4 + (2 * p / 4 + moved) / 3) / 2e10)
    assert shared["network"] == pytest.approx(2 * 2 * p * 3 / 4 / 1e10)  # weights in, gradients out
    assert four.budget.host == MACHINE.host_memory // 4
    assert four.tokens == 4 * one.tokens


@pytest.mark.parametrize(("stage", "times"), [(0, 2), (1, 2), (2, 2), (3, 3)])
def test_zero_communication_volumes(stage: int, times: int) -> None:
    """2 Psi elements up to stage 2, 3 Psi at stage 3 (1910.02054, section 7), less a rank's own part."""
    problem = small_problem(setup=RunSetup(zero_stage=stage, ranks=64), num_gpus=1)
    found = found_for(problem, RECOMPUTE)
    sent = sum(p.weight * p.by_resource["network"] for p in found.phases) * 1e10
    assert sent == pytest.approx(times * 2 * problem.workload.parameters * 63 / 64)


def test_error_9_mixed_ssd_traffic_is_measured_and_not_a_sum() -> None:
    """Equations 4 and 5 add reads and writes: between reading alone and writing alone lies what both at once reach."""
    turns = found_for(small_problem(), SPILL)
    better = found_for(small_problem(ssd_mixed=6e9), SPILL)
    worse = found_for(small_problem(ssd_mixed=3e9), SPILL)

    def ssd(found: Estimate) -> float:
        by_resource = phase(found, "last backward").by_resource
        return max(by_resource["ssd_reading"], by_resource["ssd_writing"])

    assert ssd(better) < ssd(turns) < ssd(worse)
    assert ssd(worse) == pytest.approx(ssd(turns) * 4 / 3)
    # half and half at the mixed rate exactly: r = w = M/2 takes one second
    for mixed in (3e9, 4e9, 6e9):
        problem = small_problem(ssd_mixed=mixed)
        per_unit = rates(problem)
        seconds = amounts(ssd_read=mixed * 2, ssd_write=mixed * 2) @ per_unit
        queue = [seconds[RESOURCES.index(r)] for r in ("ssd_reading", "ssd_writing")]
        assert max(queue) == pytest.approx(1.0)


def test_error_10_redone_passes_cost_what_they_cost() -> None:
    """In no equation: a clipped or overflowed step redoes its overlapped pass; waiting for the verdict costs overlap,
    gradients that wait for it host memory, and so does what an early update overwrites."""
    calm = found_for(small_problem(), RECOMPUTE)
    half = found_for(small_problem(setup=replace(ON_SSD, redo_fraction=0.5)), RECOMPUTE)
    redo = phase(half, "redo")
    assert half.seconds == pytest.approx(calm.seconds + 0.5 * redo.seconds)
    assert redo.by_resource["ssd_reading"] == pytest.approx(
        small_problem().workload.parameters * (12 / 24e9 + 14 / 12e9)
    )
    after = found_for(small_problem(setup=replace(ON_SSD, overlap="forward")), RECOMPUTE)
    assert [p.name for p in after.phases] == ["first forward", "last backward"]
    kept = small_problem(setup=replace(ON_SSD, holds_gradients=True))
    assert static_bytes(kept)["host"]["gradients"] == 2 * kept.workload.parameters
    ours = RunSetup(offload_optimizer="cpu", engine=EngineMemory(undoes=True))
    early, late = (small_problem(setup=replace(ours, overlap=x)) for x in ("backward", "forward"))
    log = static_bytes(early)["host"]["early updates"]
    assert log == static_bytes(early)["host"]["optimizer states"] == 12 * kept.workload.parameters
    assert "early updates" not in static_bytes(late)["host"]


def test_overlap_and_schedule() -> None:
    """LoHan's figure 7: naive adds the update to the SSDs' queue, none adds the whole pass."""
    setups = {
        "optimised": ON_SSD,
        "naive": replace(ON_SSD, schedule="naive"),
        "none": replace(ON_SSD, overlap="none"),
    }
    found = {
        name: found_for(small_problem(setup=setup), RECOMPUTE) for name, setup in setups.items()
    }
    assert found["optimised"].seconds < found["naive"].seconds
    assert found["optimised"].seconds < found["none"].seconds
    ssd = [
        phase(found[n], "last backward").by_resource["ssd_reading"] for n in ("naive", "optimised")
    ]
    cpu = phase(found["optimised"], "last backward").by_resource["cpu"]
    assert ssd[0] == pytest.approx(ssd[1] + cpu)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_memory_by_kind(stage: int) -> None:
    setup = RunSetup(zero_stage=stage, ranks=4)
    problem = small_problem(setup=setup, num_gpus=4)
    found = found_for(problem, KEEP)
    states = model_states(problem.workload.shape, ADAMW, Sharding(stage, 4))
    gpu = found.memory["gpu"]
    assert gpu["weights"] == states.weights
    assert gpu["gradients"] == states.gradients
    assert gpu["optimizer states"] == states.optimizer
    assert ("gathered weights" in gpu) == (stage == 3)
    sites = sum(
        layer.count * (s.nbytes + s.raw_bytes)
        for layer in problem.workload.layers
        for s in layer.sites
    )
    sites += sum(site.nbytes for site in problem.workload.head.sites)
    assert gpu["activations"] == pytest.approx(sites)
    assert found.peak("gpu") == pytest.approx(sum(gpu.values()))
    assert found.memory["host"] == {"activations": 0.0}


def test_swapped_and_8_bit_bytes() -> None:
    problem = small_problem()
    layers = problem.workload.layers
    moved = sum(layer.count * site.nbytes for layer in layers for site in layer.sites)
    swapped, spilled = found_for(problem, SWAP), found_for(problem, SPILL)
    assert swapped.memory["host"]["activations"] == moved
    assert swapped.memory["ssd"]["activations"] == 0
    assert spilled.memory["host"]["activations"] == 0
    assert spilled.memory["ssd"]["activations"] == moved
    lossy = found_for(problem, KEEP | {"mlp_intermediate": "int8"})
    wide = sum(layer.count * layer.sites[-1].nbytes for layer in layers)
    spared = (
        found_for(problem, KEEP).memory["gpu"]["activations"] - lossy.memory["gpu"]["activations"]
    )
    assert spared == pytest.approx(wide / 2, rel=0.02)  # 8 of 16 bits, less a scale per 256 tokens
    assert lossy.seconds > found_for(problem, KEEP).seconds  # encoding takes time


def test_what_is_kept_is_not_counted_again_while_its_layer_runs() -> None:
    problem = small_problem()
    layer = problem.workload.layers[-1]
    kept = sum(site.nbytes + site.raw_bytes for site in layer.sites)
    assert found_for(problem, RECOMPUTE).memory["gpu"]["working"] == layer.working_bytes - (
        layer.sites[0].nbytes  # residual recompute keeps what enters the layer
    )
    assert found_for(problem, KEEP).memory["gpu"]["working"] == max(
        layer.working_bytes - kept, problem.workload.head.logits_bytes
    )
    # swapped: all of it comes back, and that of the next layer while this one runs
    moved = sum(site.nbytes for site in layer.sites)
    assert found_for(problem, SWAP).memory["gpu"]["working"] == layer.working_bytes + moved


def test_states_on_ssd_take_two_slots() -> None:
    problem = small_problem()
    found = found_for(problem, RECOMPUTE)
    assert found.memory["ssd"]["optimizer states"] == 2 * 12 * problem.workload.parameters
    assert found.memory["ssd"]["weights"] == 2 * problem.workload.parameters


def test_low_rank_states_and_projected_backward() -> None:
    """HMT's mode: smaller states and gradients, and a third of the linears' FLOPs less."""
    setup = RunSetup(zero_stage=2)
    full = found_for(small_problem(setup=setup), KEEP)
    low = found_for(small_problem(setup=setup, mode=OptimizerMode("lowrank_adamw", rank=32)), KEEP)
    assert low.memory["gpu"]["gradients"] < 0.3 * full.memory["gpu"]["gradients"]
    assert low.memory["gpu"]["optimizer states"] < 0.5 * full.memory["gpu"]["optimizer states"]
    assert low.hardware_flops < 0.8 * full.hardware_flops
    assert low.model_flops == full.model_flops  # of ordinary training
    assert low.mfu > low.hfu


@pytest.mark.parametrize("size", ["125m", "1b", "7b"])
@pytest.mark.parametrize("name", MACHINES)
def test_no_machine_does_more_than_its_peak(name: str, size: str) -> None:
    """With little but the device at work, what is computed never passes its peak."""
    setup, everything = RunSetup(zero_stage=2), MemoryBudget(2**62, 2**62, 2**62)
    machine = named_machine(name)
    found = {}
    for mode in (OptimizerMode("lowrank_adamw", rank=32), ADAMW):
        work = build_workload(
            model_shape(size), micro_batch=8, seq_length=1024, projected=mode.backward()
        )
        problem = make_problem(work, machine, setup, mode, budget=everything)
        for choice, policy in (("keep", KEEP), ("recompute", RECOMPUTE)):
            plan = uniform_plan(work, machine, policy)
            result = estimate(problem, plan)
            assert result.bottleneck == "gpu"
            slower = result.seconds / simulate(problem, plan).seconds
            for scale in (1.0, slower):  # the simulator's seconds are printed too
                assert 0 < scale * result.hfu <= 1
            found[mode.method, choice] = result
    # projected backward: faster by what it does not compute, which shows in MFU and not in HFU
    projected, plain = (found[mode, "keep"] for mode in ("lowrank_adamw", "adamw"))
    assert projected.seconds < plain.seconds
    assert projected.model_flops == plain.model_flops
    assert projected.hardware_flops < 0.85 * plain.hardware_flops


def test_an_overflow_is_named() -> None:
    problem = small_problem(budget=MemoryBudget(gpu=10**8, host=10**12, ssd=10**13))
    found = found_for(problem, KEEP)
    assert not found.fits
    assert set(found.excess()) == {"gpu"}
    assert found.excess()["gpu"] == pytest.approx(found.peak("gpu") - 10**8)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"zero_stage": 4}, "zero_stage is 4; legal: 0, 1, 2, 3"),
        ({"accumulation": 0}, "accumulation is 0; legal: at least 1"),
        ({"offload_param": "cpu"}, "offload_param is 'cpu' at zero_stage 2.*stage 3"),
        (
            {"offload_optimizer": "cpu", "zero_stage": 0},
            "offload_optimizer is 'cpu' at zero_stage 0",
        ),
        (
            {"offload_optimizer": "nvme", "zero_stage": 0},
            "offload_optimizer is 'nvme' at zero_stage 0",
        ),
        ({"redo_fraction": 1.5}, "redo_fraction is 1.5; legal: 0 to 1"),
        ({"partition_activations": True}, "partition_activations with model_parallel 1"),
    ],
)
def test_impossible_setups_are_refused(fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RunSetup(**fields)


def test_ssds_that_are_not_there_are_refused() -> None:
    problem = small_problem()
    with pytest.raises(ValueError, match="offload to nvme on test, which has no SSD"):
        make_problem(problem.workload, replace(MACHINE, num_ssds=0), ON_SSD, ADAMW)


@pytest.mark.parametrize("score", [estimate, simulate])
def test_plans_of_other_layers_are_refused(score) -> None:  # type: ignore[no-untyped-def]
    problem = small_problem(layers=4)
    plan = uniform_plan(problem.workload, MACHINE, KEEP)
    part = replace(plan.layers[0], layers=(0, 1))
    with pytest.raises(ValueError, match="the plan has 2 layers; legal: 4"):
        score(problem, replace(plan, layers=(part,)))
    own_rank = ("layers.1.mlp.up.weight", 32)
    apart = small_problem(layers=4, mode=OptimizerMode("lowrank_adamw", rank=64, ranks=(own_rank,)))
    held = uniform_plan(apart.workload, MACHINE, KEEP)
    together = replace(held.layers[0], layers=(0, 1))
    with pytest.raises(ValueError, match=r"layers \(0, 1\) take the same choices; legal: .*equal"):
        score(apart, replace(held, layers=(together, replace(together, layers=(2, 3)))))
