"""The doctor says what a run would do, in the run's own words, and builds nothing."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import transformers
from deepspeed.accelerator import get_accelerator
from harness import Ranks
from training import ds_config, make_engine, tiny_llama

from hmt_deepspeed.__main__ import main as module_main
from hmt_deepspeed.doctor import examine, main
from hmt_deepspeed.train.models import bf16_is_fast

CONFIGS = Path(__file__).resolve().parents[1] / "ds_configs"


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: Any) -> str:
    """A folder with the tests' tiny model's config and no weights."""
    folder = tmp_path_factory.mktemp("model")
    tiny_llama().config.save_pretrained(folder)
    return str(folder)


BF16 = {"bf16": {"enabled": True}}
RUNS: dict[str, tuple[int, int, dict[str, Any], dict[str, Any]]] = {  # stage, ranks, options, more
    "fp32, stage 2": (2, 1, {"rank": 4}, {}),
    "bf16, stage 3, 2 ranks": (3, 2, {"rank_candidates": [4, 8]}, BF16),
    "int8 states, bf16, stage 1, a rank that k and v are too narrow for": (
        1,
        2,
        {"rank": 28, "state_dtype": "int8"},
        BF16,
    ),
    "int8 weights": (2, 1, {"rank": 4, "weight_dtype": "int8"}, BF16),
    "two-sided": (0, 1, {"projection": "two_sided", "rank": 4}, BF16),
    "apollo": (2, 2, {"method": "apollo", "rank": 4}, {}),
    "muon of whole matrices": (3, 2, {"method": "muon", "rank": "full"}, {}),
    "states on the host": (
        3,
        2,
        {"rank": 4},
        BF16 | {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
    ),
    "activations": (
        2,
        1,
        {"rank": 4},
        BF16 | {"hmt": {"activations": {}, "optimizer": {"rank": 4}}},
    ),
}


def started(names: list[str]) -> dict[str, tuple[str, dict[str, Any]]]:
    """The JSON and the start tables of real engines."""
    found = {}
    for name in names:
        stage, _, options, more = RUNS[name]
        config = ds_config(stage, options, **more)
        engine = make_engine(json.loads(json.dumps(config)))
        tables = [engine.optimizer.describe()]
        tables += [engine.hmt_activations.describe()] if engine.hmt_activations else []
        found[name] = "\n".join(tables), config
        engine.destroy()
    return found


@pytest.fixture(scope="module")
def real(ranks: Ranks) -> dict[str, tuple[str, dict[str, Any]]]:
    found = {}
    for world in (1, 2):
        names = [name for name, run in RUNS.items() if run[1] == world]
        found |= ranks.run(started, world, names)[0]
    return found


@pytest.mark.parametrize("name", RUNS)
def test_the_tables_are_those_of_the_start(
    name: str, real: dict[str, Any], model_folder: str, tmp_path: Path
) -> None:
    table, config = real[name]
    (tmp_path / "ds.json").write_text(json.dumps(config))
    found = examine(tmp_path / "ds.json", model_folder, ranks=RUNS[name][1])
    assert not found.errors
    assert table in str(found)


def test_nothing_is_allocated_and_nothing_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """A 13B model's states would be 200 GB; and afterwards DeepSpeed is what it was."""
    import deepspeed

    from hmt_deepspeed.zero.registration import is_registered

    stock, state = deepspeed.DeepSpeedEngine, torch.get_rng_state()
    memory = psutil.virtual_memory()._replace(available=2**34)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    found = str(examine(CONFIGS / "adamw_offload.json", "13b", 32000, ranks=2))
    assert "host memory, of which" in found  # 13e9 x 16 bytes of states do not fit there
    assert deepspeed.DeepSpeedEngine is stock
    assert not is_registered()
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.json")), ids=lambda path: path.stem)
def test_every_example_is_understood(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(get_accelerator(), "is_fp16_supported", lambda: False)  # some CPUs have it
    found = examine(path, ranks=2)
    if "fp16" in path.stem:
        (error,) = found.errors
        assert error.startswith("fp16.enabled is True")
        return
    assert not found.errors
    stage = json.loads(path.read_text())["zero_optimization"]["stage"]
    assert f"ZeRO stage {stage}" in str(found)
    assert max(map(len, str(found).splitlines())) <= 80


def test_weights_that_cannot_be_projected_are_named_with_the_reason(tmp_path: Path) -> None:
    """Kernels of convolutions, most of this model: a row of their shape, and a warning."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 8}
    sizes |= {"intermediate_size": 16, "num_conv_pos_embeddings": 3}
    sizes |= {"num_conv_pos_embedding_groups": 1, "conv_dim": [64, 64], "conv_kernel": [5, 5]}
    config = transformers.Wav2Vec2Config(
        **sizes, conv_stride=[2, 2], architectures=["Wav2Vec2ForCTC"]
    )
    config.save_pretrained(tmp_path)
    found = examine(CONFIGS / "hmt.json", str(tmp_path), ranks=1)
    assert not found.errors
    (told,) = [text for text in found.warnings if "left to AdamW" in text]
    assert "3-D weight (wav2vec2.feature_extractor.conv_layers.0.conv.weight is the first)" in told
    table = next(text for text in found.lines if "3-D weight" in text)
    assert re.search(
        r"^adamw: 3-D weight; fp32 states\n(  .*\n)*  64x64x5 +1 ", table, re.MULTILINE
    )


def test_bytes_are_counted_where_they_lie() -> None:
    """The main job's model, 5,048,576 weights in the dtype of this machine, on the host beside offload_param."""
    weights = 9.6 if bf16_is_fast("cpu") else 19.3
    told = str(examine(CONFIGS / "hmt_zero3_offload_param.json", ranks=1))
    assert re.search(rf"^host +{re.escape(str(weights))} MiB", told, re.MULTILINE)
    on_device, elsewhere = (
        re.search(r"^device +([\d.]+) MiB", text, re.MULTILINE)
        for text in (str(examine(CONFIGS / "hmt_zero3.json", ranks=1)), told)
    )
    assert on_device is not None
    assert elsewhere is not None
    assert float(on_device[1]) - float(elsewhere[1]) == pytest.approx(weights, abs=0.11)


class Gpu:
    """An accelerator of one GPU with 1 MiB."""

    def __getattr__(self, name: str) -> Any:
        from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

        return getattr(CPU_Accelerator(), name)

    def device_name(self, index: int | None = None) -> str:
        return "cuda" if index is None else f"cuda:{index}"

    def device_count(self) -> int:
        return 1

    def total_memory(self, index: int | None = None) -> int:
        return 2**20


def test_a_gpu_that_is_too_small(monkeypatch: Any) -> None:
    from hmt_deepspeed.train import models

    monkeypatch.setattr("deepspeed.accelerator.get_accelerator", Gpu)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "a small GPU")
    monkeypatch.setattr(models, "bf16_is_fast", lambda device: True)
    found = examine(CONFIGS / "hmt_zero2.json", ranks=2)
    assert "1 x a small GPU of 1.0 MiB" in str(found)
    assert "the run has more ranks than this machine has GPUs." in found.warnings
    assert [e for e in found.errors if e.startswith("weights, states and masters take")]


