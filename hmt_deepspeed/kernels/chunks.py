"""Row chunks of the torch references: what they hold in fp32 at once does not grow with the matrix."""

from __future__ import annotations

from collections.abc import Iterator

__all__ = ["CHUNK_ELEMENTS", "row_chunks"]

CHUNK_ELEMENTS = 1 << 20  # 4 MiB in fp32


def row_chunks(rows: int, n: int) -> Iterator[slice]:
    """Slices of the rows of a rows x n matrix, of at most ``CHUNK_ELEMENTS`` elements or of one row."""
    step = max(1, CHUNK_ELEMENTS // max(n, 1))
    for begin in range(0, rows, step):
        yield slice(begin, min(begin + step, rows))
