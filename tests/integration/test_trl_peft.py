"""TRL's SFTTrainer on its example JSON, and PEFT's adapters beside HMT, on a frozen base."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Ranks
from hf_runs import (
    auto_config,
    forget,
    logged,
    plain_weights,
    rows,
    save_tiny_model,
    stock_twin,
    tokenizer,
    whole_weights,
)
from training import furthest

import hmt_deepspeed

EXAMPLE = Path(__file__).resolve().parents[2] / "ds_configs" / "trl.json"
COMMON: dict[str, Any] = {
    "learning_rate": 1e-2,
    "max_steps": 6,
    "logging_steps": 1,
    "eval_strategy": "steps",
    "eval_steps": 3,
    "save_strategy": "steps",
    "save_steps": 3,
    "per_device_train_batch_size": 4,
    "report_to": [],
    "use_cpu": True,
    "disable_tqdm": True,
}


def sft(folder: Path, name: str, **arguments: Any) -> Any:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM
    from trl import SFTConfig, SFTTrainer

    forget()
    texts = [" ".join(f"w{(3 * i + j) % 50}" for j in range(4 + i % 8)) for i in range(64)]
    given = {**COMMON, "bf16": True, "max_length": 16, **arguments}
    args = SFTConfig(output_dir=str(folder / name), deepspeed=str(EXAMPLE), **given)
    data = Dataset.from_list([{"text": text} for text in texts])
    return SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder / "start", dtype=torch.float32),
        args=args,
        train_dataset=data,
        eval_dataset=data.select(range(8)),
        processing_class=tokenizer(),
    )


def sft_runs(folder: Path) -> dict[str, Any]:
    hmt_deepspeed.register()
    run = sft(folder, "run")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.train()
    engine = run.deepspeed
    run.save_model(str(folder / "saved"))
    found: dict[str, Any] = {
        "steps": logged(run, "loss", "grad_norm", "learning_rate"),
        "evaluations": logged(run, "eval_loss"),
        "warnings": [str(w.message) for w in caught],
        "types": (type(engine).__name__, type(engine.optimizer).__name__),
        "stage": engine.optimizer.settings.stage,
        "clip": engine.optimizer.settings.clip,
        "held": engine.hmt_activations.metrics()["activation_bytes_per_component"],
        "matrices": len(engine.optimizer.zero.low_rank),
        "checkpointing": run.args.activation_checkpointing,
        "weights": whole_weights(run.model),
    }
    engine.destroy()
    resumed = sft(folder, "resumed")
    resumed.train(resume_from_checkpoint=str(folder / "run" / "checkpoint-3"))
    found["resumed"] = logged(resumed, "loss", "grad_norm", "learning_rate")
    resumed.deepspeed.destroy()
    packed = sft(folder, "packed", packing=True, max_steps=2, eval_strategy="no")
    packed.train()
    found["packed"] = logged(packed, "loss", "grad_norm")
    return found


@pytest.fixture(scope="module")
def sft_run(ranks: Ranks, tmp_path_factory: Any) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("trl")
    save_tiny_model(folder / "start")
    ranks.preload("transformers.trainer", "datasets", "trl.trainer.sft_trainer")
    return ranks.run(sft_runs, 1, folder)[0] | {"folder": folder}


def test_sft_trains_by_the_example(sft_run: dict[str, Any]) -> None:
    assert sft_run["types"] == ("HMTEngine", "HMTZeroOptimizer")
    assert (sft_run["stage"], sft_run["clip"], sft_run["matrices"]) == (3, 1.0, 14)
    assert sft_run["checkpointing"]  # TRL turns it on by itself; hmt.activations takes its place
    assert sft_run["held"]["mlp_intermediate"] > 0
    losses = [loss for loss, *_ in sft_run["steps"]]
    assert losses[-1] < losses[0]
    assert sft_run["evaluations"][-1] < sft_run["evaluations"][0]
    assert [rate for *_, rate in sft_run["steps"]] == pytest.approx(
        [1e-2 * (5 - step) / 6 for step in range(6)]
    )
    assert not [w for w in sft_run["warnings"] if "lr_scheduler.step()" in w]


def test_sft_resumes_and_saves(sft_run: dict[str, Any]) -> None:
    assert sft_run["resumed"] == sft_run["steps"]
    saved, start = (plain_weights(sft_run["folder"] / name) for name in ("saved", "start"))
    assert all(torch.equal(sft_run["weights"][name], weight) for name, weight in saved.items())
    assert furthest(saved, start) > 1e-3


def test_sft_packs(sft_run: dict[str, Any]) -> None:
    assert len(sft_run["packed"]) == 2
    assert all(loss > 0 and norm > 0 for loss, norm in sft_run["packed"])


# -- PEFT ----------------------------------------------------------------------------------------------


def adapted(folder: Path, name: str, precision: str, config: str = "hmt", **arguments: Any) -> Any:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

    forget()
    given = {**COMMON, **arguments} | ({} if precision == "fp32" else {precision: True})
    path = str(folder / f"{config}.json")
    args = TrainingArguments(output_dir=str(folder / name), deepspeed=path, **given)
    torch.manual_seed(1)  # of the adapters
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(folder / "start", dtype=torch.float32),
        LoraConfig(r=4, target_modules=["q_proj", "down_proj"], modules_to_save=["lm_head"]),
    )
    return Trainer(model=model, args=args, train_dataset=rows(64), eval_dataset=rows(8))


def peft_runs(folder: Path, precision: str) -> dict[str, Any]:
    hmt_deepspeed.register()
    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss"}
    run = adapted(folder, "run", precision, **best)
    run.train()
    run.save_model(str(folder / "saved"))
    found: dict[str, Any] = {
        "steps": logged(run, "loss", "grad_norm"),
        "evaluations": logged(run, "eval_loss"),
        "again": run.evaluate()["eval_loss"],
        "rules": {e.name: e.assignment.reason for e in run.deepspeed.optimizer.zero.param_states},
        "weights": whole_weights(run.model),
    }
    run.deepspeed.destroy()
    resumed = adapted(folder, "resumed", precision)
    resumed.train(resume_from_checkpoint=str(folder / "run" / "checkpoint-3"))
    found["resumed"] = logged(resumed, "loss", "grad_norm")
    found["resumed_weights"] = whole_weights(resumed.model)
    resumed.deepspeed.destroy()
    if precision == "fp32":  # DeepSpeed's own stage 3 takes no fp32 adapters beside a bf16 base
        stock = adapted(folder, "stock", precision, config="stock")
        stock.train()
        found["stock"] = logged(stock, "loss", "grad_norm")
    return found


@pytest.fixture(scope="module", params=[(2, 1, "fp32"), (3, 2, "bf16")], ids=["zero2", "zero3"])
def peft_run(request: Any, ranks: Ranks, tmp_path_factory: Any) -> dict[str, Any]:
    stage, world, precision = request.param
    folder = tmp_path_factory.mktemp("peft")
    save_tiny_model(folder / "start")
    config = auto_config(stage, hmt={})
    for name, written in (("hmt", config), ("stock", stock_twin(config))):
        (folder / f"{name}.json").write_text(json.dumps(written))
    ranks.preload("transformers.trainer", "peft")
    found = ranks.run(peft_runs, world, folder, precision)[0]
    return found | {"folder": folder}


def test_adapters_train_by_adamw_on_a_frozen_base(peft_run: dict[str, Any]) -> None:
    reasons = list(peft_run["rules"].values())
    assert sorted(set(reasons)) == ["'lora_' is left to AdamW", "output head"]
    assert len(reasons) == 9  # A and B of two modules in two layers, and the head's copy
    for ours, stock in zip(
        peft_run["steps"], peft_run.get("stock", peft_run["steps"]), strict=True
    ):
        assert ours == pytest.approx(stock, rel=1e-5)
    start = plain_weights(peft_run["folder"] / "start")
    for name, weight in peft_run["weights"].items():
        plain = name.replace("base_model.model.", "").replace(".base_layer", "")
        if plain in start:
            assert torch.equal(weight, start[plain].to(weight.dtype)), name


def test_adapters_resume(peft_run: dict[str, Any]) -> None:
    assert peft_run["resumed"] == peft_run["steps"]
    assert peft_run["again"] == pytest.approx(min(peft_run["evaluations"])[0], rel=1e-6)


def test_saved_adapters_are_ordinary_ones(peft_run: dict[str, Any]) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    forget()
    base = AutoModelForCausalLM.from_pretrained(peft_run["folder"] / "start")
    loaded = PeftModel.from_pretrained(base, peft_run["folder"] / "saved")
    found = dict(loaded.named_parameters())
    trained = [n for n in found if "lora_" in n or "modules_to_save" in n]
    assert len(trained) == 9
    for name in trained:
        assert torch.equal(
            found[name].to(peft_run["weights"][name].dtype), peft_run["weights"][name]
        )
    assert any(found[name].abs().max() > 0 for name in trained if "lora_B" in name)  # zero at start
