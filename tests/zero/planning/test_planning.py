"""`"policy": "plan"`: a run profiles itself, plans, executes the plan and compares it with what happens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.accelerator import get_accelerator
from harness import Ranks
from planned_runs import (
    BATCH,
    FIRST_PLANNED,
    LAYERS,
    LENGTH,
    RERUN,
    cache_in,
    cached,
    engine_of,
    refusal,
    rows,
    steps,
)
from training import PAPERS_RULE, ds_config, loss_of, make_engine, matrix_ranks, tiny_llama

from hmt_deepspeed.planner.advise.compare import held_by_component
from hmt_deepspeed.planner.solve.plan import plan_from_json
from hmt_deepspeed.zero.planning.found_ranks import RankWatch


def limits(engine: Any) -> tuple[int, int]:
    """Device bytes that the reference takes by the planner, and half-way from there to keeping everything."""
    from hmt_deepspeed.config.components import PAPER_POLICY
    from hmt_deepspeed.planner.solve.cost import estimate
    from hmt_deepspeed.planner.solve.plan import uniform_plan
    from hmt_deepspeed.zero.planning.run_profile import reference_plan

    planner = engine.hmt_planner
    work = planner.facts.workload(BATCH, LENGTH)
    problem = planner.facts.problem(work, planner.machine)
    keep = uniform_plan(
        work, planner.machine, dict.fromkeys(PAPER_POLICY, "keep") | {"projected_inputs": "project"}
    )
    least, most = (
        int(estimate(problem, plan).peak("gpu"))
        for plan in (reference_plan(planner._hmt, planner.facts, work, planner.machine), keep)
    )
    return least, (least + most) // 2


def run_alone(folder: str) -> dict[str, Any]:
    """One run after another on one rank; the first one's profile is in the cache for the others."""
    cache_in(folder)
    found: dict[str, Any] = {}
    plain = engine_of(None)
    found["plain losses"] = steps(plain, 9)
    plain.destroy()

    engine = engine_of({"plan": f"{folder}/run/plan.json"})
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
    from hmt_deepspeed.config.components import PAPER_POLICY
    from hmt_deepspeed.planner.hardware import named_machine
    from hmt_deepspeed.planner.solve.plan import uniform_plan

    Path(f"{folder}/torn.json").write_text("{")
    facts = engine.hmt_planner.facts
    other = replace(facts, shape=replace(facts.shape, layers=LAYERS + 1))
    policy = PAPER_POLICY | {"residual": "swap_ssd"}
    swapping = uniform_plan(facts.workload(BATCH, LENGTH), named_machine("rtx4090"), policy)
    Path(f"{folder}/swapping.json").write_text(swapping.to_json())
    cases: dict[str, tuple[dict[str, Any], Any]] = {
        "another model": ({"plan": f"{folder}/tight/plan.json"}, other),
        "a folder": ({"plan": folder}, facts),
        "no SSD": ({"plan": f"{folder}/swapping.json"}, facts),
        "torn": ({"plan": f"{folder}/torn.json"}, facts),
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
            busy=dict,
        )
        found[name] = refusal(lambda planner=planner: planner.begin_forward((rows(0),), {}))
    return found


@pytest.fixture(scope="module")
def alone(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("planning")
    return {"folder": folder, **ranks.run(run_alone, 1, str(folder))[0]}


def test_the_plan_takes_over_after_the_profile(alone: dict[str, Any]) -> None:
    assert alone["plans"] == [step >= FIRST_PLANNED for step in range(9)]
    # there is room to hold everything, so nothing is computed again from then on
    before, after = alone["reruns"][:FIRST_PLANNED], alone["reruns"][FIRST_PLANNED:]
    assert min(before) > max(after) == 0
    assert alone["plan"].policy()["projected_inputs"] == "project"
    assert set(alone["plan"].policy().values()) == {"keep", "project"}
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
    written = (folder / "run" / "plan.json").read_text()
    assert plan_from_json(written) == alone["shorter"]  # the run's last
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
        ("another model", ["hmt.planner.plan", "the plan is of model", "name a file that is not"]),
        ("a folder", ["hmt.planner.plan", "cannot be read", "legal: null", "not there yet"]),
        ("no SSD", ["hmt.planner.plan", "swapping.json", "nvme_path names no folder. Set it"]),
        ("torn", ["hmt.planner.plan", "torn.json", "no JSON"]),
        ("more than there is", [f"hmt.planner.gpu_memory is {2**60}; legal: up to", "Lower it"]),
        ("too little", ["no plan fits", "gpu memory", "Raise hmt.planner.gpu_memory"]),
    ],
)
def test_what_cannot_be_planned_is_refused(
    alone: dict[str, Any], case: str, words: list[str]
) -> None:
    assert all(word in alone["refusals"][case] for word in words), alone["refusals"][case]


# -- ranks that are chosen ----------------------------------------------------------------------------

AUTO = {**PAPERS_RULE, "rank_candidates": [4, 32], "energy_threshold": 0.2}


