"""A classifier, a router and a reward head under a fixed rank that is above their smaller sides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Ranks
from torch import Tensor, nn
from torch.nn import functional as F
from training import assert_same, ds_config, furthest, make_engine, mean_over_ranks, result

from hmt_deepspeed.zero.optimizer.start_table import start_rows

N, LABELS, EXPERTS = 30, 3, 4
OPTIONS = {"rank": 8, "update_interval": 3, "scale": 1.0, "state_dtype": "int8"}
SIDES = {"module_rules": {"router": {"projection": "auto"}, "down": {"projection": "two_sided"}}}


class Narrow(nn.Module):
    """A mixture whose experts are scales; ``down`` and ``up`` are an adapter of five channels.

    Sigmoids: the rows of a softmax's gradient sum to zero, so that one direction fewer than its rank is found and
    rounding chooses the last.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk, self.router = nn.Linear(N, N), nn.Linear(N, EXPERTS, bias=False)
        self.down, self.up = nn.Linear(N, 5), nn.Linear(5, N)
        self.scales = nn.Parameter(torch.rand(EXPERTS, N) + 0.5)
        self.classifier, self.reward = nn.Linear(N, LABELS), nn.Linear(N, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.trunk(x)) * (self.router(x).sigmoid() @ self.scales)
        hidden = hidden + self.up(F.silu(self.down(hidden)))
        labels = (x[:, :LABELS] > 0).float()
        wrong = F.binary_cross_entropy_with_logits(self.classifier(hidden), labels)
        return wrong + F.mse_loss(self.reward(hidden), x[:, :1].sin())


def train(engine: Any, first: int, steps: int) -> list[float]:
    losses = []
    for step in range(first, first + steps):
        x = torch.randn(12, N, generator=torch.Generator().manual_seed(step))
        loss = engine(x.chunk(dist.get_world_size())[dist.get_rank()])
        engine.backward(loss)
        engine.step()
        losses.append(mean_over_ranks(loss.item()))
    return losses


def run(stage: int, folder: Path) -> dict[str, Any]:
    """Eight steps; the last three of them again from a checkpoint."""
    config = ds_config(stage, {**OPTIONS, **SIDES})
    engine = make_engine(config, Narrow())
    rows = start_rows(engine.optimizer.zero)
    losses = train(engine, 0, 5)
    engine.save_checkpoint(str(folder))
    losses += train(engine, 5, 3)
    found = result(engine, losses) | {"rows": rows}
    engine.destroy()
    again = make_engine(config, Narrow())
    again.load_checkpoint(str(folder))
    return found | {"again": result(again, train(again, 5, 3))}


@pytest.fixture(scope="module")
def alone(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return ranks.run(run, 1, 0, tmp_path_factory.mktemp("alone"))[0]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_narrow_matrices_train_alike_at_every_stage_and_resume(
    ranks: Ranks, alone: dict[str, Any], tmp_path: Path, stage: int
) -> None:
    """Two ranks, of which the second holds one row of the classifier."""
    both = ranks.run(run, 2, stage, tmp_path)
    assert_same(alone, both[0])
    assert both[0]["losses"][-1] != both[0]["losses"][5]
    for found in both:
        assert found["again"]["losses"] == found["losses"][5:]
        assert furthest(found["again"]["weights"], found["weights"]) == 0


def test_the_start_table_says_what_was_lowered(alone: dict[str, Any]) -> None:
    rows = {row.shape: row for row in alone["rows"]}
    for shape, (side, rank, lowered) in SHAPES.items():
        assert rows[shape].rank == rank
        assert f"projection {side}" in rows[shape].treatment
        assert ("rank lowered from 8" in rows[shape].treatment) == lowered
        assert "fp32 states (under 4096 elements)" in rows[shape].treatment
    assert any("a vector in disguise" in row.treatment[0] for row in alone["rows"])


SHAPES = {
    "30x30": ("right", "8", False),
    "4x30": ("left", "4", True),
    "3x30": ("right", "3", True),
    "5x30": ("two-sided", "5", True),
    "30x5": ("right", "5", True),
}
