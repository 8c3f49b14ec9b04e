"""The "hmt" block: what is accepted, what is refused, and what the refusal says."""

import json
import re
from pathlib import Path

import pytest
from pydantic import ValidationError

from hmt_deepspeed.config import (
    ActivationsConfig,
    HMTConfig,
    OptimizerConfig,
    describe_fields,
    read_json_config,
)
from hmt_deepspeed.sites import CHOICES, COMPONENTS, LEGAL_CHOICES

DEFAULTS = {
    "method": "lowrank_adamw",
    "projection": "right",
    "rank": "auto",
    "rank_candidates": (32, 64, 128, 256),
    "energy_threshold": 0.95,
    "rank_budget": None,
    "full_rank_budget": 0.0,
    "update_interval": 200,
    "refresh": "staggered",
    "early_refresh": True,
    "range_finder": "randomized",
    "moment_transfer": "rotate",
    "residual": "probe",
    "share_basis": False,
    "probes": "auto",
    "residual_scale": "auto",
    "projected_backward": "auto",
    "scale": "auto",
    "scale_type": "auto",
    "norm_growth_limit": "auto",
    "max_full_gradient_bytes": "auto",
    "state_dtype": "fp32",
    "second_moment": "full",
    "master_weights": "fp32",
    "weight_dtype": "auto",
    "target_modules": None,
    "exclude_modules": ("embed", "lm_head", "lora_"),
    "module_rules": {},
    "seed": 0,
}
POLICY = {
    "embedding": "keep",
    "attention_qkv": "recompute",
    "attention_output": "int8",
    "mlp_intermediate": "int8",
    "residual": "keep",
    "layernorm": "keep",
    "projected_inputs": "recompute",
    "lm_head": "keep",
}
ACTIVATIONS = {
    "policy": POLICY,
    "overrides": {},
    "components": {},
    "rounding": "stochastic",
    "block_size": 256,
    "host_memory": "auto",
    "nvme_path": None,
    "error_interval": 0,
}
KEPT_BY_ADAMW = {"method", "master_weights", "state_dtype", "module_rules", "seed"}
KEPT_BY_APOLLO = KEPT_BY_ADAMW | {
    "rank",
    "update_interval",
    "refresh",
    "scale",
    "scale_type",
    "norm_growth_limit",
    "projected_backward",
    "target_modules",
    "exclude_modules",
}


def problems_of(block: object) -> dict[str, str]:
    """The lines of the one ValueError that `block` raises, by key."""
    with pytest.raises(ValueError) as caught:
        HMTConfig.from_block(block)
    assert type(caught.value) is ValueError
    first, *lines = str(caught.value).splitlines()
    assert first.startswith('The "hmt" block of the DeepSpeed config has ')
    assert f" {len(lines)} problem" in first
    assert all(line.startswith("  - hmt.") for line in lines)
    return dict(line.removeprefix("  - ").split(": ", 1) for line in lines)


def problem_of_field(section: str = "optimizer", **fields: object) -> tuple[str, str]:
    problems = problems_of({section: fields})
    assert len(problems) == 1, problems
    return next(iter(problems.items()))


# --- accepted ---------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [{}, {"optimizer": {}}])
def test_defaults(block):
    config = HMTConfig.from_block(block)
    assert config.optimizer.model_dump() == DEFAULTS
    assert config == HMTConfig()


@pytest.mark.parametrize(
    ("fields", "key", "expected"),
    [
        ({"method": "adamw"}, "method", "adamw"),
        ({"method": "apollo"}, "method", "apollo"),
        ({"method": "apollo_mini", "rank": 1}, "rank", 1),
        ({"method": "apollo", "projected_backward": False}, "projected_backward", False),
        *[({"projection": v}, "projection", v) for v in ("right", "left", "auto", "two_sided")],
        *[({"range_finder": v}, "range_finder", v) for v in ("randomized", "subspace", "svd")],
        ({"range_finder": "random", "rank": 8}, "range_finder", "random"),
        *[({"moment_transfer": v}, "moment_transfer", v) for v in ("rotate", "keep", "reset")],
        *[({"state_dtype": v}, "state_dtype", v) for v in ("fp32", "bf16", "int8")],
        ({"second_moment": "factored"}, "second_moment", "factored"),
        ({"residual": "full"}, "residual", "full"),
        ({"rank_budget": 1}, "rank_budget", 1.0),
        ({"rank_budget": 1e-3}, "rank_budget", 1e-3),
        ({"full_rank_budget": 1}, "full_rank_budget", 1.0),
        ({"early_refresh": False}, "early_refresh", False),
        ({"share_basis": True}, "share_basis", True),
        ({"rank": 1}, "rank", 1),
        ({"rank_candidates": [8]}, "rank_candidates", (8,)),
        ({"rank_candidates": (4, 8)}, "rank_candidates", (4, 8)),
        ({"energy_threshold": 1}, "energy_threshold", 1.0),
        ({"energy_threshold": 1e-9}, "energy_threshold", 1e-9),
        ({"update_interval": 1}, "update_interval", 1),
        ({"residual": "none", "probes": 0}, "probes", 0),
        ({"residual": "none", "probes": 4}, "probes", 4),
        ({"probes": 1}, "probes", 1),
        ({"residual_scale": 2}, "residual_scale", 2.0),
        ({"projected_backward": True}, "projected_backward", True),
        ({"projected_backward": False}, "projected_backward", False),
        ({"scale": 1}, "scale", 1.0),
        ({"norm_growth_limit": None}, "norm_growth_limit", None),
        ({"norm_growth_limit": 1}, "norm_growth_limit", 1.0),
        ({"max_full_gradient_bytes": 1}, "max_full_gradient_bytes", 1),
        ({"master_weights": "none"}, "master_weights", "none"),
        ({"weight_dtype": "int8"}, "weight_dtype", "int8"),
        ({"target_modules": [r"\.q_proj\."]}, "target_modules", (r"\.q_proj\.",)),
        ({"exclude_modules": []}, "exclude_modules", ()),
        ({"seed": 2**63 - 1}, "seed", 2**63 - 1),
    ],
)
def test_legal_value_is_taken(fields, key, expected):
    value = getattr(HMTConfig.from_block({"optimizer": fields}).optimizer, key)
    assert value == expected
    assert type(value) is type(expected)