def test_autos_are_filled_in_and_the_blocks_stay(model_folder: str) -> None:
    found = " ".join(str(examine(CONFIGS / "trainer.json", model_folder)).split())
    assert "gradient_clipping: 1.0" in found
    assert "hmt.optimizer" not in found  # its "auto"s are not Trainer's
    assert "gradients clipped at 1" in found


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "misspelt": ({"hmt": {"optimizer": {"rnak": 4}}}, r"rnak.*rank"),
    "no block": ({"hmt": None}, 'Add "hmt": \\{\\}'),
    "super_offload": (
        {
            "zero_optimization": {
                "stage": 2,
                "offload_optimizer": {"device": "cpu", "super_offload": True},
            }
        },
        "super_offload is True",
    ),
    "batch": ({"train_batch_size": 5}, "Check batch related parameters"),
    "bytes": (
        {"hmt": {"optimizer": {"rank": 4, "max_full_gradient_bytes": 10}}},
        "max_full_gradient_bytes is 10",
    ),
    "pattern": (
        {"hmt": {"activations": {"overrides": {"no_such": {"residual": "keep"}}}}},
        "'no_such' matches no layer",
    ),
    "shared sequences": (
        {"hmt": {"fpdt": {"sequence_parallel_size": 2}}},
        "sequence_parallel_size is 2, but there are 1 ranks",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_work_is_an_error(name: str, model_folder: str, tmp_path: Path) -> None:
    changes, message = REFUSED[name]
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "HMT", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 2},
        "hmt": {},
        **changes,
    }
    config = {key: value for key, value in config.items() if value is not None}
    (tmp_path / "ds.json").write_text(json.dumps(config))
    found = examine(tmp_path / "ds.json", model_folder)
    assert len(found.errors) == 1
    assert re.search(message, found.errors[0], re.DOTALL), found.errors


def test_what_is_missing_here(model_folder: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    config = json.loads((CONFIGS / "adamw_offload.json").read_text())
    (tmp_path / "ds.json").write_text(json.dumps(config))
    found = examine(tmp_path / "ds.json", model_folder)
    assert found.errors == [
        "DeepSpeed builds cpu_adam at first use, for which a C++ compiler (install g++) is missing."
    ]
    found = examine(CONFIGS / "hmt_zero2.json", model_folder)
    assert not found.errors
    assert any("compiler" in text for text in found.warnings)


def test_the_commands_end_with_a_status(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    with pytest.raises(SystemExit) as end:
        main([str(CONFIGS / "hmt.json")])
    assert end.value.code == 0
    monkeypatch.setattr(sys, "argv", ["hmt_deepspeed", "--check", str(tmp_path / "none.json")])
    with pytest.raises(SystemExit) as end:
        module_main()
    assert end.value.code == 1
    assert "error: DeepSpeed config" in capsys.readouterr().out
