"""Backwards whose reduction is put off, and loss scales and learning rates that the caller sets."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed.utils import (
    safe_get_full_grad,
)
from harness import Ranks
from small_engines import (
    ADAMW,
    LAST,
    LOW,
    backward,
    batch,
    read,
    small_engine,
)
from torch import Tensor, nn
from training import ds_config, make_engine, model_weights

# -- coalesce_grad_reduction ----------------------------------------------------------------------------------


def coalesced(stage: int, coalesce: bool, **changes: Any) -> dict[str, Any]:
    """Three backwards a step. At stage 2 the second rank has five: nothing inside communicates there."""
    engine = small_engine(stage, LOW, gradient_clipping=0.5, **changes)
    reducer, launches = engine.optimizer.reducer, []
    for step in range(3):
        reducer.events = []
        count = 5 if stage == 2 and dist.get_rank() and coalesce else 3
        with engine.coalesce_grad_reduction() if coalesce else nullcontext():
            for number in range(count):
                engine.set_gradient_accumulation_boundary(number == count - 1)
                engine.backward(engine(batch(step + min(number, 2))).square().mean() * (number < 3))
        launches.append(sum(event == "launch" for event, _ in reducer.events))
        engine.step()
    weights = model_weights(engine)
    return {"launches": launches, "weights": weights, "norm": float(engine.get_global_grad_norm())}


@pytest.mark.parametrize(("stage", "on_host"), [(0, False), (1, False), (2, True), (3, False)])
def test_coalescing_reduces_once_to_the_same_gradients(
    ranks: Ranks, stage: int, on_host: bool
) -> None:
    changes: dict[str, Any] = {}
    if on_host:
        zero = {"offload_optimizer": {"device": "cpu"}}
        changes = {"zero_optimization": zero}
    one, other = (ranks.run(coalesced, 2, stage, coalesce, **changes) for coalesce in (False, True))
    reductions = 3 if stage >= 2 else 1  # at 0 and 1 the boundary alone reduces
    for each, once in zip(one, other, strict=True):
        assert each["launches"] == [reductions * count for count in once["launches"]]
        assert each["norm"] == pytest.approx(once["norm"], rel=1e-5)
        for name, weight in each["weights"].items():
            torch.testing.assert_close(weight, once["weights"][name], rtol=1e-4, atol=1e-5)


class Tiled(nn.Module):
    """A linear in slices of the rows, each with a backward of its own; then a whole one."""

    def __init__(self, shards: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.sliced, self.last = nn.Linear(6, 9), nn.Linear(9, 9), nn.Linear(9, 5)
        self.shards = shards

    def forward(self, x: Tensor) -> Tensor:
        from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledMLP

        weights = list(self.sliced.parameters())
        hidden = self.first(x)
        if self.shards > 1:
            hidden = TiledMLP.apply(
                lambda self, part: self.sliced(part), self, hidden, self.shards, weights
            )
        else:
            hidden = self.sliced(hidden)
        return self.last(torch.tanh(hidden))


def tiled() -> dict[str, Any]:
    found = {}
    for stage, options in ((2, ADAMW), (3, LOW)):
        for shards in (1, 4):
            engine = make_engine(ds_config(stage, options), Tiled(shards))
            for number in range(2):
                engine.optimizer.reducer.events = []
                backward(engine, number)
                events = [event for event, _ in engine.optimizer.reducer.events]
                found[f"{stage}, {number}, {shards}"] = events.count("launch"), read(engine)
                engine.step()
    return found


def test_a_linear_in_slices_is_reduced_once(ranks: Ranks) -> None:
    for found in ranks.run(tiled, 2):
        for case in ("2, 0", "2, 1", "3, 0", "3, 1"):
            launches, whole = found[f"{case}, 1"]
            sliced_launches, sliced = found[f"{case}, 4"]
            assert sliced_launches == launches, case
            for one, other in zip(whole, sliced, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


# -- what else stock's stages have ------------------------------------------------------------------------------


def scales_and_rates() -> dict[str, Any]:
    found: dict[str, Any] = {"norms": []}
    for scale in (None, 256.0):
        engine = small_engine(2, ADAMW)
        if scale is not None:
            engine.optimizer.override_loss_scale(scale)
        backward(engine, 0)
        found["scaled"] = float(safe_get_full_grad(engine.module[LAST].bias).norm())
        engine.step()
        found["norms"].append(float(engine.get_global_grad_norm()))
    found["scale"] = engine.optimizer.cur_scale, engine.optimizer.loss_scale
    engine.optimizer.set_lr(0.0)
    found["rates"] = [engine.optimizer.get_lr(), *engine.get_lr()]
    before = model_weights(engine)
    backward(engine, 1)
    engine.step()
    found["moved"] = any(not torch.equal(w, before[n]) for n, w in model_weights(engine).items())
    return found


def test_loss_scales_and_learning_rates_of_the_caller(ranks: Ranks) -> None:
    found = ranks.run(scales_and_rates, 1)[0]
    assert found["norms"][0] == pytest.approx(found["norms"][1], rel=1e-5)
    assert found["scaled"] > found["norms"][1]  # the scale is still in what is read, as in stock
    assert found["scale"] == (256.0, 256.0)
    assert found["rates"] == [0.0, 0.0]
    assert not found["moved"]
