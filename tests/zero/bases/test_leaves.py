"""Leaf modules of ZeRO-3 whose experts ranks use differently: two ranks are two micro-batches of one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed import DeepSpeedEngine
from deepspeed.utils import set_z3_leaf_modules
from harness import Ranks
from torch import Tensor, nn
from training import assert_same, ds_config, furthest, make_engine, result

WIDTH = 20
LOW_RANK = {"rank": 4, "update_interval": 3, "scale": 1.0}
# A bucket a matrix, weights gathered by module: more buckets of an unused expert than may be in flight.
ZERO = {
    "reduce_bucket_size": 400,
    "stage3_param_persistence_threshold": 0,
    "stage3_prefetch_bucket_size": 0,
    "stage3_max_reuse_distance": 0,
}


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.ups = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for gate, up in zip(self.gates, self.ups, strict=True):
            x = torch.tanh(gate(x)) * up(x)
        return x


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Expert() for _ in range(3))  # the first is never used

    def forward(self, x: Tensor, which: int) -> Tensor:
        return x + self.experts[1 + which](x)


class Model(nn.Module):
    """Linears below, beside (of the same input) and above the mixture."""

    def __init__(self) -> None:
        super().__init__()
        self.below = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.mixture, self.beside = Mixture(), nn.Linear(WIDTH, WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, which: int) -> Tensor:
        for linear in self.below:
            x = torch.tanh(linear(x))
        return (self.out(self.beside(x) + self.mixture(x, which)) - 1).square().mean()


def engine_of(stage: int, gas: int, options: dict[str, Any], **changes: Any) -> DeepSpeedEngine:
    torch.manual_seed(0)
    model = Model()
    set_z3_leaf_modules(model, [Mixture])
    config = ds_config(stage, options, gas=gas, zero_optimization=ZERO)
    config["hmt"] |= changes
    return make_engine(config, model)


def train(engine: DeepSpeedEngine, steps: range) -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    gas = engine.gradient_accumulation_steps()
    for step in steps:
        x = torch.randn(12, WIDTH, generator=torch.Generator().manual_seed(step))
        parts = x.split(12 // world // gas)
        for a in range(gas):
            part = a * world + rank
            loss = engine(parts[part], (part + part // 2) % 2)
            engine.backward(loss)
            engine.step()


def experts(stage: int, gas: int, options: dict[str, Any], **changes: Any) -> dict[str, Any]:
    engine = engine_of(stage, gas, options, **changes)
    train(engine, range(5))  # refreshes in the first and the fourth
    optimizer = engine.optimizer
    whole = [e.gradient.leaf is not None for e in optimizer.zero.low_rank]
    rows = [e.matrix.projection.shape[0] for e in optimizer.zero.low_rank]
    found = result(engine, [0.0]) | {"leaf": whole, "rows": rows}
    found["shared"] = optimizer.zero.basis_groups.shared.groups()
    engine.destroy()
    return found


def saved(stage: int, gas: int, options: dict[str, Any], folder: str) -> dict[str, Any]:
    """Seven steps, saved in the middle of an interval of refreshes."""
    engine = engine_of(stage, gas, options)
    train(engine, range(4))
    engine.save_checkpoint(folder)
    train(engine, range(4, 7))
    found = result(engine, [0.0])
    engine.destroy()
    return found


def resumed(stage: int, gas: int, options: dict[str, Any], folder: str) -> dict[str, Any]:
    engine = engine_of(stage, gas, options)
    engine.load_checkpoint(folder)
    train(engine, range(4, 7))
    found = result(engine, [0.0])
    engine.destroy()
    return found


@pytest.mark.parametrize(
    ("options", "gas"),
    [(LOW_RANK, 1), (LOW_RANK, 2), ({"method": "adamw"}, 2)],
    ids=["low rank-1", "low rank-2", "adamw-2"],
)
def test_experts_that_one_rank_uses(ranks: Ranks, options: dict[str, Any], gas: int) -> None:
    one = ranks.run(experts, 1, 0, 2 * gas, options)[0]
    both = ranks.run(experts, 2, 3, gas, options)
    assert_same(one, both[0])
    assert furthest(both[0]["weights"], both[1]["weights"]) == 0


@pytest.mark.parametrize("changes", [{}, {"basis_cache": {}}], ids=["", "cache"])
def test_what_is_outside_a_leaf_deals_its_bases(ranks: Ranks, changes: dict[str, Any]) -> None:
    """Also with bases that linears share: never one of a leaf with one outside, which reads the same input."""
    both = ranks.run(experts, 2, 3, 1, {**LOW_RANK, "share_basis": True}, **changes)
    assert furthest(both[0]["weights"], both[1]["weights"]) == 0
    for found in both:
        assert found["rows"] == [WIDTH if leaf else 0 for leaf in found["leaf"]]
        assert found["shared"] == both[0]["shared"]
        names = [name for group in found["shared"] for name in group]
        assert any("gates" in name for name in names)
        assert "beside.weight" not in names


@pytest.mark.parametrize("share_basis", [False, True])
def test_leaves_resume(ranks: Ranks, share_basis: bool, tmp_path: Path) -> None:
    """Bit for bit on the same ranks; on one, whose bases and gradients are nobody else's, as if it had saved."""
    options = {**LOW_RANK, "share_basis": share_basis}
    before = ranks.run(saved, 2, 3, 1, options, str(tmp_path))
    after = ranks.run(resumed, 2, 3, 1, options, str(tmp_path))
    for one, other in zip(before, after, strict=True):
        assert furthest(one["weights"], other["weights"]) == 0
    alone = ranks.run(resumed, 1, 0, 2, options, str(tmp_path))[0]
    assert_same(before[0], alone)
