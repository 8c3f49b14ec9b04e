"""Hugging Face's Trainer with a JSON full of "auto": evaluation, early stopping, resume, saved models."""

from __future__ import annotations

import json
from math import isfinite
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Ranks
from hf_runs import (
    auto_config,
    forget,
    plain_weights,
    rows,
    save_tiny_model,
    stock_twin,
    whole_weights,
)
from training import furthest

import hmt_deepspeed
from hmt_deepspeed.config import read_json_config

EXAMPLE = Path(__file__).resolve().parents[2] / "ds_configs" / "trainer.json"
BY_TRAINER = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
)
ARGUMENTS: dict[str, Any] = {
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "learning_rate": 3e-3,
    "weight_decay": 0.05,
    "adam_beta1": 0.85,
    "adam_beta2": 0.95,
    "adam_epsilon": 1e-7,
    "max_grad_norm": 0.7,
    "warmup_steps": 3,
    "max_steps": 12,
    "logging_steps": 1,
    "report_to": [],
    "use_cpu": True,
    "disable_tqdm": True,
    "seed": 5,
}
WATCHED: dict[str, Any] = {
    "eval_strategy": "steps",
    "eval_steps": 3,
    "save_strategy": "steps",
    "save_steps": 3,
    "load_best_model_at_end": True,
    "metric_for_best_model": "eval_loss",
    "greater_is_better": False,
    "restore_callback_states_from_checkpoint": True,
}


def trainer(
    folder: Path,
    precision: str,
    name: str,
    config: str = "hmt",
    by: Any = None,
    model: Any = None,
    **arguments: Any,
) -> Any:
    """Trained on one half of the vocabulary and evaluated on the other, so that evaluation gets worse."""
    from transformers import (
        AutoModelForCausalLM,
        EarlyStoppingCallback,
        Trainer,
        TrainingArguments,
    )

    forget()
    given = {**ARGUMENTS, **arguments} | ({} if precision == "fp32" else {precision: True})
    path = folder / f"{config}.json"
    args = TrainingArguments(output_dir=str(folder / name), deepspeed=str(path), **given)
    watched = args.load_best_model_at_end
    if model is None:
        model = AutoModelForCausalLM.from_pretrained(folder / "start", dtype=torch.float32)
    return Trainer(
        model=model,
        args=args,
        train_dataset=rows(64, high=30),
        eval_dataset=rows(5, 1000, low=30) if watched else None,  # one rank gets one more
        callbacks=[EarlyStoppingCallback(2)] if watched else [],
        optimizer_cls_and_kwargs=by,
    )


def history(run: Any, *keys: str) -> list[tuple[float, ...]]:
    return [tuple(h[k] for k in keys) for h in run.state.log_history if keys[0] in h]


def runs(folder: Path, precision: str, short_ones: tuple[str, ...]) -> dict[str, Any]:
    """One run that stops early, one that resumes it, one that neither evaluates nor saves; then short ones, of:
    two of AdamW, the example in ds_configs, and HMT as the Trainer's own optimizer class."""
    from deepspeed.accelerator import get_accelerator

    get_accelerator().is_fp16_supported = lambda: True
    hmt_deepspeed.register()
    stopped = trainer(folder, precision, "stopped", **WATCHED)
    stopped.train()
    engine = stopped.deepspeed
    found: dict[str, Any] = {
        "engine": type(engine).__name__,
        "optimizer": type(engine.optimizer).__name__,
        "stage": engine.optimizer.settings.stage,
        "dtype": engine.optimizer.settings.model_dtype,
        "matrices": len(engine.optimizer.zero.low_rank),
        "batches": (
            engine.train_batch_size(),
            engine.train_micro_batch_size_per_gpu(),
            engine.gradient_accumulation_steps(),
        ),
        "clip": engine.optimizer.settings.clip,
        "group": {k: v for k, v in engine.optimizer.param_groups[0].items() if k != "params"},
        "steps": history(stopped, "loss", "grad_norm", "learning_rate"),
        "evaluations": history(stopped, "eval_loss"),
        "best": Path(stopped.state.best_model_checkpoint).name,
        "weights": whole_weights(stopped.model),
    }
    again = stopped.evaluate()["eval_loss"]
    stopped.save_model(str(folder / "saved"))
    engine.destroy()

    resumed = trainer(folder, precision, "resumed", **WATCHED)
    resumed.train(resume_from_checkpoint=str(folder / "stopped" / "checkpoint-6"))
    resumed.deepspeed.destroy()
    bare = trainer(folder, precision, "bare")
    bare.train()
    found |= {
        "evaluated_again": again,
        "resumed_steps": history(resumed, "loss", "grad_norm", "learning_rate"),
        "resumed_evaluations": history(resumed, "eval_loss"),
    }
    found["bare_steps"] = history(bare, "loss", "grad_norm", "learning_rate")
    bare.deepspeed.destroy()
    by = (hmt_deepspeed.HMT, {"lr": 3e-3, "rank": 4})
    for name in short_ones:
        given = by if name == "class" else None
        short = trainer(folder, precision, name, config=name, by=given, max_steps=6)
        short.train()
        found[name] = history(short, "loss", "grad_norm", "learning_rate")
        if name == "class":
            groups = short.deepspeed.optimizer.param_groups
            found["decay"] = [(len(g["params"]), g["weight_decay"]) for g in groups]
            found["ranks"] = {e.matrix.rank for e in short.deepspeed.optimizer.zero.low_rank}
        short.deepspeed.destroy()
    return found


