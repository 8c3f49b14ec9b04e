"""Every mode resumes bit for bit, loads on another layout, and refuses states that do not fit."""

from __future__ import annotations

import json
import re
from math import isnan
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from harness import Ranks
from modes import INT8, LOW_RANK, MODES, mode_engine, trained, wide_llama
from test_parity import assert_same_run
from torch import nn
from training import tiny_llama

FACTORED = {"second_moment": "factored"}
SAVED, AFTER = 4, 3  # steps before and after saving; a refresh falls into both
# Single moments go with single vectors, whose signs rounding decides: the same layout only.
SAME_LAYOUT = {
    "keep": {**LOW_RANK, "moment_transfer": "keep"},
    "bf16 states": {**LOW_RANK, "projection": "auto", "state_dtype": "bf16"},
    "bf16 core": {**LOW_RANK, "projection": "two_sided", "state_dtype": "bf16"},
    "early refresh": {**LOW_RANK, "update_interval": 50, "energy_threshold": 0.9},
    "int8": INT8,
    "int8, factored": {**INT8, "projection": "auto", **FACTORED},
}
ALL = {**MODES, **SAME_LAYOUT}
ONLY_AT_STAGE_3 = [
    "auto",
    "random",
    "early refresh",
    "full_rank_budget",
    "left, full residual",
    "no residual",
    "random, left",
    "random, two_sided",
    "subspace",
    "svd",
    "keep",
    "bf16 core",
]
WITHOUT_SHARDED_GRADIENTS = [
    (name, stage) for name in ("left", "two_sided", "int8, factored") for stage in (0, 1)
]
RUNS = [
    (name, stage) for name in ALL for stage in (2, 3) if name not in ONLY_AT_STAGE_3 or stage == 3
]
RUNS += WITHOUT_SHARDED_GRADIENTS


def model_of(name: str) -> nn.Module:
    return wide_llama(seed=7) if "int8" in name else tiny_llama(layers=1, seed=7)


def hasten(engine: Any, name: str) -> None:
    """Let early refreshes happen in a run of seven steps, on the slightest fall."""
    if name == "early refresh":
        trigger = engine.optimizer.policy.trigger
        trigger.check_every = trigger.min_steps = 1
        trigger.fraction, trigger.rearm = 0.998, 0.999


# -- cases --------------------------------------------------------------------------------------------


def saved_runs(folder: str) -> dict[Any, Any]:
    """Runs saved on the way: what they were when saved, and their straight continuation."""
    found = {}
    for name, stage in RUNS:
        engine = mode_engine(ALL[name], stage, model=model_of(name))
        hasten(engine, name)
        trained(engine, SAVED)
        engine.save_checkpoint(f"{folder}/{name}/{stage}")
        held = trained(engine, 0)
        found[name, stage] = (held, trained(engine, AFTER, first=SAVED))
        engine.destroy()
    return found


def resumed_runs(folder: str, wanted: list[tuple[str, int, int]]) -> dict[Any, Any]:
    """Continuations of (mode, stage that saved it, stage now) in a new process."""
    found = {}
    for name, saved, stage in wanted:
        model = model_of(name)
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(0.5)  # everything must come from the checkpoint
        engine = mode_engine(ALL[name], stage, model=model)
        engine.load_checkpoint(f"{folder}/{name}/{saved}")
        hasten(engine, name)
        held = trained(engine, 0)
        found[name, saved, stage] = (held, trained(engine, AFTER, first=SAVED))
        engine.destroy()
    return found


def refusals(folder: str) -> dict[str, str]:
    """Loading a checkpoint of one mode into an engine of another."""
    pairs = {
        "projection": ("left", MODES["full residual"]),
        "method": ("left", MODES["apollo"]),
        "apollo to low rank": ("apollo", LOW_RANK),
        "mini to apollo": ("apollo_mini", MODES["apollo"]),
        "factored to full": ("factored", MODES["auto"]),
        "full to factored": ("left", {**MODES["left"], **FACTORED}),
        "core to one side": ("two_sided", LOW_RANK),
        "another rank that is drawn": ("apollo", {**MODES["apollo"], "rank": 3}),
        "one rule": ("left", {**MODES["left"], "module_rules": {"o_proj": {"method": "apollo"}}}),
    }
    said = {}
    for key, (saved, options) in pairs.items():
        engine = mode_engine(options, 2)
        try:
            engine.load_checkpoint(f"{folder}/{saved}/2")
            said[key] = "accepted"
        except ValueError as error:
            said[key] = str(error)
        engine.destroy()
    engine = mode_engine(MODES["apollo"], 2)
    engine.load_checkpoint(f"{folder}/left/2", load_optimizer_states=False)
    said["weights only"] = "loaded" if trained(engine, 1)["losses"][0] > 0 else ""
    return said


# -- tests --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(ranks: Ranks, tmp_path_factory: Any) -> tuple[str, list[dict[Any, Any]]]:
    """Every mode saved at stages 2 and 3 on two ranks."""
    folder = str(tmp_path_factory.mktemp("modes"))
    return folder, ranks.run(saved_runs, 2, folder)


