"""`"policy": "plan"`: a run profiles itself, plans, executes the plan and compares it with what happens."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from harness import Ranks
from training import ds_config, loss_of, make_engine, tiny_llama

LAYERS, BATCH, LENGTH = 3, 12, 64
FIRST_PLANNED = 5  # one iteration to warm up, four to profile
RERUN = "activation_rerun_flops_per_component"


def engine_of(planner: dict[str, Any] | None) -> Any:
    """No matrix refreshes after the first step; ``planner`` None: no activations section at all."""
    options = {"rank": 8, "update_interval": 1000, "early_refresh": False}
    config = ds_config(2, {**options, "max_full_gradient_bytes": 10**7})
    if planner is not None:
        config["hmt"] |= {"activations": {"policy": "plan"}, "planner": planner}
    return make_engine(config, tiny_llama(layers=LAYERS))


def rows(step: int, length: int = LENGTH, batch: int = BATCH) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7 + step)
    return torch.randint(0, 61, (batch, length), generator=generator)


def steps(engine: Any, count: int, **sizes: int) -> list[float]:
    losses = []
    for step in range(count):
        loss = loss_of(engine, rows(step, **sizes))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def refusal(work: Any) -> str:
    with pytest.raises(ValueError) as caught:
        work()
    return str(caught.value)


def cache_in(folder: str) -> None:
    """Profiles there; the user's cache folder also holds compiled operators, which stay where they are."""
    from functools import partial

    from hmt_deepspeed.zero import planning, profile_files

    planning.cache_file = partial(profile_files.cache_file, folder=folder)


def limits(engine: Any) -> tuple[int, int]:
    """Device bytes that the reference takes by the planner, and half-way from there to keeping everything."""
    from hmt_deepspeed.planner.cost import estimate
    from hmt_deepspeed.planner.plan import uniform_plan
    from hmt_deepspeed.sites import PAPER_POLICY
    from hmt_deepspeed.zero.run_profile import reference_plan

    planner = engine.hmt_planner
    work = planner.facts.workload(BATCH, LENGTH)
    problem = planner.facts.problem(work, planner.machine)
    keep = uniform_plan(work, planner.machine, dict.fromkeys(PAPER_POLICY, "keep"))
    least, most = (
        int(estimate(problem, plan).peak("gpu"))
        for plan in (reference_plan(planner._hmt, work, planner.machine), keep)
    )
    return least, (least + most) // 2


