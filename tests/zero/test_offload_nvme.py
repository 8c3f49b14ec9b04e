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


def run(
    homes: list[str], stage: int, overlaps: list[str], options: Any, gas: int, clip: float
) -> list[dict[str, Any]]:
    """One run for each home of the states, with its overlap."""
    small_chunks()
    found = []
    for folder, overlap in zip(homes, overlaps, strict=True):
        model = tiny_llama()
        # Of one element the second of two ranks holds nothing.
        model.model.norm.scalar = torch.nn.Parameter(torch.ones(1))
        changes = {"gas": gas, "gradient_clipping": clip}
        engine = make_engine(
            offloaded(folder, stage, options, {"overlap": overlap}, **changes), model
        )
        losses, norms = [], []
        for step in range(STEPS):
            losses.append(train_step(engine, step))
            norms.append(float(engine.get_global_grad_norm()))
        entry = {"losses": losses, "norms": norms, "weights": weights(engine)}
        entry["model"] = model_weights(engine)
        ssd = engine.optimizer.host.ssd
        if ssd is not None:
            entry["buffers"] = (ssd._pool.peak_bytes, ssd._pool.nbytes)
        entry["table"] = engine.optimizer.describe()
        engine.destroy()
        found.append(entry)
    return found


CASES = [
    # stage, world, overlaps, options, accumulation, clip: clipped in some steps and not in others
    (3, 2, ["none", "forward", "backward"], ADAMW, 2, 0.7),
    (2, 2, ["forward"], LOW_RANK, 1, 0.7),
    (1, 1, ["backward"], ADAMW, 1, 0.0),
]


@pytest.mark.parametrize(("stage", "world", "overlaps", "options", "gas", "clip"), CASES)
def test_the_bits_are_those_of_host_memory(
    ranks: Ranks,
    tmp_path: Path,
    stage: int,
    world: int,
    overlaps: list[str],
    options: Any,
    gas: int,
    clip: float,
) -> None:
    homes = ["", *[str(tmp_path)] * len(overlaps)]
    runs = ranks.run(run, world, homes, stage, ["none", *overlaps], options, gas, clip)[0]
    host, *others = runs
    assert clip == 0 or 0 < sum(norm > clip for norm in host["norms"]) < STEPS
    for ssd, overlap in zip(others, overlaps, strict=True):
        assert ssd["losses"] == host["losses"], overlap
        assert ssd["norms"] == host["norms"]
        assert furthest(ssd["weights"], host["weights"]) == 0
        assert furthest(ssd["model"], host["model"]) == 0
        assert ssd["buffers"] == (3 * 4096, 3 * 4096)  # pieces of 3072 bytes take a page each
        assert "on SSD" in ssd["table"]
    assert not list(tmp_path.glob("hmt-swap-*"))  # the folders go with the engine


def overflowing(folder: str, overlap: str) -> dict[str, Any]:
    """fp16 with two overflows on one rank; the scale grows in between."""
    from deepspeed.accelerator import get_accelerator

    get_accelerator().is_fp16_supported = lambda: True
    small_chunks()
    fp16 = {"enabled": True, "initial_scale_power": 8, "hysteresis": 1, "loss_scale_window": 3}
    config = offloaded(folder, 3, ADAMW, {"overlap": overlap}, fp16=fp16)
    engine = make_engine(config, tiny_llama(layers=1))
    losses = []
    for step in range(STEPS):
        loss = loss_of(engine, micro_batches(engine, step)[0])
        engine.backward(loss * (1e8 if step in (2, 4) and torch.distributed.get_rank() else 1.0))
        engine.step()
        losses.append(loss.item())
    return {"losses": losses, "weights": weights(engine), "skipped": engine.skipped_steps}


def test_steps_that_overflow_are_dropped(ranks: Ranks, tmp_path: Path) -> None:
    host = ranks.run(overflowing, 2, "", "none")[0]
    ssd = ranks.run(overflowing, 2, str(tmp_path), "backward")[0]
    assert host["skipped"] == ssd["skipped"] == 2
    assert ssd["losses"] == host["losses"]
    assert furthest(ssd["weights"], host["weights"]) == 0


# -- what is where, what is moved ------------------------------------------------------------------------


def live_bytes() -> int:
    """Of all tensors."""
    gc.collect()
    tensors = [t for t in gc.get_objects() if isinstance(t, torch.Tensor)]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def moved(folder: str) -> dict[str, Any]:
    """Host bytes on an SSD and in host memory, and what each step reads and writes."""
    small_chunks()
    found: dict[str, Any] = {}
    for home in ("", folder):
        config = offloaded(
            home, 1, ADAMW, {"overlap": "backward"}, {"pin_memory": False}, gradient_clipping=0.7
        )
        engine = make_engine(config, tiny_llama(layers=1))
        optimizer, steps = engine.optimizer, []
        for step in range(5):
            before = optimizer.metrics()
            train_step(engine, step)
            after = optimizer.metrics()
            if home:
                keys = ("ssd_bytes_read", "ssd_bytes_written")
                clipped = float(engine.get_global_grad_norm()) > 0.7
                steps.append((clipped, *(after[key] - before[key] for key in keys)))
        found[home and "ssd"] = {
            "live": live_bytes(),
            "host": optimizer.metrics()["host_bytes"],
            "files": optimizer.metrics().get("ssd_state_bytes"),
            "steps": steps,
        }
        found["numel"] = [e.weight.num_elements for e in optimizer.entries]
        engine.destroy()
        del engine, optimizer
    return found


def test_host_memory_holds_gradients_and_a_few_buffers(ranks: Ranks, tmp_path: Path) -> None:
    found = ranks.run(moved, 1, str(tmp_path))[0]
    ssd, host, numel = found["ssd"], found[""], sum(found["numel"])
    pages = sum(4096 * -(-n // 256) for n in found["numel"])
    # masters, moments and the undo log of three are gone; gradients and the new weights are left
    assert host["host"] == (4 + 12 + 12) * numel
    assert ssd["host"] == (4 + 4) * numel
    assert host["live"] - ssd["live"] == pytest.approx(20 * numel, abs=10**5)
    assert ssd["files"] == 2 * pages  # each piece in two files
    clipped = [step[1:] for step in ssd["steps"] if step[0]]
    others = [step[1:] for step in ssd["steps"] if not step[0]]
    assert clipped
    assert others
    assert set(others) == {(pages, pages)}  # read once, written once
    assert set(clipped) == {(2 * pages, 2 * pages)}  # and redone where the norm was clipped
