"""Row chunks of the torch references: what they hold in fp32 at once does not grow with matrix or stack."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

__all__ = ["CHUNK_ELEMENTS", "row_chunks", "scratch_like", "stack_pieces"]

CHUNK_ELEMENTS = 1 << 20  # 4 MiB in fp32

_threads_own = threading.local()


def row_chunks(rows: int, n: int, elements: int | None = None) -> Iterator[slice]:
    """Slices of the rows of a rows x n matrix, of at most ``elements`` (``CHUNK_ELEMENTS``) or of one row."""
    step = max(1, (elements or CHUNK_ELEMENTS) // max(n, 1))
    for begin in range(0, rows, step):
        yield slice(begin, min(begin + step, rows))


def stack_pieces(
    active: Tensor | Sequence[float], rows: int, width: int, elements: int, whole: int = 1
) -> Iterator[tuple[slice, slice]]:
    """Members and rows of a stack of rows x width matrices, in pieces of at most ``elements`` or of ``whole`` rows,
    a multiple of which each piece starts at.

    Members whose value in ``active`` is 0 are left out.
    """
    taken = active.tolist() if isinstance(active, Tensor) else active
    together = max(1, elements // max(rows * width, 1))
    step = max(rows, 1)
    if together == 1:
        step = max(1, elements // max(width * whole, 1)) * whole
    first = 0
    while first < len(taken):
        if taken[first] == 0:
            first += 1
            continue
        last = first + 1
        while last < min(first + together, len(taken)) and taken[last] != 0:
            last += 1
        for begin in range(0, rows, step):
            yield slice(first, last), slice(begin, min(begin + step, rows))
        first = last


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
