"""Linears that some steps, or none, use: the others train as if they were not there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Ranks
from low_rank_adamw import low_rank_adamw
from torch import Tensor, nn
from training import bases, ds_config, make_engine, subspace_distance, weights

WIDTH = 40
OPTIONS: dict[str, Any] = {"rank": 8, "update_interval": 4, "scale": 1.0}


class Detour(nn.Module):
    """Three linears in a row, of which the second is left out on demand. It is registered first."""

    def __init__(self) -> None:
        super().__init__()
        self.detour = nn.Linear(WIDTH, WIDTH, bias=False)
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.last = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, use: bool) -> Tensor:
        hidden = torch.relu(self.first(x))
        hidden = hidden + self.detour(torch.tanh(hidden)) if use else hidden
        return (self.last(hidden) - x).square().mean()


def detour_run(stage: int, options: dict[str, Any], used: int, unused: int) -> dict[str, Any]:
    """Steps that use all linears, then steps that leave one out."""
    torch.manual_seed(0)
    engine = make_engine(ds_config(stage, {**OPTIONS, **options}), Detour())
    matrices = {entry.name: entry.matrix for entry in engine.optimizer.zero.low_rank}
    energies = []
    for step in range(used + unused):
        loss = engine(torch.randn(12, WIDTH), step < used)
        engine.backward(loss)
        engine.step()
        energies.append(float(matrices["detour.weight"].smoothed_energy()))
    return {
        "measured": {name: matrix.measured for name, matrix in matrices.items()},
        "refreshes": engine.optimizer.zero.basis_groups.schedule.num_refreshes,
        "early": engine.optimizer.zero.basis_groups.schedule.next_refresh,
        "finite": all(bool(torch.isfinite(p).all()) for p in engine.module.parameters()),
        "energies": energies,
    }


@pytest.mark.parametrize(("stage", "world"), [(0, 1), (2, 2), (3, 2)])
def test_a_linear_that_nobody_uses_keeps_no_other_from_refreshing(
    ranks: Ranks, stage: int, world: int
) -> None:
    """One matrix fits the bytes of full gradients; the first of the queue never has one."""
    found = ranks.run(detour_run, world, stage, {}, 0, 20)[0]
    assert found["measured"] == {
        "detour.weight": False,
        "first.weight": True,
        "last.weight": True,
    }
    assert found["refreshes"][0] == 0
    assert min(found["refreshes"][1:]) >= 4  # once an interval, the first one late


def test_a_core_without_a_gradient_keeps_the_weights_finite(ranks: Ranks) -> None:
    """||U|| of 32 x 32 is above four: over a norm of zero it must not become infinite."""
    options = {"projection": "two_sided", "rank": 32, "max_full_gradient_bytes": 10**6}
    for stage in (0, 2):
        assert ranks.run(detour_run, 1, stage, options, 12, 2)[0]["finite"]


def test_steps_that_do_not_use_a_linear_say_nothing_of_its_basis(ranks: Ranks) -> None:
    """Its captured energy stays, so nothing is refreshed before its time."""
    options = {"update_interval": 400, "max_full_gradient_bytes": 10**6}
    found = ranks.run(detour_run, 1, 2, options, 12, 30)[0]
    assert 0 < found["energies"][11] == found["energies"][-1]
    assert min(found["early"]) > 42


class Pair(nn.Module):
    """Two linears that read the same input, of which the second is left out on demand."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Linear(WIDTH, WIDTH, bias=False)
        self.b = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, use: bool) -> Tensor:
        hidden = torch.tanh(self.a(x))
        hidden = hidden + self.b(x) if use else hidden
        return (hidden - x).square().mean()


PAIR_STEPS = 12
SHARED: dict[str, Any] = {**OPTIONS, "share_basis": True, "max_full_gradient_bytes": 10**6}


def pair_batch(step: int) -> Tensor:
    return torch.randn(12, WIDTH, generator=torch.Generator().manual_seed(step))


def pair_run(stage: int) -> tuple[list[int], Tensor, Tensor]:
    """Refreshes, the shared basis and the first weight, after steps of which only the first uses both."""
    config = ds_config(stage, SHARED, gradient_clipping=0.0)
    config["optimizer"]["params"]["weight_decay"] = 0.0
    engine = make_engine(config, Pair())
    world, rank = dist.get_world_size(), dist.get_rank()
    for step in range(PAIR_STEPS):
        engine.backward(engine(pair_batch(step).chunk(world)[rank], step == 0))
        engine.step()
    return engine.optimizer.zero.basis_groups.schedule.num_refreshes, *(
        f(engine)["a.weight"] for f in (bases, weights)
    )


def test_a_shared_basis_goes_on_with_the_members_that_are_used(ranks: Ranks) -> None:
    model = Pair()
    optimizer = low_rank_adamw(model, lr=3e-3, betas=(0.9, 0.99), **SHARED)
    for step in range(PAIR_STEPS):
        optimizer.zero_grad()
        model(pair_batch(step), step == 0).backward()
        optimizer.step()
    basis = optimizer.matrices["a.weight"].basis
    expected = [state["num_refreshes"] for state in optimizer.state_dict()["state"].values()]
    assert expected[0] >= 3
    for stage, world in ((0, 1), (2, 1), (2, 2), (3, 2)):
        refreshes, found, weight = ranks.run(pair_run, world, stage)[0]
        assert refreshes == expected
        assert subspace_distance(found, basis) < 1e-2  # a sine, of bases in fp32
        torch.testing.assert_close(weight, model.a.weight.detach(), atol=1e-5, rtol=0)
