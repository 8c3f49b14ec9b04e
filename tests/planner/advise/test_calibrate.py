"""From measured iterations to a machine, and from a plan to what is compared with them."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest
from problems import MACHINE, small_problem

from hmt_deepspeed.config.components import PAPER_POLICY
from hmt_deepspeed.planner.advise.calibrate import (
    IterationSeconds,
    calibrated,
    predicted_seconds,
    with_rerun_rates,
)
from hmt_deepspeed.planner.advise.compare import Busy, compare, held_by_component
from hmt_deepspeed.planner.hardware import Overheads, machine_from_json
from hmt_deepspeed.planner.run.memory import OptimizerMode
from hmt_deepspeed.planner.run.problem import Problem, RunSetup
from hmt_deepspeed.planner.solve.cost import estimate
from hmt_deepspeed.planner.solve.plan import Plan, uniform_plan
from hmt_deepspeed.planner.timeline.simulate import simulate

RECOMPUTE = PAPER_POLICY | dict.fromkeys(
    ("attention_qkv", "attention_output", "mlp_intermediate", "residual"), "recompute"
)
KEEP = dict.fromkeys(PAPER_POLICY, "keep") | {"projected_inputs": "project"}
IN_PLACE = RunSetup(zero_stage=2, accumulation=2)
MEASURED = IterationSeconds(forward=2.0, backward=7.0, update=0.5)


WATCHED = {
    "gpu_to_host": Busy(0.5, 7.0),
    "host_to_gpu": Busy(0.25, 7.0),
    "ssd_reading": Busy(0.0, 0.0),
    "ssd_writing": Busy(0.0, 0.0),
}


def planned(problem: Problem, policy: dict) -> Plan:
    return uniform_plan(problem.workload, problem.machine, policy)


def seconds_of(problem: Problem, policy: dict) -> IterationSeconds:
    plan = planned(problem, policy)
    return predicted_seconds(plan, estimate(problem, plan))


def as_tuple(seconds: IterationSeconds) -> tuple[float, ...]:
    return tuple(asdict(seconds).values())


def test_a_calibrated_machine_takes_as_long_as_was_measured() -> None:
    problem = small_problem(setup=IN_PLACE)
    machine = calibrated(problem, planned(problem, RECOMPUTE), MEASURED)
    found = replace(problem, machine=machine)
    assert as_tuple(seconds_of(found, RECOMPUTE)) == pytest.approx(as_tuple(MEASURED))
    # once more from there: what was in the machine before does not matter
    again = calibrated(found, planned(found, RECOMPUTE), MEASURED)
    assert asdict(again.overheads) == pytest.approx(asdict(machine.overheads))


def test_another_plan_differs_by_what_it_does_not_run_again() -> None:
    """The model's own work is scaled, its recompute is at the measured rate."""
    problem = small_problem(setup=IN_PLACE)
    work = problem.workload
    reruns = sum(site.flops for site in work.layers[0].sites) * work.shape.layers
    machine = calibrated(problem, planned(problem, RECOMPUTE), MEASURED)
    kept = seconds_of(replace(problem, machine=machine), KEEP)
    saved = 2 * reruns / MACHINE.matmul.bf16  # of both micro-steps
    assert kept.backward == pytest.approx(MEASURED.backward - saved)
    assert (kept.forward, kept.update) == pytest.approx((MEASURED.forward, MEASURED.update))


def test_noise_cannot_make_the_models_own_work_negative() -> None:
    problem = small_problem(setup=IN_PLACE)
    machine = calibrated(problem, planned(problem, RECOMPUTE), replace(MEASURED, backward=1e-9))
    assert machine.overheads.backward > 0


