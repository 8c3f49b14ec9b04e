"""Presets: what they stand for, what overrides them, and what a run says of it."""

from __future__ import annotations

from typing import Any

import pytest

from hmt_deepspeed.config import HMTConfig
from hmt_deepspeed.config.presets import PRESETS


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_is_its_fields(preset: str) -> None:
    config = HMTConfig.from_block({"preset": preset})
    written = HMTConfig.from_block(PRESETS[preset])  # type: ignore[index]
    assert config.model_copy(update={"preset": "balanced"}) == written
    assert config.preset == preset
    for section in ("activations", "basis_cache", "fpdt", "snapshot"):
        assert config.gives(section) == (section in PRESETS[preset])  # type: ignore[index]


def test_the_default_is_balanced_and_says_nothing() -> None:
    config = HMTConfig.from_block({})
    assert config == HMTConfig.from_block({"preset": "balanced"})
    assert config.describe_preset() == ""


def test_fields_beside_a_preset_win_and_the_run_says_so() -> None:
    block = {"preset": "memory", "optimizer": {"state_dtype": "bf16"}, "activations": {}}
    config = HMTConfig.from_block(block)
    assert config.optimizer.state_dtype == "bf16"
    assert config.optimizer.master_weights == "none"
    name, *lost = config.describe_preset().splitlines()
    assert name == 'hmt.preset "memory", but for:'
    (line,) = lost
    assert 'hmt.optimizer.state_dtype: "bf16"' in line
    assert 'instead of "int8"' in line
    whole = HMTConfig.from_block({"preset": "memory"})
    assert whole.describe_preset() == 'hmt.preset "memory"'


@pytest.mark.parametrize(
    ("preset", "own", "left"),
    [
        # a fixed rank has no candidates to choose from
        ("paper", {"rank": 64}, {"rank_candidates": "auto", "energy_threshold": 0.8}),
        ("paper", {"second_moment": "factored"}, {"projection": "right"}),
        ("paper", {"method": "muon"}, {"projection": "right"}),
        ("memory", {"method": "adamw"}, {"rank": "auto", "target_modules": None}),
        ("memory", {"rank_budget": 0.1}, {"rank": "auto", "rank_budget": 0.1}),
    ],
)
def test_what_cannot_go_together_with_the_blocks_own_fields_is_left_out(
    preset: str, own: dict[str, Any], left: dict[str, Any]
) -> None:
    config = HMTConfig.from_block({"preset": preset, "optimizer": own})
    fields = config.optimizer.model_dump()
    assert {key: fields[key] for key in own} == own
    assert {key: fields[key] for key in left} == left
    told = config.describe_preset()
    assert all(f"hmt.optimizer.{key}" in told for key in left if key not in own)


@pytest.mark.parametrize("preset", ["memroy", 1, None, {}, True])
def test_an_unknown_preset_is_one_error(preset: object) -> None:
    with pytest.raises(ValueError, match=r"hmt\.preset: got") as error:
        HMTConfig.from_block({"preset": preset, "optimizer": {"rank": 8}})
    assert "has 1 problem" in str(error.value)
    assert '"balanced", "memory" or "paper"' in str(error.value)


def test_a_problem_of_the_block_is_reported_as_without_a_preset() -> None:
    with pytest.raises(ValueError, match=r"hmt\.optimizer\.rank: got 'many'"):
        HMTConfig.from_block({"preset": "memory", "optimizer": {"rank": "many"}})
    with pytest.raises(ValueError, match=r"hmt\.optimizer: got 3"):
        HMTConfig.from_block({"preset": "memory", "optimizer": 3})
    two = {"residual": "none", "probes": 4, "rank": 8, "energy_threshold": 0.9}
    with pytest.raises(ValueError, match=r"energy_threshold") as error:
        HMTConfig.from_block({"preset": "paper", "optimizer": two})
    assert "has 1 problem" in str(error.value)