def run_chosen(folder: str) -> dict[str, Any]:
    """A profile is there already, so that the first plan comes before any basis."""
    cached(f"{folder}/tight/profile.json")
    roomy = engine_of({}, AUTO)
    steps(roomy, 1)
    _, half = limits(roomy)
    roomy.destroy()

    engine = engine_of({"gpu_memory": half}, AUTO)
    planner = engine.hmt_planner
    plans, texts = [], []
    for _ in range(4):  # bases are found in the first
        steps(engine, 1)
        plans.append(planner.plan)
        texts.append(planner.describe())
    found = {
        "plans": plans,
        "texts": texts,
        "ranks": matrix_ranks(engine),
        "predicted": planner.problem.workload.projected.others,
        "comparison": planner.comparison.as_json(),
        "limit": half,
    }
    engine.destroy()
    return found


def test_a_plan_follows_the_ranks_that_are_found(ranks: Ranks, alone: dict[str, Any]) -> None:
    found, other = ranks.run(run_chosen, 2, str(alone["folder"]))
    assert found["plans"] == other["plans"]
    assert set(found["ranks"].values()) == {4}
    assert ("model.layers.*.self_attn.q_proj.weight", 4, 8) in found["predicted"]  # r and k
    first, *others = found["plans"]
    # 32 for five matrices of a layer; those of 20 keys and values have no more than 20
    assert f"the largest candidates, {(5 * 32 + 2 * 20) / 7:.4g} in the mean" in found["texts"][0]
    again = others[0]
    assert all(plan is again for plan in others)  # once: nothing changed after that
    assert "planned again: at the ranks found the device holds" in found["texts"][1]
    assert "MiB less than planned for" in found["texts"][1]
    assert "4 in the mean" in found["texts"][1]
    kept = [sum(c.get("keep", 0) for c in plan.counts().values()) for plan in (first, again)]
    assert kept[0] < kept[1]  # the room that smaller projections leave is used
    held = found["comparison"]["activations: projected_inputs"]
    assert held["predicted"] == held["measured"] > 0  # X [Q | P] at the ranks that there are
    assert abs(found["comparison"]["activations"]["error"]) < 0.05
    assert found["comparison"]["activations"]["measured"] < found["limit"]


def test_ranks_are_looked_at_after_refreshes_only() -> None:
    class Matrices(list[Any]):
        looked = 0

        def __iter__(self) -> Any:
            self.looked += 1
            return super().__iter__()

    def entry(name: str, rank: int, measured: bool) -> Any:
        matrix = SimpleNamespace(
            rank=rank, measured=measured, candidates=(4, 64), count=1, is_full_at=lambda _: False
        )
        return SimpleNamespace(name=name, matrix=matrix)

    layers = [entry(f"m.layers.{n}.q.weight", rank, True) for n, rank in enumerate((4, 9, 10))]
    matrices = Matrices([*layers, entry("m.layers.0.k.weight", 4, False), entry("m.7.w", 8, True)])
    schedule = SimpleNamespace(num_refreshes=[0] * len(matrices))
    groups = SimpleNamespace(schedule=schedule)
    watch = RankWatch(SimpleNamespace(low_rank=matrices, basis_groups=groups), "m.layers.*")
    assert watch.news() is not None
    assert watch.news() is None
    assert matrices.looked == 1
    schedule.num_refreshes[1] = 1
    found = watch.news()
    assert found is not None
    assert dict(found.now) == {"m.layers.*.q.weight": 8, "m.layers.*.k.weight": 4, "m.7.w": 8}
    assert dict(found.to_expect) == {**dict(found.now), "m.layers.*.k.weight": 64}
    assert (found.num_found, found.num_matrices, found.mean) == (4, 5, 19.0)
    assert watch.news() is None
    assert matrices.looked == 2


# -- steps in which matrices refresh --------------------------------------------------------------------


def run_refreshing(folder: str) -> dict[str, Any]:
    """Five to seven of 21 matrices refresh in every step; at first as many as the bytes allow."""
    options = {"rank": 8, "update_interval": 4}
    config = ds_config(2, {**options, "max_full_gradient_bytes": 60_000})
    cached(f"{folder}/tight/profile.json")
    config["hmt"] |= {"activations": {"policy": "plan"}}
    engine = make_engine(config, tiny_llama(layers=LAYERS))
    steps(engine, 6)
    planned, plan = engine.hmt_planner.problem, engine.hmt_planner.plan
    found = {
        "comparison": engine.hmt_planner.comparison.as_json(),
        "of any other step": held_by_component(planned, plan)["projected_inputs"],
        "at rest": planned.of_rank.gradients,
    }
    engine.destroy()
    return found


def test_a_step_that_refreshes_is_predicted_as_it_is(ranks: Ranks, alone: dict[str, Any]) -> None:
    found = ranks.run(run_refreshing, 1, str(alone["folder"]))[0]
    rows = found["comparison"]
    products, gradients = rows["activations: projected_inputs"], rows["gpu: gradients"]
    assert products["predicted"] == products["measured"] < 0.9 * found["of any other step"]
    assert rows["activations"]["error"] == pytest.approx(0, abs=1e-3)
    assert gradients["predicted"] == gradients["measured"] > 1.2 * found["at rest"]
