"""Masters and moments on an SSD: ``offload_optimizer: nvme``."""

from __future__ import annotations

import errno
import gc
import os
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from harness import Ranks
from offloading import (
    ADAMW,
    flip_bit,
    offloaded_to,
    small_chunks,
    stock_offload,
)
from overlapping import readers, same
from training import (
    LOW_RANK,
    furthest,
    loss_of,
    make_engine,
    micro_batches,
    model_weights,
    tiny_llama,
    train,
    train_step,
    wait_for,
    weights,
)

STEPS = 6
# Read for the step that does not come: the pages that four buffers of 12 x 256 bytes hold.
AHEAD = 3 * 4096


# -- the same numbers ---------------------------------------------------------------------------------


def run(
    homes: list[str], stage: int, overlaps: list[str], options: Any, gas: int, clip: float
) -> list[dict[str, Any]]:
    """One run for each home of the states, with its overlap."""
    small_chunks()
    found = []
    for folder, overlap in zip(homes, overlaps, strict=True):
        model = tiny_llama(layers=1)
        # Of one element the second of two ranks holds nothing.
        model.model.norm.scalar = torch.nn.Parameter(torch.ones(1))
        changes = {"gas": gas, "gradient_clipping": clip}
        engine = make_engine(
            offloaded_to(folder, stage, options, {"overlap": overlap}, **changes), model
        )
        losses, norms = [], []
        for step in range(STEPS):
            losses.append(train_step(engine, step))
            norms.append(float(engine.get_global_grad_norm()))
        entry = {"losses": losses, "norms": norms, "weights": weights(engine)}
        entry["model"] = model_weights(engine)
        ssd = engine.optimizer.zero.host.ssd
        if ssd is not None:
            entry["buffers"] = (ssd.pool.peak_bytes, ssd.pool.nbytes)
        entry["table"] = engine.optimizer.describe()
        engine.destroy()
        found.append(entry)
    return found


