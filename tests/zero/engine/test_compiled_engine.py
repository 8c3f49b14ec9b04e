"""``engine.compile()``: projected linears stay out of the graphs. The "eager" backend needs no compiler."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import Ranks
from torch import Tensor, nn
from training import ds_config, make_engine, mean_over_ranks, weights


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.gate, self.down = nn.Linear(24, 40), nn.Linear(24, 40), nn.Linear(40, 24)

    def forward(self, x: Tensor) -> Tensor:
        return (self.down(torch.sigmoid(self.gate(x)) * self.up(x)) - 1).square().mean()


def trained(stage: int, compiled: bool, options: dict[str, Any]) -> dict[str, Any]:
    options = {"rank": 4, "update_interval": 3, "scale": 1.0, **options}
    engine = make_engine(ds_config(stage, options), Gated())
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    if compiled:
        engine.compile(backend=backend)
    losses = []
    for step in range(5):
        x = torch.randn(12, 24, generator=torch.Generator().manual_seed(step))
        world, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
        loss = engine(x.chunk(world)[rank])
        engine.backward(loss)
        engine.step()
        losses.append(mean_over_ranks(loss.item()))
    norm = float(engine.get_global_grad_norm())
    found = {"losses": losses, "norm": norm, "weights": weights(engine)}
    engine.destroy()
    return found | {"graphs": len(graphs)}


@pytest.mark.parametrize(
    ("stage", "world", "options"),
    [
        (2, 1, {}),
        (2, 1, {"weight_dtype": "int8"}),
        (3, 1, {}),
        pytest.param(3, 2, {}, marks=pytest.mark.slow),
    ],
)
def test_a_compiled_engine_trains_as_it_is(
    ranks: Ranks, stage: int, world: int, options: dict[str, Any]
) -> None:
    eager = ranks.run(trained, world, stage, False, options)[0]
    compiled = ranks.run(trained, world, stage, True, options)[0]
    assert compiled.pop("graphs") > eager.pop("graphs") == 0
    after, expected = compiled.pop("weights"), eager.pop("weights")
    assert compiled == eager
    assert all(torch.equal(after[name], expected[name]) for name in expected)
