"""The best plan: equal to brute force over the cost model, within every memory, lossy only where permitted."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from problems import ADAMW, MACHINE, ON_SSD, small_problem, with_budget

from hmt_deepspeed.config.components import PAPER_POLICY, Choice, Component
from hmt_deepspeed.planner.run.host import EngineMemory
from hmt_deepspeed.planner.run.loads import static_bytes
from hmt_deepspeed.planner.run.modes import OptimizerMode
from hmt_deepspeed.planner.run.problem import Problem, RunSetup
from hmt_deepspeed.planner.solve.cost import estimate
from hmt_deepspeed.planner.solve.plan import LayerChoices, Plan, uniform_plan
from hmt_deepspeed.planner.solve.solve import Allowed, allowed_choices, fits, solve

EXACT = allowed_choices(MACHINE)
RECOMPUTE: dict[Component, Choice] = {
    **dict.fromkeys(PAPER_POLICY, "recompute"),
    "layer_input": "keep",
    "layernorm": "keep",
    "lm_head": "keep",
}


def every_plan(problem: Problem, allowed: Allowed) -> Iterator[Plan]:
    """Every assignment of choices to layers, one by one, by nothing but the definition of a plan."""
    template = uniform_plan(problem.workload, problem.machine, RECOMPUTE)
    numbers = [number for layer in problem.workload.layers for number in layer.layers]
    options = []
    for number in numbers:
        components = list(template.choices_of(number))
        combinations = itertools.product(*(allowed[c] for c in components))
        options.append([dict(zip(components, chosen, strict=True)) for chosen in combinations])
    heads = [
        dict(zip(template.head, x, strict=True))
        for x in itertools.product(*(allowed[c] for c in template.head))
    ]
    for *layers, head in itertools.product(*options, heads):
        groups = tuple(
            LayerChoices((n,), chosen) for n, chosen in zip(numbers, layers, strict=True)
        )
        yield replace(template, layers=groups, head=head)


def random_problem(rng: np.random.Generator) -> tuple[Problem, Allowed]:
    """Two layers of five sites each, up to four choices for a site, a few hundred plans, little memory."""
    setup = replace(ON_SSD, overlap=str(rng.choice(["backward", "forward", "none"])))
    if rng.random() < 0.3:
        setup = RunSetup(zero_stage=2, accumulation=int(rng.integers(1, 3)))
    problem = small_problem(
        layers=2,
        setup=setup,
        mode=OptimizerMode("lowrank_adamw", rank=64)
        if setup.offload_optimizer == "none"
        else ADAMW,
        device_to_host=float(rng.uniform(2e9, 4e10)),
        both_directions=2.2e10,
        ssd_write=float(rng.uniform(1e9, 4e9)),
        cpu_adam_ns=float(rng.uniform(0.05, 1.0)),
    )
    allowed = {component: (given[0],) for component, given in EXACT.items()}
    for component in rng.choice(
        ["attention_qkv", "mlp_intermediate", "residual", "attention_output"], 2, False
    ):
        legal = ("keep", "recompute", "swap_host", "swap_ssd")
        allowed[component] = tuple(x for x in legal if rng.random() < 0.8) or ("recompute",)
    allowed["projected_inputs"] = ("project", "recompute")
    activations = problem.workload.saved_bytes
    static = {name: sum(kinds.values()) for name, kinds in static_bytes(problem).items()}
    working = max(layer.working_bytes for layer in problem.workload.layers)
    return with_budget(
        problem,
        gpu=static["gpu"] + working + rng.uniform(0.05, 0.8) * activations,
        host=static["host"] + rng.uniform(0.0, 0.3) * activations,
        ssd=static["ssd"] + rng.uniform(0.0, 0.3) * activations,
    ), allowed


def test_the_plan_is_the_best_there_is() -> None:
    rng = np.random.default_rng(1)
    tight = 0
    for _ in range(12):
        problem, allowed = random_problem(rng)
        scored = [estimate(problem, plan) for plan in every_plan(problem, allowed)]
        fitting = [found.seconds for found in scored if found.fits]
        plan = solve(problem, allowed, time_limit=100)  # of a busy machine
        assert fits(problem, allowed) == bool(fitting)
        if not fitting:
            assert plan is None
            continue
        tight += len(fitting) < len(scored)
        assert plan is not None
        found = estimate(problem, plan)
        assert found.fits
        assert found.seconds == pytest.approx(
            plan.seconds
        )  # what the program counts is what the model says
        assert found.seconds == pytest.approx(min(fitting), rel=3e-7)
        assert plan.gap <= 3e-7
    assert tight >= 4  # memory decided


def test_projected_inputs_are_held_as_far_as_there_is_room() -> None:
    """To make X [Q | P] again takes time and to hold it memory, layer by layer."""
    problem = small_problem(
        layers=6, mode=OptimizerMode("lowrank_adamw", rank=64), setup=RunSetup()
    )
    allowed = allowed_choices(MACHINE, fixed={**RECOMPUTE, "projected_inputs": "project"})
    allowed["projected_inputs"] = ("project", "recompute")
    least = estimate(problem, uniform_plan(problem.workload, problem.machine, RECOMPUTE)).peak(
        "gpu"
    )
    products = sum(x.count * x.projected_bytes for x in problem.workload.layers)
    held = []
    for part in (1.0, 0.4):
        plan = solve(with_budget(problem, gpu=least + part * products), allowed)
        assert plan is not None
        held.append(plan.counts()["projected_inputs"].get("project", 0))
    assert held == [6, 2]
    assert fits(with_budget(problem, gpu=least), allowed)


def test_96_layers_are_planned_in_less_than_two_seconds() -> None:
    mode = OptimizerMode("lowrank_adamw", rank=128)
    problem = small_problem(layers=96, hidden=2048, batch=32, seq_length=1024, mode=mode)
    static = sum(static_bytes(problem)["gpu"].values())
    problem = with_budget(problem, gpu=static + 12e9, host=40e9)
    lossy = {c: choice for c, choice in PAPER_POLICY.items() if choice == "int8"}
    took = []
    for _ in range(3):
        start = time.process_time()  # of this process alone, but its caches are shared
        plan = solve(problem, allowed_choices(MACHINE, lossy))
        took.append(time.process_time() - start)
        if took[-1] < 2:
            break
    assert min(took) < 2
    assert plan is not None
    assert estimate(problem, plan).fits
    assert plan.gap < 0.02


def test_with_memory_for_all_nothing_is_recomputed_moved_or_made_less_exact() -> None:
    problem = with_budget(small_problem(), gpu=10**12)
    lossy: dict[Component, Choice] = {"mlp_intermediate": "int8", "attention_output": "int8"}
    plan = solve(problem, allowed_choices(MACHINE, lossy))
    assert plan is not None
    assert {choice for counts in plan.counts().values() for choice in counts} == {"keep"}


def test_error_8_the_gpu_limit_holds_where_the_published_model_has_none() -> None:
    """Equations 2 to 5 have no GPU memory, and nothing is kept on it: with less and less GPU memory activations leave it, and then nothing fits."""
    problem = small_problem(layers=8)
    room = sum(static_bytes(problem)["gpu"].values()) + max(
        x.working_bytes for x in problem.workload.layers
    )
    kept = []
    for spare in (1e10, 2e8, 0.5e8):
        limited = with_budget(problem, gpu=room + spare)
        plan = solve(limited, EXACT)
        assert plan is not None
        found = estimate(limited, plan)
        assert found.peak("gpu") <= limited.budget.gpu
        kept.append(found.memory["gpu"]["activations"])
    assert kept[0] > kept[1] > kept[2]
    assert solve(with_budget(problem, gpu=room * 0.5), EXACT) is None


def test_error_8_host_and_ssd_limits_hold() -> None:
    """Equation 3 takes SSDs without end: little GPU memory and a slow GPU, so everything is swapped, to the host while
    it has room, then to SSD while that has."""
    problem = small_problem(layers=8, matmul=replace(MACHINE.matmul, bf16=1e12))
    static = static_bytes(problem)
    room = sum(static["gpu"].values()) + max(x.working_bytes for x in problem.workload.layers) * 1.3
    host = sum(static["host"].values())
    on_ssd = []
    for spare, ssd in ((1e12, 1e12), (1e8, 1e12), (1e8, 5e7)):
        limited = with_budget(
            problem, gpu=room, host=host + spare, ssd=sum(static["ssd"].values()) + ssd
        )
        plan = solve(limited, EXACT)
        assert plan is not None
        found = estimate(limited, plan)
        assert found.fits
        assert 0 < found.memory["host"]["activations"] <= spare
        assert found.memory["ssd"]["activations"] <= ssd
        on_ssd.append(found.memory["ssd"]["activations"])
    assert on_ssd[1] > on_ssd[2] > on_ssd[0] == 0


def test_error_8_room_for_what_is_on_its_way_is_set_aside() -> None:
    """Equation 3 has no page-locked staging. A slow GPU, which swapping would spare: with less room than the staging takes nothing is swapped."""
    setup = replace(ON_SSD, engine=EngineMemory(staging=10**8, ssd_staging=3 * 10**8))
    problem = small_problem(layers=8, setup=setup, matmul=replace(MACHINE.matmul, bf16=1e12))
    static = static_bytes(problem)
    assert not {"states in passing", "weights in passing"} & set(static["host"])  # another engine's
    inputs = 9 * problem.workload.layers[0].sites[0].nbytes
    working = max(x.working_bytes for x in problem.workload.layers)
    gpu, host = sum(static["gpu"].values()) + 1.3 * working + inputs, sum(static["host"].values())
    for spare, swapped in ((0.9e8, set()), (1.5e8, {"host"}), (3.1e8, {"host", "ssd"})):
        limited = with_budget(problem, gpu=gpu, host=host + spare)
        plan = solve(limited, EXACT)
        assert plan is not None
        found = estimate(limited, plan)
        assert found.fits
        held = {name for name in ("host", "ssd") if found.memory[name]["activations"] > 0}
        assert held == swapped
        expected = {"ssd": 3e8, "host": 1e8}.get(max(held, default=""))
        assert found.memory["host"].get("staging") == expected


def test_8_bits_only_where_permitted_and_worth_it() -> None:
    problem = small_problem(layers=8, matmul=replace(MACHINE.matmul, bf16=2e12))
    static = {name: sum(kinds.values()) for name, kinds in static_bytes(problem).items()}
    working = max(x.working_bytes for x in problem.workload.layers)
    gpu = static["gpu"] + working + 0.2 * problem.workload.saved_bytes
    problem = with_budget(problem, gpu=gpu, host=static["host"] + 1, ssd=static["ssd"] + 1)
    exact = solve(problem, EXACT)
    permitted: dict[Component, Choice] = {"mlp_intermediate": "fp8"}
    lossy = solve(problem, allowed_choices(MACHINE, permitted))
    assert exact is not None
    assert lossy is not None
    chosen = {c: set(counts) for c, counts in lossy.counts().items()}
    assert "fp8" in chosen["mlp_intermediate"]
    assert not any(
        {"int8", "fp8"} & choices for c, choices in chosen.items() if c != "mlp_intermediate"
    )
    assert lossy.seconds < exact.seconds


def test_of_equally_fast_plans_an_exact_one() -> None:
    """CPU Adam is the bottleneck and GPU memory is short: 8 bits would be least work, swapping is exact."""
    problem = small_problem(layers=8, cpu_adam_ns=16.0)
    static = sum(static_bytes(problem)["gpu"].values())
    working = max(x.working_bytes for x in problem.workload.layers)
    problem = with_budget(problem, gpu=static + working + 0.06 * problem.workload.saved_bytes)
    permitted: dict[Component, Choice] = {"residual": "int8"}
    plan = solve(problem, allowed_choices(MACHINE, permitted))
    assert plan is not None
    assert not any("int8" in counts for counts in plan.counts().values())


def test_partitioned_inputs_are_a_choice() -> None:
    """ZeRO-R's P_a: taken where memory is short, left where the network would only slow it down."""
    setup = replace(ON_SSD, model_parallel=4)
    problem = small_problem(
        layers=8, setup=setup, device_to_host=1e8, host_to_device=1e8, both_directions=2e8
    )
    plenty = solve(with_budget(problem, gpu=10**12), EXACT)
    assert plenty is not None
    assert not plenty.partition_activations
    needed = estimate(problem, uniform_plan(problem.workload, problem.machine, RECOMPUTE)).peak(
        "gpu"
    )
    inputs = 8 * problem.workload.layers[0].sites[0].nbytes
    short = with_budget(problem, gpu=needed - 0.5 * inputs)
    fixed = allowed_choices(MACHINE, fixed=RECOMPUTE)
    plan = solve(short, fixed)
    assert plan is not None
    assert plan.partition_activations
    found = estimate(short, plan)
    assert found.memory["gpu"]["activations"] == pytest.approx(inputs / 4 + _head_bytes(problem))
    assert found.fits


def _head_bytes(problem: Problem) -> int:
    return sum(site.nbytes for site in problem.workload.head.sites)


def test_illegal_choices_are_refused() -> None:
    with pytest.raises(ValueError, match=r"mlp: 'int8' is not legal; legal: .*mlp_intermediate"):
        allowed_choices(MACHINE, {"mlp": "int8"})  # type: ignore[dict-item]
    with pytest.raises(
        ValueError, match=r"layer_input: 'recompute' is not legal; legal: .*swap_host"
    ):
        allowed_choices(MACHINE, fixed={"layer_input": "recompute"})
    with pytest.raises(ValueError, match=r"lossy residual: 'keep' is exact; legal: .*int8"):
        allowed_choices(MACHINE, {"residual": "keep"})
    assert "swap_ssd" not in allowed_choices(replace(MACHINE, num_ssds=0))["residual"]
