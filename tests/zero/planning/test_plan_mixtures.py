"""``"policy": "plan"`` of a mixture of experts: the run measures itself, plans, and holds the bytes that are predicted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from harness import Ranks
from planned_runs import BATCH, FIRST_PLANNED, LENGTH, cache_in, steps
from training import ds_config, make_engine, tiny_mixtral

OPTIONS = {"rank": 8, "probes": 8, "max_full_gradient_bytes": 10**7}


def engine_of(planner: dict[str, Any], stage: int = 2, **options: Any) -> Any:
    config = ds_config(stage, {"update_interval": 1000, **OPTIONS, **options})
    config["hmt"] |= {"activations": {"policy": "plan"}, "planner": planner}
    return make_engine(config, tiny_mixtral())


def run_and_plan(folder: str, **options: Any) -> dict[str, Any]:
    """Three steps of the plan behind those of its profile."""
    cache_in(folder)
    engine = engine_of({}, **options)
    planned = []
    for _ in range(FIRST_PLANNED + 3):
        steps(engine, 1)
        planned.append(engine.hmt_planner.plan is not None)
    planner = engine.hmt_planner
    found = {
        "planned": planned,
        "plan": planner.plan,
        "problem": planner.problem,
        "comparison": planner.comparison.as_json(),
        "shape": planner.facts.shape,
    }
    engine.destroy()
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mixtures")


@pytest.fixture(scope="module")
def shared(ranks: Ranks, folder: Path) -> dict[str, Any]:
    return ranks.run(run_and_plan, 1, str(folder / "one"), expert_basis="shared")[0]


def check_held(found: dict[str, Any]) -> None:
    rows = found["comparison"]
    held = {name: row for name, row in rows.items() if name.startswith("activations: ")}
    assert held["activations: experts"]["measured"] > 0
    assert held["activations: projected_inputs"]["measured"] > 0
    assert all(row["predicted"] == row["measured"] for row in held.values()), held


def test_a_mixture_is_planned_after_its_profile(shared: dict[str, Any]) -> None:
    assert shared["planned"] == [False] * FIRST_PLANNED + [True] * 3
    assert shared["plan"].policy()["experts"] == "keep"  # there is room
    assert shared["shape"].experts


def test_it_holds_what_is_predicted(shared: dict[str, Any]) -> None:
    check_held(shared)
    rows = shared["comparison"]
    assert rows["gpu: weights"]["error"] == 0
    assert rows["gpu: optimizer states"]["error"] == pytest.approx(0, abs=2e-3)
    assert rows["gpu: gradients"]["error"] == pytest.approx(0, abs=2e-3)


def test_experts_with_bases_of_their_own_are_planned_as_such(ranks: Ranks, folder: Path) -> None:
    found = ranks.run(run_and_plan, 1, str(folder / "one"), expert_basis="own")[0]
    check_held(found)
    assert found["comparison"]["gpu: optimizer states"]["error"] == pytest.approx(0, abs=2e-3)


def test_two_ranks_at_stage_3_execute_one_plan(ranks: Ranks, folder: Path) -> None:
    first, second = ranks.run(run_and_plan, 2, str(folder / "two"), stage=3, expert_basis="shared")
    assert first["plan"] == second["plan"]
    for found in (first, second):
        check_held(found)
        assert abs(found["comparison"]["gpu: weights"]["error"]) <= 0.02
        # bases of experts are whole on every rank
        assert found["comparison"]["gpu: optimizer states"]["error"] == pytest.approx(0, abs=0.02)


def run_tight(folder: str) -> dict[str, Any]:
    """A limit half-way between computing everything again and keeping it."""
    from hmt_deepspeed.config.components import PAPER_POLICY
    from hmt_deepspeed.planner.solve.cost import estimate
    from hmt_deepspeed.planner.solve.plan import uniform_plan
    from hmt_deepspeed.zero.planning.run_profile import reference_plan

    cache_in(folder)
    engine = engine_of({}, expert_basis="shared")
    steps(engine, 1)
    planner = engine.hmt_planner
    work = planner.facts.workload(BATCH, LENGTH)
    problem = planner.facts.problem(work, planner.machine)
    keep = dict.fromkeys(PAPER_POLICY, "keep") | {"projected_inputs": "project"}
    plans = (
        reference_plan(planner._hmt, planner.facts, work, planner.machine),
        uniform_plan(work, planner.machine, keep),
    )
    limit = int(sum(estimate(problem, plan).peak("gpu") for plan in plans) / 2)
    engine.destroy()
    engine = engine_of({"gpu_memory": limit}, update_interval=3, expert_basis="shared")
    steps(engine, 2)
    held = []
    for _ in range(4):  # bases are found anew in one of them, or two
        steps(engine, 1)
        rows = engine.hmt_planner.comparison.as_json()
        products = rows.get("activations: projected_inputs", {"predicted": 0, "measured": 0})
        held.append((products["predicted"], products["measured"]))
    found = {
        "held": held,
        "plan": engine.hmt_planner.plan,
        "comparison": engine.hmt_planner.comparison.as_json(),
        "limit": limit,
    }
    engine.destroy()
    return found


def test_a_limit_is_kept_and_a_refresh_saves_no_products(
    ranks: Ranks, shared: dict[str, Any], folder: Path
) -> None:
    """A profile of the same run is in the cache."""
    found = ranks.run(run_tight, 1, str(folder / "one"))[0]
    choices = {choice for counts in found["plan"].counts().values() for choice in counts}
    assert choices & {"recompute", "swap_host"}
    rows = found["comparison"]
    assert rows["activations"]["measured"] < found["limit"]
    assert all(predicted == measured for predicted, measured in found["held"])
    assert min(found["held"]) < max(found["held"])
