"""The sections beside hmt.optimizer: activations, planner, basis cache, snapshots."""

import re

import pytest
from blocks import ACTIVATIONS, POLICY, problem_of_field, problems_of
from pydantic import ValidationError

from hmt_deepspeed.config import ActivationsConfig, HMTConfig, describe_fields
from hmt_deepspeed.config.components import POLICY_COMPONENTS, all_choices, legal_choices

# --- hmt.activations --------------------------------------------------------------------------


@pytest.mark.parametrize("section", [{}, {"policy": {}}, {"nvme_path": None}])
def test_activations_default_to_the_papers_table(section):
    config = HMTConfig.from_block({"activations": section})
    assert config.activations.model_dump() == ACTIVATIONS
    assert config.gives("activations")
    assert not config.gives("optimizer")
    assert config == HMTConfig.from_block({"activations": {}})
    assert hash(config) == hash(HMTConfig())


def test_activations_are_taken():
    section = {
        "policy": {"residual": "fp8", "attention_qkv": "swap_host"},
        "overrides": {r"layers\.0\.": {"mlp_intermediate": "swap_ssd"}},
        "components": {"experts": "mlp_intermediate"},
        "host_memory": 2**20,
        "nvme_path": "/ssd",
    }
    config = HMTConfig.from_block({"activations": section}).activations
    assert config.policy.model_dump() == POLICY | section["policy"]
    override = config.overrides[r"layers\.0\."].model_dump(exclude_none=True)
    assert override == {"mlp_intermediate": "swap_ssd"}
    assert config.components == section["components"]
    for key in ("host_memory", "nvme_path"):
        assert getattr(config, key) == section[key]


ILLEGAL_CHOICES = [
    (c, v) for c in POLICY_COMPONENTS for v in all_choices() if v not in legal_choices(c)
]


@pytest.mark.parametrize(("component", "choice"), ILLEGAL_CHOICES)
def test_a_choice_that_a_component_does_not_have_is_refused_with_the_reason(component, choice):
    legal = {row[0]: row[1] for row in describe_fields()}[f"hmt.activations.policy.{component}"]
    assert legal.replace(" or", ",") == ", ".join(f'"{v}"' for v in legal_choices(component))
    for fields, key in (
        ({"policy": {component: choice}}, f"policy.{component}"),
        ({"overrides": {"x": {component: choice}}}, f"overrides['x'].{component}"),
    ):
        path, text = problem_of_field("activations", **fields)
        assert path == f"hmt.activations.{key}"
        assert text.startswith(f"got {choice!r} (")
        assert ("X [Q | P]" in text) == ("project" in component + choice)
        assert f"Legal: {legal}." in text


@pytest.mark.parametrize(
    ("section", "key", "words"),
    [
        ({"policy": {"residual": "int4"}}, "policy.residual", 'Did you mean "int8"?'),
        ({"policy": {"residual": None}}, "policy.residual", "got None. Legal: "),
        ({"policy": "paper"}, "policy", "got 'paper'. Legal: \"plan\" or an object."),
        ({"policy": {"residul": "fp8"}}, "policy.residul", '"hmt.activations.policy.residual"'),
        ({"residual": "fp8"}, "residual", 'belongs at "hmt.activations.policy.residual"'),
        ({"overrides": {"x": "fp8"}}, "overrides['x']", "Legal: an object."),
        ({"overrides": {"(": {"residual": "fp8"}}}, "overrides", "not a regular expression"),
        ({"overrides": {"x": {}}}, "overrides['x']", "got {}. It sets no component: remove it."),
        ({"components": {"x": "mlp"}}, "components['x']", 'or "lm_head".'),
        ({"components": {"x": "layer_input"}}, "components['x']", "got 'layer_input'. Legal: "),
        ({"components": {"(": "residual"}}, "components", "not a regular expression"),
        ({"projected_inputs": "project"}, "projected_inputs", '"hmt.activations.policy.projected_'),
        ({"components": {"x": "projected_inputs"}}, "components['x']", 'or "lm_head".'),
        ({"host_memory": 1000}, "host_memory", '"auto" or an integer >= 1048576.'),
        ({"host_memory": "4GB"}, "host_memory", "got '4GB'."),
        ({"nvme_path": ""}, "nvme_path", "null or the path of a folder."),
    ],
)
def test_bad_activations_are_refused(section, key, words):
    path, text = problem_of_field("activations", **section)
    assert path == f"hmt.activations.{key}"
    assert words in text


