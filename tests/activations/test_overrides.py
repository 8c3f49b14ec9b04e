"""Every exception of ``hmt.activations.overrides`` decides something, or is refused by its name."""

from __future__ import annotations

from typing import Any

import pytest
from families import tiny

from hmt_deepspeed.activations.policy import check_overrides
from hmt_deepspeed.attribution import Attribution, attribute


@pytest.fixture(scope="module")
def llama() -> Attribution:
    return attribute(tiny("llama"))


@pytest.mark.parametrize(
    "overrides",
    [
        {r"layers\.1$": {"mlp_intermediate": "fp8", "residual": "int8"}},  # by the layer's name
        {r"layers\.0$": {"layer_input": "int8"}},
        {r"gate_proj$": {"mlp_intermediate": "keep"}},
        {r"o_proj": {"residual": "fp8"}},
        {r"layers\.0\..*o_proj": {"residual": "fp8"}, "o_proj": {"residual": "int8"}},
        {"head": {"lm_head": "int8"}},
        {"gate": {"mlp_intermediate": "fp8"}, r"layers\.1": {"mlp_intermediate": "int8"}},
    ],
)
def test_what_decides_something_is_allowed(llama: Attribution, overrides: Any) -> None:
    check_overrides(overrides, llama)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"no_such": {"residual": "int8"}}, r": 'no_such' matches no layer"),
        # names that exist and never own the component
        (
            {r"down_proj": {"mlp_intermediate": "int8"}, "gate_proj": {"mlp_intermediate": "fp8"}},
            r": 'down_proj' matches no layer",
        ),
        (
            {r"q_proj$": {"mlp_intermediate": "fp8"}},
            r"\['q_proj\$'\]\.mlp_intermediate decides nothing: .* has no mlp_intermediate; legal .*"
            r"model\.layers\.\*\.mlp\.gate_proj, model\.layers\.\*\.mlp\.up_proj",
        ),
        (
            {"o_proj": {"layer_input": "int8"}},
            r"layer_input decides nothing.*: model\.layers\.\*\.",
        ),
        ({r"layers\.\d+$": {"lm_head": "int8"}}, r"lm_head decides nothing.*: lm_head\."),
        (  # one of two components
            {"gate_proj": {"mlp_intermediate": "keep", "residual": "int8"}},
            r"\['gate_proj'\]\.residual decides nothing",
        ),
        (
            {"layers": {"residual": "int8"}, r"layers\.1": {"residual": "fp8"}},
            r"\['layers\\\\.1'\]\.residual decides nothing: .* by 'layers' before it",
        ),
    ],
)
def test_what_decides_nothing_is_refused(llama: Attribution, overrides: Any, words: str) -> None:
    with pytest.raises(ValueError, match=f"hmt.activations.overrides.*{words}"):
        check_overrides(overrides, llama)


def test_a_component_that_nothing_of_the_model_has() -> None:
    model: Any = tiny("llama")
    headless = attribute(model.model)
    with pytest.raises(ValueError, match=r"lm_head decides nothing.*nothing in this model"):
        check_overrides({"layers": {"lm_head": "int8"}}, headless)
