"""Device bytes while gradients are reduced, against those before: no spike (the limit that FPDT's paper names)."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch

from benchmarks.live_bytes import LiveBytes
from benchmarks.results import CaseResult, Measurement
from benchmarks.setting import TOY, Batches, Setting, Shape, engine_config, llama
from benchmarks.two_ranks import on_two_ranks

SHAPE = Shape(256, 3, 4, vocabulary=512, sequence=2048, micro_batch=1)


class ReductionPeaks:
    """Counts the peak of every stretch of backward between reductions, and of every reduction.

    A reduction is all that the reducer does when a gradient arrives and at the end: packing, sending,
    waiting, adding to the shard.

    Args:
        reducer: its class.

    Attributes:
        stretches: (peak before it since the last, peak during it) of each, in order; bytes.
    """

    def __init__(self, live: LiveBytes, reducer: type) -> None:
        self._live, self._reducer = live, reducer
        self.stretches: list[tuple[int, int]] = []

    def __enter__(self) -> ReductionPeaks:
        self._before = {name: vars(self._reducer)[name] for name in ("arrive", "flush")}
        for name, method in self._before.items():
            setattr(self._reducer, name, self._measuring(method))
        return self

    def __exit__(self, *error: object) -> None:
        for name, method in self._before.items():
            setattr(self._reducer, name, method)

    def _measuring(self, method: Any) -> Any:
        def measured(reducer: Any, *args: Any) -> None:
            before = self._live.peak
            self._live.reset_peak()
            method(reducer, *args)
            self.stretches.append((before, self._live.peak))
            self._live.reset_peak()

        return measured

    def largest_excess(self) -> int:
        """By how much a reduction's peak exceeds the peak of all that came before it, at most."""
        excess, before = -(2**62), 0
        for stretch, during in self.stretches:
            before = max(before, stretch)
            excess = max(excess, during - before)
        return excess


def count(rank: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """Of this rank, in the third step of an engine at stage 3 in chunks: the first two make buffers."""
    import hmt_deepspeed
    from hmt_deepspeed.zero.gradients.reducer import GradientReducer

    shape = Shape(**arguments["shape"])
    config = engine_config(shape, "fp32", stage=3, reduce_bucket_size=arguments["bucket"])
    config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    config["optimizer"]["type"] = "HMT"
    config["hmt"] = {
        "optimizer": arguments["optimizer"],
        "fpdt": {"chunk_size": shape.sequence // 8},
    }
    model = llama(shape)
    engine, *_ = hmt_deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )
    batches, live = Batches(shape, "cpu", rank), LiveBytes()
    for step in range(3):
        rows = batches.draw()
        if step < 2:
            engine.backward(engine(input_ids=rows, labels=rows).loss)
            engine.step()
    with live, ReductionPeaks(live, GradientReducer) as peaks:
        engine.backward(engine(input_ids=rows, labels=rows).loss)
    engine.destroy()
    return {"excess": peaks.largest_excess(), "stretches": peaks.stretches}


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "method adamw": {"method": "adamw"},
    "projected": {"method": "lowrank_adamw", "rank": 16, "update_interval": 100},
}


def reduction_peak(setting: Setting) -> CaseResult:
    """Bytes do not depend on the machine: fp32 and gloo everywhere."""
    shape = TOY if setting.toy else SHAPE
    bucket = 4096 if setting.toy else 200_000  # elements
    result = CaseResult(
        {"model": asdict(shape), "bucket_elements": bucket, "world_size": 2},
        dtype=("fp32", "two gloo ranks on the CPU, where only bytes are counted"),
    )
    for name, optimizer in OPTIMIZERS.items():
        arguments = {"shape": asdict(shape), "bucket": bucket, "optimizer": optimizer}
        found = on_two_ranks(count, arguments, "cpu")
        result.samples[name] = found
        result.measurements.append(
            Measurement(
                f"{shape.label}, {shape.sequence} tokens, stage 3, two ranks, {name}: peak of a reduction less "
                "the peak before it, over a bucket",
                found["excess"] / (bucket * torch.float32.itemsize),
                "share",
                "<=",
                1.0,
                note="device bytes counted; below 0: a reduction never reaches what a layer's backward took",
            )
        )
    return result
