"""Model, data and the life of a run that the tests with Hugging Face's libraries share."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch import Tensor, nn
from training import VOCAB, tiny_llama

# Every value that Trainer and Accelerate can fill in is left to them.
AUTO = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "optimizer": {
        "type": "HMT",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "total_num_steps": "auto",
            "warmup_min_lr": "auto",
            "warmup_max_lr": "auto",
            "warmup_num_steps": "auto",
        },
    },
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto", "initial_scale_power": 4},
    "zero_optimization": {
        "overlap_comm": True,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "hmt": {
        "optimizer": {"rank_candidates": [4, 8], "energy_threshold": 0.6, "update_interval": 3}
    },
}


def auto_config(stage: int, **changes: Any) -> dict[str, Any]:
    zero = {**AUTO["zero_optimization"], "stage": stage}  # type: ignore[dict-item]
    return {**AUTO, "zero_optimization": zero, **changes}


def stock_twin(config: dict[str, Any]) -> dict[str, Any]:
    """The same JSON for DeepSpeed's own AdamW (torch's, which compiles nothing)."""
    params = {**config["optimizer"]["params"], "torch_adam": True}
    kept = {key: value for key, value in config.items() if key != "hmt"}
    return {**kept, "optimizer": {"type": "AdamW", "params": params}}


def save_tiny_model(folder: Path) -> None:
    """What ``from_pretrained`` reads: weights as in training.py."""
    tiny_llama().save_pretrained(folder)


def rows(count: int, first: int = 0, low: int = 0, high: int = VOCAB) -> list[dict[str, list[int]]]:
    """Rows of 16 tokens from low to high, each its own labels, the same wherever they are drawn."""
    drawn = []
    for index in range(first, first + count):
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(low, high, (16,), generator=generator).tolist()
        drawn.append({"input_ids": tokens, "labels": tokens})
    return drawn


def whole_weights(model: nn.Module) -> dict[str, Tensor]:
    """Weights as forward sees them, gathered where stage 3 has partitioned them."""
    found = {}
    for name, param in model.named_parameters():
        with deepspeed.zero.GatheredParameters([param]):
            found[name] = param.detach().clone()
    return found


def plain_weights(folder: Path) -> dict[str, Tensor]:
    """What transformers alone, without DeepSpeed, loads from a folder."""
    from transformers import AutoModelForCausalLM

    forget()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    return {name: param.detach() for name, param in model.named_parameters()}


def forget() -> None:
    """End a run: what transformers and Accelerate remember of it would reach into the next."""
    from accelerate.state import AcceleratorState
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    AcceleratorState._reset_state(reset_partial_state=True)
    unset_hf_deepspeed_config()
    gc.collect()


def logged(run: Any, *keys: str) -> list[tuple[float, ...]]:
    return [tuple(h[k] for k in keys) for h in run.state.log_history if keys[0] in h]


def tokenizer() -> Any:
    """Words w0 to w57, of the tiny model's vocabulary."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<eos>": 1, "<unk>": 2} | {f"w{i}": i + 3 for i in range(58)}
    inner = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
