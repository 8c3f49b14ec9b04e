"""Values of the "hmt" block: what is accepted, what is refused, and what the refusal says."""

import json

import pytest
from blocks import ACTIVATIONS, DEFAULTS, POLICY, problem_of_field, problems_of
from pydantic import ValidationError

from hmt_deepspeed.config import HMTConfig, describe_fields

LOW = {"method": "lowrank_adamw"}

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
        *[({"projection": v}, "projection", v) for v in ("right", "left", "auto")],
        ({**LOW, "projection": "two_sided"}, "projection", "two_sided"),
        *[({"range_finder": v}, "range_finder", v) for v in ("randomized", "subspace", "svd")],
        ({"range_finder": "random", "rank": 8}, "range_finder", "random"),
        *[({"state_dtype": v}, "state_dtype", v) for v in ("fp32", "bf16", "int8")],
        ({**LOW, "second_moment": "factored"}, "second_moment", "factored"),
        ({"residual": "full"}, "residual", "full"),
        ({"rank_budget": 1}, "rank_budget", 1.0),
        ({"rank_budget": 1e-3}, "rank_budget", 1e-3),
        ({"rank_budget": "auto"}, "rank_budget", "auto"),
        ({**LOW, "full_rank_budget": 1, "rank_budget": None}, "full_rank_budget", 1.0),
        ({"energy_estimate": "out_of_sample"}, "energy_estimate", "out_of_sample"),
        ({"share_basis": True}, "share_basis", True),
        ({"rank": 1}, "rank", 1),
        ({"rank": "full", "method": "muon"}, "rank", "full"),
        ({"rank_candidates": "auto"}, "rank_candidates", "auto"),
        ({"rank_candidates": [8]}, "rank_candidates", (8,)),
        ({"rank_candidates": (4, 8)}, "rank_candidates", (4, 8)),
        ({"energy_threshold": 1}, "energy_threshold", 1.0),
        ({"energy_threshold": 1e-9}, "energy_threshold", 1e-9),
        ({"update_interval": 1}, "update_interval", 1),
        ({"residual": "none", "probes": 0}, "probes", 0),
        ({"residual": "none", "probes": 4}, "probes", 4),
        ({"probes": 1}, "probes", 1),
        ({"projected_backward": True}, "projected_backward", True),
        ({"projected_backward": False}, "projected_backward", False),
        ({"scale": 1}, "scale", 1.0),
        ({"max_full_gradient_bytes": 1}, "max_full_gradient_bytes", 1),
        ({"master_weights": "none"}, "master_weights", "none"),
        ({"weight_dtype": "int8"}, "weight_dtype", "int8"),
        ({"target_modules": [r"\.q_proj\."]}, "target_modules", (r"\.q_proj\.",)),
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
    kept = {"rank": 4, "update_interval": 9, "scale": 2.0}
    kept |= {"target_modules": ["q"], "module_rules": {"w": {"rank": 2}}}
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
    "scale",
]
NAME_FIELDS = [
    "method",
    "projection",
    "range_finder",
    "energy_estimate",
    "residual",
    "state_dtype",
    "second_moment",
    "master_weights",
    "weight_dtype",
]
BOOL_FIELDS = ["share_basis"]
NULLABLE_FIELDS = ("target_modules", "rank_budget")

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
    *[("rank_candidates", value) for value in ([], 32, "all", [64, 32], [32, 32], {32: 64})],
    *[("target_modules", value) for value in ("q_proj", 3, {"q_proj": True})],
    ("energy_threshold", 0),
    ("energy_threshold", 1.0001),
    ("rank_budget", 0),
    ("rank_budget", 1.01),
    ("full_rank_budget", 1.01),
    ("scale", 0.0),
    ("target_modules", []),
    ("seed", 2**63),
]


@pytest.mark.parametrize(("key", "value"), BAD_VALUES)
def test_bad_value_is_refused_with_key_value_and_legal_range(key, value):
    rows = {row[0]: row for row in describe_fields()}
    path, text = problem_of_field(**{key: value})
    _, legal, default, *_ = rows[f"hmt.optimizer.{key}"]
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
        ("target_modules", ["*", "embed"], 0, "'*'"),
        ("target_modules", ["embed", 3], 1, "3"),
        ("target_modules", [""], 0, "''"),
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
        (
            {"rank": 0},
            ".rank",
            'Legal: "auto", "full", an integer >= 1, a number > 0 and < 1 or null.',
        ),
        ({"rank": "8"}, ".rank", "Write it without quotes."),
        ({"method": "galore"}, ".method", "Legal: "),
        ({"projection": "rigth"}, ".projection", 'Did you mean "right"?'),
        ({"scale": 0}, ".scale", "a number > 0"),
        ({"seed": 3}, ".seed", 'it is set for all modules, at "hmt.optimizer.seed"'),
        ({"state_dtype": "bf16"}, ".state_dtype", 'all modules, at "hmt.optimizer.state_dtype"'),
        ({"Scale": 1.0}, ".Scale", "did you mean \"hmt.optimizer.module_rules['q'].scale\"?"),
        ({"chunk_size": 8}, ".chunk_size", 'it belongs at "hmt.fpdt.chunk_size"'),
        ({}, "", "got {}. It sets nothing: "),
        ({"rank": None}, "", "got {'rank': None}. It sets nothing: "),
        ({"rank": 8, "method": "adamw"}, ".rank", 'It means nothing with "method": "adamw"'),
        ({"rank": 4, "method": "apollo_mini"}, ".rank", '"apollo_mini" is rank 1'),
        ({"projection": "left", "method": "apollo"}, ".projection", "It means nothing"),
        (
            {"rank": "full", **LOW},
            ".rank",
            'set "method": "muon". AdamW of whole matrices is "method": "adamw"',
        ),
        ({"rank": "full", "method": "adamw"}, ".rank", '"adamw" has no rule for it: remove it'),
        (
            {"projection": "left", "rank": "full", "method": "muon"},
            ".projection",
            'It means nothing with "rank": "full": remove it or set another "rank".',
        ),
        ({"energy_threshold": 0}, ".energy_threshold", "a number > 0 and <= 1"),
        ({"rank_candidates": []}, ".rank_candidates", "strictly increasing"),
        ({"energy_threshold": 0.9, "rank": 8}, ".energy_threshold", 'With "rank": 8 it is ignored'),
        ({"rank_candidates": [8], "rank": 8}, ".rank_candidates", 'With "rank": 8 it is ignored'),
        ({"energy_threshold": 0.9, "method": "apollo"}, ".energy_threshold", "It means nothing"),
        ({"scale_type": "channel"}, ".scale_type", "This key was removed: Remove it: "),
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


