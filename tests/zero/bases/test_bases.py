"""Bases at stage 3: every rank keeps its rows only, and nothing but memory changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import Ranks
from training import ds_config, make_engine, train


def held_after_training(stage: int, projected: bool) -> dict[str, Any]:
    options = {"rank": 8, "scale": 1.0, "update_interval": 4, "projected_backward": projected}
    engine = make_engine(ds_config(stage, options))
    losses = train(engine, 6)
    optimizer = engine.optimizer
    return {
        "losses": losses,
        "rows": [e.matrix.projection.shape[0] for e in optimizer.zero.low_rank],
        "local": [_local_rows(e) for e in optimizer.zero.low_rank],
        "columns": [e.matrix.shape[1] for e in optimizer.zero.low_rank],
        "bytes": optimizer.metrics()["low_rank_state_bytes"],
    }


def _local_rows(entry: Any) -> int | None:
    local = entry.matrix.columns.local
    return None if local is None else local.shape[0]


@pytest.mark.parametrize("world", [2, 3])
def test_a_rank_of_stage_3_keeps_its_rows_of_every_basis(ranks: Ranks, world: int) -> None:
    for result in ranks.run(held_after_training, world, 3, True):
        assert result["rows"] == [0] * len(result["rows"])
        assert result["local"] == [-(-n // world) for n in result["columns"]]


def test_only_the_bases_are_fewer_bytes_than_at_stage_2(ranks: Ranks) -> None:
    sharded = ranks.run(held_after_training, 2, 3, True)[0]
    whole = ranks.run(held_after_training, 2, 2, True)[0]
    assert whole["rows"] == whole["columns"]
    # 40 and 77 columns in halves: 77 leaves one row of padding on the last rank.
    saved = sum(n - -(-n // 2) for n in whole["columns"]) * 8 * 4
    assert whole["bytes"] - sharded["bytes"] == saved
    torch.testing.assert_close(
        torch.tensor(sharded["losses"]), torch.tensor(whole["losses"]), rtol=1e-5, atol=0
    )


def test_without_projected_backward_the_hooks_keep_whole_bases(ranks: Ranks) -> None:
    result = ranks.run(held_after_training, 2, 3, False)[0]
    assert result["rows"] == result["columns"]
    assert result["local"] == [None] * len(result["columns"])