def test_what_was_run_again_gives_the_rate_of_products_and_attentions_overhead() -> None:
    problem = small_problem(setup=IN_PLACE)
    flops = {s.component: s.flops * 4 for s in problem.workload.layers[0].sites if s.flops}
    seconds = {name: size / 1e12 for name, size in flops.items()}
    seconds["attention_output"] *= 3
    machine = with_rerun_rates(problem.machine, problem, planned(problem, RECOMPUTE), seconds)
    assert machine.matmul.bf16 == pytest.approx(1e12)
    assert machine.overheads.attention == pytest.approx(3.0)
    took = seconds_of(replace(problem, machine=machine), RECOMPUTE).backward
    less = seconds_of(
        replace(problem, machine=machine), RECOMPUTE | {"attention_output": "keep"}
    ).backward
    assert took - less == pytest.approx(2 * seconds["attention_output"])
    assert with_rerun_rates(MACHINE, problem, planned(problem, RECOMPUTE), {}) == MACHINE


def test_the_simulator_knows_the_overheads_too() -> None:
    factors = Overheads(2.0, 3.0, 5.0, 7.0, 11.0, 13.0)
    policy = PAPER_POLICY | {"attention_output": "recompute"}
    for products in ("recompute", "project"):
        problem = small_problem(
            setup=IN_PLACE, mode=OptimizerMode("lowrank_adamw", rank=64), overheads=factors
        )
        plan = planned(problem, policy | {"projected_inputs": products})
        assert simulate(problem, plan).seconds == pytest.approx(estimate(problem, plan).seconds)


def test_a_processor_cannot_compute_while_it_copies() -> None:
    policy = KEEP | {"mlp_intermediate": "swap_host"}
    beside, alone = (
        small_problem(setup=IN_PLACE, copies_beside=is_beside) for is_beside in (True, False)
    )
    sites = [s for layer in beside.workload.layers for s in layer.sites]
    moved = sum(s.nbytes * s.count for s in sites if s.component == "mlp_intermediate")
    copying = 2 * moved * (1 / MACHINE.device_to_host + 1 / MACHINE.host_to_device)
    plan = planned(alone, policy)
    took = estimate(alone, plan).seconds
    # all the other work is on the device: without overlap it is the sum
    without = estimate(alone, planned(alone, KEEP)).seconds
    assert took == pytest.approx(without + copying)
    assert simulate(alone, plan).seconds == pytest.approx(took)
    assert estimate(beside, plan).seconds < took


def test_products_of_projected_linears_are_held_or_made_again() -> None:
    problem = small_problem(setup=IN_PLACE, mode=OptimizerMode("lowrank_adamw", rank=64))
    kept, again = planned(problem, KEEP), planned(problem, KEEP | {"projected_inputs": "recompute"})
    held, not_held = (held_by_component(problem, plan) for plan in (kept, again))
    products = sum(x.count * x.projected_bytes for x in problem.workload.layers)
    assert held.pop("projected_inputs") == products > 0
    assert not_held.pop("projected_inputs") == 0
    assert held == not_held
    flops = sum(x.count * x.projection_flops for x in problem.workload.layers)
    by_plan = [estimate(problem, plan).hardware_flops for plan in (again, kept)]
    assert by_plan[0] - by_plan[1] == 2 * flops  # both micro-steps


def test_every_row_of_a_comparison_is_of_its_own_quantity() -> None:
    problem = small_problem(setup=IN_PLACE)
    plan = planned(problem, KEEP | {"mlp_intermediate": "swap_host"})
    held = held_by_component(problem, plan)
    counted = {name: 2 * size for name, size in held.items() if size and name != "lm_head"}
    metrics = {"activation_bytes_per_component": counted, "activation_bytes_to_host": 5.0}
    found = compare(problem, plan, MEASURED, metrics, {("gpu", "weights"): 7}, WATCHED)
    expected = predicted_seconds(plan, estimate(problem, plan))
    for name, measured in asdict(MEASURED).items():
        row = found.row(name)
        assert (row.predicted, row.measured) == (getattr(expected, name), measured)
    assert found.row("iteration").measured == MEASURED.total
    assert found.row("activations").error == pytest.approx(-0.5)  # the head's input is not counted
    assert found.row("activations: attention_qkv").error == pytest.approx(-0.5)
    sites = [s for layer in problem.workload.layers for s in layer.sites]
    moved = sum(s.nbytes * s.count for s in sites if s.component == "mlp_intermediate")
    assert found.row("activation_bytes_to_host").predicted == 2 * moved
    assert found.row("gpu: weights").predicted == problem.of_rank.weights
    assert json.loads(json.dumps(found.as_json()))["activations"]["error"] == pytest.approx(-0.5)
    text = found.describe()
    assert all(row.name in text for row in found.rows)