def trained(ranks: Ranks, tmp_path_factory: Any, case: Any, *short_ones: str) -> dict[str, Any]:
    stage, world, precision = case
    folder = tmp_path_factory.mktemp("trainer")
    save_tiny_model(folder / "start")
    configs = {
        "hmt": auto_config(stage),
        "adamw": auto_config(stage, hmt={"optimizer": {"method": "adamw"}}),
        "stock": stock_twin(auto_config(stage)),
        "example": read_json_config(EXAMPLE),
        "class": {"zero_optimization": {"stage": stage}, **dict.fromkeys(BY_TRAINER, "auto")},
    }
    configs["class"]["bf16"] = {"enabled": "auto"}
    for name, config in configs.items():
        (folder / f"{name}.json").write_text(json.dumps(config))
    ranks.preload("transformers.trainer")
    found = ranks.run(runs, world, folder, precision, short_ones)[0]
    return found | {"folder": folder, "stage_asked": stage, "world": world, "precision": precision}


@pytest.fixture(scope="module")
def zero2_fp32(ranks: Ranks, tmp_path_factory: Any) -> dict[str, Any]:
    return trained(ranks, tmp_path_factory, (2, 1, "fp32"), "adamw", "stock", "example")


@pytest.fixture(scope="module")
def zero2_fp16(ranks: Ranks, tmp_path_factory: Any) -> dict[str, Any]:
    return trained(ranks, tmp_path_factory, (2, 1, "fp16"), "adamw", "stock", "example")


@pytest.fixture(scope="module")
def zero3_bf16(ranks: Ranks, tmp_path_factory: Any) -> dict[str, Any]:
    return trained(ranks, tmp_path_factory, (3, 2, "bf16"), "class")


FP16 = pytest.param("zero2_fp16", marks=pytest.mark.slow)


@pytest.fixture(scope="module", params=["zero2_fp32", FP16, "zero3_bf16"])
def run(request: Any) -> dict[str, Any]:
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module", params=["zero2_fp32", FP16])
def run_with_short_ones(request: Any) -> dict[str, Any]:
    return request.getfixturevalue(request.param)


def test_every_auto_reaches_the_engine(run: dict[str, Any]) -> None:
    assert (run["engine"], run["optimizer"]) == ("HMTEngine", "HMTZeroOptimizer")
    assert run["stage"] == run["stage_asked"]
    assert run["matrices"] == 14
    dtypes = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
    assert run["dtype"] == dtypes[run["precision"]]
    assert run["batches"] == (4 * run["world"], 2, 2)
    assert run["clip"] == 0.7
    group = run["group"]
    assert (tuple(group["betas"]), group["eps"], group["weight_decay"]) == (
        (0.85, 0.95),
        1e-7,
        0.05,
    )


def test_it_learns_by_the_schedule_and_logs_the_norm(run: dict[str, Any]) -> None:
    steps = run["steps"]
    assert len(steps) == 9
    assert run["bare_steps"][-1][0] < steps[0][0]
    assert all(isfinite(norm) and norm > 0 for _, norm, _ in steps)
    rates = [rate for *_, rate in steps]
    assert max(rates) == pytest.approx(3e-3)
    assert rates[0] < rates[1] < rates[2]
    assert rates[-1] < 3e-3


