"""Steps that the device skips: nothing changes, the host learns of it when it asks, and then all counts are right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Ranks
from held import held
from modes import FIXED, MODES, SAME_LAYOUT, mode_engine, wide_llama
from torch import Tensor
from training import ds_config, loss_of, make_engine, micro_batches, tiny_llama, train_step

PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {
        "fp16": {"enabled": True, "initial_scale_power": 8, "hysteresis": 1, "loss_scale_window": 2}
    },
    "fp16, static": {"fp16": {"enabled": True, "loss_scale": 64}},
}
STEPS, BAD = 9, (0, 2, 6, 7)
FEW, BAD_OF_FEW = (
    5,
    (1, 3),
)  # of each mode: a bad step while bases are found, and one when all are there
# Of fp16 after each step: half as large after a bad one, twice as large after three good ones.
SCALES = (128, 128, 64, 64, 64, 128, 64, 32, 32)
WARMUP = {
    "type": "WarmupLR",
    "params": {"warmup_max_lr": 3e-3, "warmup_num_steps": 20, "warmup_type": "linear"},
}
CASES: dict[str, dict[str, Any]] = {
    name: MODES[name]
    for name in (
        *("right", "left", "two_sided", "full residual", "share_basis", "factored"),
        *("full_rank_budget", "random", "random, two_sided", "muon", "apollo", "apollo_mini"),
    )
}
CASES |= {
    name: SAME_LAYOUT[name] | {"max_full_gradient_bytes": 10**6}
    for name in ("bf16 states", "int8", "int8, factored")
}
CASES["adamw"] = {"method": "adamw"}
CASES["fixed rank"] = {**FIXED, "max_full_gradient_bytes": 10**5}
CASES["int8, muon"] = {**CASES["int8"], "method": "muon"}
CASES["int8 weights"] = {**MODES["right"], "weight_dtype": "int8"}
CASES["no masters"] = {**MODES["right"], "master_weights": "none"}


def poison(engine: Any) -> Any:
    """Let one gradient of the last rank be infinite in one row, and what depends on it not a number; the layers after
    it are not touched."""

    def spoil(_: Any, __: Any, output: Tensor) -> None:
        def spoiled(gradient: Tensor) -> Tensor:
            gradient = gradient.clone()
            gradient[..., 3] = float("inf")
            return gradient

        if output.requires_grad and dist.get_rank() == dist.get_world_size() - 1:
            output.register_hook(spoiled)

    return engine.module.model.layers[0].mlp.down_proj.register_forward_hook(spoil)


def run(
    name: str,
    stage: int,
    precision: str,
    bad: tuple[int, ...] = BAD,
    by_host: bool = False,
    asks: bool = True,
    steps: int = STEPS,
    **changes: Any,
) -> dict[str, Any]:
    """Train with bad steps.

    Args:
        bad: which of the steps. by_host: the host decides on every step before anything is written. asks: after every step for what it has done.
    """
    from deepspeed.accelerator import get_accelerator

    from hmt_deepspeed.zero.optimizer.optimizer import HMTZeroOptimizer
    from hmt_deepspeed.zero.optimizer.verdict import Verdict

    get_accelerator().is_fp16_supported = lambda: True
    if by_host:
        HMTZeroOptimizer._needs_the_host = lambda self: True  # type: ignore[method-assign]
    unread, (construct, read) = set(), (Verdict.__init__, Verdict.read)

    def made(verdict: Verdict, *args: Any) -> None:
        construct(verdict, *args)
        unread.add(verdict)

    def counted(verdict: Verdict) -> bool:
        unread.discard(verdict)
        return read(verdict)

    Verdict.__init__, Verdict.read = made, counted  # type: ignore[method-assign]
    begin, after = HMTZeroOptimizer._begin_window, {}

    def watched(optimizer: Any) -> None:
        after.clear()  # the next window may draw or share bases, whatever became of this step
        after.update(held(optimizer))
        begin(optimizer)

    HMTZeroOptimizer._begin_window = watched  # type: ignore[method-assign]
    mode = dict(CASES[name])
    if mode.get("method") != "adamw":
        # Bases are found at the start, by and by, and not redrawn: that is due by the number of steps begun.
        mode["update_interval"] = 1000
    wide = name.startswith("int8") and "weights" not in name
    model = wide_llama() if wide else tiny_llama(layers=2 if name == "right" else 1)
    changes = {"scheduler": WARMUP, **PRECISIONS[precision], **changes}
    engine = mode_engine(mode, stage, model=model, **changes)
    found: dict[str, Any] = {"changed": {}, "unread": {}, "finds": {}, "said": [], "losses": []}
    for step in range(steps):
        refreshing = [p.gradient.refreshing for p in engine.optimizer.zero.low_rank]
        if step in bad:
            handle, before = poison(engine), held(engine.optimizer)
            engine.backward(loss_of(engine, micro_batches(engine, step)[0]))
            engine.step()
            handle.remove()
            found["unread"][step], found["finds"][step] = len(unread), any(refreshing)
            assert before.keys() == after.keys()
            differs = [key for key in before if not torch.equal(before[key], after[key])]
            found["changed"][step] = differs
        else:
            found["losses"].append(train_step(engine, step))
        if asks:
            found["said"].append(told(engine))
    found["end"] = told(engine) | {
        "scheduled": engine.lr_scheduler.state_dict()["last_batch_iteration"],
        "global_steps": engine.global_steps,
        "begun": engine.optimizer.zero.step_count,
    }
    found["held"] = held(engine.optimizer)
    engine.destroy()
    return found


def told(engine: Any) -> dict[str, Any]:
    """What the host knows once it asks."""
    return {
        "lr": engine.get_lr(),
        "skipped": engine.skipped_steps,
        "overflow": engine.optimizer.overflow,
        "applied": engine.was_step_applied(),
        "scale": engine.optimizer.loss_scale,
    }


# -- nothing changes ------------------------------------------------------------------------------------

# Every precision and stage on two ranks; every mode, which decides what a kernel writes, on one or two.
WANTED = [("right", stage, precision, 2, STEPS) for stage, precision in enumerate(PRECISIONS)]
WANTED += [("two_sided", 3, "fp16", 2, FEW), ("apollo", 3, "bf16", 2, FEW)]
WANTED += [("int8 weights", 0, "bf16", 1, FEW), ("no masters", 0, "bf16", 1, FEW)]
TRAVEL = {"int8 weights": 2, "no masters": 2, "left": 1}  # at these stages updates are sent
WANTED += [
    (name, TRAVEL.get(name, (2, 1, 3)[place % 3]), "bf16", 1 + (name in TRAVEL), FEW)
    for place, name in enumerate(CASES)
]


@pytest.mark.parametrize(("name", "stage", "precision", "world", "steps"), WANTED)
def test_a_skipped_step_changes_no_weight_no_state_and_no_basis(
    ranks: Ranks, name: str, stage: int, precision: str, world: int, steps: int
) -> None:
    """And the run goes on, bit for bit, as one whose host had decided before anything was written."""
    bad = BAD if steps == STEPS else BAD_OF_FEW
    device, host = (
        ranks.run(run, world, name, stage, precision, bad, by_host, steps=steps)
        for by_host in (False, True)
    )
    for found, expected in zip(device, host, strict=True):
        assert not any(found["changed"].values()), found["changed"]
        # the host decides on steps that find bases, and leaves the others to the device
        assert found["unread"] == {step: int(not finds) for step, finds in found["finds"].items()}
        assert not found["finds"][bad[-1]]
        assert found["said"] == expected["said"]
        assert found["losses"] == expected["losses"]
        assert found["held"].keys() == expected["held"].keys()
        for key, value in expected["held"].items():
            assert value.isfinite().all(), key
            assert torch.equal(found["held"][key], value), key


# -- what the host knows ----------------------------------------------------------------------------------


def expected_counts(precision: str) -> list[dict[str, Any]]:
    """After every step, with a linear warm-up over those that are taken."""
    found = []
    for step in range(STEPS):
        skipped = sum(bad <= step for bad in BAD)
        taken = step + 1 - skipped
        scale = {"fp16": float(SCALES[step]), "fp16, static": 64.0}.get(precision, 1.0)
        counts = {"skipped": skipped, "overflow": step in BAD, "applied": step not in BAD}
        rate = 3e-3 * max(taken - 1, 0) / 20
        found.append({"lr": [pytest.approx(rate)], "scale": scale, **counts})
    return found


@pytest.mark.parametrize("asks", [True, False])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_learning_rates_scales_and_counts_are_right_once_read(
    ranks: Ranks, precision: str, asks: bool
) -> None:
    """Also where nobody asks before the end."""
    (found,) = ranks.run(run, 1, "adamw", 1, precision, asks=asks)
    expected = expected_counts(precision)
    assert found["said"] == (expected if asks else [])
    places = {"scheduled": STEPS - len(BAD) - 1, "global_steps": STEPS, "begun": STEPS}
    assert found["end"] == expected[-1] | places


def test_a_verdict_that_is_read_within_the_step_counts_too(ranks: Ranks) -> None:
    """DeepSpeed reports its progress before the step is over."""
    (found,) = ranks.run(run, 1, "adamw", 1, "bf16", steps_per_print=1)
    assert found["said"] == expected_counts("bf16")


def scheduled_by_torch() -> tuple[list[float], list[float]]:
    """Learning rates of each step with a scheduler that computes the next from the last, and what they should be."""
    from torch.optim.lr_scheduler import CosineAnnealingLR

    model = tiny_llama(layers=1)
    changes = {"bf16": {"enabled": True}, "lr_scheduler": lambda o: CosineAnnealingLR(o, 10)}
    config = ds_config(1, {"method": "adamw"}, bf16=changes["bf16"])
    engine = make_engine(config, model, lr_scheduler=changes["lr_scheduler"])
    used, should = [], []
    plain = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=3e-3)
    reference = CosineAnnealingLR(plain, 10)
    for step in range(STEPS):
        handle = poison(engine) if step in BAD else None
        engine.backward(loss_of(engine, micro_batches(engine, step)[0]))
        engine.step()
        if handle is not None:
            handle.remove()
        else:
            plain.step()
            reference.step()
        if step % 2:  # every other verdict is read by the next step
            used.append(engine.get_lr()[0])
            should.append(reference.get_last_lr()[0])
    return used, should


def test_a_scheduler_of_torchs_goes_back_too(ranks: Ranks) -> None:
    ((used, should),) = ranks.run(scheduled_by_torch, 1)
    assert used == should
    assert len(set(used)) > 2


def saved_unread(folder: str, stage: int) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """What an engine says that was saved right after a skipped step, one that has loaded that, and what differs."""
    changes = {"scheduler": WARMUP, **PRECISIONS["fp16"]}
    from deepspeed.accelerator import get_accelerator

    get_accelerator().is_fp16_supported = lambda: True
    mode = {**CASES["right"], "update_interval": 20}
    engine = mode_engine(mode, stage, model=tiny_llama(), **changes)
    for step in range(5):
        train_step(engine, step)
    handle = poison(engine)
    engine.backward(loss_of(engine, micro_batches(engine, 5)[0]))
    engine.step()
    handle.remove()
    engine.save_checkpoint(folder, "skipped")
    said, before = told(engine), held(engine.optimizer)
    loaded = mode_engine(mode, stage, model=tiny_llama(seed=5), **changes)
    loaded.load_checkpoint(folder, "skipped")
    after = held(loaded.optimizer)
    differs = [key for key in before if not torch.equal(before[key], after[key])]
    return said, told(loaded), differs


def test_a_checkpoint_right_after_a_skipped_step_knows_of_it(ranks: Ranks, tmp_path: Path) -> None:
    for said, loaded, differs in ranks.run(saved_unread, 2, str(tmp_path), 2):
        assert said["skipped"] == 1
        assert said["lr"] == [pytest.approx(3e-3 * 4 / 20)]
        assert said["scale"] == 512.0  # twice as large after three and five steps, then half
        assert not differs
        for key in ("lr", "skipped", "scale"):
            assert loaded[key] == said[key], key
