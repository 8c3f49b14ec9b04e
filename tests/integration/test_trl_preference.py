"""TRL's recipes that hold a second model, whose engine is built of the same JSON without an optimizer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Ranks
from hf_runs import auto_config, forget, logged, rows, save_tiny_model, tokenizer, whole_weights
from training import furthest

import hmt_deepspeed

COMMON: dict[str, Any] = {
    "learning_rate": 1e-2,
    "max_steps": 4,
    "logging_steps": 1,
    "save_strategy": "no",
    "per_device_train_batch_size": 2,
    "report_to": [],
    "use_cpu": True,
    "bf16": False,
    "disable_tqdm": True,
}


def loaded(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder / "start", dtype=torch.float32)


def words(first: int, count: int = 4) -> str:
    return " ".join(f"w{(first + i) % 50}" for i in range(count))


def preferences() -> Any:
    from datasets import Dataset

    return Dataset.from_list(
        [
            {"prompt": words(i), "chosen": words(i + 4), "rejected": words(7 * i + 1)}
            for i in range(8)
        ]
    )


def dpo(folder: Path, **arguments: Any) -> Any:
    from trl import DPOConfig, DPOTrainer

    forget()
    args = DPOConfig(
        output_dir=str(folder / "out"), deepspeed=str(folder / "hmt.json"), **COMMON, **arguments
    )
    return DPOTrainer(
        model=loaded(folder),
        ref_model=None if args.precompute_ref_log_probs else loaded(folder),
        args=args,
        train_dataset=preferences(),
        processing_class=tokenizer(),
    )


def precomputed(folder: Path) -> Any:
    return dpo(folder, precompute_ref_log_probs=True)


def kto(folder: Path) -> Any:
    from datasets import Dataset
    from trl import KTOConfig, KTOTrainer

    forget()
    data = [{"prompt": words(i), "completion": words(3 * i), "label": i % 2 == 0} for i in range(8)]
    args = KTOConfig(output_dir=str(folder / "out"), deepspeed=str(folder / "hmt.json"), **COMMON)
    return KTOTrainer(
        model=loaded(folder),
        ref_model=loaded(folder),
        args=args,
        train_dataset=Dataset.from_list(data),
        processing_class=tokenizer(),
    )


def grpo(folder: Path) -> Any:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    forget()
    args = GRPOConfig(
        output_dir=str(folder / "out"),
        deepspeed=str(folder / "hmt.json"),
        beta=0.1,
        num_generations=2,
        max_completion_length=4,
        **COMMON,
    )
    return GRPOTrainer(
        model=str(folder / "start"),
        reward_funcs=lambda completions, **_: [float(len(set(c))) for c in completions],
        args=args,
        train_dataset=Dataset.from_list([{"prompt": words(i)} for i in range(8)]),
        processing_class=tokenizer(),
    )


def preference_run(recipe: Callable[[Path], Any], folder: Path) -> dict[str, Any]:
    torch.manual_seed(3)
    hmt_deepspeed.register()
    run = recipe(folder)
    start = whole_weights(run.model)
    reference = getattr(run, "ref_model", None)
    run.train()
    reference = getattr(run, "_precompute_engine", None) if reference is None else reference
    return {
        "types": (type(run.deepspeed.optimizer).__name__, type(reference.optimizer).__name__),
        "stage": run.deepspeed.optimizer.settings.stage,
        "losses": logged(run, "loss"),
        "norms": logged(run, "grad_norm"),
        "moved": furthest(whole_weights(run.model), start),
        "reference moved": furthest(whole_weights(reference.module), start),
        "is the model": reference.module is run.model,
    }


RECIPES = [
    (dpo, 3),
    (precomputed, 2),
    (kto, 2),
    (grpo, 3),
    *(
        pytest.param(recipe, stage, marks=pytest.mark.slow)
        for recipe, stage in [(dpo, 2), (precomputed, 3), (kto, 3), (grpo, 2)]
    ),
]


@pytest.mark.parametrize(("recipe", "stage"), RECIPES)
def test_a_reference_stands_beside_the_model_that_trains(
    ranks: Ranks, tmp_path: Path, recipe: Callable[[Path], Any], stage: int
) -> None:
    save_tiny_model(tmp_path / "start")
    config = auto_config(stage)
    config["hmt"] = {**config["hmt"], "activations": {}}
    (tmp_path / "hmt.json").write_text(json.dumps(config))
    ranks.preload("transformers.trainer", "datasets")
    ranks.preload(*(f"trl.trainer.{name}_trainer" for name in ("dpo", "kto", "grpo")))
    found = ranks.run(preference_run, 1, recipe, tmp_path)[0]
    references = {2: "NoneType", 3: "DeepSpeedZeRoOffload"}
    assert found["types"] == ("HMTZeroOptimizer", references[stage])
    assert found["stage"] == stage
    assert len(found["losses"]) == 4
    assert all(norm > 0 for (norm,) in found["norms"])
    assert found["moved"] > 1e-3
    if not found["is the model"]:
        assert found["reference moved"] == 0


# -- evaluate() first ----------------------------------------------------------------------------------


def evaluates_first(folder: Path) -> dict[str, Any]:
    """Then a Trainer of its own trains; one that has evaluated cannot, with DeepSpeed's own optimizer neither."""
    from transformers import Trainer, TrainingArguments

    def trainer() -> Any:
        forget()
        args = TrainingArguments(
            output_dir=str(folder / "out"), deepspeed=str(folder / "hmt.json"), **COMMON
        )
        return Trainer(
            model=loaded(folder), args=args, train_dataset=rows(16), eval_dataset=rows(4)
        )

    hmt_deepspeed.register()
    first = trainer()
    found: dict[str, Any] = {"evaluated": first.evaluate()["eval_loss"]}
    found["predicted"] = first.predict(rows(4)).metrics["test_loss"]
    found["optimizer"] = type(first.deepspeed.optimizer).__name__
    second = trainer()
    second.train()
    found["losses"] = logged(second, "loss")
    found["after"] = second.evaluate()["eval_loss"]
    found["trained by"] = type(second.deepspeed.optimizer).__name__
    return found


def test_evaluate_before_any_training(ranks: Ranks, tmp_path: Path) -> None:
    """At stage 3 alone: below it Trainer itself refuses, whatever the optimizer."""
    save_tiny_model(tmp_path / "start")
    (tmp_path / "hmt.json").write_text(json.dumps(auto_config(3)))
    ranks.preload("transformers.trainer")
    found = ranks.run(evaluates_first, 1, tmp_path)[0]
    assert found["optimizer"] == "DeepSpeedZeRoOffload"
    assert found["evaluated"] == pytest.approx(4.12, abs=0.1)  # of a model that knows nothing
    assert found["predicted"] == found["evaluated"]
    assert found["trained by"] == "HMTZeroOptimizer"
    assert found["after"] < found["evaluated"]
