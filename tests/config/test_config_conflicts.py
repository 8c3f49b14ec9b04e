"""Fields of hmt.optimizer that cannot be given together, or that nothing would read."""

import pytest
from blocks import (
    DEFAULTS,
    KEPT_BY_ADAMW,
    KEPT_BY_APOLLO,
    KEPT_BY_WHOLE,
    problem_of_field,
    problems_of,
)
from pydantic import ValidationError

from hmt_deepspeed.config import HMTConfig, OptimizerConfig

LOW = {"method": "lowrank_adamw"}
WITHOUT = {"second_moment", "full_rank_budget"}  # whose defaults ask for nothing

# --- fields that cannot be given together -----------------------------------------------------

LOW_RANK_ONLY = {
    "projection": "left",
    "rank": 8,
    "rank_budget": 0.5,
    "full_rank_budget": 0.5,
    "range_finder": "svd",
    "second_moment": "factored",
    "share_basis": True,
    "expert_basis": "own",
    "weight_dtype": "int8",
    "rank_candidates": [8],
    "energy_threshold": 0.5,
    "energy_estimate": "out_of_sample",
    "update_interval": 10,
    "residual": "none",
    "probes": 4,
    "projected_backward": False,
    "scale": 1.0,
    "max_full_gradient_bytes": 1,
    "target_modules": ["q_proj"],
}

