"""JSONs that ``hmt-plan --write`` writes: each trains, and holds where it says what it says."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Ranks
from offloading import needs_async_io
from training import tiny_llama

import hmt_deepspeed
from hmt_deepspeed.planner.advise.advise import Advice, Answer, advise
from hmt_deepspeed.planner.advise.deepspeed_json import deepspeed_json
from hmt_deepspeed.planner.advise.setups import ROUNDED_INPUTS, Request
from hmt_deepspeed.planner.command import main
from hmt_deepspeed.planner.hardware import named_machine
from hmt_deepspeed.planner.model.families import shape_of_config
from hmt_deepspeed.planner.run.memory import OptimizerMode

GIB = 2**30
VOCABULARY, LENGTH = 8192, 64
CONFIG = {
    "vocab_size": VOCABULARY,
    "hidden_size": 384,
    "intermediate_size": 768,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "max_position_embeddings": LENGTH,
}


def train(path: str, config: dict[str, Any] | None, seed: int = 0) -> dict[str, Any]:
    """Two steps by a JSON; ``config`` of a Llama, the tests' tiny one without."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    model = tiny_llama() if config is None else LlamaForCausalLM(LlamaConfig(**config))
    settings = json.loads(Path(path).read_text())
    engine, *_ = hmt_deepspeed.initialize(
        model=model, config=settings, model_parameters=model.parameters()
    )
    losses = []
    for step in range(2):
        generator = torch.Generator().manual_seed(step)
        size = (settings["train_micro_batch_size_per_gpu"], 16)
        tokens = torch.randint(0, model.config.vocab_size, size, generator=generator)
        batch = {"input_ids": tokens, "labels": tokens}
        if settings.get("hmt", {}).get("accumulation") == "vertical":
            loss = engine.train_batch([batch] * settings["gradient_accumulation_steps"])
        else:
            loss = engine(**batch).loss
            engine.backward(loss)
            engine.step()
        losses.append(loss.item())
    host = engine.optimizer.zero.host if engine.hmt_enabled else None
    swapper = getattr(next(model.parameters()), "nvme_swapper", None)
    found = {
        "losses": losses,
        "is_ours": engine.hmt_enabled,
        "overlap": None if host is None else engine.optimizer.settings.host.overlap,
        "on_ssd": 0 if host is None or host.ssd is None else host.ssd.slots.folder.file_bytes,
        "pools": 0 if host is None else host.pool_bytes,
        "state buffers": 0 if host is None or host.ssd is None else host.ssd.buffer_bytes,
        "weight buffers": 0 if swapper is None else swapper.buffers.nbytes,
        "activations": {} if engine.hmt_activations is None else engine.hmt_activations.metrics(),
    }
    engine.destroy()
    return found


# -- where only states on an SSD leave enough host memory ------------------------------------------------


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import LlamaConfig

    folder = tmp_path_factory.mktemp("model")
    LlamaConfig(**CONFIG).save_pretrained(folder)
    return folder


def ask(folder: Path, out: Path, *more: str) -> dict[str, Any]:
    main(
        [
            *("--model", str(folder), "--machine", "rtx4090", "--seq_length", str(LENGTH)),
            *("--num_ssds", "1", "--nvme_path", str(out / "ssd"), "--write", str(out / "ds.json")),
            *more,
        ]
    )
    return dict(json.loads((out / "ds.json").read_text()))


