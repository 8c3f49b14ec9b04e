"""JSONs as DeepSpeed's and Hugging Face's documentation and the common trainers publish them, plus the block.

Each trains two steps, or is refused with the change to make. The change of the README is applied: the
optimizer's type, or a section for it where the form has none, and the block.
"""

from __future__ import annotations

import copy
import json
import re
from math import isfinite
from pathlib import Path
from typing import Any

import pytest
from harness import Ranks
from hf_runs import forget, rows
from training import global_batch, loss_of, make_engine, tiny_llama

import hmt_deepspeed

BATCHES = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "wall_clock_breakdown": False,
}
SCALING = {
    "loss_scale": 0,
    "loss_scale_window": 1000,
    "initial_scale_power": 16,
    "hysteresis": 2,
    "min_loss_scale": 1,
}
ADAMW = {
    "type": "AdamW",
    "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
}
WARMUP = {
    "type": "WarmupLR",
    "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
}
CPU = {"device": "cpu", "pin_memory": True}
ZERO2 = {
    "stage": 2,
    "allgather_partitions": True,
    "allgather_bucket_size": 2e8,
    "overlap_comm": True,
    "reduce_scatter": True,
    "reduce_bucket_size": 2e8,
    "contiguous_gradients": True,
}
ZERO3 = {
    "stage": 3,
    "overlap_comm": True,
    "contiguous_gradients": True,
    "sub_group_size": 1e9,
    "reduce_bucket_size": "auto",
    "stage3_prefetch_bucket_size": "auto",
    "stage3_param_persistence_threshold": "auto",
    "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": 1e9,
    "stage3_gather_16bit_weights_on_model_save": True,
}
NVME = {"device": "nvme", "nvme_path": "/nvme", "pin_memory": True, "buffer_count": 4}
FP16 = {"fp16": {"enabled": "auto", **SCALING}}
BF16 = {"bf16": {"enabled": True}}
HUGGING_FACE: dict[str, dict[str, Any]] = {
    "transformers, zero2": FP16
    | {"optimizer": ADAMW, "scheduler": WARMUP, "zero_optimization": ZERO2},
    "transformers, zero2, offload": FP16
    | {
        "optimizer": ADAMW,
        "scheduler": WARMUP,
        "zero_optimization": {**ZERO2, "offload_optimizer": CPU},
    },
    "transformers, zero3": BF16
    | {"optimizer": ADAMW, "scheduler": WARMUP, "zero_optimization": ZERO3},
    "transformers, zero3, offload": BF16
    | {
        "optimizer": ADAMW,
        "scheduler": WARMUP,
        "zero_optimization": {**ZERO3, "offload_optimizer": CPU, "offload_param": CPU},
    },
    "transformers, zero3, nvme": BF16
    | {
        "optimizer": ADAMW,
        "zero_optimization": {**ZERO3, "offload_optimizer": NVME, "offload_param": NVME},
        "aio": {"block_size": 262144, "queue_depth": 32, "single_submit": False},
    },
    "llama-factory, zero0": FP16
    | {"zero_allow_untested_optimizer": True, "zero_optimization": {**ZERO2, "stage": 0}},
    "llama-factory, zero3, offload": FP16
    | BF16
    | {
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {**ZERO3, "offload_optimizer": CPU, "offload_param": CPU},
    },
    "axolotl, zero1": BF16 | {"zero_optimization": {"stage": 1, "overlap_comm": True}},
    "axolotl, zero3, offload all": BF16
    | {
        "fp16": {"enabled": "auto", "auto_cast": False, **SCALING, "initial_scale_power": 32},
        "zero_optimization": {
            **ZERO3,
            "offload_optimizer": CPU,
            "offload_param": CPU,
            "sub_group_size": 0,
            "stage3_max_live_parameters": 0,
            "stage3_max_reuse_distance": 0,
        },
    },
}
ADAM = {
    "type": "Adam",
    "params": {"lr": 1e-3, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7},
}
TUTORIAL = {
    "train_batch_size": 4,
    "steps_per_print": 2000,
    "optimizer": ADAM,
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.001, "warmup_num_steps": 1000},
    },
    "gradient_clipping": 1.0,
    "prescale_gradients": False,
    "wall_clock_breakdown": False,
}
DEEPSPEED: dict[str, dict[str, Any]] = {
    "getting started": {
        "train_batch_size": 8,
        "gradient_accumulation_steps": 1,
        "optimizer": {"type": "Adam", "params": {"lr": 0.00015}},
        "fp16": {"enabled": True},
    },
    "cifar": TUTORIAL
    | {
        "fp16": {"enabled": True, "fp16_master_weights_and_grads": False, **SCALING},
        "zero_optimization": {**ZERO2, "cpu_offload": False},
    },
    "cifar, bf16": TUTORIAL | BF16 | {"zero_optimization": ZERO2},
    "zero tutorial, stage 1": TUTORIAL
    | BF16
    | {"zero_optimization": {"stage": 1, "reduce_bucket_size": 5e8}},
    "zero-infinity": TUTORIAL
    | BF16
    | {
        "zero_optimization": {
            "stage": 3,
            "contiguous_gradients": True,
            "stage3_max_live_parameters": 1e9,
            "stage3_max_reuse_distance": 1e9,
            "stage3_prefetch_bucket_size": 1e7,
            "stage3_param_persistence_threshold": 1e5,
            "reduce_bucket_size": 1e7,
            "sub_group_size": 1e9,
            "offload_optimizer": {"device": "cpu"},
            "offload_param": {"device": "cpu"},
        },
    },
    "adam's own keys": TUTORIAL
    | BF16
    | {
        "optimizer": {
            "type": "Adam",
            "params": {**ADAM["params"], "torch_adam": True, "adam_w_mode": True},  # type: ignore[dict-item]
        },
    },
    "zero++": TUTORIAL
    | BF16
    | {
        "zero_optimization": {
            "stage": 3,
            "zero_quantized_weights": True,
            "zero_hpz_partition_size": 8,
            "zero_quantized_gradients": True,
        },
    },
    "autocast": TUTORIAL
    | {
        "torch_autocast": {"enabled": True, "dtype": "bfloat16"},
        "zero_optimization": {"stage": 2},
    },
}
REFUSED = {  # the change to make
    "transformers, zero3, nvme": r'offload_param.device is .nvme.*use "cpu"',
    "adam's own keys": r"optimizer\.params\.torch_adam is True.*Remove it.*adam_w_mode",
    "zero++": r"zero_quantized_weights is True.*Remove the key.*zero_hpz_partition_size is 8",
}


