"""What the planner says of states off the device, against what an engine keeps, moves and computes there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import Ranks
from training import HIDDEN, ds_config, make_engine, tiny_llama, train_step

# every matrix finds its basis in the first step, and keeps it
FIXED = {
    "rank": 8,
    "update_interval": 1000,
    "max_full_gradient_bytes": 10**7,
}
# name -> (fields of hmt.optimizer, ZeRO stage, accumulation)
MODES: dict[str, tuple[dict[str, Any], int, int]] = {
    "adamw": ({"method": "adamw"}, 2, 1),
    "right": (FIXED, 2, 2),
    "left": ({**FIXED, "projection": "left"}, 1, 2),
    "two-sided": ({**FIXED, "projection": "two_sided"}, 3, 1),
    "apollo": ({"method": "apollo", "rank": 8}, 2, 1),
    "muon of whole matrices": ({"method": "muon", "rank": "full"}, 2, 2),
    "full residual": ({**FIXED, "residual": "full"}, 2, 1),
    # k_proj and v_proj have 20 rows, so only the others are full
    "full rank": ({**FIXED, "rank": HIDDEN, "target_modules": ["q_proj", "up_proj"]}, 2, 1),
    "no masters": ({**FIXED, "master_weights": "none"}, 2, 1),
    "one to AdamW": ({**FIXED, "module_rules": {"o_proj": {"method": "adamw"}}}, 2, 1),
}


CASES = [(name, "bf16") for name in MODES] + [("right", "fp32"), ("right", "fp16")]


class Arithmetic:
    """Elements that the host updates, counted where it does."""

    def __init__(self) -> None:
        from hmt_deepspeed.zero.offload import weight as host_weight
        from hmt_deepspeed.zero.offload.cpu_adam import CpuAdam

        self.adam = self.added = 0
        step, add = CpuAdam.step_, host_weight.apply_whole_

        def stepping(kernel: Any, param: torch.Tensor, *args: Any, **kwargs: Any) -> None:
            self.adam += param.numel()
            step(kernel, param, *args, **kwargs)

        def adding(values: torch.Tensor, *args: Any) -> None:
            self.added += values.numel()
            add(values, *args)

        CpuAdam.step_, host_weight.apply_whole_ = stepping, adding  # type: ignore[method-assign]


def look_at(name: str, dtype: str, arithmetic: Arithmetic) -> dict[str, Any]:
    """Predicted and counted of one engine in its third step, when every basis has been found."""
    from hmt_deepspeed.config import HMTConfig
    from hmt_deepspeed.planner.hardware import named_machine
    from hmt_deepspeed.planner.run.loads import phases, static_bytes
    from hmt_deepspeed.zero.planning.memory import counted_bytes

    options, stage, accumulation = MODES[name]
    config = ds_config(
        stage, options, accumulation, **{dtype: {"enabled": True}} if dtype != "fp32" else {}
    )
    config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    engine = make_engine(config, tiny_llama())
    for step in range(2):
        train_step(engine, step)
    host = engine.optimizer.zero.host
    before = (host.engine.counters.bytes_out, host.engine.counters.bytes_in)
    arithmetic.adam = arithmetic.added = 0
    train_step(engine, 2)
    after = (host.engine.counters.bytes_out, host.engine.counters.bytes_in)

    facts = engine.run_facts(HMTConfig.from_block({}))
    problem = facts.problem(facts.workload(2, 16), named_machine("rtx4090"))
    total = sum(phase.weight * phase.base for phase in phases(problem))
    total = total + sum(p.weight * p.update for p in phases(problem) if p.update is not None)
    found = {
        "predicted": static_bytes(problem),
        "counted": counted_bytes(engine.optimizer),
        "allocated": host.nbytes + host.pool_bytes,
        "moments": sum(e.matrix.moments.nbytes for e in engine.optimizer.zero.low_rank),
        "amounts": total,
        "moved": tuple(b - a for a, b in zip(before, after, strict=True)),
        "arithmetic": (arithmetic.adam, arithmetic.added),
    }
    engine.destroy()
    return found


def look_at_all() -> dict[tuple[str, str], dict[str, Any]]:
    from deepspeed.accelerator import get_accelerator

    get_accelerator().is_fp16_supported = lambda: True  # it is slow, and right
    arithmetic = Arithmetic()
    return {(name, dtype): look_at(name, dtype, arithmetic) for name, dtype in CASES}


@pytest.fixture(scope="module")
def looks(ranks: Ranks) -> list[dict[tuple[str, str], dict[str, Any]]]:
    return ranks.run(look_at_all, 2)


@pytest.mark.parametrize("case", CASES)
def test_bytes_are_where_the_engine_has_them(
    looks: list[dict[tuple[str, str], dict[str, Any]]], case: tuple[str, str]
) -> None:
    """The planner's are of the rank that holds most."""
    static = looks[0][case]["predicted"]
    counted = [look[case]["counted"] for look in looks]
    for where, kind in (
        ("gpu", "optimizer states"),
        ("host", "optimizer states"),
        ("host", "gradients"),
    ):
        most = max(each.get((where, kind), 0) for each in counted)
        predicted = static[where].get(kind, 0)
        # beside moments and masters a rule has a count of steps and the like
        assert predicted == pytest.approx(most, rel=2e-3, abs=500), (where, kind)
    on_host = sum(static["host"].values())
    assert max(look[case]["allocated"] for look in looks) == pytest.approx(on_host, rel=1e-3)


@pytest.mark.parametrize("case", CASES)
def test_a_step_moves_and_updates_what_was_predicted(
    looks: list[dict[tuple[str, str], dict[str, Any]]], case: tuple[str, str]
) -> None:
    from hmt_deepspeed.planner.run.loads import Amount

    amounts = looks[0][case]["amounts"]
    for index, amount in enumerate((Amount.TO_HOST, Amount.TO_GPU)):
        most = max(look[case]["moved"][index] for look in looks)
        assert amounts[amount] == pytest.approx(most, rel=2e-3), amount.name
    for index, amount in enumerate((Amount.ADAM, Amount.ADDED)):
        most = max(look[case]["arithmetic"][index] for look in looks)
        assert amounts[amount] == pytest.approx(most, rel=2e-3), amount.name
