"""Linears whose weight is read outside their forward: by their owner, by another module, by a function."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import CaseFailed, Ranks
from torch import Tensor, nn
from torch.nn import functional as F
from training import assert_same, ds_config, make_engine, mean_over_ranks, result


class Attending(nn.Module):
    """``nn.MultiheadAttention`` reads the weight of ``out_proj`` itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(24, 2, 40, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(24, 24), nn.Linear(24, 24)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(torch.tanh(self.first(x)))
        return y


class Functional(Tied):
    def __init__(self) -> None:
        super().__init__()
        self.second.weight = nn.Parameter(self.first.weight.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(torch.tanh(super().forward(x)), self.second.weight)


MODELS = {model.__name__: model for model in (Attending, Tied, Functional)}


def trained_by(stage: int, model: str, options: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(0)
    options = {"rank": 4, "update_interval": 3, "scale": 1.0, **options}
    kept = {"stage3_param_persistence_threshold": 10**6}  # F.linear finds the weight at stage 3
    engine = make_engine(ds_config(stage, options, zero_optimization=kept), MODELS[model]())
    losses = []
    for step in range(5):
        x = torch.randn(12, 6, 24, generator=torch.Generator().manual_seed(step))
        part = x.chunk(dist.get_world_size())[dist.get_rank()]
        loss = (engine(part) - part.roll(1, 1)).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(mean_over_ranks(loss.item()))
    sites = {e.name: e.gradient.linear is not None for e in engine.optimizer.zero.low_rank}
    return result(engine, losses) | {"sites": sites}


@pytest.mark.parametrize(
    ("model", "sites"),
    [
        (
            "Attending",
            {
                "layer.self_attn.out_proj.weight": False,
                "layer.linear1.weight": True,
                "layer.linear2.weight": True,
            },
        ),
        ("Tied", {"first.weight": False}),
    ],
)
def test_a_weight_with_other_readers_trains_at_stage_3(
    ranks: Ranks, model: str, sites: dict[str, bool]
) -> None:
    """It has the ordinary backward, and all ranks its whole basis."""
    one = ranks.run(trained_by, 1, 0, model, {})[0]
    assert one["sites"] == sites
    for stage in (2, 3):
        assert_same(one, ranks.run(trained_by, 2, stage, model, {})[0])


def test_a_use_that_nobody_can_project_is_an_error_that_says_what_to_do(ranks: Ranks) -> None:
    with pytest.raises(CaseFailed) as failed:
        ranks.run(trained_by, 2, 3, "Functional", {})
    for words in (
        "second.weight is read outside",
        "module_rules",
        "projected_backward to false",
    ):
        assert words in str(failed.value)
    one = ranks.run(trained_by, 1, 0, "Functional", {})[0]
    remedy = {"projected_backward": False}
    assert_same(one, ranks.run(trained_by, 2, 3, "Functional", remedy)[0])


def refused(model: str) -> str:
    try:
        trained_by(0, model, {"projected_backward": True})
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("Attending", "out_proj.weight belongs to a NonDynamicallyQuantizableLinear"),
        ("Tied", "first.weight is also second.weight (tied)"),
    ],
)
def test_other_readers_are_refused_where_a_projected_backward_is_insisted_on(
    ranks: Ranks, model: str, words: str
) -> None:
    message = ranks.run(refused, 1, model)[0]
    assert "projected_backward is true" in message
    assert words in message
    assert "module_rules" in message
