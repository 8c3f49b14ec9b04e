"""Masters and moments on an SSD: ``offload_optimizer: nvme``."""

from __future__ import annotations

import gc
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Ranks
from test_offload_optimizer import ADAMW
from training import (
    LOW_RANK,
    ds_config,
    furthest,
    loss_of,
    make_engine,
    micro_batches,
    model_weights,
    tiny_llama,
    train,
    train_step,
    weights,
)

STEPS = 6


def small_chunks() -> None:
    """Every parameter in several pieces, each of one page: of 12 bytes an element, 3072 of 4096."""
    from hmt_deepspeed.zero import host_worker

    host_worker.CHUNK, host_worker.NUM_STAGED = 256, 4


def offloaded(
    folder: str,
    stage: int,
    options: dict[str, Any] = ADAMW,
    offload: dict[str, Any] | None = None,
    section: dict[str, Any] | None = None,
    **changes: Any,
) -> dict[str, Any]:
    """``offload`` is ``hmt.offload``; ``section`` goes to ``offload_optimizer``; no folder: in host RAM."""
    config = ds_config(stage, options, **changes)
    device = {"device": "nvme", "nvme_path": folder} if folder else {"device": "cpu"}
    config["zero_optimization"]["offload_optimizer"] = {**device, **(section or {})}
    if offload:
        config["hmt"]["offload"] = offload
    return config


# -- the same numbers ---------------------------------------------------------------------------------


def run(folder: str, stage: int, overlap: str, options: Any, gas: int, clip: float) -> Any:
    small_chunks()
    model = tiny_llama()
    # Of one element the second of two ranks holds nothing.
    model.model.norm.scalar = torch.nn.Parameter(torch.ones(1))
    config = offloaded(
        folder, stage, options, {"overlap": overlap}, gas=gas, gradient_clipping=clip
    )
    engine = make_engine(config, model)
    losses, norms = [], []
    for step in range(STEPS):
        losses.append(train_step(engine, step))
        norms.append(float(engine.get_global_grad_norm()))
    found = {"losses": losses, "norms": norms, "weights": weights(engine)}
    found["model"] = model_weights(engine)
    ssd = engine.optimizer.host.ssd
    if ssd is not None:
        found["buffers"] = (ssd._pool.peak_bytes, ssd._pool.nbytes)
    return found


CASES = [
    # stage, world, options, accumulation, clip: clipped in some steps and not in others
    (3, 2, ADAMW, 2, 0.7),
    (2, 2, LOW_RANK, 1, 0.7),
    (1, 1, ADAMW, 1, 0.0),
]


@pytest.mark.parametrize(("stage", "world", "options", "gas", "clip"), CASES)
def test_the_bits_are_those_of_host_memory(
    ranks: Ranks, tmp_path: Path, stage: int, world: int, options: Any, gas: int, clip: float
) -> None:
    arguments = (options, gas, clip)
    host = ranks.run(run, world, "", stage, "none", *arguments)[0]
    assert clip == 0 or 0 < sum(norm > clip for norm in host["norms"]) < STEPS
    for overlap in ("none", "forward", "backward"):
        ssd = ranks.run(run, world, str(tmp_path), stage, overlap, *arguments)[0]
        assert ssd["losses"] == host["losses"], overlap
        assert ssd["norms"] == host["norms"]
        assert furthest(ssd["weights"], host["weights"]) == 0
        assert furthest(ssd["model"], host["model"]) == 0
        assert ssd["buffers"] == (3 * 4096, 3 * 4096)  # 4 of 3072 bytes, of which a page holds one
    assert not list(tmp_path.glob("hmt-swap-*"))
