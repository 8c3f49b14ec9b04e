"""The host's work beside the device's: every overlap gives the bits of none, and none of it is pretended."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Ranks
from offloading import ADAMW, offloaded
from overlapping import overlapped, readers, same, slowed
from training import (
    LOW_RANK,
    assert_same,
    ds_config,
    furthest,
    loss_of,
    make_engine,
    micro_batches,
    model_weights,
    result,
    train,
    train_step,
    weights,
)

STEPS = 5


UNCHECKED = {"bf16": {"enabled": True, "check_grad_overflow": False}}


# -- the same bits ------------------------------------------------------------------------------------------


def run(stage: int, overlap: str, options: dict[str, Any], gas: int, clip: float) -> dict[str, Any]:
    engine = overlapped(stage, overlap, options, gas, gradient_clipping=clip)
    taken = slowed(engine)
    losses, norms = [], []
    for step in range(STEPS):
        losses.append(train_step(engine, step))
        norms.append(float(engine.get_global_grad_norm()))
    return {
        "losses": losses,
        "norms": norms,
        "weights": weights(engine),
        "model": model_weights(engine),  # after weights(), which waits
        "steps of adam": len(taken),
        "table": engine.optimizer.describe(),
    }


CASES = [
    # stage, world, options, accumulation, clip: clipped in some steps and not in others
    (3, 2, ADAMW, 2, 0.7),
    pytest.param(3, 2, LOW_RANK, 1, 0.7, marks=pytest.mark.slow),
    (2, 2, LOW_RANK, 2, 0.7),
    (1, 1, ADAMW, 1, 0.0),
]


@pytest.mark.parametrize(("stage", "world", "options", "gas", "clip"), CASES)
def test_every_overlap_gives_the_same_bits(
    ranks: Ranks, stage: int, world: int, options: dict[str, Any], gas: int, clip: float
) -> None:
    found = {
        overlap: ranks.run(run, world, stage, overlap, options, gas, clip)[0]
        for overlap in ("none", "forward", "backward")
    }
    none = found["none"]
    clipped = sum(norm > clip > 0 for norm in none["norms"])
    assert clip == 0 or STEPS // 4 <= clipped < STEPS
    for overlap, other in found.items():
        assert f"overlap {overlap}" in other["table"]
        assert other["losses"] == none["losses"]
        assert other["norms"] == none["norms"]
        assert furthest(other["weights"], none["weights"]) == 0
        assert furthest(other["model"], none["model"]) == 0
    # what was clipped was stepped twice, and nothing else
    per_step = none["steps of adam"] // STEPS
    assert found["forward"]["steps of adam"] == none["steps of adam"] == per_step * STEPS
    assert found["backward"]["steps of adam"] == per_step * (STEPS + clipped)


def overflowing(overlap: str) -> dict[str, Any]:
    from deepspeed.accelerator import get_accelerator

    get_accelerator().is_fp16_supported = lambda: True
    fp16 = {"enabled": True, "initial_scale_power": 8, "hysteresis": 1, "loss_scale_window": 3}
    engine = overlapped(3, overlap, fp16=fp16)
    losses = []
    for step in range(8):
        loss = loss_of(engine, micro_batches(engine, step)[0])
        engine.backward(loss * (1e8 if step in (2, 5) and torch.distributed.get_rank() else 1.0))
        engine.step()
        losses.append(loss.item())
    return {"losses": losses, "weights": weights(engine), "skipped": engine.skipped_steps}


def test_overflows_are_taken_back(ranks: Ranks) -> None:
    """Injected on one rank; the scale grows in between, which a guess made during backward cannot know."""
    none = ranks.run(overflowing, 2, "none")[0]
    assert none["skipped"] == 2
    for overlap in ("forward", "backward"):
        other = ranks.run(overflowing, 2, overlap)[0]
        assert other["losses"] == none["losses"]
        assert furthest(other["weights"], none["weights"]) == 0


# -- what runs when --------------------------------------------------------------------------------------------


def during_forward(stage: int) -> dict[str, Any]:
    """The update of the second layer cannot go on before the first layer's next forward has begun."""
    prefetch = {"stage3_prefetch_bucket_size": 0, "stage3_param_persistence_threshold": 0}
    engine = overlapped(stage, "forward", zero_optimization=prefetch)
    train(engine, 2)
    optimizer, began, waited = engine.optimizer, threading.Event(), []
    late = next(e for e in optimizer.zero.param_states if "layers.1.self_attn.q_proj" in e.name)
    step = late.host._next_step

    def blocked(*arguments: Any) -> Any:
        inner = step(*arguments)

        def wait(*chunk: Any) -> None:
            waited.append(began.wait(timeout=120))
            inner(*chunk)

        return wait

    late.host._next_step = blocked
    first, second = engine.module.model.layers
    first.register_forward_pre_hook(lambda *_: began.set())
    before = late.weight.master.clone()
    seen = {}

    def look(*_: Any) -> None:
        seen["pending at use"] = late.weight.pending
        seen["changed"] = not torch.equal(late.weight.master, before)

    train_step(engine, 2)
    second.self_attn.q_proj.register_forward_hook(look)
    pending = sum(e.weight.pending for e in optimizer.zero.param_states)
    began.clear()  # set by the forward before the step
    return {"pending": pending, "loss": train_step(engine, 3), "waited": waited, **seen}


