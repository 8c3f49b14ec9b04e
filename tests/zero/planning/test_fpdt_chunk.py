"""`"fpdt": {"chunk_size": "auto"}`: one size for all ranks, by what the fullest device has left."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist
from harness import Ranks
from torch import nn
from training import GLOBAL_BATCH, ds_config, make_engine, tiny_llama, tiny_mixtral

POSITIONS, AT_REST, ROOM = 4096, 5000, 40 * 10**6


def chosen(make_model: Callable[..., nn.Module]) -> dict[str, Any]:
    """The first rank has room for everything, the second for ROOM bytes beside what is there at rest."""
    from hmt_deepspeed.zero.activations import fpdt
    from hmt_deepspeed.zero.planning import fpdt_chunk

    found: dict[str, Any] = {}
    resolve, install = fpdt_chunk.fpdt_chunk_size, fpdt.install

    def noting(shape: Any, length: int, budget: int, **sizes: int) -> int:
        found.update(shape=shape, length=length, budget=budget, sizes=sizes)
        return resolve(shape, length, budget, **sizes)

    def installing(*args: Any, **kwargs: Any) -> Any:
        found["installed"] = kwargs["chunk_size"]
        return install(*args, **kwargs)

    capacity = 2**40 if dist.get_rank() == 0 else AT_REST + ROOM
    fpdt_chunk.KEPT_FREE = 0.0
    fpdt_chunk.bytes_at_rest = lambda _: AT_REST
    fpdt_chunk.device_capacity = lambda _: (AT_REST - 1, capacity)
    fpdt_chunk.fpdt_chunk_size = noting
    fpdt.install = installing
    config = ds_config(2)
    config["hmt"]["fpdt"] = {"chunk_size": "auto"}
    model: Any = make_model(use_cache=False)
    model.config.max_position_embeddings = POSITIONS
    make_engine(config, model).destroy()
    return found


@pytest.mark.parametrize("make_model", [tiny_llama, tiny_mixtral])
def test_the_chunk_follows_from_the_fullest_rank(
    ranks: Ranks, make_model: Callable[..., nn.Module]
) -> None:
    from hmt_deepspeed.planner.run.fpdt import fpdt_chunk_size

    first, second = ranks.run(chosen, 2, make_model)
    expected = fpdt_chunk_size(first["shape"], POSITIONS, ROOM, **first["sizes"])
    assert 256 <= expected < POSITIONS
    assert first["installed"] == second["installed"] == expected
    assert first["budget"] == second["budget"] == ROOM
    assert first["length"] == POSITIONS
    assert first["sizes"]["micro_batch"] == GLOBAL_BATCH // 2
    assert first["sizes"]["itemsize"] == 4


def refused() -> str:
    config = ds_config(2)
    config["hmt"]["fpdt"] = {"chunk_size": "auto"}
    model: Any = tiny_mixtral()
    model.set_experts_implementation("eager")
    with pytest.raises(ValueError, match="chunk_size") as caught:
        make_engine(config, model)
    return str(caught.value)


def test_experts_that_are_computed_otherwise_are_not_planned(ranks: Ranks) -> None:
    (said,) = ranks.run(refused, 1)
    assert "experts_implementation is 'eager'; legal: \"grouped_mm\"" in said
