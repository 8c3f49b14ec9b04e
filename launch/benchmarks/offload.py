"""Offloaded optimizer states: whole steps beside ZeRO-Offload, and beside ZeRO-3 with states on an SSD.

Each contender is a process of its own, so that its host memory is its own; they step in turn. Model compute is
pinned to one core and every other thread, which are the workers of optimizer and I/O, to another.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks import basis_cache
from benchmarks.results import CaseResult, Measurement
from benchmarks.setting import (
    TOY,
    Batches,
    EngineStep,
    Setting,
    Shape,
    engine_config,
    free_port,
    join_ranks,
    llama,
)
from benchmarks.timing import Sample, column, interleave, median_of, now, paired_spread

# A backward that is longer than moving 24 bytes of each element to and from an SSD of 1 GB/s.
SHAPE = Shape(512, 8, 8, sequence=1024, micro_batch=1)
# A forward about as long as updating in host memory takes: most of what overlapping them can hide.
SHORT = Shape(512, 8, 8, sequence=256, micro_batch=1)
ROUNDS, WARMUP = 5, 1  # of blocks
# Steps in a row: what an engine leaves to the background is done within its own block, not in the other's.
BLOCK = 4
CLIP = 1.0
AIO = {"block_size": 1 << 20, "queue_depth": 8, "overlap_events": True, "single_submit": False}
PINNED = (
    "model compute on one core, the threads of optimizer and I/O on another; means over blocks of "
    f"{BLOCK} steps, with the updates that the last one leaves to the background"
)


class Contender:
    """An engine in a process of its own, one step at a time."""

    def __init__(self, config: dict[str, Any], shape: Shape, device: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, config, shape, device, free_port()), daemon=True
        )
        self._process.start()
        theirs.close()

    def __call__(self) -> Sample:
        self._pipe.send("step")
        sample: Sample = self._pipe.recv()
        return sample

    def close(self) -> None:
        self._pipe.send("end")
        self._process.join()


def _serve(pipe: Connection, config: dict[str, Any], shape: Shape, device: str, port: int) -> None:
    import deepspeed
    import torch

    import hmt_deepspeed

    compute, workers = sorted(os.sched_getaffinity(0))[:2]
    torch.set_num_threads(1)
    join_ranks(0, 1, port, "gloo" if device == "cpu" else "nccl")
    initialize = hmt_deepspeed.initialize if "hmt" in config else deepspeed.initialize
    model = llama(shape)
    engine, *_ = initialize(model=model, model_parameters=model.parameters(), config=config)
    step = EngineStep(engine, Batches(shape, device))
    num_blocks = 0
    while pipe.recv() == "step":
        _pin(compute, workers)  # threads are made when they are first needed
        if num_blocks == WARMUP:
            Path("/proc/self/clear_refs").write_text(
                "5"
            )  # forget the peak of building and first steps
        before = _moved()
        sample = _block(engine, step)
        sample |= {key: (value - before[key]) / BLOCK for key, value in _moved().items()}
        pipe.send({**sample, "peak_host_bytes": _peak()})
        num_blocks += 1
    engine.destroy()


def _block(engine: Any, step: EngineStep) -> Sample:
    """Means over a block of steps, to the end of the last one's updates."""
    begin = now()
    samples = [step() for _ in range(BLOCK)]
    overlap = getattr(engine.optimizer, "overlap", None)
    if overlap is not None:
        overlap.synchronize()
    seconds = (now() - begin) / BLOCK
    return {"seconds": seconds, "backward": sum(column(samples, "backward")) / BLOCK}


def _pin(compute: int, workers: int) -> None:
    main = os.getpid()
    for task in map(int, os.listdir("/proc/self/task")):
        os.sched_setaffinity(task, {compute if task == main else workers})


def _moved() -> Sample:
    """Bytes that this process has had read from and written to disks."""
    lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    numbers = dict(line.split(": ") for line in lines)
    return {"ssd_read": float(numbers["read_bytes"]), "ssd_written": float(numbers["write_bytes"])}


