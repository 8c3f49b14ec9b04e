"""DeepSpeed's expert parallelism: ranks that hold some experts each are one rank that holds all, and train as DeepSpeed's."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed.moe.layer import MoE
from harness import Ranks
from torch import Tensor, nn
from training import (
    GLOBAL_BATCH,
    LOSS,
    NORM,
    WEIGHT,
    ds_config,
    furthest,
    make_engine,
    mean_over_ranks,
    stock_config,
)

WIDTH, INNER, EXPERTS, TOKENS = 20, 28, 4, 5
LOW_RANK = {
    "rank": 4,
    "scale": 1.0,
    "max_full_gradient_bytes": 10**6,
    # The rows of a gate's gradient sum to zero: a basis as high as it has a direction of nothing but rounding errors.
    "module_rules": {"wg": {"method": "adamw"}},
}
# Schedules spread refreshes over the matrices of ranks: one rank and many agree where all refresh in every step, or only
# in the first.
ALWAYS, ONCE = {**LOW_RANK, "update_interval": 1}, {**LOW_RANK, "update_interval": 100}
PARTS = 4  # micro-batches of a step over all ranks, each of which the gate sees alone


@dataclass(frozen=True)
class Layout:
    """``ep_size`` of both layers; ``data_first``: consecutive ranks hold the same experts."""

    sizes: tuple[int, int]
    data_first: bool = False

    def among_all(self, name: str) -> str:
        """The name that a parameter of this rank has on one rank with all experts."""
        found = re.fullmatch(r"(blocks\.(\d)\..*deepspeed_experts\.)(\d+)(\..*)", name)
        if found is None:
            return name
        size, rank = self.sizes[int(found[2])], dist.get_rank()
        place = rank // (dist.get_world_size() // size) if self.data_first else rank % size
        return f"{found[1]}{place * (EXPERTS // size) + int(found[3])}{found[4]}"


ALONE, TWO = Layout((1, 1)), Layout((2, 2))


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


class Block(nn.Module):
    def __init__(self, ep_size: int) -> None:
        super().__init__()
        self.below = nn.Linear(WIDTH, WIDTH)
        # a capacity below what some experts get: they drop tokens
        self.moe = MoE(WIDTH, Expert(), EXPERTS, ep_size, capacity_factor=1.5, use_rts=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y, balance, _ = self.moe(torch.tanh(self.below(x)))
        return x + y, balance


class Model(nn.Module):
    def __init__(self, layout: Layout) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(map(Block, layout.sizes))
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        balance = torch.zeros(())
        for block in self.blocks:
            x, own = block(x)
            balance = balance + own
        return (self.out(x) - 1).square().mean() + 0.01 * balance


def model_of(layout: Layout) -> Model:
    """Weights by the names among all; no token ever goes to the first layer's last expert."""
    model = Model(layout)
    with torch.no_grad():
        for name, param in model.named_parameters():
            seed = sum(layout.among_all(name).encode())
            values = torch.randn(param.shape, generator=torch.Generator().manual_seed(seed))
            param.copy_(values / WIDTH**0.5)
    gate = model.blocks[0].moe.deepspeed_moe.gate.wg.weight.requires_grad_(False)
    with torch.no_grad():
        gate[1], gate[3] = -gate[0], 0.0
    return model


def config_of(stage: int, options: dict[str, Any] | None, **changes: Any) -> dict[str, Any]:
    gas = PARTS // dist.get_world_size()
    if options is None:
        return stock_config(stage, gas, **changes)
    return ds_config(stage, options, gas, **changes)


def engine_of(stage: int, options: dict[str, Any] | None, layout: Layout, **changes: Any) -> Any:
    return make_engine(config_of(stage, options, **changes), model_of(layout))


