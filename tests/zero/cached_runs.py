"""Engines whose bases wait in host memory, and what their runs must have in common with others."""

from __future__ import annotations

from typing import Any

import torch
from training import ds_config, make_engine, tiny_llama, weights


def cached_engine(
    stage: int, mode: dict[str, Any], cache: dict[str, Any] | None, layers: int = 1, **changes: Any
) -> Any:
    config = ds_config(stage, mode, **changes)
    if cache is not None:
        config["hmt"]["basis_cache"] = cache
    return make_engine(config, tiny_llama(layers=layers))


def outcome(engine: Any, losses: list[float]) -> dict[str, Any]:
    return {"losses": losses, "weights": weights(engine)}


def assert_equal(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one["losses"] == other["losses"]
    assert all(torch.equal(weight, other["weights"][n]) for n, weight in one["weights"].items())