def test_early_stopping_ends_with_the_best_model(run: dict[str, Any]) -> None:
    evaluations = [loss for (loss,) in run["evaluations"]]
    assert len(evaluations) == 3
    assert evaluations == sorted(evaluations)
    assert run["best"] == "checkpoint-3"
    assert run["evaluated_again"] == pytest.approx(evaluations[0], rel=1e-6)
    best = plain_weights(run["folder"] / "stopped" / "checkpoint-3")
    last = plain_weights(run["folder"] / "stopped" / "checkpoint-9")
    for name, weight in best.items():
        assert torch.equal(run["weights"][name], weight), name
    assert any(not torch.equal(best[name], last[name]) for name in best)


def test_resuming_repeats_the_run(run: dict[str, Any]) -> None:
    assert run["resumed_steps"] == run["steps"]
    assert run["resumed_evaluations"] == run["evaluations"]
    first, second = (
        plain_weights(run["folder"] / n / "checkpoint-9") for n in ("stopped", "resumed")
    )
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_evaluating_and_saving_change_nothing(run: dict[str, Any]) -> None:
    assert run["bare_steps"][:9] == run["steps"]


def test_a_saved_model_is_an_ordinary_one(run: dict[str, Any]) -> None:
    saved = plain_weights(run["folder"] / "saved")
    start = plain_weights(run["folder"] / "start")
    assert all(torch.equal(run["weights"][name], weight) for name, weight in saved.items())
    moved = furthest(saved, start)
    assert moved > 1e-3  # 16-bit rounding of the start alone is below 2e-4


def test_adamw_is_deepspeeds_own(run_with_short_ones: dict[str, Any]) -> None:
    """Sums in another order move an fp32 loss by an ulp or two, and flip the rounding of a 16-bit weight."""
    run = run_with_short_ones
    tolerance = 1e-6 if run["precision"] == "fp32" else 1e-4
    assert len(run["stock"]) == 6
    for ours, stock in zip(run["adamw"], run["stock"], strict=True):
        assert ours[0] == pytest.approx(stock[0], rel=tolerance)
        assert ours[1] == pytest.approx(stock[1], rel=10 * tolerance)
        assert ours[2] == stock[2]


def test_the_example_trains(run_with_short_ones: dict[str, Any]) -> None:
    losses = [loss for loss, *_ in run_with_short_ones["example"]]
    assert losses[-1] < losses[0]


def test_hmt_as_the_trainers_optimizer_class(zero3_bf16: dict[str, Any]) -> None:
    """Trainer's groups: 16 matrices decay, 5 norms do not."""
    losses = [loss for loss, *_ in zero3_bf16["class"]]
    assert losses[-1] < losses[0]
    assert zero3_bf16["decay"] == [(16, 0.05), (5, 0.0)]
    assert zero3_bf16["ranks"] == {4}


def one_after_the_other(folder: Path) -> dict[str, Any]:
    """Two Trainers on one model, the first neither destroyed nor dropped; then one on a copy of what the first left."""
    from transformers import AutoModelForCausalLM

    hmt_deepspeed.register()
    first = trainer(folder, "fp32", "first", max_steps=4)
    first.train()
    between = whole_weights(first.model)
    second = trainer(folder, "fp32", "second", model=first.model, max_steps=4)
    second.train()
    found = {"second": history(second, "loss", "grad_norm", "learning_rate")}
    found["moved"] = furthest(whole_weights(second.model), between)
    with pytest.raises(RuntimeError) as refused:
        first.deepspeed.step()
    found["refused"] = str(refused.value)
    second.deepspeed.destroy()
    forget()  # or it is loaded in parts, at stage 3
    copy = AutoModelForCausalLM.from_pretrained(folder / "start", dtype=torch.float32)
    copy.load_state_dict(between, strict=False)  # tied weights come once
    alone = trainer(folder, "fp32", "alone", model=copy, max_steps=4)
    alone.train()
    alone.deepspeed.destroy()
    return found | {"alone": history(alone, "loss", "grad_norm", "learning_rate")}


@pytest.mark.parametrize("stage", [2, 3])
def test_a_second_trainer_takes_the_model_over(ranks: Ranks, tmp_path: Path, stage: int) -> None:
    save_tiny_model(tmp_path / "start")
    (tmp_path / "hmt.json").write_text(json.dumps(auto_config(stage)))
    ranks.preload("transformers.trainer")
    found = ranks.run(one_after_the_other, 1, tmp_path)[0]
    assert len(found["second"]) == 4
    assert found["second"] == found["alone"]
    assert found["moved"] > 1e-3
    assert "was taken apart when a new engine" in found["refused"]
