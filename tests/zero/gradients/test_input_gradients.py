"""Gradient penalties, torch.func and autograd.grad through an engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Ranks
from torch import Tensor, nn
from training import ds_config, make_engine

WIDTH = 16


def engine_of(stage: int, projected: Any = "auto") -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 24), nn.Tanh(), nn.Linear(24, WIDTH))
    options = {"rank": 2, "update_interval": 4}
    options["projected_backward"] = projected
    config = ds_config(stage, options, gas=2)
    config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    return make_engine(config, model)


def batch(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    return torch.randn(3, WIDTH, generator=generator)


def weights(engine: Any) -> Tensor:
    return torch.cat([p.detach().flatten() for p in engine.module.parameters()])


def trained(stage: int, projected: Any) -> Tensor:
    """After windows that refresh and windows that project, of micro-batches of two kinds."""
    engine = engine_of(stage, projected)
    for step in range(12):
        x = batch(step).requires_grad_()
        if step % 2:
            loss = engine(x).square().mean()
            (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
            loss = loss + 10 * gradient.square().sum()
        else:
            loss = torch.func.vmap(engine.module)(x).square().mean() + engine(x).pow(3).mean()
        engine.backward(loss)
        engine.step()
    assert engine.global_steps == 6
    engine.destroy()
    return weights(engine)


def trains_as_with_whole_gradients(stage: int) -> tuple[float, float]:
    ours, whole = trained(stage, "auto"), trained(stage, False)
    start = weights(engine_of(stage))
    return float((ours - whole).abs().max()), float((whole - start).abs().max())


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_trains_as_with_whole_gradients(ranks: Ranks, stage: int) -> None:
    """Whole gradients are those of ordinary linears, projected afterwards."""
    found = ranks.run(trains_as_with_whole_gradients, 2, stage)
    assert found[0] == found[1]
    difference, moved = found[0]
    assert moved > 1e-2
    assert difference <= 1e-6  # fp32's rounding in 6 steps of 3e-3


def input_gradients(stage: int) -> dict[str, Any]:
    """Of an engine that accumulates two micro-batches, beside those of its module; and that nothing is left."""
    engine = engine_of(stage)
    for step in range(6):  # until backward is projected
        engine.backward(engine(batch(step)).square().mean())
        engine.step()
    x = batch(5).requires_grad_()
    (found,) = torch.autograd.grad(engine(x).square().sum(), x)
    (expected,) = torch.autograd.grad(engine.module(x).square().sum(), x)
    left = [e.gradient.linear.pending for e in engine.optimizer.zero.low_rank]
    weight, messages = engine.module[0].weight, []
    for ask in (
        lambda: torch.autograd.grad(engine(x).sum(), weight),
        lambda: torch.func.grad(lambda x: engine(x).sum())(x),
        lambda: torch.autograd.functional.hvp(lambda x: engine(x).square().sum(), x, x),
    ):
        try:
            ask()
            messages.append("")
        except ValueError as error:
            messages.append(str(error))
    return {"same": torch.equal(found, expected), "left": left, "messages": messages}


@pytest.mark.parametrize("stage", [1, 3])
def test_gradients_of_inputs_are_no_backward_of_the_engine(ranks: Ranks, stage: int) -> None:
    for found in ranks.run(input_gradients, 2, stage):
        assert found["same"]  # DeepSpeed would have divided it by the 2 micro-batches
        assert found["left"] == [None, None]
        of_weight, transformed, twice = found["messages"]
        assert "0.weight, but" in of_weight
        assert "module_rules" in of_weight
        if stage == 3:
            assert "stage is 3, whose hooks" in transformed
            assert "reads 0.weight, but zero_optimization.stage is 3" in twice
        else:
            assert transformed == twice == ""
