"""A codec that is registered from outside: the planner prices and chooses it by its row alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from problems import MACHINE, small_problem, with_budget

from hmt_deepspeed.config.codecs import CODECS, CodecSpec, register_codec
from hmt_deepspeed.config.components import PAPER_POLICY, Choice, Component
from hmt_deepspeed.planner.run.loads import Amount, layer_load
from hmt_deepspeed.planner.run.memory import activation_bytes, choices_of
from hmt_deepspeed.planner.solve.plan import plan_from_json, uniform_plan
from hmt_deepspeed.planner.solve.solve import allowed_choices, solve

# Four bits an element; encoding reads the tensor twice.
NIBBLES = CodecSpec(
    "nibbles",
    held="4 bits an element",
    costs="an error of about 10 %",
    implementation="nowhere:Nibbles",  # never loaded: the planner needs no class
    nbytes=lambda tokens, channels, itemsize: tokens * channels // 2,
    lossy=True,
    passes=2,
)
KEEP: dict[Component, Choice] = dict.fromkeys(PAPER_POLICY, "keep") | {
    "projected_inputs": "project"
}


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    register_codec(NIBBLES)
    yield
    del CODECS["nibbles"]


def test_its_bytes_and_passes_are_counted() -> None:
    problem = small_problem()
    work = problem.workload
    policy = KEEP | {"mlp_intermediate": "nibbles"}
    layer = work.layers[-1]
    site = next(s for s in layer.sites if s.name == "mlp_intermediate")
    kept, coded = (layer_load(layer, chosen, problem.setup) for chosen in (KEEP, policy))
    assert coded.held[0] == kept.held[0] - site.nbytes * 3 / 4
    moved = 2 * (site.nbytes + site.nbytes / 4)
    assert coded.forward[Amount.ENCODE] == coded.backward[Amount.DECODE] == moved
    assert kept.forward[Amount.ENCODE] == 0
    held = [activation_bytes(work, choices_of(work, chosen)).device for chosen in (KEEP, policy)]
    num_layers = sum(group.count for group in work.layers)
    assert held[0] - held[1] == num_layers * site.nbytes * 3 // 4


def test_a_plan_takes_it_where_it_is_permitted_and_needed() -> None:
    problem = small_problem()
    # nothing may be computed again or moved: what is kept does not fit, four bits do
    fixed = {c: x for c, x in KEEP.items() if c != "mlp_intermediate"}
    exact = {**allowed_choices(MACHINE, fixed=fixed), "mlp_intermediate": ("keep",)}
    permitted = allowed_choices(MACHINE, {"mlp_intermediate": "nibbles"}, fixed)
    assert "nibbles" not in allowed_choices(MACHINE, fixed=fixed)["mlp_intermediate"]
    permitted["mlp_intermediate"] = ("keep", "nibbles")
    plenty = solve(problem, exact)
    assert plenty is not None
    policy = KEEP | {"mlp_intermediate": "nibbles"}
    plan = uniform_plan(problem.workload, problem.machine, policy)
    assert plan_from_json(plan.to_json()) == plan
    budget = _needed(problem, policy)
    tight = with_budget(problem, gpu=budget)
    assert solve(tight, exact) is None
    found = solve(tight, permitted)
    assert found is not None
    assert set(found.counts()["mlp_intermediate"]) == {"nibbles"}


def _needed(problem: object, policy: dict[Component, Choice]) -> int:
    from hmt_deepspeed.planner.solve.cost import estimate

    found = estimate(problem, uniform_plan(problem.workload, problem.machine, policy))
    return int(found.peak("gpu")) + 1
