"""Turns an update sharded by columns into one sharded by rows, as weights are.

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
    update: Tensor, columns: RowShards, rows: RowShards, collectives: Collectives
) -> Tensor:
    """Exchange an m x n update sharded by columns, so that each rank gets the rows that it touches.

    Args:
        update: columns this rank holds of the update, as rows: columns x m, any dtype.
        columns: partition of the transpose (n x m). rows: of the weight (m x n).
        collectives: of the ranks that hold them; one all-to-all.

    Returns:
        Rows that this rank touches x n, of the dtype of ``update``.
    """
    if rows.world == 1:
        return update.t()
    rank = collectives.rank
    owned = update[columns.counted(rank)]
    parts = []
    for other in range(rows.world):
        begin, end = rows.rows(other)
        parts.append(owned[:, begin:end].t().reshape(-1))
    begin, end = rows.rows(rank)
    counts = [last - first for first, last in map(columns.owned, range(rows.world))]
    received = collectives.all_to_all(parts, [(end - begin) * count for count in counts])
    out = torch.empty(end - begin, rows.n, dtype=update.dtype, device=update.device)
    for other, part in enumerate(received):
        first, last = columns.owned(other)
        out[:, first:last] = part.view(end - begin, last - first)
    return out
