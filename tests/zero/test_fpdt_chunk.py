"""`"fpdt": {"chunk_size": "auto"}`: one size for all ranks, by what the fullest device has left."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from harness import Ranks
from training import GLOBAL_BATCH, ds_config, make_engine, tiny_llama, train

POSITIONS = 4096


def chosen() -> dict[str, Any]:
    """First with room for everything, then with room for chunks of 512 tokens on the last rank only."""
    from hmt_deepspeed.planner.fpdt import fpdt_bytes
    from hmt_deepspeed.zero import fpdt_chunk

    found: dict[str, Any] = {"chunks": []}
    resolve, capacity = fpdt_chunk.fpdt_chunk_size, [2**40]

    def noting(shape: Any, length: int, budget: int, **sizes: int) -> int:
        chunk = resolve(shape, length, budget, **sizes)
        found["chunks"].append(chunk)
        found.update(length=length, sizes=sizes, spent=capacity[0] - budget)
        found["needed"] = fpdt_bytes(shape, length, 512, **sizes).device
        return chunk

    fpdt_chunk.fpdt_chunk_size = noting
    fpdt_chunk.KEPT_FREE = 0.0
    fpdt_chunk.device_capacity = lambda _: (1000, capacity[0])
    config = ds_config(2)
    config["hmt"]["fpdt"] = {"enabled": True, "chunk_size": "auto"}
    for _ in range(2):
        model = tiny_llama(use_cache=False)
        model.config.max_position_embeddings = POSITIONS
        engine = make_engine(config, model)
        found["losses"] = train(engine, 2)
        engine.destroy()
        if dist.get_rank() == 1:
            capacity[0] = found["spent"] + found["needed"]
    return found


def test_the_chunk_follows_from_the_fullest_rank(ranks: Ranks) -> None:
    first, second = ranks.run(chosen, 2)
    assert first["chunks"] == second["chunks"] == [POSITIONS, 512]
    assert first["losses"] == second["losses"]
    assert first["length"] == POSITIONS
    assert first["sizes"]["micro_batch"] == GLOBAL_BATCH // 2
    assert first["sizes"]["itemsize"] == 4
    assert (
        first["spent"] > 1000
    )  # weights, gradients and states, which are more than was taken then