CONFLICTS = [
    ({"rank": 8, "rank_candidates": [8]}, {"rank_candidates"}),
    ({"rank": 8, "energy_threshold": 0.95}, {"energy_threshold"}),
    (
        {"rank": 8, "rank_candidates": [8], "energy_threshold": 0.9},
        {"rank_candidates", "energy_threshold"},
    ),
    ({"rank": 8, "energy_estimate": "out_of_sample"}, {"energy_estimate"}),
    (
        {"probes": 0, "residual": "none", "energy_estimate": "out_of_sample"},
        {"energy_estimate"},
    ),
    ({"update_interval": 1, "energy_estimate": "out_of_sample"}, {"energy_estimate"}),
    ({"probes": 0}, {"probes"}),
    ({"probes": 0, "residual": "probe"}, {"probes"}),
    ({"rank": 8, "rank_budget": 0.5}, {"rank_budget"}),
    ({"rank": 8, "full_rank_budget": 0.5}, {"full_rank_budget"}),
    ({"range_finder": "random"}, {"range_finder"}),
    ({"range_finder": "random", "rank": "auto"}, {"range_finder"}),
    ({"rank_budget": 0.5, "full_rank_budget": 0.1}, {"full_rank_budget"}),
    ({"rank_budget": "auto", "full_rank_budget": 0.1}, {"full_rank_budget"}),
    ({"full_rank_budget": 0.1}, {"full_rank_budget"}),
    (
        {**LOW, "projection": "two_sided", "full_rank_budget": 0.1, "rank_budget": None},
        {"full_rank_budget"},
    ),
    ({"share_basis": True, "projection": "left"}, {"share_basis"}),
    ({**LOW, "share_basis": True, "projection": "two_sided"}, {"share_basis"}),
    ({"share_basis": True, "projection": "auto"}, {"share_basis"}),
    ({"share_basis": True, "projected_backward": False}, {"share_basis"}),
    ({"share_basis": True, "residual": "full"}, {"share_basis"}),
    ({"share_basis": True, "range_finder": "random", "rank": 8}, {"share_basis"}),
    ({"residual": "full", "projected_backward": True}, {"projected_backward"}),
    ({**LOW, "residual": "full", "projection": "two_sided"}, {"residual"}),
    ({"residual": "full", "probes": 4}, {"probes"}),
    (
        {"range_finder": "random", "rank": 8, "max_full_gradient_bytes": 9},
        {"max_full_gradient_bytes"},
    ),
    ({**LOW, "second_moment": "factored", "projection": "two_sided"}, {"second_moment"}),
    ({"second_moment": "factored"}, {"second_moment"}),
    ({"projection": "two_sided"}, {"projection"}),
    ({"method": "apollo", "projected_backward": True}, {"projected_backward"}),
    ({"method": "apollo_mini", "projected_backward": True}, {"projected_backward"}),
    ({"method": "apollo_mini", "rank": 4}, {"rank"}),
    *[
        ({"method": method, key: value}, {key})
        for method in ("apollo", "apollo_mini")
        for key, value in LOW_RANK_ONLY.items()
        if key not in KEPT_BY_APOLLO
    ],
    *[
        ({"method": "muon", "rank": "full", key: value}, {key})
        for key, value in LOW_RANK_ONLY.items()
        if key not in KEPT_BY_WHOLE
    ],
    ({"method": "muon", "rank": "full", "projection": "two_sided"}, {"projection"}),
    ({"method": "muon", "rank": "full", "projected_backward": True}, {"projected_backward"}),
    (
        {"method": "muon", "rank": "full", "weight_dtype": "int8", "projected_backward": False},
        {"weight_dtype"},
    ),
    *[({"method": m, "rank": "full"}, {"rank"}) for m in ("apollo", "apollo_mini", "adamw")],
    ({**LOW, "rank": "full"}, {"rank"}),
    *[({"method": "adamw", key: value}, {key}) for key, value in LOW_RANK_ONLY.items()],
    *[
        ({"method": "adamw", key: value}, {key})
        for key, value in DEFAULTS.items()
        if key not in KEPT_BY_ADAMW | WITHOUT
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
        {"rank": 8, "probes": 4},
        {"residual": "none", "probes": "auto"},
        {"residual": "probe", "probes": 1},
        {"method": "lowrank_adamw", "rank": 8},
        {"rank": 8, "range_finder": "random"},
        {"rank_budget": 0.5, "rank_candidates": [8]},
        {"rank_budget": 0.5, "energy_threshold": 0.9, "full_rank_budget": 0.0},
        {**LOW, "rank_budget": None, "full_rank_budget": 0.1},
        {"residual": "full", "projected_backward": "auto"},
        {"share_basis": True, "projection": "right", "projected_backward": True},
        {"method": "apollo", "rank": 8, "projected_backward": "auto"},
        {"method": "muon", "rank": "full", "projected_backward": "auto"},
        {"method": "muon", "rank": "full", "scale": 0.2, "weight_dtype": "int8"},
        {**LOW, "second_moment": "factored", "projection": "auto", "state_dtype": "int8"},
        {**LOW, "second_moment": "full", "projection": "two_sided"},
        {"second_moment": "full", "full_rank_budget": 0.0},
        {"method": "adamw", "second_moment": "full"},
        {"probes": 0, "residual": "none", "energy_estimate": "in_sample"},
        {"residual": "none", "energy_estimate": "out_of_sample"},
        {"rank_budget": 0.5, "energy_estimate": "out_of_sample"},
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
            if key not in KEPT_BY_APOLLO | {"full_rank_budget"}
        ],
        (
            {"method": "adamw", "full_rank_budget": 0.5, "rank_budget": None},
            {"method": "lowrank_adamw"},
        ),
        *[
            ({"method": "adamw", key: LOW_RANK_ONLY[key]}, {"method": method})
            for method in ("apollo", "apollo_mini", "lowrank_adamw")
            for key in ("update_interval", "projected_backward")
        ],
        ({"rank": 8, "rank_candidates": [8], "energy_threshold": 0.9}, {"rank": "auto"}),
        ({"rank": 8, "rank_budget": 0.5}, {"rank": "auto"}),
        (
            {**LOW, "projection": "two_sided", "full_rank_budget": 0.1, "rank_budget": None},
            {"projection": "right"},
        ),
        ({"residual": "full", "probes": 4}, {"residual": "probe"}),
        ({"residual": "full", "weight_dtype": "int8"}, {"residual": "probe"}),
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
            for key in ("rank", "scale", "target_modules")
        ],
        ({"method": "adamw", "projection": "left"}, {"method": "apollo"}, "projection"),
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
        ({**_RANDOM, "max_full_gradient_bytes": 9}, {"rank": 4}, "max_full_gradient_bytes"),
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
