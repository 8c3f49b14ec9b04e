"""The norm that clips, and the ways to drive a step: they all give the same one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import Ranks
from training import (
    LOW_RANK,
    assert_same,
    ds_config,
    global_batch,
    loss_of,
    make_engine,
    micro_batches,
    model_weights,
    result,
    stock_config,
    tiny_llama,
    train,
    train_step,
)

STEPS = 6

# -- the norm -----------------------------------------------------------------------------------------


def norms(stage: int, method: str) -> dict[str, Any]:
    options = {"method": "adamw"} if method == "adamw" else LOW_RANK
    engine = make_engine(ds_config(stage, options, gas=2))
    reference, own, true = tiny_llama(), [], []
    for step in range(12):
        reference.load_state_dict(model_weights(engine), strict=False)
        reference.zero_grad()
        loss_of(reference, global_batch(step)).backward()
        squares = [p.grad.double().square().sum() for p in reference.parameters()]
        true.append(float(torch.stack(squares).sum().sqrt()))
        train_step(engine, step)
        own.append(float(engine.get_global_grad_norm()))
    return {"own": own, "true": true}


@pytest.mark.parametrize(("stage", "world"), [(0, 1), (1, 2), (2, 2), (3, 2)])
def test_grad_norm_of_adamw_is_exact(ranks: Ranks, stage: int, world: int) -> None:
    found = ranks.run(norms, world, stage, "adamw")[0]
    assert found["own"] == pytest.approx(found["true"], rel=1e-5)  # fp32 sums


@pytest.mark.parametrize(("stage", "world"), [(0, 1), (3, 2)])
def test_grad_norm_of_low_rank_is_a_good_estimate(ranks: Ranks, stage: int, world: int) -> None:
    """Eight probes of up to 73 missing dimensions: some ten percent a step, no bias over steps."""
    found = ranks.run(norms, world, stage, "lowrank_adamw")[0]
    ratios = torch.tensor(found["own"]) / torch.tensor(found["true"])
    assert float((ratios - 1).abs().max()) < 0.15
    assert abs(float(ratios.mean()) - 1) < 0.04


# -- how backward and step are called ---------------------------------------------------------------------


def plain(engine: Any) -> list[float]:
    return train(engine, STEPS)


def torch_style(engine: Any) -> list[float]:
    return train(engine, STEPS, torch_style=True)


def no_sync(engine: Any) -> list[float]:
    """Configured without accumulation; the last of three thirds reduces."""
    for step in range(STEPS):
        thirds = micro_batches(engine, step)[0].chunk(3)
        with engine.no_sync():
            for tokens in thirds[:2]:
                engine.backward(loss_of(engine, tokens) / 3)
        engine.backward(loss_of(engine, thirds[2]) / 3)
        engine.step()
    return []


def evaluated(engine: Any) -> list[float]:
    for step in range(STEPS):
        for tokens in micro_batches(engine, step):
            loss = loss_of(engine, tokens)
            engine.backward(loss)
            engine.eval()
            with torch.no_grad():
                loss_of(engine, global_batch(7))
            engine.train()
            with torch.no_grad():
                loss_of(engine, global_batch(8))
            engine.step()
    return []


def boundary(engine: Any) -> list[float]:
    """Two micro-batches under a manually set boundary; one call of step."""
    for step in range(STEPS):
        first, second = micro_batches(engine, step)[0].chunk(2)
        engine.set_gradient_accumulation_boundary(False)
        engine.backward(loss_of(engine, first) / 2)
        engine.set_gradient_accumulation_boundary(True)
        engine.backward(loss_of(engine, second) / 2)
        engine.step()
    return []


def unmanaged(engine: Any) -> list[float]:
    for step in range(STEPS):
        for tokens in micro_batches(engine, step):
            engine.backward(loss_of(engine, tokens))
        engine.step()
    return []


def interrupted(engine: Any) -> list[float]:
    """Every other step has a backward that dies half-way, in the second of two micro-batches."""
    layer = engine.module.model.layers[0]

    def fail(*_: Any) -> None:
        raise RuntimeError("half-way")

    for step in range(STEPS):
        if step % 2:
            tokens = micro_batches(engine, step)
            engine.backward(loss_of(engine, tokens[0]))
            hook = layer.mlp.register_full_backward_hook(fail)
            with pytest.raises(RuntimeError, match="half-way"):
                engine.backward(loss_of(engine, tokens[1]))
            hook.remove()
            engine.zero_grad()
        train_step(engine, step)
    return []


LOOPS: dict[str, Callable[[Any], list[float]]] = {
    f.__name__: f
    for f in (plain, torch_style, no_sync, evaluated, boundary, unmanaged, interrupted)
}


def driven(stage: int, loop: str, gas: int, **changes: Any) -> dict[str, Any]:
    engine = make_engine(ds_config(stage, gas=gas, **changes))
    return result(engine, LOOPS[loop](engine))


def stock_torch_style(stage: int, gas: int, stock: bool) -> dict[str, Any]:
    config = (
        stock_config(stage, gas=gas) if stock else ds_config(stage, {"method": "adamw"}, gas=gas)
    )
    engine = make_engine(config)
    return result(engine, torch_style(engine))


def no_sync_refused(stage: int) -> str:
    engine = make_engine(ds_config(stage))
    try:
        with engine.no_sync():
            return "no error"
    except AssertionError as error:
        return str(error)


def assert_same_step(one: dict[str, Any], other: dict[str, Any]) -> None:
    """The loops return no losses to compare."""
    assert_same({**one, "losses": []}, {**other, "losses": []})


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_torch_style_backward(ranks: Ranks, stage: int) -> None:
    other = ranks.run(driven, 2, stage, "torch_style", 1)[0]
    assert_same(ranks.run(driven, 2, stage, "plain", 1)[0], other)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_torch_style_accumulation_is_stocks(ranks: Ranks, stage: int) -> None:
    ours, stock = (ranks.run(stock_torch_style, 2, stage, 2, which)[0] for which in (False, True))
    assert_same(ours, stock)


@pytest.mark.parametrize("stage", [0, 1])
def test_no_sync_is_accumulation(ranks: Ranks, stage: int) -> None:
    assert_same_step(
        ranks.run(driven, 1, 0, "plain", 1)[0], ranks.run(driven, 2, stage, "no_sync", 1)[0]
    )


def test_no_sync_is_refused_where_stock_refuses(ranks: Ranks) -> None:
    for stage in (2, 3):
        assert "no_sync" in ranks.run(no_sync_refused, 1, stage)[0]


@pytest.mark.parametrize(
    ("loop", "stage", "gas", "changes"),
    [("evaluated", stage, 2, {}) for stage in (1, 3)]
    + [("boundary", stage, 1, {}) for stage in (0, 2, 3)]
    + [("unmanaged", stage, 3, {"managed_gradient_accumulation": False}) for stage in (0, 1, 2, 3)]
    + [("interrupted", stage, 2, {}) for stage in (0, 2, 3)]
    + [("plain", 2, 1, {"prescale_gradients": True, "gradient_predivide_factor": 2.0})]
    + [("plain", 0, 2, {"prescale_gradients": True})]
    + [("plain", 2, 1, {"gradient_predivide_factor": 2.0})],
)
def test_other_ways_to_drive_the_same_step(
    ranks: Ranks, loop: str, stage: int, gas: int, changes: dict[str, Any]
) -> None:
    assert_same_step(
        ranks.run(driven, 1, 0, "plain", 1)[0], ranks.run(driven, 2, stage, loop, gas, **changes)[0]
    )


def test_predivided_gradients_of_one_rank(ranks: Ranks) -> None:
    expected = ranks.run(driven, 1, 0, "plain", 1)[0]
    assert_same(expected, ranks.run(driven, 1, 2, "plain", 1, gradient_predivide_factor=2.0)[0])