def test_models_are_frozen_and_hashable():
    config = HMTConfig()
    with pytest.raises(ValidationError, match="frozen"):
        config.optimizer.rank = 4
    assert hash(config) == hash(HMTConfig())


def test_adamw_keeps_its_own_fields():
    fields = {"method": "adamw", "master_weights": "none", "seed": 3, "state_dtype": "int8"}
    assert HMTConfig.from_block({"optimizer": fields}).optimizer.seed == 3


def test_apollo_keeps_its_own_fields():
    kept = {"rank": 4, "update_interval": 9, "scale": 2.0, "norm_growth_limit": None}
    kept |= {"scale_type": "tensor", "refresh": "together"}
    kept |= {"target_modules": ["q"], "exclude_modules": [], "module_rules": {"w": {"rank": 2}}}
    config = HMTConfig.from_block({"optimizer": {"method": "apollo", **kept}}).optimizer
    assert (config.rank, config.scale, config.module_rules["w"].rank) == (4, 2.0, 2)


def test_configs_with_module_rules_are_hashable():
    def config(rank):
        return HMTConfig.from_block({"optimizer": {"module_rules": {"q": {"rank": rank}}}})

    assert hash(config(4)) == hash(config(4))
    assert config(4) != config(8)
    assert len({config(4), config(4), config(8)}) == 2


# --- refused values ---------------------------------------------------------------------------

INTEGER_FIELDS = ["rank", "update_interval", "probes", "max_full_gradient_bytes", "seed"]
FLOAT_FIELDS = [
    "energy_threshold",
    "rank_budget",
    "full_rank_budget",
    "residual_scale",
    "scale",
    "norm_growth_limit",
]
NAME_FIELDS = [
    "method",
    "projection",
    "range_finder",
    "moment_transfer",
    "residual",
    "state_dtype",
    "second_moment",
    "master_weights",
    "weight_dtype",
    "scale_type",
]
BOOL_FIELDS = ["early_refresh", "share_basis"]
NULLABLE_FIELDS = ("target_modules", "norm_growth_limit", "rank_budget")
REGEX_FIELDS = ["target_modules", "exclude_modules"]

BAD_VALUES = [
    *[(key, value) for key in INTEGER_FIELDS for value in ("64", True, 8.0, -1, [8], "Auto")],
    *[(key, value) for key in FLOAT_FIELDS for value in ("0.5", True, -1.0, [0.5], {})],
    *[(key, value) for key in FLOAT_FIELDS for value in (float("nan"), float("inf"))],
    *[(key, value) for key in NAME_FIELDS for value in ("fp64", 1, True, None)],
    *[(key, None) for key in DEFAULTS if key not in NULLABLE_FIELDS],
    *[(key, value) for key in BOOL_FIELDS for value in (1, 0, "true", "auto")],
    *[("module_rules", value) for value in ([], "q", 3, ["q"])],
    *[(key, 0) for key in ("rank", "update_interval", "max_full_gradient_bytes")],
    *[(key, "auto") for key in ("energy_threshold", "update_interval", "seed")],
    *[("projected_backward", value) for value in (1, 0, "true", "on")],
    *[("rank_candidates", value) for value in ([], 32, "auto", [64, 32], [32, 32], {32: 64})],
    *[(key, value) for key in REGEX_FIELDS for value in ("q_proj", 3, {"q_proj": True})],
    ("energy_threshold", 0),
    ("energy_threshold", 1.0001),
    ("rank_budget", 0),
    ("rank_budget", 1.01),
    ("full_rank_budget", 1.01),
    ("residual_scale", 0),
    ("scale", 0.0),
    ("norm_growth_limit", 0.999),
    ("target_modules", []),
    ("seed", 2**63),
]


