"""Engines whose plan is made in the run, steps of them, and the cache of profiles, for tests of planning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from training import ds_config, loss_of, make_engine, tiny_llama

LAYERS, BATCH, LENGTH = 3, 12, 64
FIRST_PLANNED = 5  # one iteration to warm up, four to profile
RERUN = "activation_rerun_flops_per_component"


def engine_of(planner: dict[str, Any] | None, options: Any = None, **activations: str) -> Any:
    """No matrix refreshes after the first step; ``planner`` None: no activations section at all."""
    options = {"update_interval": 1000, **(options or {"rank": 8})}
    config = ds_config(2, {**options, "max_full_gradient_bytes": 10**7})
    if planner is not None:
        config["hmt"] |= {"activations": {"policy": "plan", **activations}, "planner": planner}
    return make_engine(config, tiny_llama(layers=LAYERS))


def rows(step: int, length: int = LENGTH, batch: int = BATCH) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7 + step)
    return torch.randint(0, 61, (batch, length), generator=generator)


def steps(engine: Any, count: int, **sizes: int) -> list[float]:
    losses = []
    for step in range(count):
        loss = loss_of(engine, rows(step, **sizes))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def refusal(work: Any) -> str:
    with pytest.raises(ValueError) as caught:
        work()
    return str(caught.value)


def cache_in(folder: str) -> None:
    """Profiles there; the user's cache folder also holds compiled operators, which stay where they are."""
    from functools import partial

    from hmt_deepspeed.zero.planning import plan_files, profile_files

    plan_files.cache_file = partial(profile_files.cache_file, folder=folder)


def cached(profile: str) -> None:
    """Every run finds this file in the cache."""
    from hmt_deepspeed.zero.planning import plan_files

    plan_files.cache_file = lambda _: Path(profile)
