"""What a basis captures of the gradients after the one it was made from, and of what use knowing it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import mean

import torch
from torch import Tensor

from benchmarks.rank_rules import SHAPE, SPREAD, state_bytes, training_gradients
from benchmarks.results import CaseResult, Measurement
from benchmarks.setting import TOY, Setting
from hmt_deepspeed.optim.bases.rank_budget import Spectrum, allocate_ranks, total_captured
from hmt_deepspeed.optim.decisions.later_energy import fading_of, later_curve
from hmt_deepspeed.optim.decisions.rank_history import RankRecord

STEPS, TOY_STEPS = (100, 200, 400), (2, 12)
# A basis is made from the first gradient, seen to hold of the next two, and tried on the others.
SEEN, TRIED = 2, 4
# Rank candidates are the hidden size over these; the rank in force is the middle one.
CANDIDATES = (16, 8, 4, 3, 2)
MIDDLE = 2


@dataclass(frozen=True)
class _Energies:
    """Of one matrix, at all candidates; bytes of its states."""

    own: list[float]
    expected: list[float]
    later: list[float]
    bytes: tuple[int, ...]


def later_energy(setting: Setting) -> CaseResult:
    shape, steps = (TOY, TOY_STEPS) if setting.toy else (SHAPE, STEPS)
    candidates = tuple(shape.hidden // share for share in CANDIDATES)
    length = 1 + SEEN + TRIED
    taken = [first + number for first in steps for number in range(length)]
    found = training_gradients(shape, setting, taken)
    windows = [found[length * i : length * (i + 1)] for i in range(len(steps))]
    measured = [
        [_energies([g[name] for g in window], candidates) for name in window[0]]
        for window in windows
    ]
    result = CaseResult(
        {"model": asdict(shape), "steps": steps, "candidates": candidates},
        dtype=("fp32", "gradients are of fp32 weights"),
    )
    own, expected, gains = [], [], []
    for step, matrices in zip(steps, measured, strict=True):
        own.append(_error(matrices, [m.own for m in matrices]))
        expected.append(_error(matrices, [m.expected for m in matrices]))
        planned = {
            which: _planned(matrices, [getattr(m, which) for m in matrices], candidates)
            for which in ("own", "expected", "later")
        }
        gains.append(planned["expected"] - planned["own"])
        result.samples[f"step {step}"] = {
            "mean own": _mean([m.own for m in matrices]),
            "mean expected": _mean([m.expected for m in matrices]),
            "mean later": _mean([m.later for m in matrices]),
            "planned": planned,
        }
    label = shape.label
    ratios = [e / o for e, o in zip(expected, own, strict=True)]
    result.measurements += [
        Measurement(
            f"{label}: energy of a basis' own gradient less that of later ones",
            mean(own),
            "share",
            spread=(min(own), max(own)),
            note=f"mean absolute difference over matrices and ranks but the one in force; {SPREAD}",
        ),
        Measurement(
            f"{label}: expected energy less that of later gradients, over the same of the own",
            mean(ratios),
            "x",
            spread=(min(ratios), max(ratios)),
            note=SPREAD,
        ),
        Measurement(
            f"{label}: energy of later gradients at the bytes of d/4, planned out of sample less in sample",
            mean(gains),
            "share",
            ">",
            0.0,
            (min(gains), max(gains)),
            f"mean over matrices; {SPREAD}",
        ),
    ]
    return result


def _energies(gradients: Sequence[Tensor], candidates: Sequence[int]) -> _Energies:
    """The smaller side is projected."""
    first, *after = [g if g.shape[0] >= g.shape[1] else g.t() for g in gradients]
    _, sigma, right = torch.linalg.svd(first, full_matrices=False)
    shares = sigma.square().cumsum(0) / sigma.square().sum()
    own = [shares[rank - 1].item() for rank in candidates]

    def held(rank: int, of: Sequence[Tensor]) -> float:
        basis = right[:rank].t()
        return mean(((g @ basis).square().sum() / g.square().sum()).item() for g in of)

    rank = candidates[MIDDLE]
    seen = [held(r, after[:SEEN]) for r in (*candidates[: MIDDLE + 1], rank // 2)]
    fading = fading_of(seen[-1], seen[-2], rank - rank // 2)
    record = RankRecord(0, rank, tuple(own), tuple(seen[:-1]), fading)
    expected = later_curve([record], candidates, first.shape[1])
    assert expected is not None
    later = [held(rank, after[SEEN:]) for rank in candidates]
    return _Energies(own, expected, later, state_bytes(first, candidates))


def _mean(energies: Sequence[Sequence[float]]) -> list[float]:
    """Over matrices, by candidate."""
    return [mean(at) for at in zip(*energies, strict=True)]


def _error(matrices: Sequence[_Energies], energies: Sequence[Sequence[float]]) -> float:
    return mean(
        abs(e - true)
        for matrix, own in zip(matrices, energies, strict=True)
        for place, (e, true) in enumerate(zip(own, matrix.later, strict=True))
        if place != MIDDLE
    )


def _planned(
    matrices: Sequence[_Energies], energies: Sequence[Sequence[float]], candidates: Sequence[int]
) -> float:
    """Mean energy of later gradients at the ranks that a plan by these energies chooses."""
    budget = sum(m.bytes[MIDDLE] for m in matrices)
    known = [
        Spectrum(tuple(candidates), tuple(e), m.bytes)
        for e, m in zip(energies, matrices, strict=True)
    ]
    true = [Spectrum(tuple(candidates), tuple(m.later), m.bytes) for m in matrices]
    return total_captured(true, allocate_ranks(known, budget))[0] / len(matrices)