@pytest.mark.parametrize(("key", "value"), BAD_VALUES)
def test_bad_value_is_refused_with_key_value_and_legal_range(key, value):
    rows = {row[0]: row for row in describe_fields()}
    path, text = problem_of_field(**{key: value})
    _, legal, default, _ = rows[f"hmt.optimizer.{key}"]
    assert path == f"hmt.optimizer.{key}"
    assert text.startswith(f"got {value!r}")
    assert f"Legal: {legal}." in text
    assert f"remove the key to get the default {default}." in text


@pytest.mark.parametrize(
    ("key", "value", "index", "element"),
    [
        ("rank_candidates", [32, "64"], 1, "'64'"),
        ("rank_candidates", [True, 64], 0, "True"),
        ("rank_candidates", [0, 64], 0, "0"),
        ("rank_candidates", [32, 64.0], 1, "64.0"),
        ("target_modules", ["q_proj", "("], 1, "'('"),
        ("exclude_modules", ["*", "embed"], 0, "'*'"),
        ("exclude_modules", ["embed", 3], 1, "3"),
        ("exclude_modules", [""], 0, "''"),
        ("target_modules", [None], 0, "None"),
    ],
)
def test_bad_list_element_is_named_by_its_index(key, value, index, element):
    path, text = problem_of_field(**{key: value})
    assert path == f"hmt.optimizer.{key}[{index}]"
    assert text.startswith(f"got {element}")


@pytest.mark.parametrize(
    ("rule", "path", "words"),
    [
        ({"rnk": 4}, ".rnk", "did you mean \"hmt.optimizer.module_rules['q'].rank\"?"),
        ({"rank": 0}, ".rank", 'Legal: "auto", an integer >= 1 or null.'),
        ({"rank": "8"}, ".rank", "Write it without quotes."),
        ({"method": "galore"}, ".method", "Legal: "),
        ({"projection": "rigth"}, ".projection", 'Did you mean "right"?'),
        ({"scale": 0}, ".scale", "a number > 0"),
        ({"seed": 3}, ".seed", 'it is set for all modules, at "hmt.optimizer.seed"'),
        ({"state_dtype": "bf16"}, ".state_dtype", 'all modules, at "hmt.optimizer.state_dtype"'),
        ({"Scale": 1.0}, ".Scale", "did you mean \"hmt.optimizer.module_rules['q'].scale\"?"),
        ({"chunk_size": 8}, ".chunk_size", 'it belongs at "hmt.fpdt.chunk_size"'),
        ({}, "", "got {}. It sets nothing: "),
        ({"rank": None}, "", "got {}. It sets nothing: "),
        ({"rank": 8, "method": "adamw"}, ".rank", 'It means nothing with "method": "adamw"'),
        ({"rank": 4, "method": "apollo_mini"}, ".rank", '"apollo_mini" is rank 1'),
        ({"projection": "left", "method": "apollo"}, ".projection", "It means nothing"),
        ({"scale_type": "channel"}, ".scale_type", "It is APOLLO's"),
        ({"scale_type": "channel", "method": "apollo_mini"}, ".scale_type", "one scale per tensor"),
        (3, "", "got 3. Legal: an object."),
    ],
)
def test_bad_module_rule_is_named_by_its_pattern(rule, path, words):
    key, text = problem_of_field(module_rules={"q": rule, "w": {"rank": 4}})
    assert key == f"hmt.optimizer.module_rules['q']{path}"
    if path:
        assert text.startswith(f"got {next(iter(rule.values()))!r}.".split("'")[0])
    assert words in text


def test_a_module_rule_that_names_no_method_is_of_the_others():
    rules = {"q": {"projection": "left"}, "w": {"rank": 4, "projection": None}}
    key, text = problem_of_field(method="apollo", module_rules=rules)
    assert key == "hmt.optimizer.module_rules['q'].projection"
    assert text.startswith("got 'left'. It means nothing")
    other = problems_of({"optimizer": {"method": "galore", "module_rules": rules}})
    assert list(other) == ["hmt.optimizer.method"]


@pytest.mark.parametrize("pattern", ["(", ""])
def test_module_rule_of_a_bad_pattern(pattern):
    key, text = problem_of_field(module_rules={pattern: {"rank": 4}})
    assert key == "hmt.optimizer.module_rules"
    assert text.startswith(f"got {pattern!r}")


@pytest.mark.parametrize(
    ("fields", "hint"),
    [
        ({"rank": "64"}, "Write it without quotes."),
        ({"rank_candidates": ["64"]}, "Write it without quotes."),
        ({"projected_backward": "true"}, "Write it without quotes."),
        ({"norm_growth_limit": "null"}, "Write it without quotes."),
        ({"method": "lowrank-adam"}, 'Did you mean "lowrank_adamw"?'),
        ({"rank": "AUTO"}, 'Did you mean "auto"?'),
        ({"exclude_modules": ["("]}, "not a regular expression: missing )"),
        ({"rank_candidates": [8, 32, 16]}, "16 follows 32"),
    ],
)
def test_hint(fields, hint):
    assert hint in problem_of_field(**fields)[1]


