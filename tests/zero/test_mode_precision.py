"""Every mode in fp16 with a step that overflows, in bf16 without masters, and with moments of few bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Ranks
from modes import INT8, MODES, mode_engine, wide_llama
from torch import Tensor
from training import (
    ds_config,
    loss_of,
    make_engine,
    micro_batches,
    model_weights,
    train,
    weights,
)


def overflows(wanted: list[tuple[str, int]]) -> dict[Any, Any]:
    """fp16: a step whose loss is infinite on one rank, between ordinary ones."""
    from deepspeed.accelerator import get_accelerator

    get_accelerator().is_fp16_supported = lambda: True
    fp16 = {"enabled": True, "initial_scale_power": 8, "hysteresis": 1, "loss_scale_window": 100}
    found = {}
    for name, stage in wanted:
        engine = mode_engine(MODES[name], stage, fp16=fp16)
        losses = train(engine, 2)
        norm = float(engine.get_global_grad_norm())
        before, scale = _everything(engine), engine.optimizer.cur_scale
        loss = loss_of(engine, micro_batches(engine, 2)[0])
        last = dist.get_rank() == dist.get_world_size() - 1
        engine.backward(loss * (1e8 if last else 1.0))
        engine.step()
        after = _everything(engine)
        found[name, stage] = {
            "same": all(torch.equal(a, b) for a, b in zip(before, after, strict=True)),
            "scales": (scale, engine.optimizer.cur_scale),
            "skipped": engine.skipped_steps,
            "steps": engine.optimizer.zero.step_count,
            "norm": norm,
            "losses": losses + train(engine, 2, first=2),  # the last on the batch of the first
        }
        engine.destroy()
    return found


def _everything(engine: Any) -> list[Tensor]:
    """Weights, moments, evidence and bases held by this rank."""
    optimizer = engine.optimizer
    tensors = [t for state in optimizer.state.values() for t in state.values()]
    tensors += [e.matrix.moments.evidence for e in optimizer.zero.low_rank]
    low_rank = [e.matrix for e in optimizer.zero.low_rank]
    held = [(m.projection, m.rank) for m in low_rank]  # its probe columns are a step's own
    tensors += [columns[:, :rank] for columns, rank in held if columns is not None]
    return [t.clone() for t in [*tensors, *weights(engine).values()]]


def replicas(wanted: list[tuple[str, int]], steps: int) -> dict[Any, dict[str, Any]]:
    """bf16 weights without masters, as this rank holds them after some steps."""
    found = {}
    for name, stage in wanted:
        mode = {**MODES[name], "master_weights": "none"}
        engine = mode_engine(mode, stage, bf16={"enabled": True})
        found[name, stage] = {
            "losses": train(engine, steps),
            "weights": model_weights(engine),
            "dtypes": {p.dtype for p in engine.module.parameters()},
            "masters": engine.optimizer.metrics()["master_weight_bytes"],
        }
        engine.destroy()
    return found


def test_fp16_overflow_on_one_rank_skips_the_step(ranks: Ranks) -> None:
    """Of every stage; optimizer/test_skipped_steps.py has every mode."""
    wanted = [("right", stage) for stage in range(4)]
    wanted += [("share_basis", 3), ("apollo_mini", 1)]
    for result in ranks.run(overflows, 2, wanted):
        for key, found in result.items():
            assert found["same"], key
            assert found["scales"] == (256.0, 128.0), key
            assert found["skipped"] == 1, key
            assert found["steps"] == 3, key
            assert 0.1 < found["norm"] < 10, key  # of the gradient, not of the scaled one
            assert found["losses"][-1] < found["losses"][0], key


@pytest.mark.parametrize("world", [2, 3])
def test_replicas_without_masters_stay_bit_identical(ranks: Ranks, world: int) -> None:
    names = ["right", "left", "two_sided", "full residual", "left, full residual", "apollo"]
    wanted = [(name, i % 2) for i, name in enumerate(names)]
    if world == 3:
        wanted = [("left", 2), ("two_sided", 2), ("apollo", 2)]
    first, *others = ranks.run(replicas, world, wanted, 8)
    for key, found in first.items():
        assert found["masters"] == 0, key
        assert found["losses"][-1] < found["losses"][0] - 0.1, key
        for other in others:
            for name, weight in found["weights"].items():
                assert torch.equal(weight, other[key]["weights"][name]), (key, name)


def test_many_steps_without_masters(ranks: Ranks) -> None:
    """Stage 2 sends the update in bf16, stage 3 does not: equal to bf16's 3 digits only."""
    first, other = ranks.run(replicas, 2, [("right", 2), ("right", 3)], 30)
    second, third = first["right", 2], first["right", 3]
    for found in (second, third):
        assert found["dtypes"] == {torch.bfloat16}
        assert found["masters"] == 0
        assert found["losses"][-1] < found["losses"][0] - 0.5
    assert third["losses"] == pytest.approx(second["losses"], rel=2e-2)
    for name, weight in third["weights"].items():
        assert torch.equal(second["weights"][name], other["right", 2]["weights"][name]), name
        distance = (weight.float() - second["weights"][name].float()).norm()
        assert distance < 0.1 * second["weights"][name].float().norm(), name