@pytest.fixture(scope="module")
def resumed(ranks: Ranks, saved: Any) -> list[dict[Any, Any]]:
    wanted = [(name, stage, stage) for name, stage in RUNS]
    return ranks.run(resumed_runs, 2, saved[0], wanted)


@pytest.mark.parametrize("name", ALL)
def test_resume_is_bit_for_bit(saved: Any, resumed: Any, name: str) -> None:
    """Losses, norms, weights, bases, ranks, refresh times, rank history, trigger, groups."""
    for straight, other in zip(saved[1], resumed, strict=True):
        for stage in [stage for mode, stage in RUNS if mode == name]:
            for one, two in zip(straight[name, stage], other[name, stage, stage], strict=True):
                for key in ("losses", "norms", "ranks", "refreshes", "shared"):
                    assert one[key] == two[key], (stage, key)
                # As text: NaN stands for what was not seen yet.
                assert json.dumps(one["policy"]) == json.dumps(two["policy"]), stage
                for key in ("weights", "bases"):
                    assert one[key].keys() == two[key].keys()
                    for tensor in one[key]:
                        assert torch.equal(one[key][tensor], two[key][tensor]), (stage, key, tensor)


def test_what_is_resumed_has_a_history(saved: Any) -> None:
    """Ranks and trigger are worth restoring: refreshes before and after, groups formed, energies."""
    for (name, _), (held, after) in saved[1][0].items():
        if name == "early refresh":  # its interval gives one
            assert min(held["refreshes"]) >= 2
            references = [reference for _, reference, *_ in held["policy"]["trigger"]]
            assert not all(map(isnan, references))
        else:
            assert after["refreshes"] != held["refreshes"], name
        if "apollo" not in name and "random" not in name:
            assert any(held["policy"]["histories"].values()), name
            assert held["policy"]["trigger"], name
    assert saved[1][0]["share_basis", 2][0]["shared"]


@pytest.mark.parametrize(("world", "stages"), [(1, [0, 3]), (3, [1, 3])])
def test_another_layout_goes_on_the_same(
    ranks: Ranks, saved: Any, world: int, stages: list[int]
) -> None:
    names = [name for name in MODES if name not in ONLY_AT_STAGE_3]
    if world > 1:
        names = ["left", "two_sided", "apollo"]
    wanted = [(name, *way) for name in names for way in zip((3, 2), stages, strict=True)]
    found = ranks.run(resumed_runs, world, saved[0], wanted)[0]
    assert len(found) == 2 * len(names)
    for (name, from_stage, _), (_, after) in found.items():
        assert_same_run(after, saved[1][0][name, from_stage][1])
        one, other = (run["policy"]["histories"] for run in (after, saved[1][0][name, 2][1]))
        steps = [{n: [entry[0] for entry in h] for n, h in p.items()} for p in (one, other)]
        assert steps[0] == steps[1], name


def test_states_that_do_not_fit_are_refused(ranks: Ranks, saved: Any) -> None:
    said = ranks.run(refusals, 2, saved[0])[0]
    assert "lowrank_adamw left, now lowrank_adamw right" in said["projection"]
    assert "lowrank_adamw left, now apollo, random of rank" in said["method"]
    assert re.search(
        "apollo, random of rank .* now lowrank_adamw right", said["apollo to low rank"]
    )
    assert "apollo_mini, random of rank 1, now apollo" in said["mini to apollo"]
    assert "now apollo, random of rank 3" in said["another rank that is drawn"]
    assert "lowrank_adamw two_sided, now lowrank_adamw right" in said["core to one side"]
    assert "lowrank_adamw auto, factored, now lowrank_adamw auto" in said["factored to full"]
    assert "lowrank_adamw left, now lowrank_adamw left, factored" in said["full to factored"]
    assert "o_proj.weight (lowrank_adamw left, now apollo, random" in said["one rule"]
    for key, text in said.items():
        if key != "weights only":
            assert "Keep method, projection, second_moment, module_rules" in text, key
            assert "load_optimizer_states=False" in text, key
    assert said["weights only"] == "loaded"


@pytest.mark.parametrize("stage", [2, 3])
def test_zero_to_fp32_reads_every_mode(saved: Any, stage: int) -> None:
    folder, runs = saved
    for name in (
        "left",
        "two_sided",
        "apollo",
        "full residual",
        "module_rules",
        "factored",
        "int8",
    ):
        consolidated = get_fp32_state_dict_from_zero_checkpoint(f"{folder}/{name}/{stage}")
        for key, weight in runs[0][name, stage][0]["weights"].items():
            assert torch.equal(consolidated[key], weight), (name, key)


def test_files_hold_plain_types_only(saved: Any) -> None:
    folder, _ = saved
    for name, stage in RUNS:
        files = list(Path(f"{folder}/{name}/{stage}").glob("*/*.pt"))
        assert files
        for path in files:
            torch.load(path, weights_only=True)