@pytest.mark.parametrize("fields", [{"method": "64"}, {"exclude_modules": "1"}, {"rank": 0}])
def test_no_hint_about_quotes_where_it_would_mislead(fields):
    assert "quotes" not in problem_of_field(**fields)[1]


# --- misspelt and misplaced keys --------------------------------------------------------------


@pytest.mark.parametrize(
    ("block", "path", "suggestion"),
    [
        ({"optimizer": {"energy_treshold": 0.9}}, "energy_treshold", "energy_threshold"),
        ({"optimizer": {"energy_treshold": 0.9}}, "energy_treshold", "got 0.9."),
        ({"optimizer": {"Rank": 8}}, "Rank", '"hmt.optimizer.rank"'),
        ({"optimizer": {"update-interval": 8}}, "update-interval", '"hmt.optimizer.update_int'),
        ({"optimizer": {"TARGET_MODULES": []}}, "TARGET_MODULES", '"hmt.optimizer.target_mod'),
    ],
)
def test_misspelt_key_gets_the_nearest_legal_key(block, path, suggestion):
    text = problems_of(block)[f"hmt.optimizer.{path}"]
    assert "did you mean" in text
    assert suggestion in text


def test_misspelt_section():
    text = problems_of({"optimiser": {"rank": 8}})["hmt.optimiser"]
    assert 'did you mean "hmt.optimizer"?' in text


def test_key_one_level_too_high_is_sent_to_its_place():
    assert problems_of({"rank": 8}) == {
        "hmt.rank": 'got 8. Unknown key here: it belongs at "hmt.optimizer.rank". Move it there.'
    }


def test_unlike_any_key_gets_all_legal_keys():
    text = problems_of({"optimizer": {"zzz": 1}})["hmt.optimizer.zzz"]
    assert f"Legal: {', '.join(DEFAULTS)}." in text


def test_key_that_is_no_string():
    assert "hmt.optimizer.7" in problems_of({"optimizer": {7: 1}})


# --- shape of the block -----------------------------------------------------------------------


@pytest.mark.parametrize("block", [None, [], "auto", 3, True])
def test_block_must_be_an_object(block):
    with pytest.raises(ValueError) as caught:
        HMTConfig.from_block(block)
    assert f'"hmt" key of the DeepSpeed config: got {block!r}. Legal: an object' in str(
        caught.value
    )


@pytest.mark.parametrize("section", [None, [], "adamw", 3, True])
def test_section_must_be_an_object(section):
    text = problems_of({"optimizer": section})["hmt.optimizer"]
    assert text.startswith(f"got {section!r}. Legal: an object.")


def test_every_problem_is_listed_at_once():
    problems = problems_of(
        {
            "optimiser": {},
            "optimizer": {
                "energy_threshold": 2,
                "probs": 4,
                "target_modules": ["(", "ok", "["],
                "residual": "none",
                "residual_scale": 1.0,
            },
        }
    )
    assert set(problems) == {
        "hmt.optimiser",
        "hmt.optimizer.energy_threshold",
        "hmt.optimizer.probs",
        "hmt.optimizer.target_modules[0]",
        "hmt.optimizer.target_modules[2]",
        "hmt.optimizer.residual_scale",
    }


# --- fields that cannot be given together -----------------------------------------------------

LOW_RANK_ONLY = {
    "projection": "left",
    "rank": 8,
    "rank_budget": 0.5,
    "full_rank_budget": 0.5,
    "early_refresh": False,
    "refresh": "together",
    "range_finder": "svd",
    "moment_transfer": "keep",
    "second_moment": "factored",
    "share_basis": True,
    "weight_dtype": "int8",
    "rank_candidates": [8],
    "energy_threshold": 0.5,
    "update_interval": 10,
    "residual": "none",
    "probes": 4,
    "residual_scale": 1.0,
    "projected_backward": False,
    "scale": 1.0,
    "scale_type": "tensor",
    "norm_growth_limit": None,
    "max_full_gradient_bytes": 1,
    "target_modules": ["q_proj"],
    "exclude_modules": [],
}

