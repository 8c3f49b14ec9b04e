"""Every mode is the same run on another stage, world size and accumulation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Ranks
from modes import INT8, MODES, mode_engine, trained, wide_llama
from test_parity import assert_same_run
from torch import Tensor
from training import loss_of, micro_batches, model_weights, train, weights

STEPS = 6  # every matrix refreshes twice, and ranks change at the first one
ON_THREE_RANKS = ["left", "two_sided", "full residual", "apollo", "module_rules"]
Run = tuple[str, int, int]  # mode, stage, accumulation


def layouts(name: str, world: int) -> list[tuple[int, int]]:
    """(stage, accumulation) of a mode's runs: the reference, stage 3 on two ranks, and two others in turn.

    Modes reach ranks through the same shards and stages: each stage meets a third of the modes at each world size. All
    stages at all world sizes are in test_parity.py, with the default mode.
    """
    index = list(MODES).index(name)
    if world == 1:
        return [(0, 1), [(1, 2), (2, 1), (3, 2)][index % 3]]
    if world == 2:
        return [[(0, 2), (1, 1), (2, 2)][index // 3 % 3], (3, 1)]
    return [(2, 2), (3, 1)] if name in ON_THREE_RANKS else []


# -- cases --------------------------------------------------------------------------------------------


def all_runs(wanted: list[Run]) -> dict[Run, dict[str, Any]]:
    """One engine after another."""
    found = {}
    for name, stage, gas in wanted:
        engine = mode_engine(MODES[name], stage, gas)
        found[name, stage, gas] = trained(engine, STEPS)
        engine.destroy()
    return found


def overflows(names: list[str], stages: list[int]) -> dict[Any, Any]:
    """fp16: a step whose loss is infinite on one rank, between ordinary ones."""
    from deepspeed.accelerator import get_accelerator

    get_accelerator().is_fp16_supported = lambda: True
    fp16 = {"enabled": True, "initial_scale_power": 8, "hysteresis": 1, "loss_scale_window": 100}
    found = {}
    for name in names:
        for stage in stages:
            engine = mode_engine(MODES[name], stage, fp16=fp16)
            losses = train(engine, 2)
            before, scale = _everything(engine), engine.optimizer.cur_scale
            loss = loss_of(engine, micro_batches(engine, 2)[0])
            last = dist.get_rank() == dist.get_world_size() - 1
            engine.backward(loss * (1e8 if last else 1.0))
            engine.step()
            after = _everything(engine)
            found[name, stage] = {
                "same": all(torch.equal(a, b) for a, b in zip(before, after, strict=True)),
                "scales": (scale, engine.optimizer.cur_scale),
                "steps": engine.optimizer.step_count,
                "losses": losses + train(engine, 6, first=2),
            }
            engine.destroy()
    return found


def _everything(engine: Any) -> list[Tensor]:
    """Weights, moments, evidence and bases held by this rank."""
    optimizer = engine.optimizer
    tensors = [t for state in optimizer.state.values() for t in state.values()]
    tensors += [e.matrix.moments.evidence for e in optimizer.low_rank]
    held = [e.matrix.projection for e in optimizer.low_rank]
    tensors += [t for t in held if t is not None]
    return [t.clone() for t in [*tensors, *weights(engine).values()]]


def replicas(names: list[str], stages: list[int]) -> dict[Any, Any]:
    """bf16 weights without masters, as this rank holds them after some steps."""
    found = {}
    for name in names:
        mode = {**MODES[name], "master_weights": "none"}
        for stage in stages:
            engine = mode_engine(mode, stage, bf16={"enabled": True})
            losses = train(engine, 8)
            masters = engine.optimizer.metrics()["master_weight_bytes"]
            found[name, stage] = (losses, model_weights(engine), masters)
            engine.destroy()
    return found


# -- tests --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runs(ranks: Ranks) -> dict[int, dict[Run, dict[str, Any]]]:
    """All runs by world size, made by one launch each."""
    wanted = {
        world: [(name, *layout) for name in MODES for layout in layouts(name, world)]
        for world in (1, 2, 3)
    }
    return {world: ranks.run(all_runs, world, these)[0] for world, these in wanted.items()}


@pytest.mark.parametrize("name", MODES)
def test_stage_world_and_accumulation_do_not_matter(runs: Any, name: str) -> None:
    reference = runs[1][name, 0, 1]
    compared = 0
    for found in runs.values():
        for (mode, *_), run in found.items():
            if mode == name:
                assert_same_run(run, reference)
                compared += 1
    assert compared == (6 if name in ON_THREE_RANKS else 4)


def test_the_runs_exercise_what_is_compared(runs: Any) -> None:
    """Clipping is active, matrices refresh twice, ranks change and differ, the loss falls."""
    for name in MODES:
        run = runs[1][name, 0, 1]
        assert min(run["norms"]) > 0.5, name
        assert min(run["refreshes"]) >= 2, name
        assert run["losses"][-1] < run["losses"][0] - 0.05, name
        if "rank_candidates" in MODES[name] and name != "module_rules":
            assert set(run["ranks"].values()) - {4}, name
    for name in ("rank_budget", "out_of_sample"):
        assert len(set(runs[1][name, 0, 1]["ranks"].values())) > 1
    full = runs[1]["full_rank_budget", 0, 1]["ranks"].values()
    assert set(full) & {40, 77}
    assert set(full) & {4, 8, 16}
    assert runs[1]["share_basis", 0, 1]["shared"] == [
        [f"model.layers.0.{name}.weight" for name in names]
        for names in (
            ("mlp.gate_proj", "mlp.up_proj"),
            ("self_attn.k_proj", "self_attn.q_proj", "self_attn.v_proj"),
        )
    ]


def test_modes_differ(runs: Any) -> None:
    """No mode silently runs as another one."""
    losses = {name: tuple(runs[1][name, 0, 1]["losses"]) for name in MODES}
    assert len(set(losses.values())) == len(losses)


def test_fp16_overflow_on_one_rank_skips_the_step(ranks: Ranks) -> None:
    names = ["left", "two_sided", "full residual", "share_basis", "apollo", "apollo_mini"]
    for result in ranks.run(overflows, 2, names, [1, 3]):
        for key, found in result.items():
            assert found["same"], key
            assert found["scales"] == (256.0, 128.0), key
            assert found["steps"] == 2, key
            assert found["losses"][-1] < found["losses"][0], key


@pytest.mark.parametrize("world", [2, 3])
def test_replicas_without_masters_stay_bit_identical(ranks: Ranks, world: int) -> None:
    names = ["left", "two_sided", "full residual", "left, full residual", "apollo"]
    first, *others = ranks.run(replicas, world, names, [0, 1] if world == 2 else [2])
    for key, (losses, held, masters) in first.items():
        assert masters == 0, key
        assert losses[-1] < losses[0] - 0.1, key
        for other in others:
            for name, weight in held.items():
                assert torch.equal(weight, other[key][1][name]), (key, name)


def small_states(kept: list[tuple[str, bool]], stages: list[int]) -> dict[Any, dict[str, Tensor]]:
    """What some steps change of the weights, by how the moments are kept and by stage."""
    found = {}
    for dtype, factored in kept:
        mode = {**INT8, "projection": "auto", "state_dtype": dtype}
        if factored:
            mode["second_moment"] = "factored"
        for stage in stages:
            engine = mode_engine(mode, stage, model=wide_llama())
            before = {name: w.clone() for name, w in weights(engine).items()}
            train(engine, 8)
            after = weights(engine)
            found[dtype, factored, stage] = {name: after[name] - before[name] for name in before}
            engine.destroy()
    return found


@pytest.mark.parametrize("factored", [False, True])
def test_small_states_in_shards_train_as_fp32_on_one_rank(ranks: Ranks, factored: bool) -> None:
    """fp32 differs by the order of sums, which Adam's division scales up where a gradient is small: 1e-5 on one machine,
    1e-4 on another; a quarter of what bf16 may is asked. bf16 rounds a moment by up to 2^-8 of it; INT8 by 1/254 of its block's largest, more of a smaller one, here 3 %.

    At rank 32 each basis vector holds some of the gradient, which comes from 61 embeddings. At 64 the last ones
    would be rounding, which Adam scales up and every machine makes differently.
    """
    whole = ranks.run(small_states, 1, [("fp32", factored)], [0])[0]["fp32", factored, 0]
    bounds = {"fp32": (0, 2**-10), "bf16": (1e-4, 2**-8), "int8": (2**-8, 0.05)}
    found = ranks.run(small_states, 2, [(dtype, factored) for dtype in bounds], [1, 2, 3])[0]
    assert len(found) == 9
    for (dtype, _, stage), moved in found.items():
        least, most = bounds[dtype]
        for name, change in whole.items():
            off = (moved[name] - change).norm() / change.norm()
            assert off < most, (dtype, stage, name)
            if "norm" not in name:  # too small for what is not fp32
                assert off >= least, (dtype, stage, name)


def next_refreshes(refresh: str) -> list[int]:
    options = {"rank": 8, "update_interval": 10, "max_full_gradient_bytes": 10**7}
    engine = mode_engine({**options, "refresh": refresh}, 2)
    train(engine, 1)
    times: list[int] = engine.optimizer.schedule.next_refresh
    return times


def test_refreshes_are_spread_over_the_interval_or_come_together(ranks: Ranks) -> None:
    assert set(ranks.run(next_refreshes, 1, "together")[0]) == {10}
    assert len(set(ranks.run(next_refreshes, 1, "staggered")[0])) > 4
