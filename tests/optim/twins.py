"""A rule in fp32 and its float64 twin of ``hmt_simple.py``, on the same gradients with the same random numbers."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf
from typing import Any

import torch
from hmt_simple import SimpleHMT
from low_rank_adamw import low_rank_adamw
from torch import Tensor, nn

from hmt_deepspeed.kernels.noise import Stream, base_keys, normals, step_keys
from hmt_deepspeed.optim.bases.basis import keyed_generator

TALL, WIDE = (32, 24), (24, 32)
STEPS = 14
CPU = torch.device("cpu")
STREAMS = {"probes": Stream.PROBES, "turn": Stream.TURN, "apollo": Stream.AUXILIARY_SPACE}
# Of what a step moves the weight. One differs by some 2e-6: fp32's 6e-8, times some thirty for the directions of a basis
# that are close to one another and for Adam's division by the small ones. Steps add up, to 4e-5 at most as measured
# here; a wrong factor anywhere is some percent.
TOLERANCE = 1e-4
# Three bases in STEPS.
LOW_RANK: dict[str, Any] = {"rank": 6, "scale": 0.5, "update_interval": 5}


def draw(label: str, number: int, rows: int, columns: int) -> Tensor:
    """The Gaussian numbers that the only matrix of an optimizer draws."""
    if label in STREAMS:
        keys = step_keys(base_keys(0, ["param_0"], CPU), number, STREAMS[label])
        return normals(keys, rows, columns)[0].double()
    generator = keyed_generator(CPU, 0, "param_0", label, number)
    return torch.randn(rows, columns, generator=generator).double()


def gradients(shape: tuple[int, int]) -> Iterator[Tensor]:
    """Singular values over a decade in a row space that turns, noise, and a size that grows: a limiter has work.

    One of them has nothing in the strong directions, so that a basis hardly sees it.
    """
    generator, side = torch.Generator().manual_seed(1), min(shape)
    left, right = (torch.linalg.qr(torch.randn(x, side, generator=generator)).Q for x in shape)
    left *= torch.logspace(0, -1, side)
    for t in range(STEPS):
        right = torch.linalg.qr(right + 0.02 * torch.randn(right.shape, generator=generator)).Q
        seen = slice(side // 2, None) if t == 7 else slice(None)
        noise = 0.02 * torch.randn(shape, generator=generator)
        yield (1 + 0.1 * t) * left[:, seen] @ right[:, seen].t() + (t != 7) * noise


def assert_same_steps(shape: tuple[int, int], max_norm: float = inf, **options: Any) -> SimpleHMT:
    """Train one matrix both ways; weights agree after every step.

    Returns:
        The twin, which knows what its limiter did.
    """
    hyper: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.99), "weight_decay": 0.1, **options}
    start = 0.1 * torch.randn(shape, generator=torch.Generator().manual_seed(0))
    weight, twins = nn.Parameter(start.clone()), start.double()
    optimizer, twin = low_rank_adamw([weight], **hyper), SimpleHMT(draw, **hyper)
    for gradient in gradients(shape):
        weight.grad, before = gradient.clone(), twins
        if max_norm < inf:
            norm = optimizer.clip_grad_norm_(max_norm)
            assert norm > max_norm, "clipped, and not only measured"
        optimizer.step()
        twins = twin.step(twins, gradient.double(), max_norm)
        error = (weight.detach() - twins).norm() / (twins - before).norm()
        assert error < TOLERANCE, f"step {twin.t} of {options}"
    return twin
