"""Each preset as a run has it: it trains, says what it is, and holds what it promises."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import pytest
from harness import Ranks
from training import ds_config, make_engine, tiny_llama, train

from hmt_deepspeed.config.presets import PRESETS
from hmt_deepspeed.zero.optimizer.statistics import state_bytes

STEPS = 40
STAGES = {"balanced": 2, "memory": 3, "paper": 1}


def hosted() -> dict[str, Any]:
    """The default block with the states in host memory that may be there: AdamW's, in fp32, and masters."""
    config = ds_config(2, bf16={"enabled": True})
    config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    config["hmt"] = {}
    engine = make_engine(config, tiny_llama(seed=7))
    losses = train(engine, STEPS)
    rules = {entry.assignment.rule for entry in engine.optimizer.zero.low_rank}
    engine.destroy()
    return {"losses": losses, "rules": rules}


def preset_runs() -> dict[str, dict[str, Any]]:
    found = {}
    for preset, stage in STAGES.items():
        config = ds_config(stage, bf16={"enabled": True})
        config["hmt"] = {"preset": preset}
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            engine = make_engine(config, tiny_llama(seed=7))
        losses = train(engine, STEPS)
        entries = engine.optimizer.zero.param_states
        found[preset] = {
            "losses": losses,
            "said": said.getvalue(),
            "state_bytes": sum(map(state_bytes, entries)),
            "low_rank": sum(entry.matrix is not None for entry in entries),
            "masters": any(entry.weight.has_master for entry in entries),
            "caches": engine.optimizer.settings.cache is not None,
            "activations": engine.hmt_activations is not None,
        }
        engine.destroy()
    return found


@pytest.fixture(scope="module")
def runs(ranks: Ranks) -> dict[str, dict[str, Any]]:
    (found,) = ranks.run(preset_runs, 1)
    return found


def test_the_default_block_goes_with_states_on_the_host(ranks: Ranks) -> None:
    (found,) = ranks.run(hosted, 1)
    assert found["losses"][-1] < found["losses"][0] - 0.1
    assert found["rules"] == {"muon"}


def test_every_preset_is_run() -> None:
    assert set(STAGES) == set(PRESETS)


@pytest.mark.parametrize("preset", STAGES)
def test_a_preset_trains(preset: str, runs: dict[str, dict[str, Any]]) -> None:
    losses = runs[preset]["losses"]
    assert losses[-1] < losses[0] - 0.1
    assert (f'hmt.preset "{preset}"' in runs[preset]["said"]) == (preset != "balanced")
    assert "but for" not in runs[preset]["said"]


def test_presets_hold_what_they_promise(runs: dict[str, dict[str, Any]]) -> None:
    balanced, memory, paper = (runs[preset] for preset in STAGES)
    assert memory["low_rank"] == balanced["low_rank"] + 2  # embeddings and head
    assert balanced["masters"]
    assert not memory["masters"]
    assert not paper["masters"]
    # of tensors this small the states stay in fp32, so that the width and masters count alone
    assert memory["state_bytes"] < 0.5 * balanced["state_bytes"]
    assert not balanced["activations"]
    assert memory["activations"]
    assert paper["activations"]
    assert paper["caches"]
    assert not memory["caches"]