def train(engine: Any, steps: Sequence[int]) -> dict[str, list[float]]:
    world, rank = dist.get_world_size(), dist.get_rank()
    found: dict[str, list[float]] = {"losses": [], "norms": []}
    for step in steps:
        x = torch.randn(GLOBAL_BATCH, TOKENS, WIDTH, generator=torch.Generator().manual_seed(step))
        parts, total = x.split(GLOBAL_BATCH // PARTS), 0.0
        for part in parts[rank::world]:
            loss = engine(part.to(engine.module.out.weight.dtype))
            engine.backward(loss)
            engine.step()
            total += loss.item() * world / PARTS
        found["losses"].append(mean_over_ranks(total))
        norm = engine.get_global_grad_norm()
        found["norms"].append(None if norm is None else float(norm))
    return found


def weights(engine: Any, layout: Layout) -> dict[str, Tensor]:
    """What this rank holds, by name among all."""
    return {
        layout.among_all(name): param.detach().clone()
        for name, param in engine.module.named_parameters()
    }


def run(
    stage: int, options: dict[str, Any] | None, layout: Layout, steps: int = 3, **changes: Any
) -> dict[str, Any]:
    engine = engine_of(stage, options, layout, **changes)
    found: dict[str, Any] = train(engine, range(steps))
    found["weights"] = weights(engine, layout)
    if options is not None:
        states = engine.optimizer.zero.param_states
        found["masters"] = {
            p.name: engine.optimizer.state_access.get_full_hp_param(p.gradient.param)
            for p in states
        }
        found["shards"] = {p.name: p.gradient.shards.world for p in states}
        found["low_rank"] = [p.name for p in states if p.matrix is not None]
        found["ranks"] = {p.name: p.matrix.rank for p in states if p.matrix is not None}
    engine.destroy()
    return found


def whole(parts: Sequence[dict[str, Any]], key: str = "weights") -> dict[str, Tensor]:
    """Of all ranks; what several hold is the same bit for bit."""
    found: dict[str, Tensor] = {}
    for part in parts:
        for name, value in part[key].items():
            assert torch.equal(found.setdefault(name, value), value), name
    return found


def assert_like(parts: Sequence[dict[str, Any]], one: dict[str, Any]) -> None:
    for part in parts:
        assert part["losses"] == pytest.approx(one["losses"], rel=LOSS)
        assert part["norms"] == pytest.approx(one["norms"], rel=NORM)
        assert part["norms"] == parts[0]["norms"]
    assert furthest(whole(parts), one["weights"]) < WEIGHT


def poisoned(stage: int, layout: Layout) -> dict[str, Any]:
    """One expert of the last rank has a gradient that is not finite, in the second step."""
    engine = engine_of(stage, ALWAYS, layout)
    train(engine, [0])
    before = weights(engine, layout)
    hook = None
    if dist.get_rank() == dist.get_world_size() - 1:
        expert = engine.module.blocks[1].moe.deepspeed_moe.experts.deepspeed_experts[0]
        hook = expert.up.bias.register_hook(lambda grad: grad * float("nan"))
    train(engine, [1])
    if hook is not None:
        hook.remove()
    after = weights(engine, layout)
    found = train(engine, [2])
    moved = furthest(before, after)
    return {**found, "skipped": engine.skipped_steps, "moved": moved}


def saved(stage: int, options: dict[str, Any], folder: str, **changes: Any) -> dict[str, Any]:
    engine = engine_of(stage, options, TWO, **changes)
    train(engine, range(2))
    engine.save_checkpoint(folder, tag="two")
    here = weights(engine, TWO)
    found = train(engine, range(2, 4))
    return {**found, "weights": weights(engine, TWO), "saved": here}


def resumed(
    stage: int, options: dict[str, Any], layout: Layout, folder: str, **changes: Any
) -> dict[str, Any]:
    engine = engine_of(stage, options, layout, **changes)
    with torch.no_grad():
        for param in engine.module.parameters():
            param.zero_()
    path, _ = engine.load_checkpoint(folder)
    assert path is not None
    found = train(engine, range(2, 4))
    return {**found, "weights": weights(engine, layout)}


def frozen_experts(layout: Layout, folder: str, saves: bool) -> dict[str, Any]:
    model = model_of(layout)
    for name, param in model.named_parameters():
        param.requires_grad_("experts" not in name)
    engine = make_engine(config_of(1, ALWAYS), model)
    if saves:
        engine.save_checkpoint(folder)
        with pytest.raises(ValueError, match="the first rank's experts only"):
            engine.save_16bit_model(folder)
    else:
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
        engine.load_checkpoint(folder)
    return {"weights": weights(engine, layout)}


# -- tests --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def alone(ranks: Ranks) -> dict[str, dict[str, Any]]:
    """One rank with all experts."""
    return {
        name: ranks.run(run, 1, 0, options, ALONE)[0]
        for name, options in (("always", ALWAYS), ("once", ONCE))
    }


@pytest.mark.parametrize(
    ("world", "stage", "refreshes", "layout"),
    [
        (2, 0, "always", TWO),
        (2, 2, "always", TWO),
        (4, 0, "once", Layout((2, 2), data_first=True)),
        (4, 1, "always", Layout((2, 4))),
        (4, 2, "once", TWO),
    ],
    ids=str,
)
def test_ranks_are_one_rank(
    ranks: Ranks,
    alone: dict[str, dict[str, Any]],
    world: int,
    stage: int,
    refreshes: str,
    layout: Layout,
) -> None:
    one = alone[refreshes]
    assert min(one["norms"]) > 0.5  # clipping is active
    assert sum("experts" in name for name in one["low_rank"]) == 2 * EXPERTS * 2
    changes = {
        "use_data_before_expert_parallelism": layout.data_first,
        "prescale_gradients": stage == 2,  # divided before the sum, also where that is of one rank
    }
    options = {"always": ALWAYS, "once": ONCE}[refreshes]
    parts = ranks.run(run, world, stage, options, layout, **changes)
    assert_like(parts, one)
    assert furthest(whole(parts, "masters"), one["masters"]) < WEIGHT
    for part in parts:
        for name, shards in part["shards"].items():
            size = layout.sizes[int(name.split(".")[1])] if "experts" in name else 1
            assert shards == (world // size if stage else 1), name


def test_adamw_is_deepspeeds(ranks: Ranks) -> None:
    stock = ranks.run(run, 4, 1, None, TWO)
    ours = ranks.run(run, 4, 1, {"method": "adamw"}, TWO)
    for own, other in zip(ours, stock, strict=True):
        assert own["losses"] == pytest.approx(other["losses"], rel=LOSS)
        assert own["norms"] == pytest.approx(other["norms"], rel=NORM)
    assert furthest(whole(ours), whole(stock)) < WEIGHT


@pytest.mark.parametrize(("device", "world"), [("cpu", 2), ("nvme", 4)])
def test_offloaded_states(
    ranks: Ranks, alone: dict[str, dict[str, Any]], device: str, world: int, tmp_path: Path
) -> None:
    path = {"nvme_path": str(tmp_path)} if device == "nvme" else {}
    offload = {"offload_optimizer": {"device": device, **path}}
    parts = ranks.run(run, world, 2, ALWAYS, TWO, zero_optimization=offload)
    assert_like(parts, alone["always"])


def test_chosen_ranks_agree(ranks: Ranks) -> None:
    """Holders of an expert choose its rank alike, and all ranks those of the others, though experts differ."""
    parts = ranks.run(run, 4, 1, {"update_interval": 2}, TWO, bf16={"enabled": True})
    whole(parts)
    chosen: dict[str, int] = {}
    for part in parts:
        for name, rank in part["ranks"].items():
            assert chosen.setdefault(name, rank) == rank, name


def test_one_experts_gradient_skips_the_step_everywhere(ranks: Ranks) -> None:
    parts = ranks.run(poisoned, 4, 1, TWO)
    for part in parts:
        assert part["skipped"] == 1
        assert part["moved"] == 0
        assert part["norms"] == parts[0]["norms"]
        assert part["norms"][0] > 0.1


def test_checkpoints_load_at_another_ep_size(ranks: Ranks, tmp_path: Path) -> None:
    before = ranks.run(saved, 2, 1, ALWAYS, str(tmp_path))
    again = ranks.run(resumed, 2, 1, ALWAYS, TWO, str(tmp_path))
    for one, other in zip(before, again, strict=True):
        assert one["norms"] == other["norms"]
        assert furthest(one["weights"], other["weights"]) == 0
    known = {"losses": before[0]["losses"], "norms": before[0]["norms"], "weights": whole(before)}
    assert_like(ranks.run(resumed, 1, 0, ALWAYS, ALONE, str(tmp_path)), known)
    assert_like(ranks.run(resumed, 4, 2, ALWAYS, TWO, str(tmp_path)), known)
    # DeepSpeed's layout of weights
    for number in range(EXPERTS):
        path = tmp_path / "two" / f"layer_1_expert_{number}_mp_rank_00_model_states.pt"
        for name, value in torch.load(path, weights_only=True).items():
            assert torch.equal(value, whole(before, "saved")[name])


def test_bf16_resumes_bit_for_bit(ranks: Ranks, tmp_path: Path) -> None:
    options, changes = {"update_interval": 3}, {"bf16": {"enabled": True}}
    before = ranks.run(saved, 4, 2, options, str(tmp_path), **changes)
    again = ranks.run(resumed, 4, 2, options, TWO, str(tmp_path), **changes)
    for one, other in zip(before, again, strict=True):
        assert one["norms"] == other["norms"]
        assert furthest(one["weights"], other["weights"]) == 0


def test_frozen_experts_load(ranks: Ranks, tmp_path: Path) -> None:
    before = whole(ranks.run(frozen_experts, 2, TWO, str(tmp_path), True))
    assert (
        furthest(before, ranks.run(frozen_experts, 1, ALONE, str(tmp_path), False)[0]["weights"])
        == 0
    )
