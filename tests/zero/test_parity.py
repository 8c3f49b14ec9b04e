"""The same global batch gives the same run at every stage, world size and accumulation."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from harness import Ranks
from training import (
    LOW_RANK,
    bases,
    ds_config,
    furthest,
    global_batch,
    loss_of,
    make_engine,
    matrix_ranks,
    micro_batches,
    model_weights,
    stock_config,
    subspace_distance,
    tiny_llama,
    train,
    train_step,
    weights,
)

from hmt_deepspeed.optim.hmt import HMT

STEPS = 10

# Sums over ranks, micro-batches and shards are taken in another order, which costs 1e-7 a step;
# Adam's division by sqrt(v) amplifies it where v is small. Ten steps stay two digits below these.
LOSS = 1e-5
NORM = 1e-3
WEIGHT = 2e-3  # of weights that moved by up to STEPS * lr = 3e-2
ANGLE = 1e-2  # sine between subspaces; another basis of the same gradient would be near 1


# -- cases --------------------------------------------------------------------------------------------


def low_rank_run(stage: int, gas: int, options: dict[str, Any]) -> dict[str, Any]:
    engine = make_engine(ds_config(stage, {**LOW_RANK, **options}, gas=gas))
    start = matrix_ranks(engine)
    losses, norms = [], []
    for step in range(STEPS):
        losses.append(train_step(engine, step))
        norms.append(float(engine.get_global_grad_norm()))
    return {
        "losses": losses,
        "norms": norms,
        "ranks": matrix_ranks(engine),
        "start_ranks": start,
        "refreshes": list(engine.optimizer.schedule.num_refreshes),
        "bases": bases(engine),
        "weights": weights(engine),
    }


def adamw_run(stage: int, gas: int, stock: bool) -> dict[str, Any]:
    config = (
        stock_config(stage, gas=gas) if stock else ds_config(stage, {"method": "adamw"}, gas=gas)
    )
    engine = make_engine(config)
    losses, norms = [], []
    for step in range(STEPS):
        losses.append(train_step(engine, step))
        norm = engine.get_global_grad_norm()  # None from stock stage 0 in fp32
        norms.append(None if norm is None else float(norm))
    return {"losses": losses, "norms": norms, "weights": model_weights(engine)}


def engine_and_plain_optimizer() -> dict[str, Any]:
    engine = make_engine(ds_config(2))
    engine_losses = train(engine, STEPS)
    model = tiny_llama()
    optimizer = HMT(model, lr=3e-3, betas=(0.9, 0.99), weight_decay=0.1, **LOW_RANK)
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


def without_masters(stage: int, steps: int) -> dict[str, Any]:
    options = {**LOW_RANK, "master_weights": "none", "update_interval": 8}
    engine = make_engine(ds_config(stage, options, bf16={"enabled": True}), tiny_llama(layers=1))
    losses = train(engine, steps)
    return {
        "losses": losses,
        "weights": model_weights(engine),
        "dtypes": {p.dtype for p in engine.module.parameters()},
        "masters": engine.optimizer.metrics()["master_weight_bytes"],
    }


def sees_its_own_batch() -> list[Any]:
    return micro_batches(make_engine(ds_config(2, gas=2)), 0)


# -- tests --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def low_rank(ranks: Ranks) -> Any:
    """Runs by (stage, world, accumulation, options), each made once."""

    @cache
    def run(stage: int, world: int, gas: int = 1, **options: Any) -> list[dict[str, Any]]:
        return ranks.run(low_rank_run, world, stage, gas, options)

    return run


def assert_same_run(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one["losses"] == pytest.approx(other["losses"], rel=LOSS)
    if other["norms"][0] is not None:
        assert one["norms"] == pytest.approx(other["norms"], rel=NORM)
    assert furthest(one["weights"], other["weights"]) < WEIGHT
    if "ranks" in one:
        assert one["ranks"] == other["ranks"]
        assert one["refreshes"] == other["refreshes"]
        for name, basis in one["bases"].items():
            assert subspace_distance(basis, other["bases"][name]) < ANGLE, name


def test_the_reference_run_exercises_what_is_compared(low_rank: Any) -> None:
    """Clipping is active, every matrix refreshes more than once, and ranks change and differ."""
    run = low_rank(0, 1)[0]
    assert min(run["norms"]) > 0.5
    assert min(run["refreshes"]) >= 2
    assert set(run["start_ranks"].values()) == {4}
    assert len(set(run["ranks"].values())) > 1
    assert run["losses"][9] < run["losses"][0] - 0.2


def test_ranks_share_the_global_batch(ranks: Ranks) -> None:
    parts = ranks.run(sees_its_own_batch, 2)
    rows = [torch.cat([parts[0][a], parts[1][a]]) for a in range(2)]
    assert torch.equal(torch.cat(rows), global_batch(0))


@pytest.mark.parametrize(
    ("stage", "world", "gas"),
    [(1, 1, 1), (2, 1, 1), (3, 1, 1), (0, 1, 4), (3, 1, 4)]
    + [(stage, 2, 1) for stage in range(4)]
    + [(0, 3, 1), (2, 3, 1), (3, 3, 1), (2, 3, 4), (1, 3, 4)],
)
def test_stage_world_and_accumulation_do_not_matter(
    low_rank: Any, stage: int, world: int, gas: int
) -> None:
    assert_same_run(low_rank(stage, world, gas)[0], low_rank(0, 1)[0])


@pytest.mark.parametrize(("stage", "world"), [(0, 1), (2, 2), (3, 2)])
def test_projected_backward_does_not_matter(low_rank: Any, stage: int, world: int) -> None:
    assert_same_run(low_rank(stage, world, projected_backward=False)[0], low_rank(0, 1)[0])


@pytest.mark.parametrize(
    ("stage", "world", "gas"), [(0, 1, 1), (1, 1, 1), (2, 2, 1), (3, 2, 1), (1, 2, 2), (3, 3, 2)]
)
def test_adamw_is_deepspeeds(ranks: Ranks, stage: int, world: int, gas: int) -> None:
    ours = ranks.run(adamw_run, world, stage, gas, stock=False)[0]
    stock = ranks.run(adamw_run, world, stage, gas, stock=True)[0]
    assert min(ours["norms"]) > 0.5  # clipping is active
    assert_same_run(ours, stock)


def test_plain_optimizer_is_the_engine_on_one_rank(ranks: Ranks) -> None:
    both = ranks.run(engine_and_plain_optimizer, 1)[0]
    assert both["engine"][0] == pytest.approx(both["plain"][0], rel=LOSS)
    assert furthest(both["engine"][1], both["plain"][1]) < WEIGHT


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_replicas_without_masters_stay_bit_identical(ranks: Ranks, stage: int) -> None:
    first, second = ranks.run(without_masters, 2, stage, 50)
    assert first["dtypes"] == {torch.bfloat16}
    assert first["masters"] == 0
    for name, weight in first["weights"].items():
        assert torch.equal(weight, second["weights"][name]), name
    assert first["losses"][-1] < first["losses"][0] - 0.5


def test_stage_3_without_masters_trains_the_same(ranks: Ranks) -> None:
    """Stages 1 and 2 send the update in bf16, stage 3 does not: equal to bf16's 3 digits only."""
    third = ranks.run(without_masters, 2, 3, 50)[0]
    second = ranks.run(without_masters, 2, 2, 50)[0]
    assert third["masters"] == 0
    assert third["losses"] == pytest.approx(second["losses"], rel=2e-2)
    for name, weight in third["weights"].items():
        distance = (weight.float() - second["weights"][name].float()).norm()
        assert distance < 0.1 * second["weights"][name].float().norm(), name