def with_block(published: dict[str, Any]) -> dict[str, Any]:
    config = copy.deepcopy(published)
    config.setdefault("optimizer", copy.deepcopy(ADAMW))["type"] = "HMT"
    return config | {"hmt": {"optimizer": {"rank": 4}}}


def trained_by_trainer(config: dict[str, Any], folder: Path, precision: str) -> Any:
    from transformers import Trainer, TrainingArguments

    forget()
    path = folder / "ds.json"
    path.write_text(json.dumps(BATCHES | config))
    args = TrainingArguments(
        output_dir=str(folder),
        deepspeed=str(path),
        per_device_train_batch_size=2,
        max_steps=2,
        logging_steps=1,
        warmup_steps=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        **{precision: True},
    )
    run = Trainer(model=tiny_llama(layers=1), args=args, train_dataset=rows(8))
    run.train()
    losses = [entry["loss"] for entry in run.state.log_history if "loss" in entry]
    return run.deepspeed, losses


def trained_by_engine(config: dict[str, Any]) -> Any:
    engine = make_engine(config, tiny_llama(layers=1))
    losses = []
    for step in range(2):
        loss = loss_of(engine, global_batch(step)[: engine.train_micro_batch_size_per_gpu()])
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return engine, losses


def outcomes(folder: Path) -> dict[str, Any]:
    """Per form the error, or what ran; then the forms without an optimizer, given the block alone."""
    from deepspeed.accelerator import get_accelerator

    get_accelerator().is_fp16_supported = lambda: True
    hmt_deepspeed.register()
    found: dict[str, Any] = {}

    def outcome(train: Any, *args: Any) -> Any:
        try:
            engine, losses = train(*args)
        except (ValueError, TypeError, AssertionError) as error:
            return f"{type(error).__name__}: {error}"
        ran = {
            "losses": losses,
            "stage": engine.optimizer.settings.stage,
            "bf16": engine.bfloat16_enabled(),
            "fp16": engine.fp16_enabled(),
            "on_host": engine.optimizer.zero.host is not None,
            "matrices": len(engine.optimizer.zero.low_rank),
        }
        engine.destroy()
        return ran

    for name, published in HUGGING_FACE.items():
        precision = "bf16" if "bf16" in published else "fp16"
        found[name] = outcome(trained_by_trainer, with_block(published), folder, precision)
        if "optimizer" not in published:
            alone = {**published, "hmt": {}}
            found[f"{name}, block alone"] = outcome(trained_by_trainer, alone, folder, precision)
    for name, published in DEEPSPEED.items():
        found[name] = outcome(trained_by_engine, with_block(published))
    return found


@pytest.fixture(scope="module")
def found(ranks: Ranks, tmp_path_factory: Any) -> dict[str, Any]:
    ranks.preload("transformers.trainer")
    return ranks.run(outcomes, 1, tmp_path_factory.mktemp("published"))[0]


FORMS = HUGGING_FACE | DEEPSPEED


@pytest.mark.parametrize("name", [name for name in FORMS if name not in REFUSED])
def test_it_trains(found: dict[str, Any], name: str) -> None:
    ran, published = found[name], FORMS[name]
    assert isinstance(ran, dict), ran
    zero = published.get("zero_optimization", {"stage": 0})
    assert ran["stage"] == zero["stage"]
    assert ran["on_host"] == ("offload_optimizer" in zero)
    by_section = "bf16" in published, "fp16" in published and "bf16" not in published
    assert (ran["bf16"], ran["fp16"]) == by_section
    assert ran["matrices"] == 7
    assert len(ran["losses"]) == 2
    assert all(map(isfinite, ran["losses"]))


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_with_the_change_to_make(found: dict[str, Any], name: str) -> None:
    assert found[name].startswith("ValueError: ")
    assert re.search(REFUSED[name], found[name], re.DOTALL), found[name]


def test_the_block_alone_names_the_optimizer_to_add(found: dict[str, Any]) -> None:
    alone = [text for name, text in found.items() if name.endswith("block alone")]
    assert len(alone) == 4
    for text in alone:
        assert '"optimizer": {"type": "HMT", ...}' in text


def test_fields_of_the_block_among_the_parameters_are_refused(ranks: Ranks) -> None:
    """They reach the torch optimizer that the engine takes its groups from, and nothing else."""
    assert "Give it as hmt.optimizer.rank." in ranks.run(misplaced, 1)[0]


def misplaced() -> str:
    config = with_block(DEEPSPEED["cifar, bf16"])
    config["optimizer"]["params"]["rank"] = 8
    with pytest.raises(ValueError, match=r"optimizer\.params\.rank is 8") as refusal:
        make_engine(config, tiny_llama(layers=1))
    return str(refusal.value)
