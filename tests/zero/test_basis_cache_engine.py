"""``hmt.basis_cache``: bases wait in host memory, and nothing but where they are changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Ranks
from training import LOW_RANK, ds_config, make_engine, model_weights, train, weights

CACHE = {"max_bytes": 2**20}
STEPS = 7  # with refreshes in most, and a change of rank in some


def cached(stage: int, cache: dict[str, Any] | None, **changes: Any) -> dict[str, Any]:
    config = ds_config(stage, {**LOW_RANK, **changes.pop("options", {})}, **changes)
    if cache is not None:
        config["hmt"]["basis_cache"] = cache
    return config


def run(stage: int, cache: dict[str, Any] | None, **changes: Any) -> dict[str, Any]:
    engine = make_engine(cached(stage, cache, **changes))
    losses = train(engine, STEPS)
    optimizer = engine.optimizer
    found = {
        "losses": losses,
        "weights": weights(engine),
        "ranks": [e.matrix.rank for e in optimizer.low_rank],
        "metrics": optimizer.metrics(),
        "table": optimizer.describe(),
    }
    engine.destroy()
    return found


def both(stages: list[int], cache: dict[str, Any], **changes: Any) -> list[Any]:
    return [(run(s, None, **changes), run(s, cache, **changes)) for s in stages]


def assert_equal(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one["losses"] == other["losses"]
    assert one["ranks"] == other["ranks"]
    for name, weight in one["weights"].items():
        assert torch.equal(weight, other["weights"][name]), name


@pytest.mark.parametrize(("world", "stages"), [(1, [0, 1, 2, 3]), (2, [0, 2, 3])])
def test_a_run_with_a_cache_is_the_run_without_bit_for_bit(
    ranks: Ranks, world: int, stages: list[int]
) -> None:
    for plain, ours in ranks.run(both, world, stages, CACHE)[0]:
        assert_equal(plain, ours)
        print(
            {k: v for k, v in ours["metrics"].items() if "bas" in k},
            plain["metrics"]["basis_device_bytes"],
            ours["table"].splitlines()[-1],
        )