def test_states_on_an_ssd_are_ours_and_the_json_trains(
    ranks: Ranks, model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    limits = (
        "--gpu_memory",
        "0.08",
        "--host_memory",
        "0.25",
        "--method",
        "adamw",
        "--lossy",
        "never",
    )
    config = ask(model_folder, tmp_path, *limits)
    said = " ".join(capsys.readouterr().out.split())  # whatever its lines
    assert "Recommended (the fastest exact one): ZeRO-3, CPU Adam, states on nvme." in said
    assert "DeepSpeed's CPU Adam, states on nvme" in said  # tried, and slower
    assert config["optimizer"]["type"] == "HMT"
    offload = config["zero_optimization"]["offload_optimizer"]
    assert (offload["device"], offload["nvme_path"]) == ("nvme", str(tmp_path / "ssd"))

    (found,) = ranks.run(train, 1, str(tmp_path / "ds.json"), CONFIG)
    assert found["is_ours"]
    parameters = 2 * VOCABULARY * 384 + 2 * (4 * 384**2 + 3 * 384 * 768 + 2 * 384) + 384
    assert found["on_ssd"] >= 2 * 12 * parameters  # two slots of each
    del config["zero_optimization"]["offload_optimizer"]
    (tmp_path / "plain.json").write_text(json.dumps(config))
    (plain,) = ranks.run(train, 1, str(tmp_path / "plain.json"), CONFIG)
    assert found["losses"] == pytest.approx(plain["losses"], rel=1e-3)  # bf16


@needs_async_io
def test_buffers_of_weights_on_an_ssd_hold_the_largest(
    ranks: Ranks, model_folder: Path, tmp_path: Path
) -> None:
    """The embedding's 3 million elements: the buffers are as large as that, and counted as they are."""
    config = ask(model_folder, tmp_path, "--method", "lowrank_adamw", "--offload_param", "nvme")
    assert config["zero_optimization"]["offload_param"]["buffer_size"] == VOCABULARY * 384
    (found,) = ranks.run(train, 1, str(tmp_path / "ds.json"), CONFIG)
    shape = shape_of_config_file(model_folder)
    answer = answers(shape, offload_param="nvme", zero_stage=3).best
    counted = found["weight buffers"]  # the swapper aligns them
    assert answer.estimate.memory["host"]["weight buffers"] == pytest.approx(counted, rel=1e-2)


def shape_of_config_file(folder: Path) -> Any:
    from transformers import AutoConfig

    return shape_of_config(AutoConfig.from_pretrained(folder))


# -- everything that it may recommend --------------------------------------------------------------------


def answers(shape: Any, **fields: Any) -> Advice:
    machine = named_machine("rtx4090", num_ssds=1, host_memory=64 * GIB)
    modes = (OptimizerMode("lowrank_adamw", rank=8), OptimizerMode(method="adamw"))
    asked = {"seq_length": 16, "micro_batch": 2, "modes": modes, **fields}
    return advise(Request(shape, machine, **asked))


def every_answer() -> list[tuple[str, Request, Answer]]:
    shape = shape_of_config(tiny_llama().config)
    found = []
    swapped = {"fixed": {"residual": "swap_host"}, "zero_stage": 2}
    for fields in ({}, {"zero_stage": 1}, swapped):
        advice = answers(shape, **fields)
        assert all(answer.plan is not None for answer in advice.answers)
        swaps = " and swapped residuals" * bool(fields.get("fixed"))
        found += [
            (answer.name + swaps, advice.request, answer)
            for answer in advice.answers
            if not answer.problem.setup.vertical  # of thousands of micro-batches
        ]
    on_ssd = answers(shape, fixed={"mlp_intermediate": "swap_ssd"}, cpu_adam=False).best
    found.append(("activations on nvme", found[0][1], on_ssd))
    no_masters = tuple(replace(mode, master_weights="none") for mode in advice.request.modes)
    beside = answers(shape, lossy_modes=no_masters, offload_param="none")
    found += [
        (answer.name, beside.request, answer)
        for answer in beside.answers
        if answer.is_lossy and answer.problem.setup.offload_optimizer != "none"
    ]
    less = OptimizerMode("lowrank_adamw", rank=8, master_weights="none", state_dtype="bf16")
    inputs = {"fixed": ROUNDED_INPUTS, "offload_param": "cpu", "zero_stage": 3, "global_batch": 6}
    in_order = answers(shape, modes=(less,), cpu_adam=False, **inputs)
    found += [(a.name, in_order.request, a) for a in in_order.answers]
    assert {a.problem.setup.vertical for a in in_order.answers} == {True, False}
    others = OptimizerMode(method="apollo", rank=8), OptimizerMode(method="muon", rank="full")
    for mode in (less, replace(less, weight_dtype="int8"), *others):
        advice = answers(shape, modes=(mode,), cpu_adam=False, zero_stage=2)
        found.append((advice.best.name, advice.request, advice.best))
    return found


def train_all(paths: dict[str, str]) -> dict[str, dict[str, Any]]:
    return {name: train(path, None) for name, path in paths.items()}


@needs_async_io
def test_every_recommendation_trains(ranks: Ranks, tmp_path: Path) -> None:
    paths, written = {}, {}
    for number, (name, request, answer) in enumerate(every_answer()):
        config = deepspeed_json(request, answer, nvme_path=str(tmp_path / "ssd"))
        paths[name] = str(tmp_path / f"{number}.json")
        Path(paths[name]).write_text(json.dumps(config))
        written[name] = (config, answer)
    blocks = [c["zero_optimization"].get("offload_optimizer") for c, _ in written.values()]
    assert {block and block["device"] for block in blocks} == {None, "cpu", "nvme"}
    (found,) = ranks.run(train_all, 1, paths)
    for name, (config, answer) in written.items():
        result, host = found[name], answer.estimate.memory["host"]
        assert all(torch.isfinite(torch.tensor(result["losses"]))), name
        assert result["is_ours"] == (not answer.is_stock) == ("hmt" in config), name
        if answer.is_stock:
            continue
        setup = answer.problem.setup
        if setup.offload_optimizer != "none":
            assert result["overlap"] == setup.overlap, name
        for kind in ("pools", "state buffers"):
            assert host.get(kind, 0) == result[kind], (name, kind)
        assert ("host_memory" in config["hmt"]["activations"]) == ("staging" in host), name
        if "staging" in host:
            assert result["activations"]["activation_staging_bytes"] == host["staging"], name
            assert result["activations"]["activation_peak_host_bytes"] > 0 or "nvme" in name
