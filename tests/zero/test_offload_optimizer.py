"""Masters and moments in host memory, updated by DeepSpeed's CPU Adam: ``offload_optimizer: cpu``."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from harness import Ranks
from torch import Tensor
from training import (
    LOW_RANK,
    assert_same,
    ds_config,
    furthest,
    loss_of,
    make_engine,
    micro_batches,
    model_weights,
    result,
    stock_config,
    tiny_llama,
    train,
    train_step,
    weights,
)

OFFLOAD = {"offload_optimizer": {"device": "cpu", "pin_memory": True}}
ADAMW = {"method": "adamw"}
STEPS = 20


def offloaded(config: dict[str, Any], **changes: Any) -> dict[str, Any]:
    config["zero_optimization"] |= {
        "offload_optimizer": {**OFFLOAD["offload_optimizer"], **changes}
    }
    return config


def parity_run(stage: int, gas: int, stock: bool) -> dict[str, Any]:
    """Twenty steps with the same JSON, ours or stock; a parameter that no backward reaches included."""
    if stock:
        config = stock_config(stage, gas=gas)
        del config["optimizer"]["params"]["torch_adam"]
    else:
        config = ds_config(stage, ADAMW, gas=gas)
    engine = make_engine(offloaded(config))
    losses, norms = [], []
    for step in range(STEPS):
        losses.append(train_step(engine, step))
        norms.append(float(engine.get_global_grad_norm()))
    kernel = type(getattr(engine.optimizer, "optimizer", None)).__name__
    return {"losses": losses, "norms": norms, "weights": model_weights(engine), "kernel": kernel}


@pytest.mark.parametrize(("stage", "world", "gas"), [(1, 1, 1), (2, 2, 1), (3, 2, 2)])
def test_the_numbers_are_zero_offloads(ranks: Ranks, stage: int, world: int, gas: int) -> None:
    ours = ranks.run(parity_run, world, stage, gas, stock=False)[0]
    stock = ranks.run(parity_run, world, stage, gas, stock=True)[0]
    assert stock["kernel"] == "DeepSpeedCPUAdam"
    assert sum(norm > 0.5 for norm in ours["norms"]) >= STEPS // 4  # clipping is active
    assert ours["losses"] == pytest.approx(stock["losses"], rel=1e-5)
    assert ours["norms"] == pytest.approx(stock["norms"], rel=1e-3)
    assert furthest(ours["weights"], stock["weights"]) < 2e-3
