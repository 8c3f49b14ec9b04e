"""The small model and the steps that every case takes."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM  # here, so that forks find it imported

import hmt_deepspeed
from hmt_deepspeed.config.components import PAPER_POLICY
from hmt_deepspeed.planner.hardware import named_machine
from hmt_deepspeed.planner.model.families import shape_of_config
from hmt_deepspeed.planner.model.workload import build_workload
from hmt_deepspeed.planner.solve.plan import uniform_plan

__all__ = [
    "batch",
    "is_vertical",
    "micro_batches",
    "plan_of",
    "raised_by_us",
    "small_model",
    "train_step",
]

VOCAB, LENGTH = 61, 16


def small_model(layers: int = 2, vocabulary: int = VOCAB) -> nn.Module:
    """A grouped-query Llama whose sizes divide by nothing convenient; seeded."""
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=40,
        intermediate_size=77,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config)


def plan_of(model: nn.Module) -> str:
    """A saved plan for micro-batches of two rows: the HMT paper's table in every layer."""
    work = build_workload(shape_of_config(model.config), micro_batch=2, seq_length=LENGTH)
    return uniform_plan(work, named_machine("rtx4090"), PAPER_POLICY).to_json()


def batch(step: int, rank: int, rows: int) -> Tensor:
    """rows x LENGTH tokens, the same for the same step and rank."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(0, VOCAB, (rows, LENGTH), generator=generator)


def is_vertical(config: Mapping[str, Any]) -> bool:
    """Whether steps of a JSON are ``engine.train_batch``."""
    return config.get("hmt", {}).get("accumulation") == "vertical"


def micro_batches(engine: Any, step: int, rank: int = 0) -> list[dict[str, Any]]:
    """What ``engine.train_batch`` takes in a step."""
    number = engine.gradient_accumulation_steps()
    rows = engine.train_micro_batch_size_per_gpu()
    parts = (batch(step * number + part, rank, rows) for part in range(number))
    return [{"input_ids": part, "labels": part, "use_cache": False} for part in parts]


def train_step(engine: Any, step: int, rank: int = 0) -> float:
    """One optimizer step; this rank's mean loss."""
    total, number = 0.0, engine.gradient_accumulation_steps()
    for part in range(number):
        tokens = batch(step * number + part, rank, engine.train_micro_batch_size_per_gpu())
        tokens = tokens.to(engine.device)
        loss = engine(input_ids=tokens, labels=tokens, use_cache=False).loss
        engine.backward(loss)
        engine.step()
        total += loss.item() / number
    return total


def raised_by_us(error: BaseException) -> bool:
    """Whether our own code refused something, and not a library under it."""
    frames = traceback.extract_tb(error.__traceback__)
    package = Path(hmt_deepspeed.__file__).resolve().parent
    return bool(frames) and package in Path(frames[-1].filename).resolve().parents
