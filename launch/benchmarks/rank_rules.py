"""Ranks by threshold and by budget: what equal bytes capture of the gradients of a model in training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from statistics import mean

import torch
from torch import Tensor, nn

from benchmarks.results import CaseResult, Measurement
from benchmarks.setting import LEARNING_RATE, TOY, Batches, Setting, Shape, llama
from hmt_deepspeed.optim.bases.rank import select_rank
from hmt_deepspeed.optim.bases.rank_budget import Spectrum, allocate_ranks, total_captured
from hmt_deepspeed.train.data import prepare_data
from hmt_deepspeed.train.packing import GlobalOrder

SHAPE = Shape(256, 4, 4, vocabulary=512, sequence=256, micro_batch=8)
STEPS, TOY_STEPS = (100, 200, 400), (2, 4)
SPREAD = "the spread is from the least to the most over the steps at which gradients were taken"
THRESHOLDS = (0.7, 0.8, 0.9)
# Rank candidates are the hidden size over these. Early gradients are of so low a rank that with larger
# ones alone every matrix would sit at the smallest, and the rules would not differ.
CANDIDATES = (64, 32, 16, 8, 4, 2)


def rank_rules(setting: Setting) -> CaseResult:
    shape, steps = (TOY, TOY_STEPS) if setting.toy else (SHAPE, STEPS)
    candidates = tuple(shape.hidden // share for share in CANDIDATES)
    gradients = training_gradients(shape, setting, steps)
    spectra = [[_spectrum(g, candidates) for g in each.values()] for each in gradients]
    result = CaseResult(
        {"model": asdict(shape), "steps": steps, "candidates": candidates},
        dtype=("fp32", "spectra are of fp32 gradients"),
    )
    for threshold in THRESHOLDS:
        compared = [_compare(own, threshold) for own in spectra]
        label = f"{shape.label}, threshold {threshold}"
        gains = [budgeted - captured for captured, budgeted, _ in compared]
        sizes = [share for _, _, share in compared]
        result.measurements += [
            Measurement(
                f"{label}: captured energy at equal bytes, budget less threshold",
                mean(gains),
                "share",
                ">",
                0.0,
                (min(gains), max(gains)),
                f"mean over matrices; {SPREAD}",
            ),
            Measurement(
                f"{label}: bytes for the same captured energy, budget / threshold",
                mean(sizes),
                "share",
                "<=",
                1.0,
                (min(sizes), max(sizes)),
                SPREAD,
            ),
        ]
        result.samples[f"threshold {threshold}"] = [
            {"step": step, "captured": one, "captured by budget": other, "bytes": share}
            for step, (one, other, share) in zip(steps, compared, strict=True)
        ]
    return result


def _compare(spectra: Sequence[Spectrum], threshold: float) -> tuple[float, float, float]:
    """(energy by threshold, by budget at its bytes, share of its bytes that hold its energy)."""
    ranks = [select_rank(s.captured, s.candidates, threshold) for s in spectra]
    energy, size = total_captured(spectra, ranks)
    budgeted, _ = total_captured(spectra, allocate_ranks(spectra, size))
    low, high = sum(s.bytes[0] for s in spectra), size
    while high - low > size // 1000:
        middle = (low + high) // 2
        reached, _ = total_captured(spectra, allocate_ranks(spectra, middle))
        low, high = (low, middle) if reached >= energy else (middle, high)
    return energy / len(spectra), budgeted / len(spectra), high / size


def _spectrum(gradient: Tensor, candidates: Sequence[int]) -> Spectrum:
    """Of the right side, as :meth:`LowRankMatrix.moment_bytes_at` and `basis_bytes_at` count, fp32."""
    squares = torch.linalg.svdvals(gradient).square()
    captured = (squares.cumsum(0) / squares.sum()).tolist()
    sizes = state_bytes(gradient, candidates)
    return Spectrum(tuple(candidates), tuple(captured[r - 1] for r in candidates), sizes)


def state_bytes(gradient: Tensor, candidates: Sequence[int]) -> tuple[int, ...]:
    """Of fp32 moments and basis at each rank, columns projected."""
    rows, columns = gradient.shape
    return tuple(4 * rank * (2 * rows + columns) for rank in candidates)


def training_gradients(
    shape: Shape, setting: Setting, steps: Sequence[int]
) -> list[dict[str, Tensor]]:
    """Of every linear in the decoder layers, before the update of the given steps, under AdamW."""
    model = llama(shape).to(setting.device)
    linears = {
        f"{name}.weight": module.weight
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name != "lm_head"
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    found = []
    for step, rows in zip(range(max(steps) + 1), _rows(shape, setting), strict=False):
        model(input_ids=rows, labels=rows).loss.backward()
        if step in steps:
            found.append({n: w.grad.clone() for n, w in linears.items() if w.grad is not None})
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return found


def _rows(shape: Shape, setting: Setting) -> Iterator[Tensor]:
    """Token rows without end: the standard library's source, at toy sizes random."""
    if setting.toy:
        batches = Batches(shape, setting.device)
        while True:
            yield batches.draw()
    data = prepare_data("stdlib", "bpe", shape.sequence, shape.vocabulary).train
    order = GlobalOrder(len(data), 0)
    step = 0
    while True:
        rows = order.rows(step * shape.micro_batch, shape.micro_batch)
        yield data.batch(rows)["input_ids"].to(setting.device)
        step += 1
