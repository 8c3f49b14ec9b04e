"""Engines whose JSON has the block and names no optimizer: they infer, ignore the block and say so."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from harness import Ranks
from torch import nn
from training import ds_config, global_batch, loss_of, make_engine, tiny_llama, train

import hmt_deepspeed
from hmt_deepspeed.zero.dry_run import dry_run


def config_of(stage: int, block: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A training run's JSON, the optimizer taken out."""
    config = ds_config(stage, **{"gradient_clipping": 0.0, **changes}, hmt=block)
    del config["optimizer"]
    return config


def built(config: dict[str, Any], model: nn.Module | None = None) -> tuple[Any, str]:
    """The engine and what it printed."""
    said = io.StringIO()
    model = nn.Sequential(nn.Linear(8, 8)) if model is None else model
    with contextlib.redirect_stdout(said):
        engine = hmt_deepspeed.initialize(model=model, config=config)[0]
    engine.eval()
    return engine, said.getvalue()


def refusals(engine: Any) -> dict[str, str]:
    """What each way to train says."""
    found = {}
    output = engine(torch.ones(2, 8)).sum()
    ways = {
        "backward": lambda: engine.backward(output),
        "loss.backward": lambda: engine(torch.ones(2, 8)).sum().backward(),
        "scale": lambda: engine.scale(output),
        "step": engine.step,
    }
    for name, way in ways.items():
        try:
            way()
            found[name] = "accepted"
        except ValueError as error:
            found[name] = str(error)
    return found


def infers(folder: str) -> dict[Any, Any]:
    """Sections that train, on a model without decoder layers: none is honoured, none is an error."""
    blocks = {
        "empty": {},
        "activations": {"activations": {"policy": {"mlp_intermediate": "int8"}}},
        "plan": {"activations": {"policy": "plan"}, "planner": {"gpu_memory": 10**10}},
        "others": {
            "optimizer": {"rank": 4, "weight_dtype": "int8"},
            "fpdt": {},
            "offload": {"overlap": "backward"},
            "basis_cache": {},
            "snapshot": {"path": f"{folder}/snapshots", "interval": 1},
        },
    }
    found: dict[Any, Any] = {}
    for stage, names in ((0, ("empty", "others")), (3, tuple(blocks))):
        for name in names:
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(8, 8))
            inputs = torch.ones(2, 8)
            expected = model(inputs).detach()
            engine, said = built(config_of(stage, blocks[name]), model)
            with torch.no_grad():
                same = torch.equal(engine(inputs), expected)
            parts = (engine.hmt_activations, engine.hmt_planner, engine.hmt_snapshots)
            found[stage, name] = same, said, (*parts, engine.hmt_fpdt)
            if name == "empty":
                found[stage, "refusals"] = refusals(engine)
            engine.destroy()
    return found


def refused() -> dict[str, str]:
    configs = {
        "misspelt": config_of(0, {"optimiser": {}}),
        "out of range": config_of(3, {"optimizer": {"rank": 0}}),
        "stage 1": config_of(1, {}),
        "stage 2": config_of(2, {}),
    }
    found = {}
    for name, config in configs.items():
        try:
            built(config)
            found[name] = "accepted"
        except ValueError as error:
            found[name] = str(error)
    return found


def a_training_engine_after(stage: int, bf16: bool) -> list[Any]:
    """What preference training does that computes its reference before it begins, with the model itself."""
    found = []
    precision = {"bf16": {"enabled": bf16}}
    for before in (False, True):
        model = tiny_llama(layers=1)
        if before:
            inference, _ = built(config_of(stage, {"optimizer": {}}, **precision), model)
            with torch.no_grad():
                first = float(loss_of(inference, global_batch()))
            held = type(inference.optimizer).__name__
        engine = make_engine(ds_config(stage or 2, **precision), model)
        found.append(train(engine, 3))
        if before:
            with torch.no_grad():
                found.append([first, float(loss_of(inference, global_batch()))])
            found.append(held)
        engine.destroy()
    return found


def test_the_block_is_ignored_and_training_refused(ranks: Ranks, tmp_path: Path) -> None:
    first, second = ranks.run(infers, 2, str(tmp_path))
    for stage in (0, 3):
        for name in ("empty", "activations", "plan", "others") if stage else ("empty", "others"):
            same, said, parts = first[stage, name]
            assert same, (stage, name)
            assert parts == (None,) * 4
            assert said.count('the "hmt" block is ignored') == 1
            assert "hmt" not in second[stage, name][1]  # one rank says it
        for way, text in first[stage, "refusals"].items():
            assert "built without an optimizer" in text, way
            assert '"optimizer": {"type": "HMT", ...}' in text
    assert not (tmp_path / "snapshots").exists()


def test_what_is_malformed_is_refused_all_the_same(ranks: Ranks) -> None:
    found = ranks.run(refused, 1)[0]
    assert "optimiser" in found["misspelt"]
    assert "rank" in found["out of range"]
    for stage in (1, 2):
        assert f"zero_optimization.stage is {stage}" in found[f"stage {stage}"]
        assert "is 0 or 3" in found[f"stage {stage}"]


@pytest.mark.parametrize(("stage", "bf16"), [(0, False), (0, True), (3, False)])
def test_the_model_trains_afterwards(ranks: Ranks, stage: int, bf16: bool) -> None:
    """And the engine for inference sees what it has learned. Stock's would make fp32 copies in bf16."""
    alone, after, seen, held = ranks.run(a_training_engine_after, 1, stage, bf16)[0]
    assert after == alone
    assert seen[0] == alone[0]
    assert seen[1] < seen[0]
    assert held == ("DeepSpeedZeRoOffload" if stage else "NoneType")


def test_the_dry_run_says_so() -> None:
    config = {
        "train_batch_size": 2,
        "train_micro_batch_size_per_gpu": 2,
        "hmt": {"activations": {"policy": "plan"}},
    }
    found = dry_run(config, lambda dtype: nn.Linear(8, 8, dtype=dtype), 1)
    assert (found.is_hmt, found.infers) == (False, True)
    assert any('the "hmt" block is ignored' in note for note in found.notes)
    assert found.tables == ()


def test_another_engine_is_stocks(ranks: Ranks) -> None:
    """Without the block nothing is ours to refuse."""
    (text,) = ranks.run(stock_refusal, 1)
    assert text.startswith("AssertionError: must provide optimizer")


def stock_refusal() -> str:
    config = config_of(0, {})
    del config["hmt"]
    engine, said = built(config)
    assert "hmt" not in said
    assert isinstance(engine, deepspeed.DeepSpeedEngine)
    try:
        engine.step()
    except AssertionError as error:
        return f"AssertionError: {error}"
    return "accepted"
