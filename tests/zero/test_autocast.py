"""``torch_autocast``: fp32 weights, forward and backward in bf16."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import Ranks
from torch import nn
from training import (
    LOW_RANK,
    ds_config,
    make_engine,
    model_weights,
    stock_config,
    tiny_llama,
    train,
)

AUTOCAST = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
RECOMPUTED = {
    "attention_qkv": "recompute",
    "attention_output": "recompute",
    "mlp_intermediate": "recompute",
}
STEPS = 3


def losses(cases: list[tuple[str, int]]) -> list[tuple[list[float], set[str]]]:
    """Losses, and in which dtypes linears computed and weights are kept."""
    found = []
    for kind, stage in cases:
        config = stock_config(stage, **AUTOCAST)
        if kind != "stock":
            config = ds_config(
                stage, {"method": "adamw"} if kind == "adamw" else LOW_RANK, **AUTOCAST
            )
        if kind == "recompute":
            config["hmt"]["activations"] = {"policy": RECOMPUTED}
        engine = make_engine(config, tiny_llama(layers=1))
        dtypes: set[str] = set()
        for module in engine.module.modules():
            if isinstance(module, nn.Linear):
                module.register_forward_hook(lambda _, __, y, seen=dtypes: seen.add(str(y.dtype)))
        found.append((train(engine, STEPS), dtypes))
        assert {weight.dtype for weight in model_weights(engine).values()} == {torch.float32}
        engine.destroy()
    return found


@pytest.fixture(scope="module")
def found(ranks: Ranks) -> dict[tuple[str, int], Any]:
    kinds = [("stock", 2), ("adamw", 0), ("adamw", 3)]
    kinds += [("low rank", 0), ("low rank", 3), ("recompute", 3)]
    return dict(zip(kinds, ranks.run(losses, 2, kinds)[0], strict=True))


def test_linears_compute_in_bf16(found: dict[tuple[str, int], Any]) -> None:
    assert all(dtypes == {"torch.bfloat16"} for _, dtypes in found.values())


@pytest.mark.parametrize("stage", [0, 3])
def test_adamw_is_deepspeeds(found: dict[tuple[str, int], Any], stage: int) -> None:
    """DeepSpeed reduces the gradients of linears in bf16, HMT in fp32: three steps differ in the sixth digit, from
    training without autocast in the fifth."""
    (mine, _), (stock, _) = found["adamw", stage], found["stock", 2]
    assert mine == pytest.approx(stock, rel=3e-5)


def test_low_rank_is_the_same_everywhere(found: dict[tuple[str, int], Any]) -> None:
    """Sums of other orders, rounded to bf16 where linears begin; recomputation repeats forward bit for bit."""
    whole, _ = found["low rank", 0]
    assert found["low rank", 3][0] == pytest.approx(whole, rel=3e-5)
    assert found["recompute", 3][0] == found["low rank", 3][0]
