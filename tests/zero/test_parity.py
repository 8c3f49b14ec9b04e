"""Our AdamW is DeepSpeed's, our engine is our optimizer without DeepSpeed; and what "the same run" means.

That the same global batch gives the same run at every stage, world size and accumulation is asked in test_modes.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import Ranks
from low_rank_adamw import low_rank_adamw
from training import (
    LOSS,
    LOW_RANK,
    WEIGHT,
    assert_same_run,
    ds_config,
    furthest,
    global_batch,
    loss_of,
    make_engine,
    micro_batches,
    model_weights,
    stock_config,
    tiny_llama,
    train,
    train_step,
    weights,
)

STEPS = 10

# -- cases --------------------------------------------------------------------------------------------


def adamw_runs(ways: list[tuple[int, int]], stock: bool) -> list[dict[str, Any]]:
    """By stage and accumulation."""
    found = []
    for stage, gas in ways:
        config = (
            stock_config(stage, gas=gas)
            if stock
            else ds_config(stage, {"method": "adamw"}, gas=gas)
        )
        engine = make_engine(config)
        losses, norms = [], []
        for step in range(STEPS // 2):
            losses.append(train_step(engine, step))
            norms.append(float(engine.get_global_grad_norm()))
        found.append({"losses": losses, "norms": norms, "weights": model_weights(engine)})
        engine.destroy()
    return found


def engine_and_plain_optimizer() -> dict[str, Any]:
    engine = make_engine(ds_config(2))
    engine_losses = train(engine, STEPS)
    model = tiny_llama()
    optimizer = low_rank_adamw(model, lr=3e-3, betas=(0.9, 0.99), weight_decay=0.1, **LOW_RANK)
    plain_losses = []
    for step in range(STEPS):
        loss = loss_of(model, global_batch(step))
        loss.backward()
        optimizer.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()
        plain_losses.append(loss.item())
    plain = {name: p.detach() for name, p in model.named_parameters()}
    return {"engine": (engine_losses, weights(engine)), "plain": (plain_losses, plain)}


def sees_its_own_batch() -> list[Any]:
    return micro_batches(make_engine(ds_config(2, gas=2)), 0)


# -- tests --------------------------------------------------------------------------------------------


def test_ranks_share_the_global_batch(ranks: Ranks) -> None:
    parts = ranks.run(sees_its_own_batch, 2)
    rows = [torch.cat([parts[0][a], parts[1][a]]) for a in range(2)]
    assert torch.equal(torch.cat(rows), global_batch(0))


def test_adamw_is_deepspeeds(ranks: Ranks) -> None:
    """DeepSpeed's own run on one rank stands for all layouts, with which it does not change either."""
    stock = ranks.run(adamw_runs, 1, [(1, 1)], stock=True)[0][0]
    ways = {1: [(0, 1), (1, 1)], 2: [(2, 1), (3, 1), (1, 2)], 3: [(3, 2)]}
    for world, these in ways.items():
        for ours in ranks.run(adamw_runs, world, these, stock=False)[0]:
            assert min(ours["norms"]) > 0.5  # clipping is active
            assert_same_run(ours, stock)


def test_plain_optimizer_is_the_engine_on_one_rank(ranks: Ranks) -> None:
    both = ranks.run(engine_and_plain_optimizer, 1)[0]
    assert both["engine"][0] == pytest.approx(both["plain"][0], rel=LOSS)
    assert furthest(both["engine"][1], both["plain"][1]) < WEIGHT