def _peak() -> float:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    (found,) = [line.split()[1] for line in lines if line.startswith("VmHWM:")]
    return 1024.0 * float(found)


def _compare(
    setting: Setting,
    shape: Shape,
    title: str,
    target: float | None,
    offload: dict[str, Any],
    stage: int,
    clip: float,
    overlap: str,
    **more: Any,
) -> CaseResult:
    shape = TOY if setting.toy else shape
    label = f"{shape.label}, {shape.tokens} tokens"
    if len(os.sched_getaffinity(0)) < 2:
        raise RuntimeError("this case pins its threads to two cores, of which there is one here")
    stock = engine_config(shape, setting.dtype, stage=stage, offload_optimizer=offload)
    stock |= {"gradient_clipping": clip, **more}
    ours = {**stock, "optimizer": {**stock["optimizer"], "type": "HMT"}}
    ours["hmt"] = {"optimizer": {"method": "adamw"}, "offload": {"overlap": overlap}}
    contenders = {
        "deepspeed": Contender(stock, shape, setting.device),
        "hmt": Contender(ours, shape, setting.device),
    }
    samples = interleave(contenders, setting.rounds_or(ROUNDS), warmup=WARMUP)
    for contender in contenders.values():
        contender.close()
    settings = {
        "model": asdict(shape),
        "zero_stage": stage,
        "clip": clip,
        "overlap": overlap,
        "offload": offload,
    }
    result = CaseResult({**settings, **more, "pinned": PINNED}, samples=dict(samples))
    theirs, mine = samples["deepspeed"], samples["hmt"]
    ratios = paired_spread(column(theirs), column(mine))
    result.measurements += [
        Measurement(
            f"{label}: steps/s, HMT / {title}",
            median_of(theirs) / median_of(mine),
            "x",
            "" if target is None else ">=",
            target,
            ratios,
            PINNED,
        ),
        Measurement(f"{label}: step, {title}", median_of(theirs), "s"),
        Measurement(f"{label}: step, HMT", median_of(mine), "s"),
        Measurement(f"{label}: backward, HMT", median_of(mine, "backward"), "s"),
        _share(f"{label}: host memory peak, HMT / {title}", "peak_host_bytes", samples, 1.0),
    ]
    return result


def _share(label: str, key: str, samples: dict[str, Any], target: float) -> Measurement:
    theirs, mine = (max(column(samples[name], key)) for name in ("deepspeed", "hmt"))
    note = f"{mine:,.0f} bytes / {theirs:,.0f} bytes"
    return Measurement(label, mine / max(theirs, 1.0), "share", "<=", target, note=note)


def host_step(setting: Setting) -> CaseResult:
    offload = {"device": "cpu", "pin_memory": False}
    result = _compare(setting, SHORT, "ZeRO-Offload", 1.15, offload, 2, CLIP, "forward")
    if not setting.toy:
        longer = _compare(setting, SHAPE, "ZeRO-Offload", None, offload, 2, CLIP, "forward")
        result.measurements += longer.measurements
        result.settings["longer"], result.samples["longer"] = longer.settings, longer.samples
    return result


def nvme_step(setting: Setting) -> CaseResult:
    title = "ZeRO-3 with NVMe optimizer offload"
    with tempfile.TemporaryDirectory(prefix="hmt-bench-", dir=Path.cwd()) as folder:
        offload = {"device": "nvme", "nvme_path": folder, "pin_memory": False}
        offload |= {"pipeline_read": True, "pipeline_write": True, "buffer_count": 5}
        result = _compare(setting, SHAPE, title, 1.3, offload, 3, 0.0, "backward", aio=AIO)
    for key in ("ssd_read", "ssd_written"):
        label = f"bytes of a step, {key.replace('_', ' ')}, HMT / {title}"
        result.measurements.append(_share(label, key, result.samples, 1.1))
    return result


SUITE = "offload"
CASES: dict[str, Callable[[Setting], CaseResult]] = {
    "host_step": host_step,
    "nvme_step": nvme_step,
    **basis_cache.CASES,
}
USES_ENGINE = set(basis_cache.CASES)  # the others start their contenders in processes of their own
