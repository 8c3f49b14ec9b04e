"""What stands in a checkpoint beside weights and states: DeepSpeed's own loader restores it, from ours too."""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from deepspeed.checkpoint import ds_to_universal
from deepspeed.runtime.engine import DeepSpeedEngine
from harness import Ranks
from torch import Tensor, nn
from training import GLOBAL_BATCH, ds_config, make_engine, stock_config

from hmt_deepspeed.zero.saving.client_objects import plain_numbers
from hmt_deepspeed.zero.saving.durable import AtomicCheckpointEngine

# Of a model that HMT refuses: DeepSpeed's expert layers.
OF_EXPERTS = {"num_experts", "ds_autoep_layers", "autoep_layers"}
# Ours reads these itself, from all ranks' files.
OF_WEIGHTS = {"optimizer", "frozen_param_fragments"}
# Saved for zero_to_fp32.py and for the reader; DeepSpeed's loader leaves them to the caller.
FOR_OTHERS = {
    "buffer_names",
    "param_shapes",
    "frozen_param_shapes",
    "shared_params",
    "ds_config",
    "ds_version",
}
NAMES = {
    "AUTOEP_LAYERS_KEY": "ds_autoep_layers",
    "AUTOEP_LAYERS_KEY_LEGACY": "autoep_layers",
    "FROZEN_PARAM_FRAGMENTS": "frozen_param_fragments",
}


def keys_read(method: Any) -> set[str]:
    """Keys that a method asks ``checkpoint`` for: ``checkpoint[k]``, ``k in checkpoint``, ``checkpoint.get(k)``."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(method)))):
        found |= set(_asked(node))
    return found


def _asked(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
        whole, key = node.value, node.slice
    elif isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In):
        whole, key = node.comparators[0], node.left
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
        whole, key = node.func.value, node.args[0]
    else:
        return
    if not isinstance(whole, ast.Name) or whole.id not in ("checkpoint", "optim_checkpoint"):
        return
    if isinstance(key, ast.Constant):
        yield key.value
    elif isinstance(key, ast.Name):
        yield NAMES[key.id]  # another constant: a key that nobody here has heard of


class Recorded(dict[str, Any]):
    """A state that remembers what it was asked for."""

    asked: set[str]

    def __getitem__(self, key: str) -> Any:
        self.asked.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.asked.add(str(key))
        return super().__contains__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)


class Rows(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    def __len__(self) -> int:
        return 8 * GLOBAL_BATCH

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.full((8,), float(index)), torch.tensor(index)


def data_efficiency(folder: str) -> dict[str, Any]:
    """Random-LTD over 16, 32, 48 and 64 tokens; a curriculum of difficulties 1 to 4 without an index."""
    schedule = {"require_steps": 4, "seq_per_step": 16}
    ltd = {
        "enabled": True,
        "total_layer_num": 2,
        "random_ltd_layer_num": 1,
        "random_ltd_layer_id": [0],
        "model_mask_name": "attention_mask",
        "model_type": "decoder",
        "hidden_state_order": "batch_seq_dim",
        "random_ltd_schedule": {
            "min_value": 16,
            "max_value": 64,
            "schedule_type": "fixed_linear",
            "schedule_config": schedule,
        },
    }
    metric = {
        "index_to_sample_path": "",
        "index_to_metric_path": "",
        "difficulty_type": "value",
        "clustering_type": "single_cluster",
        "min_difficulty": 1,
        "max_difficulty": 4,
        "schedule_type": "fixed_linear",
        "schedule_config": {"total_curriculum_step": 8, "difficulty_step": 1},
    }
    curriculum = {
        "enabled": True,
        "data_cluster_path": folder,
        "curriculum_metrics": {"length": metric},
    }
    return {
        "enabled": True,
        "seed": 1,
        "data_routing": {"enabled": True, "random_ltd": ltd},
        "data_sampling": {"enabled": True, "num_workers": 0, "curriculum_learning": curriculum},
    }


SCHEDULER = {"type": "WarmupLR", "params": {"warmup_num_steps": 100}}


def engine_with_everything(stage: int, folder: str, of: Any = ds_config) -> Any:
    config = of(stage, data_efficiency=data_efficiency(f"{folder}/clusters"), scheduler=SCHEDULER)
    if of is ds_config:
        config["hmt"] = {
            "optimizer": {"method": "adamw"},
            "snapshot": {"path": f"{folder}/snapshots", "interval": 3},
        }
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    return make_engine(config, model, training_data=Rows())


def step(engine: Any) -> None:
    rows, _ = next(iter(engine.training_dataloader))
    engine.backward(engine(rows).pow(2).mean() * 1e-4)
    engine.step()


def restorable(engine: Any) -> dict[str, Any]:
    sampler = engine.training_dataloader.data_sampler.state_dict()
    sampler = {key: str(plain_numbers(value)) for key, value in sampler.items()}
    return {
        "random_ltd": dict(engine.random_ltd_scheduler.state_dict()),
        "data_sampler": sampler,
        "lr_scheduler": engine.lr_scheduler.state_dict(),
        "steps": (engine.global_steps, engine.skipped_steps, engine.global_samples),
        "worlds": (
            engine.loaded_checkpoint_dp_world_size,
            engine.loaded_checkpoint_mp_world_size,
        ),
    }


def saves_all(stage: int, folder: str) -> dict[str, Any]:
    np.random.seed(5)
    engine = engine_with_everything(stage, folder)
    for _ in range(3):
        step(engine)
    engine.skipped_steps = 2
    engine.save_checkpoint(f"{folder}/saved", client_state={"mine": 1})
    found = restorable(engine)
    engine.destroy()  # writes the snapshot
    return found


def loads_all(stage: int, folder: str, of: str = "saved") -> dict[str, Any]:
    asked: set[str] = set()
    load = AtomicCheckpointEngine.load

    def recorded(self: Any, path: str, map_location: Any = None) -> Any:
        state = Recorded(load(self, path, map_location))
        state.asked = asked
        return state

    AtomicCheckpointEngine.load = recorded  # type: ignore[method-assign]
    np.random.seed(6)
    engine = engine_with_everything(stage, folder)
    fresh = restorable(engine)
    client = engine.load_checkpoint(f"{folder}/{of}")[1]
    return {"fresh": fresh, "asked": asked, "client": set(client), **restorable(engine)}


def saved_by_stock(folder: str) -> dict[str, Any]:
    """What DeepSpeed's own engine restores of the same run."""
    found = []
    for _ in range(2):
        np.random.seed(len(found))
        engine = engine_with_everything(1, folder, stock_config)
        if found:
            engine.load_checkpoint(f"{folder}/stock")
        else:
            for _ in range(3):
                step(engine)
            engine.save_checkpoint(f"{folder}/stock")
        found.append(restorable(engine))
    return {"saved": found[0], "loaded": found[1]}


