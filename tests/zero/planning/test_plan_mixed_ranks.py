"""``"rank": "auto"`` where some layers' matrices come to full rank and others do not: priced as each is."""

from __future__ import annotations

from typing import Any

import pytest
from harness import Ranks
from training import ds_config, make_engine, tiny_llama, train_step

LAYERS, SMALL, FULL_LAYER = 3, 4, 1
COLUMNS = {"down_proj": 77}  # of a matrix as it is projected; 40 of all others
BATCH, LENGTH = 12, 16


def columns_of(name: str) -> int:
    return next((size for end, size in COLUMNS.items() if f"{end}." in name), 40)


def run() -> dict[str, Any]:
    from hmt_deepspeed.config import HMTConfig
    from hmt_deepspeed.config.components import PAPER_POLICY
    from hmt_deepspeed.optim.decisions.policy import RankPolicy
    from hmt_deepspeed.planner.hardware import named_machine
    from hmt_deepspeed.planner.run.loads import Amount, phases, static_bytes
    from hmt_deepspeed.planner.solve.plan import uniform_plan
    from hmt_deepspeed.zero.planning.found_ranks import RankWatch, reason_to_plan_again
    from hmt_deepspeed.zero.planning.memory import counted_bytes

    def choose(policy: Any, index: int, *_: Any) -> int:
        name = policy._leader(index).name
        return columns_of(name) if f"layers.{FULL_LAYER}." in name else SMALL

    RankPolicy._choose = choose  # type: ignore[method-assign]
    options = {"rank_candidates": [SMALL, 16], "energy_threshold": 0.99, "update_interval": 1000}
    options |= {"max_full_gradient_bytes": 10**7}
    config = ds_config(2, options, bf16={"enabled": True})
    config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    engine = make_engine(config, tiny_llama(layers=LAYERS))
    facts = engine.run_facts(HMTConfig.from_block({}))
    watch = RankWatch(engine.optimizer.zero, facts.shape.names.layer)
    before = facts.at_ranks(watch.news().to_expect)  # type: ignore[union-attr]
    train_step(engine, 0)  # bases are found
    train_step(engine, 1)
    host = engine.optimizer.zero.host.engine.counters
    sent = host.bytes_out
    train_step(engine, 2)
    found = watch.news()
    assert found is not None
    machine, problems = named_machine("rtx4090"), []
    for ranks in (before, facts.at_ranks(found.now)):
        work = ranks.workload(BATCH, LENGTH)
        problems.append(ranks.problem(work, machine))
    planned, now = problems
    plan = uniform_plan(
        planned.workload,
        machine,
        dict.fromkeys(PAPER_POLICY, "keep") | {"projected_inputs": "project"},
    )
    total = sum(p.weight * p.base for p in phases(now))
    total = total + sum(p.weight * p.update for p in phases(now) if p.update is not None)
    size = engine.optimizer.settings.accumulate_dtype.itemsize
    matrices = [entry.matrix for entry in engine.optimizer.zero.low_rank]
    result = {
        "accumulated": sum(size * m.num_rows * m.width for m in matrices),
        "ranks": {e.name: e.matrix.rank for e in engine.optimizer.zero.low_rank},
        "named": dict(found.now),
        "predicted": static_bytes(now),
        "counted": counted_bytes(engine.optimizer),
        "sent": (total[Amount.TO_HOST], host.bytes_out - sent),
        "groups": [layer.layers for layer in now.workload.layers],
        "reason": reason_to_plan_again(planned, now, plan),
    }
    engine.destroy()
    return result


def test_full_and_low_ranks_of_one_kind_are_priced_apart(ranks: Ranks) -> None:
    (found,) = ranks.run(run, 1)
    full = {name: columns_of(name) for name in found["ranks"] if f".{FULL_LAYER}." in name}
    assert found["ranks"] == {name: full.get(name, SMALL) for name in found["ranks"]}
    assert {name: rank for name, rank in found["named"].items() if "*" not in name} == full
    assert {rank for name, rank in found["named"].items() if "*" in name} == {SMALL}
    assert sorted(found["groups"]) == [(0, 2), (1,)]
    on_device = found["predicted"]["gpu"]
    counted = found["counted"]["gpu", "optimizer states"]
    assert on_device["optimizer states"] == pytest.approx(counted, rel=2e-3, abs=500)
    assert on_device["gradients"] == found["accumulated"]
    assert found["sent"][0] == pytest.approx(found["sent"][1], rel=2e-3)
    assert found["reason"] is None or "planned again" in found["reason"]