CONFLICTS = [
    ({"rank": 8, "rank_candidates": [8]}, {"rank_candidates"}),
    ({"rank": 8, "energy_threshold": 0.95}, {"energy_threshold"}),
    (
        {"rank": 8, "rank_candidates": [8], "energy_threshold": 0.9},
        {"rank_candidates", "energy_threshold"},
    ),
    ({"probes": 0}, {"probes"}),
    ({"probes": 0, "residual": "none", "early_refresh": True}, {"early_refresh"}),
    ({"probes": 0, "residual": "probe"}, {"probes"}),
    ({"residual": "none", "residual_scale": "auto"}, {"residual_scale"}),
    ({"residual": "none", "norm_growth_limit": None}, {"norm_growth_limit"}),
    ({"rank": 8, "rank_budget": 0.5}, {"rank_budget"}),
    ({"rank": 8, "full_rank_budget": 0.5}, {"full_rank_budget"}),
    ({"range_finder": "random"}, {"range_finder"}),
    ({"range_finder": "random", "rank": "auto"}, {"range_finder"}),
    (
        {"rank_budget": 0.5, "energy_threshold": 0.9, "full_rank_budget": 0.1},
        {"energy_threshold", "full_rank_budget"},
    ),
    ({"projection": "two_sided", "full_rank_budget": 0.1}, {"full_rank_budget"}),
    *[({"share_basis": True, "projection": v}, {"share_basis"}) for v in ("left", "two_sided")],
    ({"share_basis": True, "projection": "auto"}, {"share_basis"}),
    ({"share_basis": True, "projected_backward": False}, {"share_basis"}),
    ({"share_basis": True, "residual": "full"}, {"share_basis"}),
    ({"share_basis": True, "range_finder": "random", "rank": 8}, {"share_basis"}),
    ({"residual": "full", "projected_backward": True}, {"projected_backward"}),
    ({"residual": "full", "projection": "two_sided"}, {"residual"}),
    ({"residual": "full", "probes": 4}, {"probes"}),
    ({"residual": "full", "residual_scale": 2.0}, {"residual_scale"}),
    ({"residual": "full", "residual_scale": "auto"}, {"residual_scale"}),
    ({"range_finder": "random", "rank": 8, "early_refresh": True}, {"early_refresh"}),
    (
        {"range_finder": "random", "rank": 8, "max_full_gradient_bytes": 9},
        {"max_full_gradient_bytes"},
    ),
    ({"second_moment": "factored", "projection": "two_sided"}, {"second_moment"}),
    ({"method": "apollo", "projected_backward": True}, {"projected_backward"}),
    ({"method": "apollo_mini", "projected_backward": True}, {"projected_backward"}),
    ({"method": "apollo_mini", "rank": 4}, {"rank"}),
    ({"method": "apollo_mini", "scale_type": "channel"}, {"scale_type"}),
    *[({"scale_type": kind}, {"scale_type"}) for kind in ("channel", "tensor")],
    *[
        ({"method": method, key: value}, {key})
        for method in ("apollo", "apollo_mini")
        for key, value in LOW_RANK_ONLY.items()
        if key not in KEPT_BY_APOLLO
    ],
    *[({"method": "adamw", key: value}, {key}) for key, value in LOW_RANK_ONLY.items()],
    *[
        ({"method": "adamw", key: value}, {key})
        for key, value in DEFAULTS.items()
        if key not in KEPT_BY_ADAMW
    ],
]


def test_the_table_covers_every_low_rank_field():
    assert set(LOW_RANK_ONLY) == set(DEFAULTS) - KEPT_BY_ADAMW


@pytest.mark.parametrize(("fields", "blamed"), CONFLICTS)
def test_conflict_is_refused(fields, blamed):
    problems = problems_of({"optimizer": fields})
    assert set(problems) == {f"hmt.optimizer.{key}" for key in blamed}
    for key in blamed:
        text = problems[f"hmt.optimizer.{key}"]
        assert text.startswith(f"got {fields[key]!r}. ")
        assert "set " in text  # the way out


@pytest.mark.parametrize(("fields", "blamed"), CONFLICTS)
def test_conflict_is_refused_by_the_model_itself(fields, blamed):
    with pytest.raises(ValidationError) as caught:
        OptimizerConfig(**fields)
    assert all(f"{key}: " in str(caught.value) for key in blamed)


@pytest.mark.parametrize(
    "fields",
    [
        {"rank": "auto", "rank_candidates": [8], "energy_threshold": 0.5},
        {"rank": 8, "probes": 4, "residual_scale": 1.0, "norm_growth_limit": None},
        {"residual": "none", "probes": "auto"},
        {"residual": "probe", "probes": 1},
        {"method": "lowrank_adamw", "rank": 8},
        {"rank": 8, "range_finder": "random"},
        {"rank_budget": 0.5, "rank_candidates": [8]},
        {"residual": "full", "projected_backward": "auto", "norm_growth_limit": 1.05},
        {"share_basis": True, "projection": "right", "projected_backward": True},
        {"method": "apollo", "rank": 8, "projected_backward": "auto"},
        {"second_moment": "factored", "projection": "auto", "state_dtype": "int8"},
        {"second_moment": "full", "projection": "two_sided"},
        {"range_finder": "random", "rank": 8, "early_refresh": False},
        {"range_finder": "random", "rank": 8, "max_full_gradient_bytes": "auto"},
    ],
)
def test_no_conflict(fields):
    optimizer = HMTConfig.from_block({"optimizer": fields}).optimizer
    assert optimizer.model_fields_set == set(fields)
    given = {key: tuple(v) if isinstance(v, list) else v for key, v in fields.items()}
    assert {key: getattr(optimizer, key) for key in fields} == given


