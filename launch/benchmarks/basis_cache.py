"""The basis cache and the snapshots: device bytes of bases, time waited for them, steps beside a snapshot."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any

from benchmarks.results import CaseResult, Measurement
from benchmarks.setting import (
    LEARNING_RATE,
    SMALL,
    STEADY_AFTER,
    TOY,
    Batches,
    EngineStep,
    Setting,
    Shape,
    alternating_options,
    engine_config,
    llama,
)
from benchmarks.timing import Sample, column, interleave, median_of, paired_spread

SHAPE = replace(SMALL, layers=4)


def _engine(shape: Shape, dtype: str, rank: int, block: Mapping[str, Any]) -> Any:
    """HMT's engine in the steady state of alternating refreshes, with further sections of its block."""
    import hmt_deepspeed

    config = engine_config(shape, dtype)
    config["optimizer"] = {"type": "HMT", "params": {"lr": LEARNING_RATE, "weight_decay": 0.01}}
    config["hmt"] = {"optimizer": alternating_options(shape, rank), **block}
    model = llama(shape)
    engine, *_ = hmt_deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )
    return engine


def _counted(engine: Any, batches: Batches) -> Callable[[], Sample]:
    """A step with what it did to the cache."""
    step = EngineStep(engine, batches)
    keys = ("basis_seconds_waited", "basis_cache_hits", "basis_cache_misses")

    def run() -> Sample:
        before = engine.optimizer.metrics()
        sample = step()
        after = engine.optimizer.metrics()
        counts = {key: after.get(key, 0) - before.get(key, 0) for key in keys}
        return {**sample, **counts, "device_bytes": after["basis_device_bytes"]}

    return run


def basis_cache(setting: Setting) -> CaseResult:
    from hmt_deepspeed.memory.fetch_ahead import PREFETCH

    shape = TOY if setting.toy else SHAPE
    rank = shape.hidden // 8
    blocks = {"on the device": {}, "cached": {"basis_cache": {}}}
    engines = {n: _engine(shape, setting.dtype, rank, block) for n, block in blocks.items()}
    contenders = {n: _counted(e, Batches(shape, setting.device)) for n, e in engines.items()}
    samples = interleave(contenders, setting.rounds_or(8), warmup=STEADY_AFTER)
    plain, cached = samples["on the device"], samples["cached"]
    found = engines["cached"].optimizer.metrics()
    held = engines["on the device"].optimizer.metrics()["basis_device_bytes"]
    peak = found["basis_peak_fetched_bytes"]
    result = CaseResult(
        {"model": asdict(shape), "rank": rank, "zero_stage": 2, "prefetch": PREFETCH},
        samples={**samples, "peak_fetched_bytes": peak, "held_bytes": held},
    )
    waited = [s["basis_seconds_waited"] / s["seconds"] for s in cached]
    asked = sum(s["basis_cache_hits"] + s["basis_cache_misses"] for s in cached)
    label = f"{shape.label}, r = d/8"
    result.measurements += [
        Measurement(
            f"{label}: device bytes of bases, cached / without a cache",
            max(sample["device_bytes"] for sample in cached) / held,
            "share",
            "<=",
            3 * PREFETCH / shape.layers / 7,
            note="between two steps, as in forward: one in use and two on their way, of seven a layer and of the copies "
            "that groups of linears hold; on top come q, k, v (gate, up) side by side while they are multiplied. Inside "
            "a step up to 128 MiB are in use, and as much is on its way: all of this model's",
        ),
        Measurement(
            f"{label}: share of the step that the host waits for bases",
            sum(waited) / len(waited),
            "share",
            "<=",
            0.02,
            note="on a CPU every copy is waited for, and runs then; on CUDA a stream waits, which is not seen here",
        ),
        Measurement(
            f"{label}: bases that were on the device, or on their way there, when they were asked for",
            sum(s["basis_cache_hits"] for s in cached) / asked,
            "share",
            ">=",
            0.95,
        ),
        Measurement(
            f"{label}: step time, cached / without a cache",
            median_of(cached) / median_of(plain),
            "x",
            spread=paired_spread(column(cached), column(plain)),
        ),
    ]
    return result


def snapshots(setting: Setting) -> CaseResult:
    """Every second step takes one; on two cores the writer has one of them."""
    shape = TOY if setting.toy else SHAPE
    rank = shape.hidden // 8
    with tempfile.TemporaryDirectory() as folder:
        section = {"path": folder, "interval": 2}
        engine = _engine(shape, setting.dtype, rank, {"snapshot": section})
        plain = _engine(shape, setting.dtype, rank, {})
        contenders = {
            "without": EngineStep(plain, Batches(shape, setting.device)),
            "beside a snapshot": _beside(engine, Batches(shape, setting.device)),
        }
        samples = interleave(contenders, setting.rounds_or(6), warmup=STEADY_AFTER)
        metrics = engine.hmt_snapshots.metrics()
        engine.destroy()
    ours, theirs = samples["beside a snapshot"], samples["without"]
    result = CaseResult(
        {"model": asdict(shape), "rank": rank, "zero_stage": 2}, samples={**samples, **metrics}
    )
    taken = metrics["snapshots"]
    result.measurements += [
        Measurement(
            f"{shape.label}: two steps, the first of which takes a snapshot, / two steps without",
            median_of(ours) / (2 * median_of(theirs)),
            "x",
            spread=paired_spread(column(ours), [2 * s for s in column(theirs)]),
        ),
        Measurement(
            f"{shape.label}: time of the training thread for a snapshot / a step",
            metrics["snapshot_seconds_taking"] / taken / median_of(theirs),
            "share",
            note="starting its copies, and waiting for them before the next update",
        ),
        Measurement(
            f"{shape.label}: time the writing thread takes for it / a step",
            metrics["snapshot_seconds_writing"] / taken / median_of(theirs),
            "share",
        ),
        Measurement(
            f"{shape.label}: bytes of a snapshot",
            metrics["snapshot_bytes_written"] / taken,
            "bytes",
        ),
    ]
    return result


def _beside(engine: Any, batches: Batches) -> Callable[[], Sample]:
    """Two steps: after the first a snapshot is begun, and the second runs beside it."""
    step = EngineStep(engine, batches)

    def run() -> Sample:
        while engine.global_steps % 2 == 0:  # so that the next step is one that takes a snapshot
            step()
        engine.hmt_snapshots.finish()
        first, second = step(), step()
        return {"seconds": first["seconds"] + second["seconds"]}

    return run


CASES: dict[str, Callable[[Setting], CaseResult]] = {
    "basis_cache": basis_cache,
    "snapshots": snapshots,
}
