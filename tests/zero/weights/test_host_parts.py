"""Weights in host memory: updated on the device as those that are there, by copies that nobody waits for too late."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import Ranks
from training import ds_config, make_engine, model_weights, tiny_llama, tiny_mixtral, train

from hmt_deepspeed.memory.streams import Direction, TwinStreams
from hmt_deepspeed.planner.run.host import what_rounding_takes
from hmt_deepspeed.zero.weights import host_parts
from hmt_deepspeed.zero.weights.host_parts import HostParts

MODES: dict[str, dict[str, Any]] = {
    "masters": {},
    "no masters": {"master_weights": "none"},
    "whole updates": {"residual": "full", "master_weights": "none"},
}


def runs(mode: str, mixture: bool) -> list[Any]:
    """Losses and weights of four steps with weights on the device, and with weights in host memory."""
    found = []
    for device in ("none", "cpu"):
        options = {"rank": 8, "update_interval": 2, **MODES[mode]}
        changes: dict[str, Any] = {"bf16": {"enabled": True}}
        changes["zero_optimization"] = {"offload_param": {"device": device}}
        model = tiny_mixtral() if mixture else tiny_llama()
        engine = make_engine(ds_config(3, options, gas=2, **changes), model)
        away = [p.weight.away is not None for p in engine.optimizer.zero.param_states]
        assert all(away) if device == "cpu" else not any(away)
        found.append((train(engine, 4), model_weights(engine)))
        engine.destroy()
    return found


@pytest.mark.parametrize(
    ("mode", "mixture", "world"),
    [("no masters", True, 2), ("whole updates", False, 1), ("masters", True, 1)],
)
def test_the_same_run_bit_for_bit(ranks: Ranks, mode: str, mixture: bool, world: int) -> None:
    for there, away in ranks.run(runs, world, mode, mixture):
        assert there[0] == away[0]
        for name, weight in there[1].items():
            assert torch.equal(weight, away[1][name]), name


def test_page_locked_weights_that_torch_rounds_up_are_told() -> None:
    sizes = [2**28, 3 * 2**27]  # 256 and 384 MiB, which is rounded to 512
    assert "0.6 GiB are page-locked in 0.8" in what_rounding_takes(sizes, {})
    assert not what_rounding_takes(sizes[:1], {})
    named = {"PYTORCH_ALLOC_CONF": "pinned_max_round_threshold_mb:16"}
    assert not what_rounding_takes(sizes, named)


def test_parts_come_ahead_and_go_within_their_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_parts, "MOST", 100)
    streams = TwinStreams()
    parts = HostParts(streams, torch.device("cpu"))
    params: list[Any] = [torch.nn.Parameter(torch.empty(0)) for _ in range(6)]
    for place, param in enumerate(params):
        param.ds_tensor = torch.full((10,), float(place))  # of 40 bytes

    def under_way(way: Direction) -> int:
        return len(streams.pending[way])

    parts.expect(params)
    assert under_way(Direction.TO_DEVICE) == 2
    for place, param in enumerate(params):
        values = parts.take(param)
        assert values.tolist() == [place] * 10
        assert under_way(Direction.TO_DEVICE) <= 2
        parts.put(param, values + 10)
        assert under_way(Direction.TO_HOST) <= 2
    parts.finish()
    assert [param.ds_tensor[0].item() for param in params] == [10, 11, 12, 13, 14, 15]
    parts.expect(params)
    parts.finish()
    streams.drain()  # what was expected in vain has memory to come to
    assert parts.take(params[0]).tolist() == [10] * 10
