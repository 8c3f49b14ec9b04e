"""HFU's count of what a step computes, against PyTorch's count of a running one."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from harness import Ranks
from torch.utils.flop_counter import FlopCounterMode
from training import (
    GLOBAL_BATCH,
    LENGTH,
    ds_config,
    loss_of,
    make_engine,
    micro_batches,
    tiny_llama,
    tiny_mixtral,
)

RIGHT = {"rank": 8, "update_interval": 1000}
RECOMPUTE = {"policy": {"attention_qkv": "recompute", "mlp_intermediate": "recompute"}}


def grouped(rows: Any, weight: Any, *_: Any, **__: Any) -> int:
    """FLOPs of a product of sorted rows by experts, S x in and E x in x out, or out x S and S x in."""
    return int(2 * rows[0] * rows[1] * weight[-1])


def count(
    options: dict[str, Any],
    activations: dict[str, Any] | None,
    every_n_layers: int,
    build: Any = tiny_llama,
    steps: int = 2,
) -> Any:
    """(predicted, counted) of a step that refreshes nothing; Hugging Face checkpoints no layer at 0."""
    importlib.import_module("transformers.integrations.moe")  # has an operator of its own
    operators = (torch.ops.aten._grouped_mm, torch.ops.transformers.grouped_mm_fallback)
    if options["method"] == "lowrank_adamw":
        options = {**options, "max_full_gradient_bytes": 10**7}
    config = ds_config(2, options, 2)
    if activations is not None:
        config["hmt"]["activations"] = activations
    model = build(attn_implementation="eager")
    if every_n_layers:
        model.activation_checkpointing_enable(
            {"use_reentrant": False}, every_n_layers=every_n_layers
        )
    engine = make_engine(config, model)
    found = (0.0, 0.0)
    for step in range(steps):
        counted = 0.0
        for tokens in micro_batches(engine, step):
            formulas = dict.fromkeys(operators, grouped)
            with FlopCounterMode(display=False, custom_mapping=formulas) as counter:
                engine.backward(loss_of(engine, tokens))
            counted += counter.get_total_flops()
            engine.step()
        predicted = engine.hmt_metrics.computed_flops(GLOBAL_BATCH // 2, LENGTH)
        found = (predicted, counted)
    engine.destroy()
    return found


def count_all() -> dict[str, Any]:
    low_rank = {"method": "lowrank_adamw", **RIGHT}
    return {
        "adamw": count({"method": "adamw"}, None, 0),
        "projected": count(low_rank, None, 0),
        "chosen": count(
            {**low_rank, "rank": "auto", "rank_candidates": [4, 16], "energy_threshold": 0.1},
            None,
            0,
        ),
        "backend": count(low_rank, RECOMPUTE, 0),
        "checkpointing": count(low_rank, None, 1),
        "every other layer": count(low_rank, None, 2),
    }


def test_hfu_counts_what_is_computed(ranks: Ranks) -> None:
    found = ranks.run(count_all, 1)[0]
    for name, (predicted, counted) in found.items():
        # the counter sees the products of a loss's few elements and of norms as none: they are no products
        assert predicted == pytest.approx(counted, rel=1e-3), name
    assert found["projected"][0] < 0.95 * found["adamw"][0]


def count_mixtures() -> dict[str, Any]:
    low_rank = {"method": "lowrank_adamw", **RIGHT}
    again = {"policy": {"attention_qkv": "recompute", "experts": "recompute"}}
    cases: dict[str, Any] = {
        "adamw": ({"method": "adamw"}, None, 0),
        "shared": (low_rank | {"expert_basis": "shared"}, None, 0),
        "own": (low_rank | {"expert_basis": "own"}, None, 0),
        "backend": (low_rank | {"expert_basis": "shared"}, again, 0),
        "checkpointing": (low_rank | {"expert_basis": "shared"}, None, 1),
    }
    return {name: count(*case, build=tiny_mixtral) for name, case in cases.items()}


def test_hfu_counts_what_experts_compute(ranks: Ranks) -> None:
    """By the tokens that each is sent, projected or not."""
    found = ranks.run(count_mixtures, 1)[0]
    for name, (predicted, counted) in found.items():
        assert predicted == pytest.approx(counted, rel=1e-3), name
    assert found["shared"][0] < 0.95 * found["adamw"][0]