_RANDOM = {"range_finder": "random", "rank": 8}


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        *[
            ({"method": method, key: value}, {"method": "lowrank_adamw"})
            for method in ("adamw", "apollo")
            for key, value in LOW_RANK_ONLY.items()
            if key not in KEPT_BY_APOLLO
        ],
        *[
            ({"method": "adamw", key: LOW_RANK_ONLY[key]}, {"method": method})
            for method in ("apollo", "apollo_mini", "lowrank_adamw")
            for key in ("update_interval", "refresh", "norm_growth_limit", "projected_backward")
        ],
        ({"rank": 8, "rank_candidates": [8], "energy_threshold": 0.9}, {"rank": "auto"}),
        ({"rank": 8, "rank_budget": 0.5}, {"rank": "auto"}),
        ({"projection": "two_sided", "full_rank_budget": 0.1}, {"projection": "right"}),
        ({"residual": "full", "probes": 4, "residual_scale": 2.0}, {"residual": "probe"}),
        ({"residual": "full", "weight_dtype": "int8"}, {"residual": "probe"}),
        ({"residual": "none", "norm_growth_limit": None}, {"residual": "probe"}),
        ({"residual": "none", "norm_growth_limit": None}, {"method": "apollo"}),
        ({"residual": "none", "probes": 0, "early_refresh": True}, {"residual": "full"}),
        ({**_RANDOM, "early_refresh": True}, {"range_finder": "svd"}),
        ({**_RANDOM, "max_full_gradient_bytes": 9}, {"range_finder": "svd"}),
    ],
)
def test_what_a_module_rule_reads_is_legal(fields, rule):
    written = {**fields, "module_rules": {"w": {"method": "adamw"}, "q": rule}}
    optimizer = HMTConfig.from_block({"optimizer": written}).optimizer
    assert optimizer.model_fields_set == set(written)


@pytest.mark.parametrize(
    ("fields", "rule", "blamed"),
    [
        *[
            ({"method": "adamw", key: LOW_RANK_ONLY[key]}, {"method": "lowrank_adamw"}, key)
            for key in ("rank", "scale", "scale_type", "target_modules", "exclude_modules")
        ],
        ({"method": "adamw", "projection": "left"}, {"method": "apollo"}, "projection"),
        ({"method": "adamw", "early_refresh": True}, {"method": "apollo"}, "early_refresh"),
        (
            {"method": "apollo", "projection": "left"},
            {"method": "lowrank_adamw", "projection": "right"},
            "projection",
        ),
        (
            {"method": "adamw", "energy_threshold": 0.5},
            {"method": "lowrank_adamw", "rank": 8},
            "energy_threshold",
        ),
        ({"rank": 8, "energy_threshold": 0.5}, {"method": "apollo"}, "energy_threshold"),
        ({"residual": "full", "probes": 4}, {"residual": "full", "rank": 4}, "probes"),
        ({**_RANDOM, "early_refresh": True}, {"rank": 4}, "early_refresh"),
        ({"projection": "left", "share_basis": True}, {"projection": "right"}, "share_basis"),
        ({"range_finder": "random"}, {"rank": 8}, "range_finder"),
    ],
)
def test_what_no_module_rule_reads_is_refused(fields, rule, blamed):
    key, text = problem_of_field(**fields, module_rules={"w": {"method": "adamw"}, "q": rule})
    assert key == f"hmt.optimizer.{blamed}"
    assert text.startswith(f"got {fields[blamed]!r}. ")


def test_a_bad_module_rule_does_not_make_what_it_reads_a_conflict():
    rules = {"q": {"method": "lowrank_adamw", "projection": "lft"}}
    problems = problems_of(
        {"optimizer": {"method": "adamw", "energy_threshold": 0.5, "module_rules": rules}}
    )
    assert set(problems) == {"hmt.optimizer.module_rules['q'].projection"}


@pytest.mark.parametrize(
    ("fields", "blamed"),
    [
        ({"residual": "nne", "probes": 0}, "residual"),
        ({"rank": "8", "energy_threshold": 0.9}, "rank"),
        ({"rank": True, "energy_threshold": 0.9}, "rank"),
    ],
)
def test_a_bad_value_does_not_also_make_a_conflict(fields, blamed):
    assert set(problems_of({"optimizer": fields})) == {f"hmt.optimizer.{blamed}"}


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
        "rounding": "nearest",
        "block_size": 32,
        "host_memory": 2**20,
        "nvme_path": "/ssd",
        "error_interval": 10,
    }
    config = HMTConfig.from_block({"activations": section}).activations
    assert config.policy.model_dump() == POLICY | section["policy"]
    override = config.overrides[r"layers\.0\."].model_dump(exclude_none=True)
    assert override == {"mlp_intermediate": "swap_ssd"}
    assert config.components == section["components"]
    for key in ("rounding", "block_size", "host_memory", "nvme_path", "error_interval"):
        assert getattr(config, key) == section[key]


ILLEGAL_CHOICES = [(c, v) for c in COMPONENTS for v in CHOICES if v not in LEGAL_CHOICES[c]]


