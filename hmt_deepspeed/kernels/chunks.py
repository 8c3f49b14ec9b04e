"""Row chunks of the torch references: what they hold in fp32 at once does not grow with the matrix."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import torch
from torch import Tensor

__all__ = ["CHUNK_ELEMENTS", "row_chunks", "scratch_like"]

CHUNK_ELEMENTS = 1 << 20  # 4 MiB in fp32

_threads_own = threading.local()


def row_chunks(rows: int, n: int) -> Iterator[slice]:
    """Slices of the rows of a rows x n matrix, of at most ``CHUNK_ELEMENTS`` elements or of one row."""
    step = max(1, CHUNK_ELEMENTS // max(n, 1))
    for begin in range(0, rows, step):
        yield slice(begin, min(begin + step, rows))


def scratch_like(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Memory of a chunk's shape, which this thread's next call for the dtype gets again.

    Memory allocated for every chunk may be paged in anew each time, which takes longer than the arithmetic.
    """
    if value.device.type != "cpu":
        return torch.empty_like(value, dtype=dtype)  # that allocator keeps what is freed
    held: dict[str, Tensor] = vars(_threads_own)
    key, numel = str(dtype), value.numel()
    if key not in held or held[key].numel() < numel:
        held[key] = torch.empty(max(numel, CHUNK_ELEMENTS), dtype=dtype)
    return held[key][:numel].view(value.shape)