@pytest.mark.parametrize("stage", [2, 3])
def test_forward_runs_over_the_updates_of_later_layers(ranks: Ranks, stage: int) -> None:
    for found in ranks.run(during_forward, 2, stage):
        assert found["pending"] > 10  # the step returned before they were done
        assert all(
            found["waited"]
        )  # no update had to wait longer than for the first layer's forward
        assert found["changed"]
        assert not found["pending at use"]


def during_backward() -> dict[str, Any]:
    engine = overlapped(2, "auto", gas=2, gradient_clipping=0.0, **UNCHECKED)
    train(engine, 2)
    host, optimizer = engine.optimizer.zero.host, engine.optimizer
    masters = [e.weight.master for e in optimizer.zero.param_states]
    found = {"table": optimizer.describe()}
    for tokens in micro_batches(engine, 2):
        before = [m.clone() for m in masters]
        device = model_weights(engine)
        engine.backward(loss_of(engine, tokens))
        host.drain()
        last = engine.is_gradient_accumulation_boundary()
        moved = [not torch.equal(m, b) for m, b in zip(masters, before, strict=True)]
        found[f"moved, last {last}"] = sum(moved) / len(moved)
        found[f"device, last {last}"] = furthest(model_weights(engine), device)
        engine.step()
    found["after"] = furthest(model_weights(engine), device)
    return found


def test_backward_updates_masters_before_the_step(ranks: Ranks) -> None:
    found = ranks.run(during_backward, 1)[0]
    assert "overlap backward" in found["table"]  # "auto" without clipping and overflow check
    assert found["moved, last False"] == 0
    assert found["moved, last True"] == 1
    assert found["device, last False"] == found["device, last True"] == 0
    assert found["after"] > 0


def test_auto(ranks: Ranks) -> None:
    for stage, clip, changes, said in [
        (3, 0.5, UNCHECKED, "forward"),
        (2, 0.5, UNCHECKED, "none"),
        (3, 0.0, {}, "forward"),  # fp32 is checked
        (3, 0.0, UNCHECKED, "backward"),
    ]:
        assert f"overlap {said}" in ranks.run(table, 1, stage, clip, changes)[0]


def table(stage: int, clip: float, changes: dict[str, Any]) -> str:
    said: str = overlapped(stage, "auto", gradient_clipping=clip, **changes).optimizer.describe()
    return said


# -- who reads, waits ------------------------------------------------------------------------------------------


READERS = [(2, "forward"), (3, "forward"), pytest.param(3, "backward", marks=pytest.mark.slow)]


@pytest.mark.parametrize(("stage", "overlap"), READERS)
def test_readers_see_the_last_step(ranks: Ranks, tmp_path: Path, stage: int, overlap: str) -> None:
    mine, plain = tmp_path / overlap, tmp_path / "none"
    ours = ranks.run(readers, 2, stage, overlap, str(mine))[0]
    none = ranks.run(readers, 2, stage, "none", str(plain))[0]
    assert ours.keys() == none.keys()
    for name, value in none.items():
        assert same(value, ours[name]), name
    states = [torch.load(path / "model.bin", weights_only=True) for path in (mine, plain)]
    assert furthest(*states) == 0


def cannot_be_taken_back() -> dict[str, str]:
    said = {}
    for name in ("second gradient", "dropped", "another rate"):
        engine = overlapped(2, "backward", gradient_clipping=0.0, **UNCHECKED)
        train(engine, 1)
        engine.backward(loss_of(engine, micro_batches(engine, 1)[0]))
        try:
            if name == "second gradient":
                engine.backward(loss_of(engine, micro_batches(engine, 1)[0]))
            elif name == "dropped":
                engine.zero_grad()
            else:
                engine.optimizer.param_groups[0]["lr"] *= 2
                engine.step()
            said[name] = "went on"
        except RuntimeError as error:
            said[name] = str(error)
    return said


def test_what_cannot_be_taken_back_is_an_error(ranks: Ranks) -> None:
    said = ranks.run(cannot_be_taken_back, 1)[0]
    assert "got a second gradient in the last micro-batch" in said["second gradient"]
    assert "gradients dropped between backward and step" in said["dropped"]
    assert "learning rate changed between backward and step" in said["another rate"]
    for message in said.values():
        assert '"overlap": "none"' in message


# -- ranks that use other modules -----------------------------------------------------------------------


class Tower(torch.nn.Module):
    """A tower that only some batches pass through, then what all do."""

    def __init__(self) -> None:
        super().__init__()
        self.tower, self.text = torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, uses_tower: bool) -> torch.Tensor:
        hidden = x + self.tower(x) if uses_tower else x
        return (self.text(hidden) - 1).square().mean()


def diverging(stage: int, overlap: str) -> dict[str, Any]:
    torch.manual_seed(0)
    config = offloaded(ds_config(stage, ADAMW))
    config["hmt"]["offload"] = {"overlap": overlap}
    engine = make_engine(config, Tower())
    rank = torch.distributed.get_rank()
    for step in range(5):
        x = torch.randn(6, 16, generator=torch.Generator().manual_seed(2 * step + rank))
        engine.backward(engine(x, step == 0 or step % 2 == rank))
        engine.step()
    engine.optimizer.overlap.synchronize()
    return result(engine, [])


@pytest.mark.parametrize("stage", [1, 2])
def test_ranks_that_use_other_modules_gather_the_same(ranks: Ranks, stage: int) -> None:
    """Where one rank's forward meets a module that the other's does not, their gathers still pair up."""
    plain = ranks.run(diverging, 2, stage, "none")
    beside = ranks.run(diverging, 2, stage, "forward")
    for found in (*plain[1:], *beside):
        assert_same(plain[0], found)
