"""A rank that trains the small model and writes down its losses; it can be told to die or to resume.

python -m reliability.train_worker ORDER.json     (or a fork, see forks)
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

import hmt_deepspeed
from reliability.engines import batch, is_vertical, micro_batches, small_model


def train(order: Mapping[str, Any]) -> None:
    """Carry out an order on this rank, whose place is in the environment.

    Keys: config, steps, save_every, checkpoints, losses (a file); perhaps die and full_disk.
    """
    torch.set_num_threads(1)
    get_accelerator().is_fp16_supported = lambda: True
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    model = small_model()
    engine, *_ = hmt_deepspeed.initialize(
        model=model, config=order["config"], model_parameters=list(model.parameters())
    )
    # Snapshots, where the config has them, are taken by the engine, into the same folder.
    snaps = "snapshot" in order["config"]["hmt"]
    engine.snapshot_client_state = lambda: {"step": engine.global_steps}
    first = 0
    if order["save_every"] and Path(order["checkpoints"]).exists():
        path, state = engine.load_checkpoint(order["checkpoints"])
        first = 0 if path is None else state["step"]
    for step in range(first, order["steps"]):
        if is_vertical(order["config"]):
            loss = float(engine.train_batch(micro_batches(engine, step, dist.get_rank())))
        else:
            loss = _step(engine, step, order.get("die"))
        if dist.get_rank() == 0:
            with open(order["losses"], "a", encoding="utf-8") as file:
                # A killed rank may have left half a line: begin a new one.
                file.write("\n" + json.dumps({"step": step, "loss": loss}))
        _perhaps_fill_disk(step, order.get("full_disk"))
        if order["save_every"] and not snaps and (step + 1) % order["save_every"] == 0:
            engine.save_checkpoint(order["checkpoints"], client_state={"step": step + 1})
    dist.barrier()
    dist.destroy_process_group()


def _step(engine: Any, step: int, die: dict[str, Any] | None) -> float:
    """One optimizer step; where ``die`` says so, the end of this rank."""

    def perhaps_die(place: str) -> None:
        if die and (die["rank"], die["step"], die["place"]) == (dist.get_rank(), step, place):
            os.kill(os.getpid(), signal.SIGKILL)

    tokens = batch(step, dist.get_rank(), engine.train_micro_batch_size_per_gpu())
    perhaps_die("before forward")
    loss = engine(input_ids=tokens, labels=tokens, use_cache=False).loss
    perhaps_die("before backward")
    engine.backward(loss)
    perhaps_die("before step")
    engine.step()
    mean = loss.detach().double()
    dist.all_reduce(mean)
    return float(mean) / dist.get_world_size()


def _perhaps_fill_disk(step: int, full: dict[str, Any] | None) -> None:
    """From now on no file of this rank can grow beyond the limit, as on a disk without room."""
    if full and (full["rank"], full["step"]) == (dist.get_rank(), step):
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # an error, not the end of the process
        resource.setrlimit(resource.RLIMIT_FSIZE, (full["limit"], resource.RLIM_INFINITY))


if __name__ == "__main__":
    train(json.loads(Path(sys.argv[-1]).read_text(encoding="utf-8")))
