"""Dense AdamW in chunks: what they are does not show, and no fp32 copy is whole."""

from __future__ import annotations

from math import inf
from typing import Any

import pytest
import torch
from hmt_simple import SimpleHMT
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from twins import TALL, assert_same_steps, draw

from hmt_deepspeed.optim.rules import dense
from hmt_deepspeed.optim.rules.dense import dense_adamw_, new_dense_state, state_keys

NUMEL, CHUNK = 5000, 1024  # chunks are whole blocks and vectors; the last one is neither
HYPER: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def randn(seed: int) -> Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed))


def train(dtype: torch.dtype, states: str, part: slice = slice(None)) -> list[Tensor]:
    """Three steps of a part of a parameter; the second has no gradient."""
    weight = randn(0)[part].to(dtype)
    state = new_dense_state(tuple(weight.shape), states, NUMEL, weight.device)
    for step in range(3):
        gradient = None if step == 1 else randn(1 + step)[part].bfloat16()
        dense_adamw_(
            weight,
            gradient,
            state,
            factor=torch.tensor(0.5),
            key=step,
            state_keys=state_keys(0, "w", step),
            offset=part.start or 0,
            **HYPER,
        )
    return [weight, state[0].read(), state[1].read(), state[2]]


@pytest.mark.parametrize("states", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunks_do_not_show(monkeypatch: Any, dtype: torch.dtype, states: str) -> None:
    whole = train(dtype, states)
    monkeypatch.setattr(dense, "CHUNK_ELEMENTS", CHUNK)
    for one, other in zip(whole, train(dtype, states), strict=True):
        assert torch.equal(one, other)
    assert whole[3] == 3


def test_it_is_the_twin() -> None:
    twin, weight = SimpleHMT(draw, method="adamw", **HYPER), randn(0).double()
    for gradient in (randn(1).bfloat16(), torch.zeros(NUMEL), randn(3).bfloat16()):
        weight = twin.step(weight, 0.5 * gradient.double())
    assert twin.adam is not None
    found = train(torch.float32, "fp32")
    for one, other in zip(found[:3], [weight, twin.adam.m, twin.adam.v], strict=True):
        # fp32's 6e-8 some ten times over, as three steps add it up
        torch.testing.assert_close(one.double(), other, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("max_norm", [inf, 1.0])
def test_steps_of_the_optimizer_are_the_twins(max_norm: float) -> None:
    assert_same_steps(TALL, max_norm, method="adamw")


def test_shards_of_a_rounded_weight_round_alike() -> None:
    parts = [train(torch.bfloat16, "fp32", slice(*ends)) for ends in ((0, 2048), (2048, NUMEL))]
    whole = train(torch.bfloat16, "fp32")
    assert torch.equal(torch.cat([part[0] for part in parts]), whole[0])


class Largest(TorchDispatchMode):
    """Most bytes of one new tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in args if isinstance(t, Tensor)}
        if isinstance(out, Tensor) and out.untyped_storage().data_ptr() not in given:
            self.nbytes = max(self.nbytes, out.nbytes)
        return out


@pytest.mark.parametrize("states", ["bf16", "int8"])
def test_nothing_new_is_larger_than_a_chunk(monkeypatch: Any, states: str) -> None:
    monkeypatch.setattr(dense, "CHUNK_ELEMENTS", CHUNK)
    weight, gradient = randn(0).bfloat16(), randn(1).bfloat16()
    state = new_dense_state((NUMEL,), states, NUMEL, weight.device)
    keys = state_keys(0, "w", 0)
    with Largest() as largest:
        dense_adamw_(weight, gradient, state, factor=None, key=0, state_keys=keys, **HYPER)
    assert 0 < largest.nbytes <= 8 * CHUNK  # int64 counters of the rounding's noise
