"""LoHan's own planner: swap or recompute, layer by layer (paper, section IV-D, equations 1 to 8).

The special case of `planner/solve/` with two choices, whole layers and everything offloaded: an amount A of
activations is swapped, the rest is computed again. Kept because the paper's figures are about it and because
its three cases explain a plan. Four of its errors are mended here: SSD time is never negative, the amount
returned is one that was tested and never below the amount that must be swapped, that least amount is tested
too, and CPU Adam counts. What greedy by benefit cannot mend (whole layers) is `planner/solve/`'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

__all__ = ["Case", "Load", "Rates", "SwapLayer", "Sweep", "phase_seconds", "sweep"]

# How the iteration's time depends on the amount swapped: 1 it grows (swap the least), 2 it falls (swap
# everything), 3 it has its minimum in between.
Case = Literal[1, 2, 3]


@dataclass(frozen=True)
class Rates:
    """FLOP/s of the GPU, bytes/s of a link one way and of the SSDs, seconds of CPU Adam per parameter."""

    gpu: float
    link: float
    ssd_read: float
    ssd_write: float
    adam: float = 0.0


@dataclass(frozen=True)
class Load:
    """Elements of all parameters, FLOPs of a forward, host bytes left for swapped activations."""

    parameters: float
    forward_flops: float
    host_room: float = 0.0


@dataclass(frozen=True)
class SwapLayer:
    """A layer in LoHan's sense: bytes of its activation, and FLOPs to make it again."""

    nbytes: float
    flops: float

    @property
    def benefit(self) -> float:
        """FLOPs spared per byte swapped (equation 6)."""
        return self.flops / self.nbytes


@dataclass(frozen=True)
class Sweep:
    """Iteration times at every amount the greedy order offers.

    Attributes:
        amounts: bytes swapped, rising from the least that must be.
        forward, backward: seconds of the phases at each amount.
        best: index of the fastest.
    """

    amounts: tuple[float, ...]
    forward: tuple[float, ...]
    backward: tuple[float, ...]

    @property
    def seconds(self) -> tuple[float, ...]:
        """Of an iteration at each amount (equation 1)."""
        return tuple(f + b for f, b in zip(self.forward, self.backward, strict=True))

    @property
    def best(self) -> int:
        """Index of the fastest amount; the smallest of equals."""
        return min(range(len(self.amounts)), key=lambda i: self.seconds[i])

    @property
    def case(self) -> Case:
        """Which of the paper's three cases this is."""
        if self.best == 0:
            return 1
        return 2 if self.best == len(self.amounts) - 1 else 3


def phase_seconds(
    load: Load, rates: Rates, swapped: float, recomputed: float
) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds by resource of forward and backward (equations 2 to 5, mended).

    Args:
        swapped: bytes A that leave the GPU in forward and return in backward.
        recomputed: FLOPs of backward's recompute.
    """
    p = load.parameters
    spilled = max(0.0, swapped - load.host_room)  # equation 3, which lacks the maximum
    forward = {
        "gpu": load.forward_flops / rates.gpu,
        "gpu_to_host": swapped / rates.link,
        "host_to_gpu": 2 * p / rates.link,
        "ssd": 2 * p / rates.ssd_read + spilled / rates.ssd_write,
    }
    backward = {
        "gpu": (2 * load.forward_flops + recomputed) / rates.gpu,
        "gpu_to_host": 2 * p / rates.link,
        "host_to_gpu": (2 * p + swapped) / rates.link,
        "ssd": (14 * p + spilled) / rates.ssd_read + 14 * p / rates.ssd_write,
        "cpu": rates.adam * p,
    }
    return forward, backward


def sweep(layers: Sequence[SwapLayer], must_swap: float, load: Load, rates: Rates) -> Sweep:
    """Swap layers in order of benefit and note the iteration's time after each (algorithm 1, mended).

    Args:
        must_swap: bytes that are swapped at least, or recompute overflows the GPU (the paper's
            A_interBlock; 0 for none).
    """
    order = sorted(layers, key=lambda layer: -layer.benefit)
    amount, recomputed = 0.0, sum(layer.flops for layer in layers)
    points = [(amount, recomputed)]
    for layer in order:
        amount, recomputed = amount + layer.nbytes, recomputed - layer.flops
        points.append((amount, recomputed))
    points = [point for point in points if point[0] >= must_swap]
    if not points:
        raise ValueError(
            f"must_swap is {must_swap:g} bytes; legal: at most what the layers hold, {amount:g}. Give "
            "all layers or a smaller amount."
        )
    phases = [phase_seconds(load, rates, *point) for point in points]
    return Sweep(
        amounts=tuple(point[0] for point in points),
        forward=tuple(max(forward.values()) for forward, _ in phases),
        backward=tuple(max(backward.values()) for _, backward in phases),
    )
