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
OPTIMIZERS = {"adamw": {"method": "adamw"}, "int8 weights": {**LOW_RANK, "weight_dtype": "int8"}}
SECTIONS = {
    "recompute": {"activations": {"policy": RECOMPUTED}},
    "chunks": {"fpdt": {"chunk_size": 5}},
}
STEPS = 3


def losses(cases: list[tuple[str, int]]) -> list[tuple[list[float], set[str]]]:
    """Losses, and in which dtypes linears computed and weights are kept."""
    found = []
    for kind, stage in cases:
        name, _, without = kind.partition(", ")
        autocast = {} if without else AUTOCAST
        config = stock_config(stage, **autocast)
        if name != "stock":
            config = ds_config(stage, OPTIMIZERS.get(name, LOW_RANK), **autocast)
            config["hmt"] |= SECTIONS.get(name, {})
        engine = make_engine(config, tiny_llama(layers=1, use_cache=False))
        dtypes: set[str] = set()
        for path, module in engine.module.named_modules():
            if (
                name == "chunks" and path == "lm_head"
            ):  # hands on its input: the loss multiplies chunks of it
                continue
            if isinstance(module, nn.Linear):
                module.register_forward_hook(lambda _, __, y, seen=dtypes: seen.add(str(y.dtype)))
        found.append((train(engine, STEPS), dtypes))
        assert {weight.dtype for weight in model_weights(engine).values()} == {torch.float32}
        engine.destroy()
    return found


@pytest.fixture(scope="module")
def found(ranks: Ranks) -> dict[tuple[str, int], Any]:
    kinds = [("stock", 2), ("adamw", 0), ("adamw", 3)]
    kinds += [("low rank", 0), ("low rank", 3), ("recompute", 3), ("chunks", 3)]
    kinds += [("int8 weights", 2), ("int8 weights, in fp32", 2)]
    return dict(zip(kinds, ranks.run(losses, 2, kinds)[0], strict=True))


def test_linears_compute_in_bf16(found: dict[tuple[str, int], Any]) -> None:
    for (kind, _), (_, dtypes) in found.items():
        assert dtypes == {"torch.float32" if "in fp32" in kind else "torch.bfloat16"}, kind


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


# What bf16 moves the losses of this model by, either way.
ROUNDED = 1e-4


def test_chunks_and_int8_weights_differ_by_rounding(found: dict[tuple[str, int], Any]) -> None:
    chunked, whole = found["chunks", 3][0], found["low rank", 3][0]
    assert chunked == pytest.approx(whole, rel=ROUNDED)
    assert chunked != whole  # they are other sums
    encoded, in_fp32 = found["int8 weights", 2][0], found["int8 weights, in fp32", 2][0]
    assert encoded == pytest.approx(in_fp32, rel=ROUNDED)
