"""Checkpoints and snapshots of mixtures whose experts are 3-D weights, and DeepSpeed's tools in the middle of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
)
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from harness import Ranks
from mixture_runs import (
    STEPS,
    alone,
    assert_all_same,
    assert_equal,
    engine_of,
    is_expert,
    train,
)
from training import LOSS, WEIGHT, furthest, loss_of, micro_batches, model_weights

AUTO, OWN = {"expert_basis": "auto"}, {"expert_basis": "own", "second_moment": "factored"}
Layout = tuple[int, int]  # stage, ranks
# Options, experts, where it is saved and after how many steps, where else it goes on: with the same experts, some or all.
# Experts with "auto" decide in the second step. One of the two steps that follow refreshes bases.
CHECKPOINTS: dict[str, tuple[dict[str, Any], int, Layout, int, list[Layout]]] = {
    "undecided": (AUTO, 5, (2, 2), 1, [(3, 3)]),
    "decided": (AUTO, 5, (2, 3), 2, [(3, 2), (0, 1)]),
    "own, of which ranks share one": (OWN, 2, (3, 3), 1, [(2, 2)]),
}


def saved(
    family: str,
    stage: int,
    options: dict[str, Any],
    folder: str,
    after: int = 1,
    loads: bool = False,
    **keyword: Any,
) -> dict[str, Any]:
    """``loads``: at the end it is to refuse what it has saved."""
    engine = engine_of(family, stage, options, **keyword)
    train(engine, range(after))
    engine.save_checkpoint(folder)
    if engine.hmt_snapshots is not None:
        engine.hmt_snapshots.finish()
    found = train(engine, range(after, after + 2))
    if loads:
        with pytest.raises(ValueError, match="load it into a new engine") as refused:
            engine.load_checkpoint(folder)
        assert "experts.down_proj" in str(refused.value)
    engine.destroy()
    return found


def resumed(
    family: str,
    stage: int,
    options: dict[str, Any],
    folder: str,
    after: int = 1,
    tag: str | None = None,
    **keyword: Any,
) -> dict[str, Any]:
    engine = engine_of(family, stage, options, **keyword)
    path, _ = engine.load_checkpoint(folder, tag=tag)
    assert path is not None
    found = train(engine, range(after, after + 2))
    engine.destroy()
    return found


@pytest.mark.parametrize("case", CHECKPOINTS)
def test_checkpoints_load_on_other_ranks(ranks: Ranks, case: str, tmp_path: Path) -> None:
    """Bit for bit on the same ones, snapshots too; up to rounding at another stage and on others. Experts that have decided
    load nothing undecided."""
    options, experts, (stage, world), after, others = CHECKPOINTS[case]
    how = options, str(tmp_path / "checkpoints"), after
    snapshots = {"snapshot": {"path": str(tmp_path / "snapshots"), "interval": after}}
    block, loads = (snapshots if options is OWN else None), case == "undecided"
    before = ranks.run(
        saved, world, "GptOss", stage, *how, experts=experts, loads=loads, block=block
    )
    again = ranks.run(resumed, world, "GptOss", stage, *how, experts=experts)
    assert_equal(again, before)
    if block:
        how = options, str(tmp_path / "snapshots"), after, f"step{after:08d}"
        assert_equal(ranks.run(resumed, world, "GptOss", stage, *how, experts=experts), before)
    how = options, str(tmp_path / "checkpoints"), after
    for other, number in others:
        found = ranks.run(resumed, number, "GptOss", other, *how, experts=experts)
        assert_all_same(found, before[0])


@pytest.mark.parametrize(
    ("stage", "world", "experts"),
    [(2, 2, 5), (3, 3, 4), pytest.param(1, 2, 6, marks=pytest.mark.slow)],
)
def test_bf16_resumes_bit_for_bit(
    ranks: Ranks, stage: int, world: int, experts: int, tmp_path: Path
) -> None:
    """Without masters, in 8-bit states; and ranks see the same weights. Three parts of four experts end inside a row."""
    options = {"master_weights": "none", "state_dtype": "int8"}
    how = {"bf16": {"enabled": True}, "experts": experts}
    how["widths"] = {"hidden_size": 40, "head_dim": 20, "intermediate_size": 24}
    before = ranks.run(saved, world, "Mixtral", stage, options, str(tmp_path), **how)
    again = ranks.run(resumed, world, "Mixtral", stage, options, str(tmp_path), **how)
    assert_equal(again, before)
    assert_equal(before, before[:1] * world)


# -- tools ----------------------------------------------------------------------------------------------


def tools(stage: int, options: dict[str, Any], folder: str, experts: int) -> dict[str, Any]:
    """What DeepSpeed's tools read of experts and write to them, in the middle of a run."""
    zero = {"stage3_gather_16bit_weights_on_model_save": True}
    engine = engine_of("GptOss", stage, options, experts=experts, zero_optimization=zero)
    found: dict[str, Any] = train(engine, range(2))
    name, weight = next((n, p) for n, p in engine.module.named_parameters() if is_expert(n))
    found["table"] = engine.optimizer.describe()
    found["moment"] = safe_get_full_optimizer_state(weight, "exp_avg")
    found["master"] = safe_get_full_fp32_param(weight)
    for tokens in micro_batches(engine, 2):
        engine.backward(loss_of(engine, tokens))
    found["gradient"] = safe_get_full_grad(weight)
    engine.zero_grad()
    engine.offload_states()
    engine.reload_states()
    state = engine.optimizer.state_access
    state.set_full_hp_param(found["moment"] * 2, weight, "exp_avg")
    found["doubled"] = safe_get_full_optimizer_state(weight, "exp_avg")
    state.set_full_hp_param(found["moment"], weight, "exp_avg")
    engine.save_checkpoint(folder)
    engine.save_16bit_model(folder)
    if dist.get_rank() == 0:
        found["consolidated"] = get_fp32_state_dict_from_zero_checkpoint(folder)[name].clone()
        found["saved"] = torch.load(f"{folder}/pytorch_model.bin", weights_only=True)[name]
    found["losses"] += train(engine, range(2, STEPS))["losses"]
    found["weights"] = model_weights(engine)
    engine.destroy()
    return found


