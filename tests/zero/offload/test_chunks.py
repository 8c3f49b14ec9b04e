"""Chunks of host updates: few, with one event that weights are waited by, and no other bits for their size."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from harness import Ranks
from torch import nn

from hmt_deepspeed.zero.offload import worker as host_worker
from hmt_deepspeed.zero.weights.low_rank_change import LowRankChange

ROWS, COLUMNS = 64, 130  # 8320 elements: 32 pieces of 256 and half a one
HYPER = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}


def count_calls(owner: Any, name: str, seen: Counter[str]) -> None:
    """Of a copy by its direction."""
    call = getattr(owner, name)

    def counted(*args: Any, **keyword: Any) -> Any:
        seen[args[0].value if name == "copy" else name] += 1
        return call(*args, **keyword)

    setattr(owner, name, counted)


def updated(num_pieces: int, states: tuple[str, ...]) -> dict[str, Any]:
    """Two steps of a low-rank update (one state or none), or of AdamW (its moments); what was submitted for them.

    Factors are whole numbers, whose product is exact: else torch's rounding depends on the rows multiplied at once.
    """
    from hmt_deepspeed.zero.offload.adamw import HostAdamW
    from hmt_deepspeed.zero.offload.states import RamStates
    from hmt_deepspeed.zero.offload.weight import HostWeight
    from hmt_deepspeed.zero.sharding.shards import RowShards

    host_worker.PIECE, host_worker.NUM_PIECES = 256, num_pieces
    seen: Counter[str] = Counter()
    worker = host_worker.HostWorker(torch.device("cpu"), pinned=False)
    streams: Any = worker.engine.streams
    count_calls(worker, "submit", seen)
    count_calls(streams, "mark", seen)
    count_calls(streams, "copy", seen)
    draw = torch.Generator().manual_seed(0)
    start = torch.randn(ROWS, COLUMNS, generator=draw)
    param = nn.Parameter(start.bfloat16(), requires_grad=False)
    held = RamStates(worker, "w", param.numel(), states, False)
    weight = HostWeight(param, RowShards(ROWS, COLUMNS, 1), 0, held, worker, "w")
    dense = "exp_avg" in states
    gradient = host_worker.HostGradient(worker, "w", param.numel())
    adam = HostAdamW(weight, gradient, torch.zeros(()))
    norms = []
    for step in range(2):
        seen.clear()
        if dense:
            gradient.add(torch.randn(ROWS, COLUMNS, generator=draw), last=True)
            norms.append(gradient.square_norm())
            adam.step(0.5, step, HYPER)
        else:
            left, right = (
                torch.randint(-9, 9, (n, 6), generator=draw).float() for n in (ROWS, COLUMNS)
            )
            keys = (None, step)
            change = LowRankChange(
                *(left[None], [right], 6, torch.ones(1, 2), *keys, False, 1e-2, 0.1)
            )
            weight.step_rows([weight], change)
        weight.finish()
        gradient.clear()
    values = {column: held.read(column).clone() for column in states}
    worker.close()
    return {"seen": dict(seen), "weights": param.detach(), "norms": norms, "values": values}


@pytest.mark.parametrize(
    "states", [(), ("master",), ("exp_avg", "exp_avg_sq"), ("master", "exp_avg", "exp_avg_sq")]
)
def test_larger_chunks_are_fewer_and_change_no_bit(ranks: Ranks, states: tuple[str, ...]) -> None:
    found = {size: ranks.run(updated, 1, size, states)[0] for size in (1, 4, 100)}
    small = found[1]
    for size, other in found.items():
        assert torch.equal(other["weights"], small["weights"])
        assert other["norms"] == small["norms"]
        for column, values in other["values"].items():
            assert torch.equal(values, small["values"][column])
        chunks = -(-ROWS * COLUMNS // (256 * size))
        dense, has_master = "exp_avg" in states, "master" in states
        sent = chunks * (dense + (not dense or not has_master))
        assert other["seen"] == {
            "submit": chunks * (1 + dense),
            "device to host": sent,
            "host to device": chunks,
            "mark": sent + 1,  # of what is sent, and one for all of the weights that come back
        }


def test_a_7b_step_is_1632_chunks_through_128_mib() -> None:
    """Before a chunk was four pieces it was 6,180 chunks, each of which cost the training thread 66 to 91 us."""
    layer = [4096 * 4096] * 4 + [4096 * 11008] * 3
    matrices = layer * 32 + [32000 * 4096] * 2
    assert sum(len(host_worker.chunks(numel)) for numel in matrices) == 1632
    assert 4 << 20 <= host_worker.chunk_elements() <= 8 << 20
    assert 2 * host_worker.pool_bytes() == 128 << 20
    # low-rank updates in 16 bits are as many bytes a chunk
    assert sum(len(host_worker.chunks(numel, 2)) for numel in layer * 32) == 32 * 26
    assert host_worker.chunk_elements(2) == 8 << 20
