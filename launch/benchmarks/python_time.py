"""Python's time in the activation backend: a tiny Llama on the CPU, whose kernels take next to none."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from benchmarks.results import CaseResult, Measurement
from benchmarks.setting import TOY, Batches, Setting, Shape, llama
from benchmarks.timing import Sample, column, interleave, median_of, spread
from hmt_deepspeed.activations.backend import ActivationBackend
from hmt_deepspeed.activations.codecs import Int8, Keep
from hmt_deepspeed.attribution import attribute
from hmt_deepspeed.kernels.token_blocks import new_blocks

SHAPE = Shape(64, 8, 4, vocabulary=64, sequence=8, micro_batch=1)
PLAIN, HF = "no checkpointing", "Hugging Face's gradient checkpointing"
_INSIDE = ("attention_qkv", "attention_output", "mlp_intermediate", "residual")
POLICIES: dict[str, dict[str, str]] = {
    "everything kept": dict.fromkeys(_INSIDE, "keep"),
    "full recompute": dict.fromkeys(_INSIDE, "recompute"),
    "the paper's table": {},
}
_WARMUP = 5  # a layer is recorded in the second step, checked in its backward
_TARGET = 5e-4


class _Allocating(Int8):
    """Without its kernels, which are no Python on a GPU: memory for codes, and zeros for what they decode to."""

    def encode_matrix(self, value: Tensor, key: int) -> tuple[Tensor, Tensor]:
        return new_blocks(value, self.block_size, torch.int8)

    def decode_matrix(self, codes: Tensor, scales: Tensor, out: Tensor) -> None:
        out.zero_()


def python_time(setting: Setting) -> CaseResult:
    shape = TOY if setting.toy else SHAPE
    steps = {name: _step(name, shape) for name in (PLAIN, HF, *POLICIES)}
    samples = interleave(steps, setting.rounds_or(60), _WARMUP)
    result = CaseResult(
        {"model": asdict(shape), "targets_are_of": "a layer and micro-batch"},
        samples=samples,
        dtype=("fp32", "on the CPU, where Python and dispatch are nearly all of a tiny step"),
    )
    plain = column(samples[PLAIN])
    note = "CPU time of this thread, forward and backward; medians of interleaved rounds"
    for name in (HF, *POLICIES):
        mine = column(samples[name])
        added = [(a - b) / shape.layers for a, b in zip(mine, plain, strict=True)]
        value = (median_of(samples[name]) - median_of(samples[PLAIN])) / shape.layers
        goal: dict[str, Any] = {} if name == HF else {"relation": "<=", "target": _TARGET}
        label = f"{shape.label}: added to {PLAIN} for a layer and micro-batch, {name}"
        measured = Measurement(label, value, "s", spread=spread(added), note=note, **goal)
        result.measurements.append(measured)
    return result


def _step(name: str, shape: Shape) -> Callable[[], Sample]:
    """Forward and backward of a model of its own, in this thread."""
    model: Any = llama(shape).train()
    if name == HF:
        model.activation_checkpointing_enable()
    elif name in POLICIES:
        codecs = {"keep": Keep(), "int8": _Allocating()}
        ActivationBackend(model, attribute(model), POLICIES[name], codecs).install()
    batches = Batches(shape, "cpu")

    def step() -> Sample:
        rows = batches.draw()
        model.zero_grad()
        begin = time.thread_time()
        model(input_ids=rows, labels=rows).loss.backward()
        return {"seconds": time.thread_time() - begin}

    return step
