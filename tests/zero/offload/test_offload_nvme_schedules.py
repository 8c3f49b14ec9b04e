"""When states come from an SSD and go back: beside backward or after it, by which files."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from harness import Ranks
from offloading import (
    ADAMW,
    needs_async_io,
    offloaded_to,
    small_chunks,
)
from training import (
    furthest,
    loss_of,
    make_engine,
    micro_batches,
    model_weights,
    stock_config,
    tiny_llama,
    train,
    wait_for,
    weights,
)

IN_TURN = {"pipeline_read": False, "pipeline_write": False}
# overlap, and keys of offload_optimizer
SCHEDULES: dict[str, tuple[str, dict[str, bool]]] = {
    "optimised": ("backward", {}),
    "naive": ("backward", IN_TURN),
    "serial": ("none", IN_TURN),
}


def scheduled(folder: str, schedule: str) -> dict[str, Any]:
    """Losses, and what was read, updated and written in the third step, before or after backward's end."""
    small_chunks()
    overlap, pipeline = SCHEDULES[schedule]
    config = offloaded_to(folder, 1, ADAMW, {"overlap": overlap}, pipeline, gradient_clipping=0.0)
    engine = make_engine(config, tiny_llama(layers=1))
    ssd, adam = engine.optimizer.zero.host.ssd, engine.optimizer.zero.host.adam
    losses = train(engine, 2)
    if schedule == "optimised":  # the first reads for the step to come are over
        num = sum(len(entry.weight.states.pieces) for entry in engine.optimizer.zero.param_states)
        wait_for(lambda: ssd.counters.num_in >= 2 * num + 2)
    slow_down(ssd.slots, "read", 3e-3)
    slow_down(ssd.slots, "write", 3e-3)
    slow_down(adam, "step_", 4e-3)
    ssd.events = []
    (tokens,) = micro_batches(engine, 2)
    loss = loss_of(engine, tokens)
    embedding = engine.module.get_parameter("model.embed_tokens.weight")
    if schedule != "serial":  # the last gradient does not come before the first read
        embedding.register_hook(lambda _: wait_for(lambda: bool(ssd.events)))
    engine.backward(loss)
    ended = time.perf_counter()
    engine.step()
    losses.append(loss.item())
    engine.optimizer.overlap.synchronize()  # the last writes
    found = {"losses": losses, "events": ssd.events, "backward": ended}
    found["table"] = engine.optimizer.describe()
    ssd.events = None
    return {**found, "weights": weights(engine)}


def slow_down(of: Any, name: str, seconds: float) -> None:
    method = getattr(of, name)

    def slow(*arguments: Any, **keyword: Any) -> Any:
        time.sleep(seconds)
        return method(*arguments, **keyword)

    setattr(of, name, slow)


def overlapping(events: list[Any], one: str, other: str) -> int:
    """Pairs of different verbs that ran at once."""
    first = [e for e in events if e.verb == one]
    second = [e for e in events if e.verb == other]
    return sum(a.begin < b.end and b.begin < a.end for a in first for b in second)


def test_the_schedules_are_those_of_figure_7(ranks: Ranks, tmp_path: Path) -> None:
    runs = {name: ranks.run(scheduled, 1, str(tmp_path), name)[0] for name in SCHEDULES}
    for name, found in runs.items():
        events, ended = found["events"], found["backward"]
        updates = [e for e in events if e.verb == "update"]
        num, updated = len(updates), {e.name: e.begin for e in updates}
        reads = sum(
            e.verb == "read" and e.end <= updated[e.name] for e in events
        )  # not the next step's
        assert num // 2 < reads < num if name == "optimised" else reads == num  # some a step before
        assert sum(e.verb == "write" for e in events) == num
        during_backward = sum(e.begin < ended for e in events)
        pairs = [("read", "update"), ("write", "update"), ("read", "write")]
        at_once = [overlapping(events, *pair) for pair in pairs]
        if name == "optimised":
            assert min(at_once) > num // 4
            assert "reads beside and writes beside updates" in found["table"]
        else:
            assert at_once == [0, 0, 0]
            assert [e.verb for e in events] == ["read", "update", "write"] * num
            assert "reads after and writes after updates" in found["table"]
        assert (during_backward == 0) == (name == "serial")
        assert found["losses"] == runs["serial"]["losses"]
        assert furthest(found["weights"], runs["serial"]["weights"]) == 0


def through_async_io(folder: str, aio: bool) -> dict[str, Any]:
    """With DeepSpeed's async_io, and through the page cache; or DeepSpeed's own NVMe offload."""
    small_chunks()
    config = offloaded_to(folder, 3, ADAMW, {"overlap": "forward"})
    if aio:
        config["aio"] = {"block_size": 65536, "queue_depth": 4}
    engine = make_engine(config, tiny_llama(layers=1))
    found = {"losses": train(engine, 3), "weights": weights(engine)}
    return {**found, "table": engine.optimizer.describe()}


def zero_infinity(folder: str) -> dict[str, Any]:
    config = stock_config(3, aio={"block_size": 65536, "queue_depth": 4})
    del config["optimizer"]["params"]["torch_adam"]
    section = {"device": "nvme", "nvme_path": folder, "pipeline_read": True, "pipeline_write": True}
    config["zero_optimization"]["offload_optimizer"] = section
    engine = make_engine(config, tiny_llama(layers=1))
    return {"losses": train(engine, 3), "weights": model_weights(engine)}


@pytest.mark.slow
@needs_async_io
def test_async_io_and_zero_infinity(ranks: Ranks, tmp_path: Path) -> None:
    plain = ranks.run(through_async_io, 1, str(tmp_path), False)[0]
    ours = ranks.run(through_async_io, 1, str(tmp_path), True)[0]
    assert "through DeepSpeed's async_io" in ours["table"]
    assert "through the page cache" in plain["table"]
    assert ours["losses"] == plain["losses"]
    assert furthest(ours["weights"], plain["weights"]) == 0
    stock = ranks.run(zero_infinity, 1, str(tmp_path))[0]
    assert ours["losses"] == pytest.approx(stock["losses"], rel=1e-5)
    assert furthest(ours["weights"], stock["weights"]) < 2e-3