@pytest.mark.parametrize(("component", "choice"), ILLEGAL_CHOICES)
def test_a_choice_that_a_component_does_not_have_is_refused_with_the_reason(component, choice):
    legal = {row[0]: row[1] for row in describe_fields()}[f"hmt.activations.policy.{component}"]
    assert legal.replace(" or", ",") == ", ".join(f'"{v}"' for v in LEGAL_CHOICES[component])
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
        ({"components": {"x": "embedding"}}, "components['x']", "got 'embedding'. Legal: "),
        ({"components": {"(": "residual"}}, "components", "not a regular expression"),
        ({"projected_inputs": "project"}, "projected_inputs", '"hmt.activations.policy.projected_'),
        ({"components": {"x": "projected_inputs"}}, "components['x']", 'or "lm_head".'),
        ({"rounding": "up"}, "rounding", 'Legal: "stochastic" or "nearest".'),
        ({"block_size": 100}, "block_size", "Legal: a power of two from 16 to 1024."),
        ({"block_size": 8}, "block_size", "got 8 (not a power of two from 16 to 1024)."),
        ({"block_size": 2048}, "block_size", "got 2048 "),
        ({"block_size": 64.0}, "block_size", "got 64.0. Legal: "),
        ({"host_memory": 1000}, "host_memory", '"auto" or an integer >= 1048576.'),
        ({"host_memory": "4GB"}, "host_memory", "got '4GB'."),
        ({"nvme_path": ""}, "nvme_path", "null or the path of a folder."),
        ({"error_interval": -1}, "error_interval", "an integer >= 0."),
    ],
)
def test_bad_activations_are_refused(section, key, words):
    path, text = problem_of_field("activations", **section)
    assert path == f"hmt.activations.{key}"
    assert words in text


_NO_CODEC = {"policy": {"attention_output": "recompute", "mlp_intermediate": "keep"}}


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
        ({"host_memory": 2**30}, "host_memory", "No component is swap_host or swap_ssd"),
        ({"block_size": 64, **_NO_CODEC}, "block_size", "No component is int8 or fp8"),
        ({"rounding": "nearest", **_NO_CODEC}, "rounding", "No component is int8 or fp8"),
        ({"error_interval": 5, **_NO_CODEC}, "error_interval", "No component is int8 or fp8"),
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
        {"block_size": 64, "overrides": {"x": {"residual": "fp8"}}, **_NO_CODEC},
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


# --- describe_fields --------------------------------------------------------------------------


PLANNER = ("gpu_memory", "host_memory", "lossy", "profile", "plan", "save_plan")
FPDT = ("enabled", "chunk_size", "offload_kv", "sequence_parallel_size")
BASIS_CACHE = ("max_entries", "max_bytes", "prefetch", "old_bases", "old_moments")
SNAPSHOT = ("path", "interval", "keep")


def test_every_field_is_described_once():
    rows = describe_fields()
    fields = [f"hmt.optimizer.{key}" for key in DEFAULTS]
    fields += ["hmt.activations.policy"]
    fields += [f"hmt.activations.policy.{key}" for key in POLICY]
    fields += [f"hmt.activations.{key}" for key in ACTIVATIONS if key != "policy"]
    fields += [f"hmt.planner.{key}" for key in PLANNER]
    fields += [f"hmt.fpdt.{key}" for key in FPDT]
    fields += ["hmt.offload.overlap", "hmt.offload.schedule"]
    fields += [f"hmt.basis_cache.{key}" for key in BASIS_CACHE]
    fields += [f"hmt.snapshot.{key}" for key in SNAPSHOT]
    assert [row[0] for row in rows] == fields
    assert all(description.endswith(".") for _, _, _, description in rows)


def test_described_defaults_are_the_defaults():
    block: dict = {}
    for key, _, default, _ in describe_fields():
        *sections, name = key.split(".")[1:]
        section = block
        for part in sections:
            section = section.setdefault(part, {})
        section[name] = json.loads(default)
    assert HMTConfig.from_block(block) == HMTConfig()


@pytest.mark.parametrize(
    "fields",
    [
        {"chunk_size": 0},
        {"chunk_size": "half"},
        {"enabled": 1},
        {"chunk": 8},
        {"sequence_parallel_size": 0},
    ],
)
def test_bad_fields_of_fpdt_are_named(fields):
    assert set(problems_of({"fpdt": fields})) == {f"hmt.fpdt.{next(iter(fields))}"}


def test_a_wrong_overlap_is_named_with_what_is_legal():
    with pytest.raises(ValueError, match=r'hmt\.offload\.overlap: got \'foreward\'.*"forward"'):
        HMTConfig.from_block({"offload": {"overlap": "foreward"}})


