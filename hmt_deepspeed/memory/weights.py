"""The error of weights that find no host memory."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hmt_deepspeed.memory.available import free_host_memory

__all__ = ["taking_host_memory"]


@contextmanager
def taking_host_memory(weights: Callable[[], int]) -> Iterator[None]:
    """While a model's weights go to host memory.

    Args:
        weights: bytes of all of them, asked for in an error.

    Raises:
        MemoryError: there is too little: how much, for what, and what to lower.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not re.search("allocate memory|out of memory|page-lock", str(error)):
            raise
        raise MemoryError(
            f"zero_optimization.offload_param takes {weights()} bytes of host memory for the weights, shared by the ranks, and "
            f"{free_host_memory()} are free: {error}. Page-locked, each takes a power of two of bytes, unless the environment has "
            "PYTORCH_ALLOC_CONF=pinned_max_round_threshold_mb:16. Set that, or offload_param.pin_memory to false, or take more "
            "ranks, narrower weights or a smaller model."
        ) from error
