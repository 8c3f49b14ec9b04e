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

from hmt_deepspeed.kernels.noise import base_key
from hmt_deepspeed.optim.rules import dense
from hmt_deepspeed.optim.rules.dense import (
    SmallParameter,
    dense_adamw_,
    dense_adamw_together_,
    new_dense_state,
)

CPU = torch.device("cpu")
NUMEL, CHUNK = 5000, 1024  # chunks are whole blocks and vectors; the last one is neither
HYPER: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def randn(seed: int) -> Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed))


def keys(step: int) -> tuple[int, int]:
    return base_key(0, "w"), step


def train(dtype: torch.dtype, states: str, part: slice = slice(None)) -> list[Tensor]:
    """Three steps of a part of a parameter; the second has no gradient."""
    weight = randn(0)[part].to(dtype)
    state = new_dense_state(tuple(weight.shape), states, weight.device)
    for step in range(3):
        gradient = None if step == 1 else randn(1 + step)[part].bfloat16()
        dense_adamw_(
            weight,
            gradient,
            state,
            *keys(step),
            factor=torch.tensor(0.5),
            offset=part.start or 0,
            **HYPER,
        )
    return [weight, state[0].read(), state[1].read(), state[2]]


@pytest.mark.parametrize("states", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunks_do_not_show(monkeypatch: Any, dtype: torch.dtype, states: str) -> None:
    whole = train(dtype, states)
    monkeypatch.setattr(dense, "CHUNK_ELEMENTS", {True: CHUNK})
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


@pytest.mark.parametrize("states", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_that_is_not_taken_changes_no_bit(
    monkeypatch: Any, dtype: torch.dtype, states: str
) -> None:
    monkeypatch.setattr(dense, "CHUNK_ELEMENTS", {True: CHUNK})
    weight, state = randn(0).to(dtype), new_dense_state((NUMEL,), states, CPU)
    held = [weight, *state[0].tensors(), *state[1].tensors(), state[2]]
    bad = randn(2)
    bad[::7] = float("nan")
    taken = {"factor": torch.tensor(1.0), "taken": torch.tensor(True)}
    dense_adamw_(weight, randn(1), state, *keys(1), **taken, **HYPER)
    before = [tensor.clone() for tensor in held]
    for gradient in (bad, None, torch.full((NUMEL,), float("inf"), dtype=torch.bfloat16)):
        skipped = {"factor": torch.tensor(0.0), "taken": torch.tensor(False)}
        dense_adamw_(weight, gradient, state, *keys(2), **skipped, **HYPER)
        for tensor, was in zip(held, before, strict=True):
            assert torch.equal(tensor, was)
    dense_adamw_(weight, randn(1), state, *keys(3), **taken, **HYPER)
    assert state[2] == 2
    assert not any(torch.equal(tensor, was) for tensor, was in zip(held, before, strict=True))


@pytest.mark.parametrize("states", ["fp32", "bf16", "int8"])
def test_a_step_that_is_taken_is_the_same_by_decision_of_the_device(states: str) -> None:
    found = []
    for given in ({}, {"taken": torch.tensor(True)}):
        weight, state = randn(0).bfloat16(), new_dense_state((NUMEL,), states, CPU)
        for step in range(3):
            dense_adamw_(weight, randn(1 + step), state, *keys(step), **given, **HYPER)
        found.append([weight, *state[0].tensors(), *state[1].tensors(), state[2]])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("states", ["fp32", "bf16", "int8"])
def test_a_number_on_the_device_rounds_as_one_of_the_host(states: str) -> None:
    found = []
    for kind in (int, torch.tensor):
        weight, state = randn(0).bfloat16(), new_dense_state((NUMEL,), states, CPU)
        for step in range(3):
            dense_adamw_(weight, randn(1 + step), state, base_key(0, "w"), kind(step), **HYPER)
        found.append([weight, *state[0].tensors(), *state[1].tensors()])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_a_shard_without_elements_counts_its_steps() -> None:
    weight, state = torch.zeros(0), new_dense_state((0,), "fp32", CPU)
    for taken in (True, False, True):
        how = {"factor": torch.tensor(1.0), "taken": torch.tensor(taken), **HYPER}
        dense_adamw_(weight, None, state, *keys(0), **how)
    assert state[2] == 2


@pytest.mark.parametrize("skips", [False, True])
def test_small_parameters_step_together_as_alone(skips: bool) -> None:
    """Gradients of several dtypes, and none; copies of weights in 16 bits, and weights that are rounded. A step that
    is skipped has a NaN."""
    sizes, found = (7, 300, 1, NUMEL, 300, 300, 300), []
    kinds = (torch.float32, torch.bfloat16, torch.float16, None) + 3 * (torch.bfloat16,)
    copies = (None, torch.bfloat16, torch.float16, None, None, None, None)
    rounded = {4: 0, 5: 0, 6: 100}  # offset in the whole parameter
    for together in (False, True):
        params = []
        for place, (size, dtype) in enumerate(zip(sizes, copies, strict=True)):
            weight = randn(size + place)[:size].clone()
            copy = None if dtype is None else weight.to(dtype)
            if place in rounded:
                weight = weight.bfloat16()
            state = new_dense_state((size,), "fp32", CPU)
            base, offset = base_key(0, str(place)), rounded.get(place, 0)
            params.append(SmallParameter(weight, None, state, copy, base, offset))
        for step in range(3):
            taken = torch.tensor(step != 1 or not skips)
            how = {"factor": taken * torch.tensor(0.5), "taken": taken, **HYPER}
            given = []
            for param, kind in zip(params, kinds, strict=True):
                gradient = None if kind is None else randn(step)[: len(param.weight)].to(kind)
                if gradient is not None and not taken:
                    gradient[0] = float("nan")
                given.append(param._replace(gradient=gradient))
            if together:
                dense_adamw_together_(given, number=step, **how)
                continue
            for param in given:
                how["offset"] = param.offset
                own = param.weight, param.gradient, param.state, param.base
                dense_adamw_(*own, step, **how)
                if param.copy is not None:
                    param.copy.copy_(param.weight)
        for param in params:
            first, second, taken = param.state
            assert taken == (2 if skips else 3)
            found += [param.weight, first.data, second.data]
            found += [] if param.copy is None else [param.copy]
    half = len(found) // 2
    for one, other in zip(found[:half], found[half:], strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("states", ["bf16", "int8"])
def test_states_of_fewer_bits_do_not_step_with_others(states: str) -> None:
    small = SmallParameter(randn(0), None, new_dense_state((NUMEL,), states, CPU), None)
    assert not small.fits


@pytest.mark.parametrize(
    ("dtype", "limit", "changed"),
    [
        (torch.float32, "CHUNK_ELEMENTS", {True: CHUNK}),
        (torch.bfloat16, "CHUNK_ELEMENTS", {True: CHUNK}),
        (torch.bfloat16, "MOST_ROUNDED", CHUNK),
    ],
)
def test_what_is_large_does_not_step_with_others(
    monkeypatch: Any, dtype: torch.dtype, limit: str, changed: Any
) -> None:
    weight, state = randn(0).to(dtype), new_dense_state((NUMEL,), "fp32", CPU)
    small = SmallParameter(weight, None, state, None)
    assert small.fits
    monkeypatch.setattr(dense, limit, changed)
    assert not small.fits


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
    monkeypatch.setattr(dense, "CHUNK_ELEMENTS", {True: CHUNK})
    weight, gradient = randn(0).bfloat16(), randn(1).bfloat16()
    state = new_dense_state((NUMEL,), states, weight.device)
    with Largest() as largest:
        dense_adamw_(weight, gradient, state, *keys(0), taken=torch.tensor(True), **HYPER)
    assert 0 < largest.nbytes <= 8 * CHUNK  # int64 counters of the rounding's noise
