"""Turns updates sharded by columns into ones sharded by rows, as weights are.

A rule on the transpose shards the columns of a weight over ranks; the weight's own shard is a range of its
rows. Low-rank updates are gathered whole (they are small); a whole update travels once, each element to
the rank that holds its weight.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hmt_deepspeed.zero.sharding.collectives import Collectives
from hmt_deepspeed.zero.sharding.shards import RowShards

__all__ = ["rows_from_columns"]


def rows_from_columns(
    updates: Tensor, columns: RowShards, rows: RowShards, collectives: Collectives
) -> Tensor:
    """Exchange m x n updates sharded by columns, so that each rank gets the rows that it touches.

    Args:
        updates: columns this rank holds of B updates, as rows: B x columns x m, any dtype.
        columns: partition of the transpose (n x m). rows: of the weight (m x n).
        collectives: of the ranks that hold them; one all-to-all.

    Returns:
        Rows that this rank touches, B x rows x n, of the dtype of ``updates``.
    """
    rank, size = collectives.rank, len(updates)
    owned = updates[:, columns.counted(rank)].mT
    parts = [owned[:, slice(*rows.rows(other))].reshape(-1) for other in range(rows.world)]
    begin, end = rows.rows(rank)
    counts = [last - first for first, last in map(columns.owned, range(rows.world))]
    sizes = [size * (end - begin) * count for count in counts]
    received = collectives.all_to_all(parts, sizes)
    blocks = [part.view(size, end - begin, -1) for part in received if part.numel()]
    return torch.cat(blocks, dim=2) if blocks else updates.new_empty(size, 0, rows.n)