def test_each_resource_is_compared_and_what_nobody_times_is_said() -> None:
    problem = small_problem(setup=replace(IN_PLACE, ranks=2), num_gpus=2)
    plan = planned(problem, KEEP | {"mlp_intermediate": "swap_host"})
    found = compare(problem, plan, MEASURED, {"activation_bytes_per_component": {}}, {}, WATCHED)
    sites = [s for layer in problem.workload.layers for s in layer.sites]
    moved = 2 * sum(s.nbytes * s.count for s in sites if s.component == "mlp_intermediate")
    # forwards send only and backwards fetch only: neither way waits for the other
    for way, seconds in (("gpu to host", 0.5), ("host to gpu", 0.25)):
        row = found.row(f"busy: {way}")
        assert row.predicted == pytest.approx(moved / MACHINE.device_to_host)
        assert row.measured == seconds
        assert found.row(f"moved: {way}").predicted == moved
        assert found.row(f"moved: {way}").measured == 7.0
    for name, note in (("gpu", "kernels are not timed"), ("network", "collectives are not timed")):
        row = found.row(f"busy: {name}")
        assert row.predicted > 0
        assert row.measured is row.error is None
        assert note in row.note
        assert note in found.as_json()[f"busy: {name}"]["note"]
        assert note in found.describe()
    assert not [row for row in found.rows if "ssd" in row.name or "cpu" in row.name]  # idle
    nobody = compare(problem, plan, MEASURED, {"activation_bytes_per_component": {}}, {}, {})
    assert nobody.row("busy: gpu to host").measured is None
    assert "DeepSpeed" in nobody.row("busy: gpu to host").note


def test_ssds_that_wait_for_the_cpu_are_not_busy() -> None:
    """On the naive schedule states are read and written in turn with their update."""
    on_ssd = RunSetup(zero_stage=2, offload_optimizer="nvme", overlap="none")
    rows = []
    for setup in (on_ssd, replace(on_ssd, schedule="naive")):
        problem = small_problem(setup=setup)
        plan = planned(problem, KEEP)
        counted = {"activation_bytes_per_component": {}}
        rows.append(
            compare(problem, plan, MEASURED, counted, {}, WATCHED | {"cpu": Busy(1.0, 0.0)})
        )
    for name in ("busy: ssd reading", "busy: ssd writing", "busy: cpu", "moved: ssd reading"):
        assert rows[0].row(name).predicted == pytest.approx(rows[1].row(name).predicted)
    assert rows[0].row("moved: ssd reading").predicted == problem.of_rank.optimizer
    assert "moved: cpu" not in {row.name for row in rows[0].rows}


def test_profiles_without_overheads_can_be_read() -> None:
    factors = replace(MACHINE, overheads=Overheads(attention=2.5), copies_beside=False)
    assert machine_from_json(factors.to_json()) == factors
    old = {k: v for k, v in asdict(MACHINE).items() if k not in ("overheads", "copies_beside")}
    assert machine_from_json(json.dumps(old)) == MACHINE
    bad = json.dumps({**old, "overheads": {"forward": 0.0}})
    with pytest.raises(ValueError, match=r"overheads.forward is 0.0; legal"):
        machine_from_json(bad)
