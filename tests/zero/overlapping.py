"""Engines whose host works beside the device, a worker that is late, and all that reads what it updates."""

from __future__ import annotations

import time
from typing import Any

import torch
from offloading import ADAMW, offloaded, small_chunks
from training import (
    ds_config,
    loss_of,
    make_engine,
    micro_batches,
    model_weights,
    train_step,
    weights,
)


def overlapped(
    stage: int,
    overlap: str,
    options: dict[str, Any] | None = None,
    gas: int = 1,
    home: str = "",
    **changes: Any,
) -> Any:
    """An engine whose states are in host memory, or on an SSD in the folder ``home``."""
    small_chunks()
    config = offloaded(ds_config(stage, options or ADAMW, gas=gas, **changes))
    if home:
        config["zero_optimization"]["offload_optimizer"] = {"device": "nvme", "nvme_path": home}
    config["hmt"]["offload"] = {"overlap": overlap}
    return make_engine(config)


def slowed(engine: Any) -> list[int]:
    """A worker that is always late; the steps of Adam that it takes, by number."""
    adam, taken = engine.optimizer.zero.host.adam, []
    step = adam.step_

    def late(*arguments: Any, **keyword: Any) -> None:
        taken.append(arguments[4])
        time.sleep(1e-4)
        step(*arguments, **keyword)

    adam.step_ = late
    return taken


def readers(stage: int, overlap: str, folder: str, home: str = "") -> dict[str, Any]:
    """Everything that reads or replaces weights and states, between steps and within one."""
    zero = {"stage3_gather_16bit_weights_on_model_save": True}
    engine = overlapped(stage, overlap, home=home, gradient_clipping=1.0, zero_optimization=zero)
    slowed(engine)
    found: dict[str, Any] = {}

    def after_a_step(name: str, read: Any) -> None:
        train_step(engine, len(found))
        found[name] = read()

    def evaluated() -> Any:
        with torch.no_grad():
            return loss_of(engine, micro_batches(engine, 0)[0])

    def copied(state: dict[str, Any]) -> dict[str, Any]:
        return {name: value.clone() for name, value in state.items()}

    after_a_step("masters", lambda: weights(engine))
    after_a_step("evaluated", evaluated)
    if stage == 3:  # below, GatheredParameters gathers nothing, so nothing can be gated
        after_a_step("gathered", lambda: model_weights(engine))
    else:
        after_a_step("module state", lambda: copied(engine.module.state_dict()))
    after_a_step("consolidated", lambda: engine.save_16bit_model(folder, "model.bin"))
    after_a_step("saved", lambda: engine.save_checkpoint(folder, tag="one"))
    after_a_step("state", lambda: [s["exp_avg"].clone() for s in engine.optimizer.state.values()])
    engine.load_checkpoint(folder, tag="one")
    found["loaded"] = train_step(engine, 5)
    engine.backward(loss_of(engine, micro_batches(engine, 6)[0]))
    found["between"] = weights(engine)  # an update begun during backward is taken back
    engine.step()
    found["end"] = weights(engine)
    return found


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)