def saved_nowhere() -> list[str]:
    engine = make_engine(ds_config(1, {}), nn.Sequential(nn.Linear(8, 8)))
    found = []
    for call in (engine.save_checkpoint, engine.load_checkpoint):
        for folder in (None, ""):
            try:
                call(folder)
                found.append("accepted")
            except ValueError as error:
                found.append(str(error))
    return found


def converted(folder: str) -> str:
    given = ["--input_folder", f"{folder}/saved/global_step3", "--output_folder", f"{folder}/out"]
    sys.argv = ["ds_to_universal.py", *given]
    try:
        ds_to_universal.main(ds_to_universal.parse_arguments())
    except (ValueError, RuntimeError) as error:
        return str(error)
    return "converted"


@pytest.mark.parametrize(("saving", "loading"), [((2, 1), (2, 1)), ((3, 2), (1, 1))])
def test_everything_deepspeed_saves_is_restored(
    ranks: Ranks, tmp_path: Path, saving: tuple[int, int], loading: tuple[int, int]
) -> None:
    saved = ranks.run(saves_all, saving[1], saving[0], str(tmp_path))[0]
    for of in ("saved", "snapshots"):
        loaded = ranks.run(loads_all, loading[1], loading[0], str(tmp_path), of)[0]
        for key in ("random_ltd", "data_sampler", "lr_scheduler", "steps"):
            if (key, of) == ("steps", "snapshots"):
                saved = saved | {"steps": (3, 0, 3 * GLOBAL_BATCH)}
            assert loaded[key] == saved[key], (of, key)
            assert loaded[key] != loaded["fresh"][key], (of, key)
        assert loaded["worlds"] == (saving[1], 1)
        if of == "saved":
            assert "mine" in loaded["client"]
            assert FOR_OTHERS - {"frozen_param_shapes"} <= loaded["client"]
            assert not loaded["client"] & {"module", "lr_scheduler", "random_ltd"}
    for path in (tmp_path / "saved").glob("*/*.pt"):
        torch.load(path, weights_only=True)


def test_the_loader_is_stocks(ranks: Ranks, tmp_path: Path) -> None:
    """Every key that stock's loader reads is read; every key that its saver writes has a reader, or a reason."""
    ranks.run(saves_all, 1, 1, str(tmp_path))
    loaded = ranks.run(loads_all, 1, 1, str(tmp_path))[0]
    stocks = keys_read(DeepSpeedEngine._load_checkpoint)
    stocks |= keys_read(DeepSpeedEngine.load_checkpoint)
    stocks |= keys_read(DeepSpeedEngine.load_module_state_dict)
    assert stocks >= {"random_ltd", "data_sampler", "lr_scheduler", "global_samples"}
    assert stocks - loaded["asked"] <= OF_EXPERTS | OF_WEIGHTS
    source = textwrap.dedent(inspect.getsource(DeepSpeedEngine._common_checkpoint_state))
    written = {
        keyword.arg
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "dict"
        for keyword in node.keywords
        if keyword.arg is not None
    }
    assert written >= {"random_ltd", "module"}
    assert written - loaded["asked"] <= FOR_OTHERS | OF_WEIGHTS


def test_stock_restores_the_same(ranks: Ranks, tmp_path: Path) -> None:
    found = ranks.run(saved_by_stock, 1, str(tmp_path))[0]
    for key in ("random_ltd", "data_sampler", "lr_scheduler", "steps"):
        assert found["saved"][key] == found["loaded"][key]


def test_a_missing_folder_is_refused_on_every_rank(ranks: Ranks) -> None:
    for said in ranks.run(saved_nowhere, 2):
        for text, (name, value) in zip(
            said, [(n, v) for n in ("save_dir", "load_dir") for v in ("None", "''")], strict=True
        ):
            assert f"{name} is {value}" in text
            assert "path of a folder" in text


@pytest.mark.parametrize("stage", [1, 3])
def test_the_universal_converter_says_what_to_use_instead(
    ranks: Ranks, tmp_path: Path, stage: int
) -> None:
    ranks.run(saves_all, 1, stage, str(tmp_path))
    said = ranks.run(converted, 1, str(tmp_path))[0]
    assert "not supported for HMT's checkpoints" in said
    assert "engine.load_checkpoint loads this folder at any world size and ZeRO stage" in said
