"""Plans: as JSON and back, refused for another model, and as the policy that the backend reads."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import replace

import pytest
from problems import MACHINE, small_problem

from hmt_deepspeed.config.components import PAPER_POLICY, POLICY_COMPONENTS
from hmt_deepspeed.planner.run.modes import OptimizerMode
from hmt_deepspeed.planner.solve.plan import (
    LayerChoices,
    Plan,
    fingerprint,
    plan_from_json,
    regrouped,
    spread,
    uniform_plan,
)

WORKLOAD = small_problem(layers=6).workload


@pytest.fixture
def plan() -> Plan:
    """Six layers in three groups, seen from the HMT paper's policy."""
    uniform = uniform_plan(WORKLOAD, MACHINE, PAPER_POLICY)
    (alike,) = uniform.layers
    swapped = {**alike.choices, "residual": "swap_host", "attention_output": "recompute"}
    groups = (LayerChoices((0, 1, 3, 5), alike.choices), LayerChoices((2, 4), swapped))
    return replace(uniform, layers=groups, seconds=1.5, gap=0.01)


def test_json_and_back(plan: Plan) -> None:
    assert plan_from_json(plan.to_json()) == plan


def test_a_plan_of_something_else_is_refused(plan: Plan) -> None:
    plan.check_fits(WORKLOAD, MACHINE)
    other = small_problem(layers=6, hidden=512).workload
    with pytest.raises(
        ValueError, match=f"of model {plan.model}, this one is {fingerprint(other.shape)}"
    ):
        plan.check_fits(other)
    with pytest.raises(ValueError, match="micro_batch 8 and seq_length 512, the run has 4 and 512"):
        plan.check_fits(small_problem(layers=6, batch=4).workload)
    with pytest.raises(ValueError, match="is for machine"):
        plan.check_fits(WORKLOAD, replace(MACHINE, num_ssds=1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda found: found.pop("head"), "legal: exactly the keys"),
        (lambda found: found.update(colour=1), "legal: exactly the keys"),
        (lambda found: found.update(version=9), "another version; legal: 2"),
        (
            lambda found: found["layers"][0]["choices"].update(residual="zip"),
            "residual: 'zip'; legal",
        ),
        (lambda found: found["layers"][0]["choices"].update(mlp="keep"), "component 'mlp'; legal"),
        (lambda found: found["layers"].pop(), "layers .0, 1, 3, 5.; legal"),
        (lambda found: found["layers"].append(found["layers"][0]), "each once"),
        (lambda found: found.update(layers=[3]), "malformed"),
    ],
)
def test_a_file_that_is_no_plan_is_refused(plan: Plan, change, message: str) -> None:  # type: ignore[no-untyped-def]
    found = json.loads(plan.to_json())
    change(found)
    with pytest.raises(ValueError, match=message):
        plan_from_json(json.dumps(found))
    with pytest.raises(ValueError, match="no JSON"):
        plan_from_json("{")


def test_policy_and_overrides_give_every_layer_its_choices(plan: Plan) -> None:
    """As the backend reads them: the first pattern found in a layer's name that names a component decides."""
    policy, overrides = plan.policy(), plan.overrides("model.layers.*")
    assert set(policy) == set(POLICY_COMPONENTS) - {"projected_inputs"}  # AdamW projects nothing
    for number in range(6):
        for component, wanted in plan.choices_of(number).items():
            name = f"model.layers.{number}"
            found = [
                c[component] for p, c in overrides.items() if component in c and re.search(p, name)
            ]
            assert (found[0] if found else policy[component]) == wanted
    # layers that follow the policy have no override, the others only what differs
    assert all(c[x] != policy[x] for c in overrides.values() for x in c)
    assert not any(re.search(pattern, "model.layers.12") for pattern in overrides)
    assert not any(re.search(pattern, "model.layers.2.self_attn") for pattern in overrides)


def test_layers_that_project_at_other_ranks_only_take_what_is_executed_there() -> None:
    """A plan made where some layer projects nothing has no choice for it: the policy is in force then."""
    projecting = small_problem(layers=6, mode=OptimizerMode("lowrank_adamw", rank=64)).workload
    held = PAPER_POLICY | {"projected_inputs": "project"}
    without = uniform_plan(WORKLOAD, MACHINE, PAPER_POLICY)
    whole = uniform_plan(projecting, MACHINE, held)
    assert regrouped(whole, WORKLOAD).layers == without.layers
    assert regrouped(without, projecting) == uniform_plan(projecting, MACHINE, PAPER_POLICY)
    groups = (
        LayerChoices((0,), without.layers[0].choices),
        LayerChoices((1, 2, 3, 4, 5), whole.layers[0].choices),
    )
    mixed = replace(whole, layers=groups)
    assert [regrouped(mixed, projecting).choices_of(n) for n in range(6)] == [
        whole.choices_of(n) for n in range(6)
    ]


def test_counts(plan: Plan) -> None:
    counts = plan.counts()
    assert counts["attention_output"] == {"int8": 4, "recompute": 2}
    assert counts["layer_input"] == {"keep": 6}
    assert counts["lm_head"] == {"keep": 1}
    with pytest.raises(ValueError, match="layer is 6; legal: 0 to 5"):
        plan.choices_of(6)


def test_layers_are_dealt_evenly() -> None:
    groups = spread(range(12), [3, 6, 3])
    assert sorted(n for group in groups for n in group) == list(range(12))
    assert [len(group) for group in groups] == [3, 6, 3]
    for group, size in zip(groups, (3, 6, 3), strict=True):
        gaps = [b - a for a, b in itertools.pairwise(group)]
        assert max(gaps) <= 12 / size + 2
