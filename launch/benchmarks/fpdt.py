"""The numbers of FPDT: device bytes of a layer and of a model, and time against full recompute."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import nn

from benchmarks.live_bytes import LiveBytes
from benchmarks.results import CaseResult, Measurement
from benchmarks.setting import TOY, Batches, Setting, Shape, llama
from benchmarks.timing import Sample, column, interleave, median_of, now, paired_spread
from hmt_deepspeed.fpdt.install import Installation, install
from hmt_deepspeed.fpdt.visibility import Visibility

NARROW = Shape(64, 1, 1, vocabulary=64, micro_batch=1)
WIDE = Shape(256, 2, 4, vocabulary=8192, micro_batch=1)
CHUNKS = (2, 4, 8, 16, 32)


@contextmanager
def _chunked(model: nn.Module, chunk_size: int) -> Iterator[Installation]:
    installation = install(model, chunk_size)
    try:
        yield installation
    finally:
        installation.remove()


def _counted(run: Callable[[], object]) -> int:
    """Peak bytes of the second run: the first makes the host's pools."""
    run()
    with LiveBytes() as live:
        run()
    return live.peak


def layer_workspace(model: Any, length: int, chunk_size: int, dtype: torch.dtype) -> int:
    """Device bytes of a layer's forward and backward beyond its output and its input's gradient, which
    are as long as the sequence whoever computes them, and beyond the gradients of its weights."""
    layer = model.model.layers[0]
    x = torch.randn(1, length, model.config.hidden_size, dtype=dtype, requires_grad=True)
    grad = torch.randn_like(x)
    rotary = model.model.rotary_emb(x, torch.arange(length)[None])

    def run() -> None:
        seen = Visibility.causal(length)
        layer(x, attention_mask=seen, position_embeddings=rotary).backward(grad)
        x.grad = None
        model.zero_grad()

    with _chunked(model, chunk_size):
        peak = _counted(run)
    return peak - 2 * x.nbytes - sum(p.nbytes for p in layer.parameters())


def layer_memory(setting: Setting) -> CaseResult:
    lengths = (256, 512) if setting.toy else (16384, 32768, 65536, 131072)
    model: Any = llama(NARROW).to(setting.torch_dtype)
    shortest = lengths[0]
    by_chunks = {
        n: layer_workspace(model, shortest, shortest // n, setting.torch_dtype) for n in CHUNKS
    }
    fixed = shortest // 8
    by_length = {
        length: layer_workspace(model, length, fixed, setting.torch_dtype) for length in lengths
    }
    result = CaseResult(
        {"model": asdict(NARROW), "lengths": lengths, "chunk_size": fixed},
        samples={"bytes_by_chunks": by_chunks, "bytes_by_length": by_length},
    )
    fewest, most = CHUNKS[0], CHUNKS[-1]
    result.measurements += [
        Measurement(
            f"one layer, {shortest} tokens: device bytes in {fewest} chunks / in {most} chunks, over "
            f"{most // fewest}",
            by_chunks[fewest] / by_chunks[most] / (most // fewest),
            "share",
            ">=",
            0.8,
            note="beyond the layer's output, its input's gradient and its weights' gradients; 1 is 1/chunks",
        ),
        Measurement(
            f"one layer, chunks of {fixed}: device bytes at {lengths[-1]} tokens / at {lengths[0]}",
            by_length[lengths[-1]] / by_length[lengths[0]],
            "share",
            "<=",
            1.05,
            note="a fixed number of chunks is on the device",
        ),
    ]
    return result


def _step(model: Any, batches: Batches) -> None:
    rows = batches.draw()
    model(input_ids=rows, labels=rows).loss.backward()
    model.zero_grad()


def model_memory(setting: Setting) -> CaseResult:
    shape = (
        replace(TOY, sequence=256, micro_batch=1) if setting.toy else replace(WIDE, sequence=16384)
    )
    chunk_size = shape.sequence // 16
    model = llama(shape).to(setting.torch_dtype)
    batches = Batches(shape, "cpu")
    plain = _counted(lambda: _step(model, batches))
    with _chunked(model, chunk_size):
        ours = _counted(lambda: _step(model, batches))
    result = CaseResult(
        {"model": asdict(shape), "chunk_size": chunk_size},
        samples={"plain_bytes": plain, "fpdt_bytes": ours},
    )
    result.measurements.append(
        Measurement(
            f"{shape.label}, {shape.sequence} tokens: device bytes of a step, plain / FPDT",
            plain / ours,
            "x",
            ">=",
            8.0,
            note="weights aside; sdpa without checkpointing against chunks of a sixteenth",
        )
    )
    return result


def step_time(setting: Setting) -> CaseResult:
    """Against sdpa with every layer recomputed; run on a machine that does nothing else."""
    shape = (
        replace(TOY, sequence=256, micro_batch=1) if setting.toy else replace(WIDE, sequence=16384)
    )
    plain, chunked = (llama(shape).to(setting.device, setting.torch_dtype) for _ in range(2))
    plain.gradient_checkpointing_enable()  # type: ignore[operator]
    plain.train()
    installation = install(chunked, shape.sequence // 8)
    batches = Batches(shape, setting.device)

    def contender(model: nn.Module) -> Callable[[], Sample]:
        def run() -> Sample:
            counters = installation.memory.engine and installation.memory.engine.counters
            waited, begin = counters.seconds_waited if counters else 0.0, now()
            _step(model, batches)
            seconds = now() - begin
            waited = counters.seconds_waited - waited if counters else 0.0
            return {"seconds": seconds, "waited": waited}

        return run

    contenders = {"sdpa, recompute": contender(plain), "fpdt": contender(chunked)}
    samples = interleave(contenders, setting.rounds_or(5), warmup=1)
    installation.remove()
    ours, theirs = samples["fpdt"], samples["sdpa, recompute"]
    result = CaseResult(
        {"model": asdict(shape), "chunk_size": shape.sequence // 8}, samples=dict(samples)
    )
    result.measurements += [
        Measurement(
            f"{shape.label}, {shape.sequence} tokens: step time, FPDT / sdpa with full recompute",
            median_of(ours) / median_of(theirs),
            "x",
            "<=",
            1.15,
            spread=paired_spread(column(ours), column(theirs)),
        ),
        Measurement(
            f"{shape.label}, {shape.sequence} tokens: share of the step that the host waits for chunks",
            median_of(ours, "waited") / median_of(ours),
            "share",
            note="on a CPU every copy is waited for; on CUDA what the device's stream waits is not seen here",
        ),
    ]
    return result


SUITE = "fpdt"
CASES: dict[str, Callable[[Setting], CaseResult]] = {
    "layer_memory": layer_memory,
    "model_memory": model_memory,
    "step_time": step_time,
}
USES_ENGINE: set[str] = set()
