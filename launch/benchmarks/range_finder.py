"""Range finders against an SVD: time, captured energy and columns sketched."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from benchmarks.results import CaseResult, Measurement
from benchmarks.setting import Setting
from benchmarks.timing import Sample, column, interleave, median_of, now, paired_spread
from hmt_deepspeed.optim.bases.range_finder import Subspace, find_subspace
from hmt_deepspeed.optim.bases.search import find_subspace_to_energy

SPEED_TARGET, ENERGY_TARGET = 5.0, 0.01


@dataclass(frozen=True)
class Problem:
    """An m x n gradient with singular values i^-decay; a start that lost ``drift`` against it."""

    m: int
    n: int
    rank: int
    decay: float
    drift: float
    rounds: int

    @property
    def label(self) -> str:
        return f"{self.m}x{self.n}, r = {self.rank}, sigma_i ~ i^-{self.decay}"


# Slow enough a decay that a range finder has something to miss: rank 512 of 2048 holds .97 of the energy.
PROBLEM = Problem(2048, 5461, 512, 0.7, 0.3, 5)
TOY_PROBLEM = Problem(96, 160, 24, 0.7, 0.3, 2)


def _orthonormal(rows: int, columns: int, seed: int, device: str) -> Tensor:
    draw = torch.Generator(device=device).manual_seed(seed)
    return torch.linalg.qr(torch.randn(rows, columns, generator=draw, device=device)).Q


def build(problem: Problem, device: str) -> tuple[Tensor, Tensor]:
    """The gradient, and a basis of its leading directions that were turned by the drift."""
    side = min(problem.m, problem.n)
    left, right = (_orthonormal(s, side, i, device) for i, s in enumerate((problem.m, problem.n)))
    sigma = torch.arange(1, side + 1, device=device).float() ** -problem.decay
    draw = torch.Generator(device=device).manual_seed(2)
    noise = torch.randn(problem.n, problem.rank, generator=draw, device=device) / problem.n**0.5
    start = torch.linalg.qr(right[:, : problem.rank] + problem.drift * noise).Q
    return (left * sigma) @ right.t(), start


def range_finder(setting: Setting) -> CaseResult:
    problem = TOY_PROBLEM if setting.toy else PROBLEM
    gradient, start = build(problem, setting.device)
    draw = torch.Generator(device=setting.device).manual_seed(3)

    def contender(kind: str, warm: bool) -> Callable[[], Sample]:
        def run() -> Sample:
            begin = now()
            found = find_subspace(kind, gradient, problem.rank, draw, start if warm else None)
            return {"seconds": now() - begin, "energy": _held(gradient, found)}

        return run

    contenders = {
        "svd": contender("svd", False),
        "randomized, cold": contender("randomized", False),
        "randomized, warm": contender("randomized", True),
        "subspace, warm": contender("subspace", True),
    }
    samples = interleave(contenders, setting.rounds_or(problem.rounds), warmup=1)
    result = CaseResult(
        {"problem": asdict(problem)},
        samples=dict(samples),
        dtype=("fp32", "range finders compute in fp32 on every device"),
    )
    for name in list(contenders)[1:]:
        svd, own = samples["svd"], samples[name]
        result.measurements += [
            Measurement(
                f"{problem.label}: torch.linalg.svd / {name}, time",
                median_of(svd) / median_of(own),
                "x",
                ">=",
                SPEED_TARGET,
                paired_spread(column(svd), column(own)),
            ),
            Measurement(
                f"{problem.label}: energy of torch.linalg.svd less {name}'s",
                median_of(svd, "energy") - median_of(own, "energy"),
                "share",
                "<=",
                ENERGY_TARGET,
                note="share of ||G||^2 that the basis captures, measured on G; the warm start is the "
                "leading basis turned by a random drift",
            ),
        ]
    result.measurements.append(_columns(problem, gradient, start, draw))
    return result


def _held(gradient: Tensor, found: Subspace) -> float:
    return ((gradient @ found.basis).square().sum() / found.total).item()


def _columns(
    problem: Problem, gradient: Tensor, start: Tensor, draw: torch.Generator
) -> Measurement:
    """Columns multiplied when the rank predicted is right, against sketching the largest candidate."""
    ranks = [problem.rank // 4, problem.rank // 2, problem.rank]
    wanted = find_subspace("subspace", gradient, ranks[0], draw, start).captured()[-1].item()

    def products(first: int) -> int:
        return find_subspace_to_energy(
            "subspace", gradient, ranks, 0.99 * wanted, draw, start, first=first
        ).products

    return Measurement(
        f"{problem.label}: columns multiplied from a right prediction of r/4 / from the largest, r",
        products(ranks[0]) / products(ranks[-1]),
        "share",
        "<=",
        0.5,
        note="each column multiplied by G or its transpose is 2mn FLOPs",
    )