def run_alone(folder: str) -> dict[str, Any]:
    """One run after another on one rank; the first one's profile is in the cache for the others."""
    cache_in(folder)
    found: dict[str, Any] = {}
    plain = engine_of(None)
    found["plain losses"] = steps(plain, 9)
    plain.destroy()

    engine = engine_of({"save_plan": f"{folder}/run/plan.json"})
    planner = engine.hmt_planner
    losses, reruns, plans = [], [], []
    for step in range(9):
        loss = loss_of(engine, rows(step))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        reruns.append(sum(engine.hmt_activations.metrics()[RERUN].values()))
        plans.append(planner.plan is not None)
    found |= {"losses": losses, "reruns": reruns, "plans": plans}
    found["comparison"] = planner.comparison.as_json()
    found["description"] = planner.describe()
    found["profile_seconds"] = planner.profile_seconds
    found["machine"], found["plan"] = planner.machine, planner.plan
    found["metrics"] = planner.metrics()
    least, half = limits(engine)
    steps(engine, 1, length=2 * LENGTH)
    longer = planner.plan
    steps(engine, 1, length=2 * LENGTH - 8)
    found["longer"] = (longer, planner.plan is longer)
    steps(engine, 1, length=LENGTH // 2)
    found["shorter"] = planner.plan
    engine.eval()
    with torch.no_grad():
        loss_of(engine, rows(0, length=4 * LENGTH))  # what is no training is not planned for
    found["after evaluation"] = planner.plan is found["shorter"]
    engine.destroy()

    lossy = {"gpu_memory": half, "lossy": {"mlp_intermediate": "int8"}}
    for name, settings, count in (
        ("tight", {"gpu_memory": half}, 4),
        ("lossy", lossy, FIRST_PLANNED + 3),  # the codec is measured too: another profile
    ):
        engine = engine_of(settings)
        found[f"{name} losses"] = steps(engine, count)
        found[name] = {
            "profiled": engine.hmt_planner.profile_seconds,
            "plan": engine.hmt_planner.plan,
            "comparison": engine.hmt_planner.comparison.as_json(),
            "limit": half,
        }
        engine.hmt_planner.save(Path(folder) / name)
        engine.destroy()

    again = engine_of({"plan": f"{folder}/tight/plan.json"})
    found["again losses"] = steps(again, 2)
    found["again"] = (again.hmt_planner.plan, again.hmt_planner.machine)
    steps(again, 1, length=LENGTH // 2)  # a smaller batch is no reason to stop
    found["outgrown"] = refusal(lambda: steps(again, 1, length=2 * LENGTH))
    found["refusals"] = refusals(again, folder, least)
    again.destroy()
    return found


def refusals(engine: Any, folder: str, least: int) -> dict[str, str]:
    """What planners of the engine's run say that are given something else."""
    from hmt_deepspeed.config import HMTConfig

    Path(f"{folder}/torn.json").write_text("{")
    facts = engine.hmt_planner.facts
    other = replace(facts, shape=replace(facts.shape, layers=LAYERS + 1))
    cases: dict[str, tuple[dict[str, Any], Any]] = {
        "another model": ({"plan": f"{folder}/tight/plan.json"}, other),
        "no file": ({"plan": f"{folder}/missing.json"}, facts),
        "torn": ({"plan": f"{folder}/torn.json"}, facts),
        "unknown machine": ({"profile": "rtx5090"}, facts),
        "more than there is": ({"gpu_memory": 2**60}, facts),
        "too little": ({"gpu_memory": max(2**20, least // 2)}, facts),
    }
    found = {}
    for name, (settings, run) in cases.items():
        block = {"activations": {"policy": "plan"}, "planner": settings}
        planner = type(engine.hmt_planner)(
            run,
            HMTConfig.from_block(block),
            get_accelerator(),
            engine.device,
            adopt=lambda _: None,
            activations=lambda: engine.hmt_activations,
            counted=dict,
        )
        found[name] = refusal(lambda planner=planner: planner.begin_forward((rows(0),), {}))
    return found


@pytest.fixture(scope="module")
def alone(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("planning")
    return {"folder": folder, **ranks.run(run_alone, 1, str(folder))[0]}


def test_the_plan_takes_over_after_the_profile(alone: dict[str, Any]) -> None:
    assert alone["plans"] == [step >= FIRST_PLANNED for step in range(9)]
    # there is room to keep everything, so nothing but X [Q | P] is computed again from then on
    before, after = alone["reruns"][:FIRST_PLANNED], alone["reruns"][FIRST_PLANNED:]
    assert min(before) > 2 * max(after)
    assert set(alone["plan"].policy().values()) == {"keep"}
    assert alone["losses"] == pytest.approx(alone["plain losses"], rel=1e-6)


def test_the_profile_is_of_this_run(alone: dict[str, Any]) -> None:
    machine = alone["machine"]
    assert alone["profile_seconds"] > 0
    assert machine.cpu_adam_ns == 1.0  # nothing is updated by CPU Adam, so nothing was measured
    assert not machine.copies_beside
    assert machine.overheads.forward != machine.overheads.backward != 1.0
    assert machine.overheads.attention != 1.0


def test_bytes_held_are_those_predicted(alone: dict[str, Any]) -> None:
    for name in ("tight", "lossy"):
        row = alone[name]["comparison"]["activations"]
        assert row["measured"] > 0
        assert abs(row["error"]) < 0.05, name
    weights = alone["comparison"]["gpu: weights"]
    assert weights["predicted"] == weights["measured"] > 0
    assert alone["comparison"]["iteration"]["measured"] > 0


def test_plan_and_profile_are_written_and_printed(alone: dict[str, Any]) -> None:
    folder = alone["folder"]
    assert json.loads((folder / "run" / "plan.json").read_text())["micro_batch"] == BATCH
    assert (folder / "run" / "plan.json.profile.json").exists()
    assert (folder / "tight" / "profile.json").exists()
    text = alone["description"]
    assert f"micro-batches of {BATCH} x {LENGTH} tokens" in text
    assert "profiled in" in text
    assert alone["metrics"]["planned_step_seconds"] == alone["plan"].seconds > 0


def test_the_next_run_of_the_model_is_planned_at_once(alone: dict[str, Any]) -> None:
    assert alone["tight"]["profiled"] is None


def test_a_limit_makes_a_plan_that_holds_less(alone: dict[str, Any]) -> None:
    choices = {c for counts in alone["tight"]["plan"].counts().values() for c in counts}
    assert "keep" in choices
    assert choices & {"recompute", "swap_host"}
    assert not choices & {"int8", "fp8"}  # not allowed
    held = [alone[name]["comparison"]["activations"]["measured"] for name in ("tight", "lossy")]
    assert max(held) < alone["tight"]["limit"]
    assert alone["tight losses"] == pytest.approx(alone["plain losses"][:4], rel=1e-6)


def test_larger_and_much_smaller_batches_are_planned_for_anew(alone: dict[str, Any]) -> None:
    longer, was_kept = alone["longer"]
    assert longer.seq_length == 2 * LENGTH
    assert was_kept  # slightly shorter is no reason
    assert alone["shorter"].seq_length == LENGTH // 2
    assert alone["after evaluation"]


def test_a_saved_plan_is_executed_without_a_profile(alone: dict[str, Any]) -> None:
    plan, machine = alone["again"]
    assert plan == alone["tight"]["plan"]
    assert machine is None
    assert alone["again losses"] == pytest.approx(alone["plain losses"][:2], rel=1e-6)
    assert "hmt.planner.plan" in alone["outgrown"]
    assert f"{BATCH} x {2 * LENGTH}" in alone["outgrown"]


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("another model", ["hmt.planner.plan", "the plan is of model", "remove the key"]),
        ("no file", ["hmt.planner.plan", "missing.json", "cannot be read", "legal: null"]),
        ("torn", ["hmt.planner.plan", "torn.json", "no JSON"]),
        ("unknown machine", ["hmt.planner.profile", "rtx5090", "legal", "rtx4090"]),
        ("more than there is", [f"hmt.planner.gpu_memory is {2**60}; legal: up to", "Lower it"]),
        ("too little", ["no plan fits", "gpu memory", "Raise hmt.planner.gpu_memory"]),
    ],
)
def test_what_cannot_be_planned_is_refused(
    alone: dict[str, Any], case: str, words: list[str]
) -> None:
    assert all(word in alone["refusals"][case] for word in words), alone["refusals"][case]


# -- several ranks ------------------------------------------------------------------------------------


def run_together(folder: str) -> dict[str, Any]:
    """Ranks with unlike memory and batches of unlike length; the smaller memory and the longer batch count."""
    from hmt_deepspeed.config import HMTConfig
    from hmt_deepspeed.zero import planning

    cache_in(folder)
    rank = dist.get_rank()
    taken, capacity = 2**20, 2**33 - rank * 2**30
    planning.device_capacity = lambda _: (taken, capacity)
    engine = engine_of({})
    length = LENGTH - 8 * (1 - rank)
    steps(engine, FIRST_PLANNED + 3, batch=BATCH // 2, length=length)
    planner = engine.hmt_planner
    settings = {"plan": f"{folder}/missing.json"}
    found = {
        "plan": planner.plan,
        "machine": planner.machine,
        "budget": planner._problem.budget.gpu,
    }
    planner._hmt = HMTConfig.from_block({"activations": {"policy": "plan"}, "planner": settings})
    return found | {"refusal": refusal(planner._use_files)}


def test_ranks_execute_one_plan(ranks: Ranks, tmp_path: Path) -> None:
    first, second = ranks.run(run_together, 2, str(tmp_path))
    assert first["plan"] == second["plan"]
    assert first["machine"] == second["machine"]
    assert first["budget"] == second["budget"] < 2**33 - 2**30
    assert (first["plan"].micro_batch, first["plan"].seq_length) == (BATCH // 2, LENGTH)
    assert first["refusal"] == second["refusal"]  # found by rank 0, raised by both