CASES = [
    # stage, world, overlaps, options, accumulation, clip: clipped in some steps and not in others
    (3, 2, ["none", "forward", "backward"], ADAMW, 2, 0.7),
    (2, 2, ["forward"], LOW_RANK, 1, 0.65),
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
    config = offloaded_to(folder, 3, ADAMW, {"overlap": overlap}, fp16=fp16)
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


def exact_run(folder: str, stock: bool) -> dict[str, Any]:
    """200 steps in fp32 on fresh tokens, two of which overflow; both engines are told to look for that, which
    they otherwise do in 16 bits only."""
    if stock:
        config = stock_offload(2)
        config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    else:
        config = offloaded_to(folder, 2, ADAMW, {"overlap": "backward"})
    engine = make_engine(config, tiny_llama(layers=1))
    if stock:
        engine.optimizer.check_grad_overflow = True
    else:
        engine.optimizer.settings = replace(engine.optimizer.settings, check_overflow=True)
    losses, norms = [], []
    for step in range(200):
        generator = torch.Generator().manual_seed(step)
        loss = loss_of(engine, torch.randint(0, 61, (12, 16), generator=generator))
        engine.backward(loss * (float("inf") if step in (40, 120) else 1.0))
        engine.step()
        losses.append(loss.item())
        norms.append(float(engine.get_global_grad_norm()))
    found = {"losses": losses, "norms": norms, "weights": model_weights(engine)}
    return {**found, "skipped": engine.skipped_steps}


@pytest.mark.slow
def test_200_steps_are_zero_offloads(ranks: Ranks, tmp_path: Path) -> None:
    ours = ranks.run(exact_run, 1, str(tmp_path), False)[0]
    stock = ranks.run(exact_run, 1, "", True)[0]
    assert ours["skipped"] == stock["skipped"] == 2
    assert sum(norm > 0.5 for norm in ours["norms"]) >= 50  # clipped
    # twenty times the steps of test_the_numbers_are_zero_offloads, and ten times its tolerance
    assert ours["losses"] == pytest.approx(stock["losses"], rel=1e-4)
    assert furthest(ours["weights"], stock["weights"]) < 2e-3


def on_the_host(folder: str, offloaded_param: bool) -> dict[str, Any]:
    """``offload_param``: this rank's partitions are in host memory too. Of a CPU they always are, so the way
    to them is chosen by hand."""
    from hmt_deepspeed.zero.offload.weight import HostWeight

    small_chunks()
    if offloaded_param:
        HostWeight._offloaded = property(lambda _: True)  # type: ignore[assignment]
    found = {}
    for overlap, masters in (("forward", "none"), ("backward", "fp32")):
        options = {"method": "adamw", "master_weights": masters}
        config = offloaded_to(folder, 3, options, {"overlap": overlap}, bf16={"enabled": True})
        engine = make_engine(config, tiny_llama(layers=1))
        losses = train(engine, 3)
        found[overlap + masters] = {"losses": losses, "weights": model_weights(engine)}
        engine.destroy()
    return found


def test_partitions_in_host_memory_are_written_at_once(ranks: Ranks, tmp_path: Path) -> None:
    plain = ranks.run(on_the_host, 2, str(tmp_path), False)[0]
    for name, found in ranks.run(on_the_host, 2, str(tmp_path), True)[0].items():
        assert found["losses"] == plain[name]["losses"], name
        assert furthest(found["weights"], plain[name]["weights"]) == 0


# -- what is where, what is moved ------------------------------------------------------------------------


def live_bytes() -> int:
    """Of all tensors."""
    gc.collect()
    tensors = [t for t in gc.get_objects() if isinstance(t, torch.Tensor)]
    return sum(
        {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values()
    )


def metrics_after_reading(optimizer: Any, nbytes: int) -> dict[str, float]:
    wait_for(lambda: optimizer.metrics()["ssd_bytes_read"] >= nbytes)
    return optimizer.metrics()


def moved(folder: str) -> dict[str, Any]:
    """Host bytes on an SSD and in host memory, and what each step reads and writes."""
    small_chunks()
    found: dict[str, Any] = {}
    for home in ("", folder):
        config = offloaded_to(
            home, 1, ADAMW, {"overlap": "backward"}, {"pin_memory": False}, gradient_clipping=0.7
        )
        engine = make_engine(config, tiny_llama(layers=1))
        optimizer, times, metrics = engine.optimizer, [], [engine.optimizer.metrics()]
        for step in range(5):
            train_step(engine, step)
            optimizer.overlap.synchronize()  # the last writes
            clipped = float(engine.get_global_grad_norm()) > 0.7
            times.append(2 if clipped else 1)  # redone
            metrics.append(optimizer.metrics())
        if home:
            pages = sum(
                4096 * -(-e.weight.num_elements // 256) for e in optimizer.zero.param_states
            )
            read = metrics[0]["ssd_bytes_read"] + sum(times) * pages
            metrics[-1] = metrics_after_reading(optimizer, read + AHEAD)
        found[home and "ssd"] = {
            "live": live_bytes(),
            "host": optimizer.metrics()["optimizer_host_bytes"],
            "files": optimizer.metrics().get("ssd_state_bytes"),
            "times": times,
            "metrics": metrics,
        }
        found["numel"] = [e.weight.num_elements for e in optimizer.zero.param_states]
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
    times = ssd["times"]
    assert set(times) == {1, 2}
    written = [m["ssd_bytes_written"] for m in ssd["metrics"]]
    assert [b - a for a, b in pairwise(written)] == [n * pages for n in times]
    read = [m["ssd_bytes_read"] for m in ssd["metrics"]]
    assert read[-1] - read[0] == sum(times) * pages + AHEAD


# -- who reads, waits -------------------------------------------------------------------------------------


def test_readers_see_the_last_step(ranks: Ranks, tmp_path: Path) -> None:
    host = ranks.run(readers, 2, 3, "none", str(tmp_path / "host"))[0]
    ssd = ranks.run(readers, 2, 3, "backward", str(tmp_path / "ssd"), str(tmp_path / "home"))[0]
    assert ssd.keys() == host.keys()
    for name, value in host.items():
        assert same(value, ssd[name]), name


# -- checkpoints -----------------------------------------------------------------------------------------------


def ssd_engine(folder: str, home: str, stage: int = 3, seed: int = 0, **changes: Any) -> Any:
    small_chunks()
    config = offloaded_to(home, stage, ADAMW, {"overlap": "forward"}, **changes)
    return make_engine(config, tiny_llama(layers=1, seed=seed))


def linked(folder: str) -> dict[str, int]:
    """Names of every file of moments in a checkpoint, with how many names it has."""
    return {path.name: path.stat().st_nlink for path in Path(folder, "ssd_states").glob("*.bin")}


def saved(folder: str, home: str, copied: bool) -> dict[str, Any]:
    """Three steps, save, three more steps, save."""
    if copied:

        def refuse(*_: Any) -> None:
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

        os.link = refuse
    engine = ssd_engine(folder, home)
    train(engine, 3)
    engine.save_checkpoint(folder, "three")
    found = {"at three": weights(engine), "linked": linked(f"{folder}/three")}
    found["losses"] = train(engine, 3, first=3)
    engine.save_checkpoint(folder, "six")
    found["later"], found["weights"] = linked(f"{folder}/three"), weights(engine)
    found["files"] = engine.optimizer.metrics()["ssd_state_bytes"]
    return found


def resumed(folder: str, home: str, stage: int, tag: str | None = "three") -> dict[str, Any]:
    engine = ssd_engine(folder, home, stage, seed=1)
    path, _ = engine.load_checkpoint(folder, tag)
    steps = 3 if tag == "three" else 0
    found = {"losses": train(engine, steps, first=3), "weights": weights(engine)}
    return {**found, "path": path}


@pytest.mark.parametrize("copied", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_checkpoints(ranks: Ranks, tmp_path: Path, copied: bool) -> None:
    """Bit for bit on the same layout; at another world size, stage and home up to summation."""
    folder, home = str(tmp_path), str(tmp_path / "ssd")
    whole = ranks.run(saved, 2, folder, home, copied)[0]
    assert len(whole["linked"]) > 50
    assert set(whole["linked"].values()) == {1 if copied else 2}
    assert set(whole["later"].values()) == {1}  # the run writes to other files
    same = ranks.run(resumed, 2, folder, home, 3)[0]
    assert same["losses"] == whole["losses"]
    assert furthest(same["weights"], whole["weights"]) == 0
    fp32 = get_fp32_state_dict_from_zero_checkpoint(folder, "three")
    at_three = {name: fp32[name] for name in whole["at three"]}
    assert furthest(at_three, whole["at three"]) == 0
    for world, stage, other_home in ((1, 2, home), (2, 3, "")):
        other = ranks.run(resumed, world, folder, other_home, stage)[0]
        assert other["losses"] == pytest.approx(whole["losses"], rel=1e-5)
        assert furthest(other["weights"], whole["weights"]) < 2e-3
    damaged_tags(ranks, tmp_path, whole)


def damaged_tags(ranks: Ranks, tmp_path: Path, whole: dict[str, Any]) -> None:
    folder, home = str(tmp_path), str(tmp_path / "ssd")
    path = sorted((tmp_path / "six" / "ssd_states").glob("*.bin"))[7]
    flip_bit(path)
    codes, _, logs = ranks.attempt(resumed, 1, folder, home, 2, "six")
    assert codes != [0]
    assert f"{path.name} does not match its checksum" in logs[0]
    found = ranks.run(resumed, 1, folder, home, 2, None)[0]
    assert found["path"].endswith("three")
    assert furthest(found["weights"], whole["at three"]) == 0
