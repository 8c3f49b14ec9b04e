"""Every row of the table says what its class keeps and sums."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
import torch
from alone import Alone, draw_probes
from torch import Tensor

from hmt_deepspeed.optim.rules.build import build_matrix
from hmt_deepspeed.optim.rules.matrix import MatrixRule
from hmt_deepspeed.optim.settings.options import complete_options, matrix_settings
from hmt_deepspeed.rules import DEFAULT, DENSE, RULES, Rule, State, register_rule, rule_of

SHAPE, ROWS, RANK = (96, 72), (30, 77), 16
OF_MATRICES = [name for name, rule in RULES.items() if not rule.is_dense]


def built(name: str, **fields: Any) -> MatrixRule:
    """The rows :data:`ROWS` of a matrix under a row of the table."""
    rule = RULES[name]
    rank = {} if rule.fixed_rank else {"rank": RANK}
    options = complete_options({"method": rule.method, **rank, **dict(rule.where), **fields})
    settings = matrix_settings(options)
    assert settings is not None
    assert settings.rule is rule
    return build_matrix("w", SHAPE, ROWS, settings, torch.bfloat16, torch.device("cpu"))


def step(matrix: MatrixRule, counted: slice) -> tuple[Tensor, Tensor]:
    """The sums of a step, early and late."""
    generator = torch.Generator().manual_seed(0)
    reduced = torch.randn(matrix.num_rows, matrix.width, generator=generator)
    draw_probes(matrix)
    alone = Alone(matrix, betas=(0.9, 0.99), eps=1e-8)
    early = alone.measure(reduced, counted)
    alone.observe(early)
    _, late = alone.advance(reduced, counted)
    return early, late


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("name", OF_MATRICES)
def test_its_states_have_the_names_shapes_and_bytes_that_it_says(name: str, dtype: str) -> None:
    matrix = built(name, state_dtype=dtype)
    rule, rank = RULES[name], matrix.rank
    saved = matrix.state_dict()
    sizes = {"rows": matrix.num_rows, "columns": SHAPE[1], "rank": rank, 1: 1}
    for state in rule.states:
        assert tuple(saved[state.name].shape) == tuple(sizes[axis] for axis in state.shape)
    assert matrix.states().keys() <= {state.name for state in rule.states}
    said = {
        s: s.nbytes(matrix.num_rows, SHAPE[1], rank, matrix.state_dtype, 2) for s in rule.states
    }
    in_model = sum(size for state, size in said.items() if state.stored == "model")
    assert matrix.moments.nbytes == sum(said.values()) - in_model
    basis = SHAPE[1] * rank * 2 if rule.bases == "found" else 0
    assert matrix.state_bytes() == sum(said.values()) + basis


@pytest.mark.parametrize("name", OF_MATRICES)
def test_it_sums_what_it_says(name: str) -> None:
    matrix = built(name)
    for sums, of in zip(step(matrix, slice(1, None)), ("gradient", "states"), strict=True):
        lengths = RULES[name].sum_lengths(of, *SHAPE, matrix.rank)
        assert sums.shape == (sum(lengths.values()),)
        found = matrix.STACK([matrix]).named(sums.unsqueeze(0), of)
        assert {name: tuple(each.shape) for name, each in found.items()} == {
            name: (1, length) for name, length in lengths.items()
        }


@pytest.mark.parametrize("name", OF_MATRICES)
def test_rows_that_another_counts_are_in_no_sum(name: str) -> None:
    """Holders add up to the whole."""
    whole, first, rest = (step(built(name), c) for c in (slice(None), slice(20), slice(20, None)))
    for of_all, one, other in zip(whole, first, rest, strict=True):
        torch.testing.assert_close(one + other, of_all, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", OF_MATRICES)
def test_it_takes_the_gradient_that_it_says(name: str) -> None:
    matrix, whole = built(name), RULES[name].gradient == "whole"
    assert matrix.takes_whole == whole
    assert matrix.width == SHAPE[1] if whole else matrix.width > matrix.rank
    assert (matrix.projection is None) == whole


def test_every_class_is_there() -> None:
    for rule in RULES.values():
        module, _, name = rule.carried_out_by.partition(":")
        assert callable(getattr(import_module(module), name))


def test_rows_of_a_method_are_told_apart_by_fields() -> None:
    assert rule_of(DEFAULT).name == DEFAULT
    assert rule_of(DENSE).is_dense
    for rule in RULES.values():
        assert rule_of(rule.method, dict(rule.where)) is rule
    layouts = [(rule.method, rule.note, *rule.where) for rule in RULES.values()]
    assert len(set(layouts)) == len(layouts)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "is in the table"),
        (
            {"name": "new", "method": "new", "where": (("projection", "left"),)},
            "first of the method",
        ),
        ({"name": "new", "carried_out_by": "nowhere"}, "'module:class'"),
        ({"name": "new", "carried_out_by": "module:"}, "'module:class'"),
    ],
)
def test_a_row_that_cannot_be_found_is_refused(changes: dict[str, Any], said: str) -> None:
    before = dict(RULES)
    with pytest.raises(ValueError, match=said):
        register_rule(replace(RULES[DEFAULT], **changes))
    assert before == RULES


def test_states_by_rows_are_those_with_rows() -> None:
    assert State("a", ("rows", 1)).by_rows
    assert not State("a", ("rank", "rank")).by_rows
    rule: Rule = RULES["lowrank_adamw, factored"]
    assert rule.row_states == ("exp_avg", "exp_avg_sq_row")
