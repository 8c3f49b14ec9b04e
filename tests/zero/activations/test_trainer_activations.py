"""``hmt.activations`` under Hugging Face's ``Trainer``, evaluated and saved in the middle of training."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from harness import Ranks
from training import LENGTH, VOCAB, ds_config, tiny_llama

LOSSLESS = {
    "policy": {"attention_output": "keep", "mlp_intermediate": "recompute", "residual": "recompute"}
}
# name -> (section, gradient_checkpointing)
RUNS: dict[str, tuple[dict[str, Any] | None, bool]] = {
    "without": (None, False),
    "automatic": (LOSSLESS, False),
    "asked for": (LOSSLESS, True),
}
STEPS, MIDDLE, ROWS = 4, 2, 24


def _rows(seed: int, count: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(0, VOCAB, (count, LENGTH), generator=generator)
    return [{"input_ids": row, "labels": row} for row in rows]


def _config(section: dict[str, Any] | None) -> dict[str, Any]:
    """As a user of Trainer writes it."""
    config = ds_config(2, gas=3)
    config["optimizer"]["params"] = dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")
    for key in (
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "gradient_clipping",
    ):
        config[key] = "auto"
    if section is not None:
        config["hmt"]["activations"] = copy.deepcopy(section)
    return config


def _run(folder: str, section: dict[str, Any] | None, checkpointed: bool) -> dict[str, Any]:
    from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

    found: dict[str, Any] = {"held in evaluation": []}

    class Middle(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            found["metrics"] = trainer.model_wrapped.hmt_metrics.read()
            if state.global_step == MIDDLE:
                trainer.save_model(folder)
                found["middle"] = {n: w.clone() for n, w in trainer.model.state_dict().items()}

        def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            activations = trainer.model_wrapped.hmt_activations
            if activations is not None:
                found["held in evaluation"].append(activations.backend.held_bytes)

    arguments = TrainingArguments(
        output_dir=folder,
        deepspeed=_config(section),
        gradient_checkpointing=checkpointed,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=3,
        max_steps=STEPS,
        learning_rate=3e-3,
        lr_scheduler_type="constant",
        eval_strategy="steps",
        eval_steps=MIDDLE,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = Trainer(
        model=tiny_llama(),
        args=arguments,
        train_dataset=_rows(0, ROWS),
        eval_dataset=_rows(1, 8),
        callbacks=[Middle()],
    )
    trainer.train()
    log = trainer.state.log_history
    found["losses"] = [entry["loss"] for entry in log if "loss" in entry]
    found["evaluations"] = [entry["eval_loss"] for entry in log if "eval_loss" in entry]
    saved: Any = AutoModelForCausalLM.from_pretrained(folder)
    found["saved"] = dict(saved.state_dict())
    found["weights"] = {n: w.clone() for n, w in trainer.model.state_dict().items()}
    trainer.model_wrapped.destroy()
    return found


def trained(folder: str) -> dict[str, Any]:
    import hmt_deepspeed

    hmt_deepspeed.register()
    return {
        name: _run(f"{folder}/{index}", *options)
        for index, (name, options) in enumerate(RUNS.items())
    }


@pytest.fixture(scope="module")
def runs(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return ranks.run(trained, 1, str(tmp_path_factory.mktemp("trainer")))[0]


@pytest.mark.parametrize("name", ["automatic", "asked for"])
def test_training_and_evaluation_are_the_same(runs: dict[str, Any], name: str) -> None:
    found, expected = runs[name], runs["without"]
    assert len(expected["losses"]) == STEPS
    assert len(expected["evaluations"]) == STEPS // MIDDLE
    assert found["losses"] == expected["losses"]
    assert found["evaluations"] == expected["evaluations"]
    for key in ("middle", "weights"):
        assert found[key].keys() == expected[key].keys()
        assert all(torch.equal(found[key][n], expected[key][n]) for n in expected[key])


@pytest.mark.parametrize("name", ["automatic", "asked for"])
def test_the_policy_is_what_is_carried_out(runs: dict[str, Any], name: str) -> None:
    metrics = runs[name]["metrics"]
    rerun = set(metrics["activation_rerun_flops_per_component"])
    assert rerun == {
        "attention_qkv",
        "mlp_intermediate",
        "residual",
        "projected_inputs",
    }  # no attention
    held = metrics["activation_bytes_per_component"]
    assert set(held) == {"layer_input", "attention_output", "layernorm", "lm_head"}
    evaluated = runs[name]["held in evaluation"]
    assert evaluated
    assert not any(evaluated)


@pytest.mark.parametrize("name", RUNS)
def test_a_model_saved_in_the_middle_loads(runs: dict[str, Any], name: str) -> None:
    found = runs[name]
    assert found["saved"].keys() == found["middle"].keys()
    assert all(torch.equal(found["saved"][n], w) for n, w in found["middle"].items())
    assert not torch.equal(found["middle"]["lm_head.weight"], found["weights"]["lm_head.weight"])
