"""Bytes of optimizer states and gradient buffers, read from an engine and held against formulas."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch

from benchmarks.results import CaseResult, Measurement
from benchmarks.setting import TOY, Batches, EngineStep, Setting, Shape, hmt_engine

SHAPE = Shape(256, 2, 4, vocabulary=512, sequence=64, micro_batch=1)
INTERVAL = 200


def memory(setting: Setting) -> CaseResult:
    shape = TOY if setting.toy else SHAPE
    rank = shape.hidden // 8
    elements = shape.layers * (4 * shape.hidden**2 + 3 * shape.hidden * shape.intermediate)
    # All bases are found at step 0, so that step 1 accumulates projected gradients only.
    options = {
        "rank": rank,
        "update_interval": INTERVAL,
        "max_full_gradient_bytes": 4 * elements,
    }
    engine = hmt_engine(shape, setting.dtype, options)
    batches = Batches(shape, setting.device)
    EngineStep(engine, batches)()
    gradients = _one_backward(engine, batches)
    state = engine.optimizer.metrics()["low_rank_state_bytes"]
    adam = sum(2 * 4 * m * n for m, n in _shapes(engine))
    result = CaseResult(
        {"model": asdict(shape), "rank": rank, "zero_stage": 2, "world_size": 1},
        samples={
            "low_rank_state_bytes": state,
            "formula_state_bytes": state_formula(engine),
            "adamw_moment_bytes": adam,
            **gradients,
        },
    )
    result.measurements += [
        Measurement(
            f"{shape.label}, r = d/8: state bytes of low-rank matrices / formula",
            state / state_formula(engine),
            "share",
            "=",
            1.0,
            note="per matrix two fp32 moments m·r, r + 1 fp32 weights of evidence, and the basis n·r in "
            "the model's dtype",
        ),
        Measurement(
            f"{shape.label}, r = d/8: state bytes of low-rank matrices / AdamW's moments",
            state / adam,
            "share",
            "<=",
            0.3,
        ),
        Measurement(
            f"{shape.label}, r = d/8: gradient bytes of low-rank matrices / (r + k)·m",
            gradients["low_rank_gradient_bytes"] / gradients["projected_formula_bytes"],
            "share",
            "=",
            1.0,
            note="held after the backward of a step without a refresh; k probe columns beside the r",
        ),
        Measurement(
            f"{shape.label}, r = d/8: gradient bytes of low-rank matrices / m·n",
            gradients["low_rank_gradient_bytes"] / gradients["full_gradient_bytes"],
            "share",
        ),
        Measurement(
            f"{shape.label}, r = d/8: most gradient bytes alive in that step, all parameters / full",
            gradients["peak_gradient_bytes"] / gradients["full_gradient_bytes_of_all"],
            "share",
        ),
    ]
    return result


def _shapes(engine: Any) -> list[tuple[int, int]]:
    return [entry.matrix.shape for entry in engine.optimizer.zero.low_rank]


def _element_size(dtype: torch.dtype) -> int:
    return torch.empty(0, dtype=dtype).element_size()


def state_formula(engine: Any) -> int:
    """Bytes the low-rank states should take at the rank in force, on one rank."""
    basis_size = _element_size(engine.optimizer.settings.model_dtype)
    total = 0
    for entry in engine.optimizer.zero.low_rank:
        (m, n), rank = entry.matrix.shape, entry.matrix.rank
        total += 2 * 4 * m * rank + 4 * (rank + 1) + basis_size * n * rank
    return total


def _one_backward(engine: Any, batches: Batches) -> dict[str, int]:
    """Gradient bytes between backward and step, when no matrix refreshes."""
    optimizer = engine.optimizer
    assert not any(entry.gradient.refreshing for entry in optimizer.zero.low_rank)
    optimizer.reducer.peak_bytes = 0
    rows = batches.draw()
    engine.backward(engine(input_ids=rows, labels=rows).loss)
    size = _element_size(optimizer.settings.accumulate_dtype)
    every = sum(e.gradient.shards.m * e.gradient.shards.n for e in optimizer.zero.param_states)
    found = {
        "low_rank_gradient_bytes": sum(e.gradient.nbytes() for e in optimizer.zero.low_rank),
        "projected_formula_bytes": sum(
            size * e.matrix.shape[0] * e.matrix.width for e in optimizer.zero.low_rank
        ),
        "full_gradient_bytes": sum(size * m * n for m, n in _shapes(engine)),
        "peak_gradient_bytes": optimizer.reducer.peak_bytes,
        "full_gradient_bytes_of_all": size * every,
    }
    engine.step()
    return found
