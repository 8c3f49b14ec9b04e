"""Counting what a computation would allocate, without its arithmetic where that takes hours."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor

from benchmarks.live_bytes import LiveBytes
from hmt_deepspeed.fpdt.ops import CpuAttention

__all__ = ["attention_not_computed", "counted"]


def counted(run: Callable[[], object]) -> int:
    """Peak bytes of the storages that a second run makes: the first makes the host's pools."""
    run()
    with LiveBytes() as live:
        run()
    return live.peak


@contextmanager
def attention_not_computed() -> Iterator[None]:
    """FPDT's attention makes its outputs and gradients, of zeros: the same storages, quadratic work left out."""

    def forward(
        ops: CpuAttention, query: Tensor, key: Tensor, value: Tensor, *_: object
    ) -> tuple[Tensor, Tensor]:
        sums = torch.zeros(query.shape[:-1], dtype=torch.float32, device=query.device)
        return torch.zeros_like(query), sums

    def backward(
        ops: CpuAttention, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: object
    ) -> tuple[Tensor, Tensor, Tensor]:
        return torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)

    with (
        mock.patch.object(CpuAttention, "forward", forward),
        mock.patch.object(CpuAttention, "backward", backward),
    ):
        yield