@pytest.mark.parametrize(
    ("section", "key", "words"),
    [
        ({"policy": {"residual": "swap_ssd"}}, "policy.residual", 'set "nvme_path"'),
        (
            {"overrides": {"x": {"lm_head": "swap_ssd"}}},
            "overrides['x'].lm_head",
            "got 'swap_ssd'. It needs a folder",
        ),
        ({"nvme_path": "/ssd"}, "nvme_path", "No component is swap_ssd: remove it"),
        (
            {"nvme_path": "/ssd", "policy": {"residual": "swap_host"}},
            "nvme_path",
            "No component is swap_ssd",
        ),
    ],
)
def test_activations_that_would_be_ignored_are_refused(section, key, words):
    path, text = problem_of_field("activations", **section)
    assert path == f"hmt.activations.{key}"
    assert words in text
    with pytest.raises(ValidationError, match=re.escape(f"{key}: ")):
        ActivationsConfig.model_validate(section)


@pytest.mark.parametrize(
    "section",
    [
        {"host_memory": 2**30, "policy": {"residual": "swap_host"}},
        {"nvme_path": "/ssd", "overrides": {"x": {"residual": "swap_ssd", "lm_head": None}}},
    ],
)
def test_activations_that_are_read_are_no_conflict(section):
    assert HMTConfig.from_block({"activations": section}).activations.model_fields_set == set(
        section
    )


@pytest.mark.parametrize(
    "section",
    [
        {"policy": {"residual": "swap_sdd"}, "nvme_path": "/ssd"},
        {"policy": {"residual": "swap_ssd"}, "nvme_path": 3},
        {"overrides": {"x": {"residual": "swap_sdd"}}, "nvme_path": "/ssd"},
    ],
)
def test_a_bad_choice_does_not_also_make_a_conflict(section):
    assert len(problems_of({"activations": section})) == 1


# -- planner ------------------------------------------------------------------------------------------


def test_a_plan_is_a_policy_that_computes_everything_again_until_it_is_made():
    planned = HMTConfig.from_block({"activations": {"policy": "plan"}}).activations
    assert planned.is_planned
    limited = {"activations": {"policy": "plan", "host_memory": 2**25}}
    assert HMTConfig.from_block(limited).activations.host_memory == 2**25
    assert planned.policy.mlp_intermediate == "recompute"
    assert not HMTConfig.from_block({"activations": {}}).activations.is_planned


@pytest.mark.parametrize(
    ("block", "key", "words"),
    [
        ({"planner": {"plan": "x.json"}}, "hmt.planner", "Nothing is planned"),
        (
            {"activations": {}, "planner": {"gpu_memory": 2**30}},
            "hmt.planner",
            "Nothing is planned",
        ),
        ({"activations": {"policy": "plam"}}, "hmt.activations.policy", '"plan" or an object'),
        (
            {"activations": {"policy": "plan", "overrides": {"x": {"residual": "keep"}}}},
            "hmt.activations.overrides",
            "write the policy out",
        ),
        (
            {"activations": {"policy": "plan"}, "planner": {"lossy": {"layernorm": "int8"}}},
            "hmt.planner.lossy",
            "never held in 8 bits",
        ),
        (
            {"activations": {"policy": "plan"}, "planner": {"gpu_memory": 5}},
            "hmt.planner.gpu_memory",
            "an integer >= 1048576",
        ),
        (
            {"activations": {"policy": "plan"}, "fpdt": {}},
            "hmt.activations.policy",
            "remove hmt.fpdt",
        ),
    ],
)
def test_sections_that_nothing_would_follow(block, key, words):
    with pytest.raises(ValueError, match="1 problem") as caught:
        HMTConfig.from_block(block)
    assert f"{key}: " in str(caught.value)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "section",
    [
        {"basis_cache": {"history": -1}},
        {"basis_cache": {"history": True}},
        {"basis_cache": {"enabled": True}},
        {"snapshot": {"interval": -1, "path": "/ssd"}},
        {"snapshot": {"path": "", "interval": 1}},
    ],
)
def test_bad_fields_of_the_basis_cache_and_of_snapshots_are_named(section):
    ((name, fields),) = section.items()
    assert set(problems_of(section)) == {f"hmt.{name}.{next(iter(fields))}"}


@pytest.mark.parametrize(
    ("half", "advice"), [({"path": "/ssd"}, '"interval"'), ({"interval": 5}, "a folder")]
)
def test_half_a_snapshot_is_refused(half, advice):
    problems = problems_of({"snapshot": half})
    assert set(problems) == {f"hmt.snapshot.{next(iter(half))}"}
    assert advice in str(problems)
