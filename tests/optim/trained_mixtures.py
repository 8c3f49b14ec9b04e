"""Small mixtures of transformers, tokens that they learn, and their training under HMT."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor, nn

from hmt_deepspeed.optim.hmt import HMT

WIDTHS: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_experts_per_tok": 2,
    "use_cache": False,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", {"num_local_experts": 4}),
    "qwen3": ("Qwen3Moe", {"num_experts": 4, "moe_intermediate_size": 48, "head_dim": 16}),
    "gpt_oss": (
        "GptOss",
        {"num_local_experts": 4, "head_dim": 16, "layer_types": ["full_attention"] * 2},
    ),
}
OPTIONS: dict[str, Any] = {
    "lr": 3e-3,
    "weight_decay": 0.1,
    "rank": 8,
    "update_interval": 4,
    "max_full_gradient_bytes": 2**30,
}
BASES = ["shared", "own", "auto"]


def mixture(family: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    name, more = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**WIDTHS, **more)
    torch.manual_seed(0)
    model: nn.Module = getattr(transformers, f"{name}ForCausalLM")(config)
    return model.to(dtype)


def batch(step: int) -> Tensor:
    """Tokens that follow from the one before, but for some noise."""
    generator = torch.Generator().manual_seed(step % 3)
    tokens = torch.randint(64, (4, 24), generator=generator)
    for place in range(1, 24):
        tokens[:, place] = (3 * tokens[:, place - 1] + 1) % 64
    return tokens


def train(model: nn.Module, optimizer: HMT, steps: range, micro_batches: int = 1) -> list[float]:
    losses = []
    for step in steps:
        optimizer.zero_grad()
        for rows in batch(step).chunk(micro_batches):
            loss = model(input_ids=rows, labels=rows).loss / micro_batches
            loss.backward()
        losses.append(float(loss.detach()) * micro_batches)
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
    return losses
