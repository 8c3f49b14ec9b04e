"""Work that one process does for all of them."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

T = TypeVar("T")


def rank() -> int:
    """Global rank; also right before the process group exists (from the launcher's variables)."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def on_rank_zero(work: Callable[[], T]) -> T:
    """Run `work` on rank 0 only and give its (picklable) result to every rank.

    A ValueError of `work` is raised on every rank, so that all of them end together.
    """
    if world_size() == 1:
        return work()
    answer: list[tuple[T | None, str | None]] = [(None, None)]
    if rank() == 0:
        try:
            answer = [(work(), None)]
        except ValueError as error:
            answer = [(None, str(error))]
    dist.broadcast_object_list(answer, src=0)
    result, message = answer[0]
    if message is not None:
        raise ValueError(message)
    return result  # type: ignore[return-value]


def on_every_node(build: Callable[[str | None], str]) -> str:
    """Build something on disk once per file system and return its key on every rank.

    Rank 0 calls `build(None)` and gets the key. Then the first rank of every other node calls
    `build(key)`, which finds the work done on a shared disk and does it on a disk of its own.
    """
    key = on_rank_zero(lambda: build(None))
    if world_size() > 1:
        if rank() != 0 and int(os.environ.get("LOCAL_RANK", "0")) == 0:
            build(key)
        dist.barrier()
    return key
