"""Engines that take snapshots, steps that wait for them, and their names in a folder, for tests of snapshots."""

from __future__ import annotations

import os
from typing import Any

from training import LOW_RANK, ds_config, make_engine, tiny_llama, train

INTERVAL, STEPS = 2, 7


def snapshot_engine(stage: int, folder: str | None, seed: int = 0, **changes: Any) -> Any:
    block = changes.pop("block", {})
    config = ds_config(stage, {**LOW_RANK, **changes.pop("options", {})}, **changes)
    config["hmt"] |= block
    if folder is not None:
        config["hmt"]["snapshot"] = {"path": folder, "interval": INTERVAL}
    engine = make_engine(config, tiny_llama(layers=1, seed=seed))
    if folder is not None:
        engine.snapshot_client_state = lambda: {"position": engine.global_steps * 12}
    return engine


def train_in_step(engine: Any, steps: int, first: int = 0) -> list[float]:
    """Each snapshot written before the next is due: none is left out, whatever the disk's speed."""
    losses = []
    for step in range(first, first + steps):
        losses += train(engine, 1, first=step)
        engine.hmt_snapshots.finish()
    return losses


def tags(folder: str) -> list[str]:
    return sorted(name for name in os.listdir(folder) if name.startswith("step"))
