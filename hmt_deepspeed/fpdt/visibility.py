"""Visibility of keys to queries as rectangles: causal, with documents, padding on the right and a sliding window.

A query sees the keys of its own document that are not after it, not padding, and fewer than ``window``
before it. Between two spans of tokens that is a few rectangles, most of them whole or causal. So documents and
padding need no masks, and pairs that are not seen cost nothing.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

__all__ = ["Span", "Tile", "Visibility", "bands", "spans_of"]

Span = tuple[int, int]  # tokens [begin, end)


def spans_of(length: int, size: int) -> tuple[Span, ...]:
    """The spans of ``size`` tokens that cover ``length``; the last one may be shorter."""
    return tuple((begin, min(begin + size, length)) for begin in range(0, length, size))


@dataclass(frozen=True)
class Tile:
    """A rectangle of queries and keys in which every query sees at least one key.

    Attributes:
        batch: sequences [begin, end) of the batch that it belongs to.
        queries, keys: positions in the sequence.
        window: the sliding window, where it cuts this tile.
    """

    batch: Span
    queries: Span
    keys: Span
    window: int | None

    @property
    def shape(self) -> Literal["full", "causal", "band"]:
        """full: all is seen. causal: query ``a`` of the tile sees its first ``a + 1`` keys. band: neither."""
        if self.window is None and self.keys[1] - 1 <= self.queries[0]:
            return "full"
        if self.window is None and self.keys[0] == self.queries[0]:
            return "causal"
        return "band"


@dataclass(frozen=True)
class Visibility:
    """The mask of a batch of sequences.

    Attributes:
        length: tokens of a sequence.
        documents: per sequence the first tokens of its documents, ascending from 0.
        lengths: per sequence its tokens without the padding on the right, at least 1.
        window: keys a query sees at most, itself included.
    """

    length: int
    documents: tuple[tuple[int, ...], ...]
    lengths: tuple[int, ...]
    window: int | None = None

    @classmethod
    def causal(cls, length: int, batch: int = 1, window: int | None = None) -> Visibility:
        """One document to a sequence and no padding."""
        return cls(length, ((0,),) * batch, (length,) * batch, window)

    def tiles(self, queries: Span, keys: Span) -> tuple[Tile, ...]:
        """Rectangles of two spans of tokens in which queries see keys."""
        groups = [(0, len(self.documents))]
        if len(set(zip(self.documents, self.lengths, strict=True))) > 1:
            groups = [(row, row + 1) for row in range(len(self.documents))]
        return tuple(tile for group in groups for tile in self._tiles(group, queries, keys))

    def _tiles(self, batch: Span, queries: Span, keys: Span) -> Iterator[Tile]:
        starts, valid = self.documents[batch[0]], self.lengths[batch[0]]
        first = max(bisect_right(starts, max(queries[0], keys[0])) - 1, 0)
        last = bisect_left(starts, min(queries[1], keys[1]))
        for index in range(first, last):
            begin = starts[index]
            end = starts[index + 1] if index + 1 < len(starts) else self.length
            tile = self._tile(
                batch,
                (max(queries[0], begin), min(queries[1], end)),
                (max(keys[0], begin), min(keys[1], end, valid)),
            )
            if tile is not None:
                yield tile

    def _tile(self, batch: Span, queries: Span, keys: Span) -> Tile | None:
        """The rectangle of one document, without the queries that see nothing and the keys that nobody sees."""
        (q0, q1), (k0, k1) = queries, keys
        k1 = min(k1, q1)
        q0 = max(q0, k0)
        window = self.window
        if window is not None:
            q1 = min(q1, k1 + window - 1)
            k0 = max(k0, q0 - window + 1)
            window = window if q1 - 1 - k0 >= window else None
        return Tile(batch, (q0, q1), (k0, k1), window) if q0 < q1 and k0 < k1 else None

    def sees(self, queries: Span, keys: Span) -> bool:
        """Whether any query of the one span sees any key of the other."""
        return bool(self.tiles(queries, keys))

    def allowed(self, row: int, query: int, key: int) -> bool:
        """The rule itself, one pair at a time."""
        starts = self.documents[row]
        same = bisect_right(starts, query) == bisect_right(starts, key)
        near = self.window is None or query - key < self.window
        return same and near and key <= query and key < self.lengths[row]


def bands(tile: Tile, num_queries: int) -> Iterator[Tile]:
    """A band in pieces of at most ``num_queries`` queries, each with only the keys that they see."""
    (q0, q1), (k0, k1) = tile.queries, tile.keys
    for begin in range(q0, q1, num_queries):
        end = min(begin + num_queries, q1)
        first = k0 if tile.window is None else max(k0, begin - tile.window + 1)
        last = min(k1, end)
        cut = tile.window is not None and end - 1 - first >= tile.window
        yield Tile(tile.batch, (begin, end), (first, last), tile.window if cut else None)