@pytest.mark.parametrize(
    ("key", "legal"),
    [
        ("method", '"lowrank_adamw", "apollo", "apollo_mini" or "adamw"'),
        ("projection", '"right", "left", "auto" or "two_sided"'),
        ("rank_budget", "a number > 0 and <= 1 or null"),
        ("full_rank_budget", "a number >= 0 and <= 1"),
        ("early_refresh", "true or false"),
        ("refresh", '"staggered" or "together"'),
        ("module_rules", "an object of regular expressions and objects"),
        ("rank", '"auto" or an integer >= 1'),
        ("rank_candidates", "a non-empty, strictly increasing list of integers >= 1"),
        ("energy_threshold", "a number > 0 and <= 1"),
        ("update_interval", "an integer >= 1"),
        ("probes", '"auto" or an integer >= 0'),
        ("projected_backward", '"auto", true or false'),
        ("scale", '"auto" or a number > 0'),
        ("norm_growth_limit", '"auto", a number >= 1 or null'),
        ("target_modules", "null or a non-empty list of non-empty regular expressions"),
        ("seed", f"an integer >= 0 and <= {2**63 - 1}"),
    ],
)
def test_legal_values_in_words(key, legal):
    assert {row[0]: row[1] for row in describe_fields()}[f"hmt.optimizer.{key}"] == legal


# --- read_json_config -------------------------------------------------------------------------


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "ds.json"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("convert", [str, Path])
def test_read_json_config(tmp_path, convert):
    path = write(tmp_path, '{"hmt": {"optimizer": {"rank": 8}}, "name": "µ", "a": {"name": 1}}')
    config = read_json_config(convert(path))
    assert config == {"hmt": {"optimizer": {"rank": 8}}, "name": "µ", "a": {"name": 1}}


def read_error(path: Path) -> str:
    with pytest.raises(ValueError) as caught:
        read_json_config(path)
    assert type(caught.value) is ValueError
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_missing_file(tmp_path):
    text = read_error(tmp_path / "none.json")
    assert "does not exist" in text
    assert "Give the path" in text


def test_directory(tmp_path):
    assert "is a directory. Give the path" in read_error(tmp_path)


def test_path_through_a_file(tmp_path):
    assert "cannot be read" in read_error(write(tmp_path, "{}") / "ds.json")


def test_not_utf8(tmp_path):
    path = tmp_path / "ds.json"
    path.write_bytes(b'{"a": "\xff"}')
    assert "not UTF-8 text: invalid start byte at byte 7" in read_error(path)


@pytest.mark.parametrize(
    ("text", "line", "column", "shown"),
    [
        ('{\n  "a": 1\n  "b": 2\n}', 3, 3, '    "b": 2\n    ^\n'),
        ('{\n\t"a": 1 // one\n}', 2, 9, '   "a": 1 // one\n          ^\n'),
        ("", 1, 1, "\n  \n  ^\n"),
        ('{"a": 1', 1, 8, '  {"a": 1\n         ^\n'),
        ('{"a": "\u2028", b: 1}', 1, 12, '  {"a": "\u2028", b: 1}\n             ^\n'),
    ],
)
def test_malformed_json_shows_the_place(tmp_path, text, line, column, shown):
    message = read_error(write(tmp_path, text))
    assert f"at line {line}, column {column}:" in message
    assert shown in message
    assert "no comments and no trailing commas" in message


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ('{"fp16": {}, "hmt": {}, "fp16": {}}', '"fp16"'),
        ('{"hmt": {"optimizer": {"rank": 8, "rank": 8}}}', '"rank"'),
        ('{"b": [{"a": 1, "a": 2, "c": 1, "c": 1}]}', '"a", "c"'),
    ],
)
def test_duplicate_keys(tmp_path, text, names):
    message = read_error(write(tmp_path, text))
    assert f"gives {names} more than once" in message
    assert "Remove all but one" in message


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("[]", "an array"),
        ('"a"', "a string"),
        ("3", "a number"),
        ("1.5", "a number"),
        ("true", "a boolean"),
        ("null", "null"),
    ],
)
def test_top_level_must_be_an_object(tmp_path, text, kind):
    assert f"holds {kind} at its top level. Legal: an object" in read_error(write(tmp_path, text))


def test_the_plain_optimizer_has_the_same_defaults():
    from hmt_deepspeed.optim import options

    assert OptimizerConfig().model_dump() == options.DEFAULTS


# -- planner ------------------------------------------------------------------------------------------


def test_a_plan_is_a_policy_that_computes_everything_again_until_it_is_made():
    planned = HMTConfig.from_block({"activations": {"policy": "plan"}}).activations
    assert planned.is_planned
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
            {"activations": {"policy": "plan", "host_memory": 2**25}},
            "hmt.activations.host_memory",
            "hmt.planner.host_memory",
        ),
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
            {"activations": {"policy": "plan"}, "fpdt": {"enabled": True}},
            "hmt.activations.policy",
            "turn hmt.fpdt off",
        ),
    ],
)
def test_planner_problems(block, key, words):
    with pytest.raises(ValueError, match="1 problem") as caught:
        HMTConfig.from_block(block)
    assert f"{key}: " in str(caught.value)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "section",
    [
        {"basis_cache": {"max_entries": 0}},
        {"basis_cache": {"max_bytes": 2**20 - 1}},
        {"basis_cache": {"prefetch": -1}},
        {"basis_cache": {"old_bases": 1}},
        {"basis_cache": {"old_moments": -1}},
        {"basis_cache": {"enabled": True}},
        {"snapshot": {"keep": 0, "path": "/ssd", "interval": 1}},
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
