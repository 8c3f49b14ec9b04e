"""One op whose kernel is timed beside eager PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

FUSED = "fused"
NAMES = (FUSED, "eager", "eager, whole", "eager, bf16 result")  # of contenders, in this order
WEIGHT_DECAY, KEY = 0.1, 7

Tensors = tuple[Tensor, ...]


@dataclass(frozen=True)
class Problem:
    """One op on given tensors.

    contenders: take ``inputs``, of which they may update some. error: of what a contender returned and
    of the inputs it left, against float64, given the inputs it found. num_bytes: what the op has to move,
    where its bandwidth is held against that of copying the first input.
    """

    label: str
    inputs: Tensors
    contenders: dict[str, Callable[..., Any]]
    error: Callable[[Any, Tensors, Tensors], float]
    num_bytes: int | None = None


def contenders(*ops: Callable[..., Any], **arguments: Any) -> dict[str, Callable[..., Any]]:
    """Ops by the names of :data:`NAMES`, with arguments that all of them take."""
    return {name: partial(op, **arguments) for name, op in zip(NAMES, ops, strict=False)}


def difference(result: Tensor, exact: Tensor) -> float:
    """The largest error, as a share of the largest entry."""
    return ((result.double() - exact).abs().max() / exact.abs().max()).item()