@pytest.mark.parametrize(
    ("options", "stage", "world", "experts"),
    [({}, 3, 2, 5), ({"expert_basis": "own"}, 2, 3, 2)],
    ids=["shared", "own, of which ranks share one"],
)
def test_tools(
    ranks: Ranks, options: dict[str, Any], stage: int, world: int, experts: int, tmp_path: Path
) -> None:
    known = alone("GptOss", experts, **options)
    (one,) = ranks.run(tools, 1, 0, options, str(tmp_path / "one"), experts)
    parts = ranks.run(tools, world, stage, options, str(tmp_path / "many"), experts)
    assert one["losses"] == pytest.approx(known["losses"], rel=LOSS)
    assert one["moment"].shape == (experts, 40, 6)
    assert torch.equal(parts[0]["saved"], parts[0]["master"])
    assert torch.equal(parts[0]["consolidated"], parts[0]["master"])
    for part in parts:
        assert part["losses"] == pytest.approx(one["losses"], rel=LOSS)
        # A basis's directions have either sign, which sums in another order may choose.
        signs = (part["moment"] * one["moment"]).sum(1, keepdim=True).sign()
        for key, turned in (("moment", signs), ("master", 1), ("gradient", 1)):
            assert part[key].shape == one[key].shape
            largest = float(one[key].abs().max())
            assert furthest({key: part[key] * turned}, {key: one[key]}) < WEIGHT * largest
        assert torch.equal(part["doubled"], 2 * part["moment"])
        assert f"experts {experts}x24x40" in part["table"]
        kind = "a basis of each expert" if options else "one basis of all experts"
        assert kind in part["table"].replace("\n    ", " ")
