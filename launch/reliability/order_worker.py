"""A process that carries out orders one after another and writes down what it saw.

python -m reliability.order_worker ORDERS.json ANSWERS.jsonl      (started by the cases)
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import math
import sys
import traceback
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import logger

import hmt_deepspeed
from benchmarks.setting import free_port, join_ranks
from reliability.engines import batch, is_vertical, micro_batches, small_model
from reliability.heap import memory_now

_KEPT = 2000


class _Tail(io.TextIOBase):
    """A text file of which the last characters alone are kept: the timers of a long run print in every step."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> int:
        self.text = (self.text + text)[-_KEPT:]
        return len(text)


def main() -> None:
    orders = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    torch.set_num_threads(1)
    get_accelerator().is_fp16_supported = lambda: True
    join_ranks(0, 1, free_port())
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    with open(sys.argv[2], "w", encoding="utf-8") as answers:
        for order in orders:
            print(json.dumps(_carry_out(order)), file=answers, flush=True)


def _carry_out(order: dict[str, Any]) -> dict[str, Any]:
    engine, said = None, _Tail()
    handler = logging.StreamHandler(said)
    logger.addHandler(handler)
    try:
        model = small_model(order.get("layers", 2))
        engine, *_ = hmt_deepspeed.initialize(
            model=model, config=order["config"], model_parameters=list(model.parameters())
        )
        with contextlib.redirect_stdout(said):
            found = _load(engine, order) | _train(engine, order)
        return {**found, "said": said.text, "skipped": int(engine.skipped_steps)}
    except Exception:
        return {"error": traceback.format_exc(), "said": said.text}
    finally:
        logger.removeHandler(handler)
        if engine is not None:
            with contextlib.suppress(Exception):
                engine.destroy()


def _load(engine: Any, order: dict[str, Any]) -> dict[str, Any]:
    if "load" not in order:
        return {}
    path, state = engine.load_checkpoint(order["load"])
    return {"loaded": path, "loaded_step": None if state is None else state["step"]}


def _train(engine: Any, order: dict[str, Any]) -> dict[str, Any]:
    losses: list[float | None] = []
    memory: list[dict[str, int]] = []
    unchanged, bad = True, order.get("bad", {})
    every, save_every = order.get("memory_every", 0), order.get("save_every", 0)
    for step in range(order["steps"]):
        if is_vertical(order["config"]):
            loss = engine.train_batch(micro_batches(engine, step))
        else:
            tokens = batch(step, 0, engine.train_micro_batch_size_per_gpu())
            loss = engine(input_ids=tokens, labels=tokens, use_cache=False).loss
            before = None
            if step == bad.get("step"):
                loss, before = loss * float(bad["value"]), _weights(engine)
            engine.backward(loss)
            engine.step()
            if before is not None:
                unchanged = all(map(torch.equal, before, _weights(engine)))
        if not every:
            losses.append(loss.item() if math.isfinite(loss.item()) else None)
        elif step % every == 0:
            memory.append({"step": step, **memory_now()})
        if save_every and (step + 1) % save_every == 0:
            engine.save_checkpoint(order["checkpoints"], client_state={"step": step + 1})
    return {"losses": losses, "unchanged": unchanged, "memory": memory}


def _weights(engine: Any) -> list[torch.Tensor]:
    found = []
    for param in engine.module.parameters():
        with deepspeed.zero.GatheredParameters([param]):
            found.append(param.detach().clone())
    return found


if __name__ == "__main__":
    main()