ADAMS_EPS, LARGE_EPS = 1e-8, 1e-3
Kept = tuple[str, bool, float]  # moments' dtype, whether the second one is factored, eps


def small_states(kept: list[tuple[Kept, list[int]]]) -> dict[Any, dict[str, Tensor]]:
    """What some steps change of the weights, by how the moments are kept and by stages."""
    found = {}
    for (dtype, factored, eps), stages in kept:
        mode = {**INT8, "projection": "auto", "state_dtype": dtype}
        if factored:
            mode["second_moment"] = "factored"
        for stage in stages:
            config = ds_config(stage, mode)
            config["optimizer"]["params"]["eps"] = eps
            engine = make_engine(config, wide_llama())
            before = {name: w.clone() for name, w in weights(engine).items()}
            train(engine, 8)
            after = weights(engine)
            found[dtype, eps, stage] = {name: after[name] - before[name] for name in before}
            engine.destroy()
    return found


@pytest.mark.parametrize("factored", [False, True])
def test_small_states_in_shards_train_as_fp32_on_one_rank(ranks: Ranks, factored: bool) -> None:
    """bf16 rounds a moment by up to 2^-8 of it; INT8 by 1/254 of its block's largest, more of a smaller one, here 3 %.

    fp32 differs by the order of sums. At eps 1e-8 that is 1e-4 of k and q, between accumulations on one rank too, and
    nearly all of it in one element of 4096, whose first gradient is no larger than eps: Adam divides what rounding
    left there by eps. And where two directions of a gradient are almost equally long, rounding turns them into each
    other, by 6e-3 once at eps 1e-4, of which Adam's division by elements makes 3e-4. At eps 1e-3, above most gradients,
    both are gone: 3e-6 to 6e-6 was found, that is some hundred roundings of 2^-24, and 2^-15 is five times as much. A
    moment rounded to zero shows at a small eps only: bf16 and INT8 stay there.

    At rank 32 each basis vector holds some of the gradient, which comes from 61 embeddings. At 64 the last ones
    would be rounding, which Adam scales up and every machine makes differently.
    """
    bounds = {
        "fp32": (LARGE_EPS, 0, 2**-15),
        "bf16": (ADAMS_EPS, 1e-4, 2**-8),
        "int8": (ADAMS_EPS, 2**-8, 0.05),
    }
    stages = {"fp32": [3], "bf16": [1], "int8": [2, 3]}  # moments meet a stage through their shards
    references = [(("fp32", factored, eps), [0]) for eps in (ADAMS_EPS, LARGE_EPS)]
    wholes = ranks.run(small_states, 1, references)[0]
    kept = [((dtype, factored, eps), stages[dtype]) for dtype, (eps, *_) in bounds.items()]
    found = ranks.run(small_states, 2, kept)[0]
    assert len(found) == 4
    for (dtype, eps, stage), moved in found.items():
        _, least, most = bounds[dtype]
        for name, change in wholes["fp32", eps, 0].items():
            off = (moved[name] - change).norm() / change.norm()
            assert off < most, (dtype, stage, name)
            if "norm" not in name:  # too small for what is not fp32
                assert off >= least, (dtype, stage, name)