def test_what_the_others_leave_a_module_rule_to_ignore_is_refused():
    rules = {"q": {"energy_threshold": 0.9}}
    key, text = problem_of_field(rank=4, module_rules=rules)
    assert key == "hmt.optimizer.module_rules['q'].energy_threshold"
    assert 'With "rank": 4' in text
    HMTConfig.from_block({"optimizer": {"module_rules": {"q": {**rules["q"], "rank": "auto"}}}})


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
        ({"rank_budget": "null"}, "Write it without quotes."),
        ({"method": "lowrank-adam"}, 'Did you mean "lowrank_adamw"?'),
        ({"rank": "AUTO"}, 'Did you mean "auto"?'),
        ({"target_modules": ["("]}, "not a regular expression: missing )"),
        ({"rank_candidates": [8, 32, 16]}, "16 follows 32"),
    ],
)
def test_hint(fields, hint):
    assert hint in problem_of_field(**fields)[1]


@pytest.mark.parametrize("fields", [{"method": "64"}, {"target_modules": "1"}, {"rank": 0}])
def test_no_hint_about_quotes_where_it_would_mislead(fields):
    assert "quotes" not in problem_of_field(**fields)[1]


# --- describe_fields --------------------------------------------------------------------------


PLANNER = ("gpu_memory", "lossy", "plan")
FPDT = ("chunk_size", "offload_kv", "sequence_parallel_size")
BASIS_CACHE = ("history",)
SNAPSHOT = ("path", "interval")


def test_every_field_is_described_once():
    rows = describe_fields()
    fields = ["hmt.preset", *(f"hmt.optimizer.{key}" for key in DEFAULTS)]
    fields += ["hmt.activations.policy"]
    fields += [f"hmt.activations.policy.{key}" for key in POLICY]
    fields += [f"hmt.activations.{key}" for key in ACTIVATIONS if key != "policy"]
    fields += [f"hmt.planner.{key}" for key in PLANNER]
    fields += [f"hmt.fpdt.{key}" for key in FPDT]
    fields += ["hmt.offload.overlap"]
    fields += [f"hmt.basis_cache.{key}" for key in BASIS_CACHE]
    fields += ["hmt.accumulation"]
    fields += [f"hmt.snapshot.{key}" for key in SNAPSHOT]
    assert [row[0] for row in rows] == fields
    assert all(text.endswith(".") for row in rows for text in row[3:])


def test_the_block_has_at_most_48_fields():
    """Of which overrides and module_rules are one each, whatever stands in them; the policy is its components."""
    assert len({row[0] for row in describe_fields()} - {"hmt.activations.policy"}) <= 48


def test_described_defaults_are_the_defaults():
    block: dict = {}
    for key, _, default, *_ in describe_fields():
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
        ("method", '"lowrank_adamw", "muon", "apollo", "apollo_mini" or "adamw"'),
        ("projection", '"right", "left", "auto" or "two_sided"'),
        ("rank_budget", '"auto", a number > 0 and <= 1 or null'),
        ("full_rank_budget", "a number >= 0 and <= 1"),
        ("module_rules", "an object of regular expressions and objects"),
        ("rank", '"auto", "full", an integer >= 1 or a number > 0 and < 1'),
        ("rank_candidates", '"auto" or a non-empty, strictly increasing list of integers >= 1'),
        ("energy_threshold", "a number > 0 and <= 1"),
        ("update_interval", "an integer >= 1"),
        ("probes", '"auto" or an integer >= 0'),
        ("projected_backward", '"auto", true or false'),
        ("scale", '"auto" or a number > 0'),
        ("target_modules", 'null, "all" or a non-empty list of non-empty regular expressions'),
        ("seed", f"an integer >= 0 and <= {2**63 - 1}"),
    ],
)
def test_legal_values_in_words(key, legal):
    assert {row[0]: row[1] for row in describe_fields()}[f"hmt.optimizer.{key}"] == legal
