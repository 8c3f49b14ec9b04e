"""What weights take of host memory, page-locked or not, and the error of those that find none."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

from hmt_deepspeed.memory.available import free_host_memory

__all__ = ["taking_host_memory", "what_rounding_takes"]

_UNROUNDED = "pinned_max_round_threshold_mb"


def what_rounding_takes(sizes: Iterable[int], environment: Mapping[str, str]) -> str:
    """A line of the start where page-locking weights takes a tenth more than they are, else "".

    Args:
        sizes: bytes of each, which torch rounds up to a power of two. environment: of the process, that may say not to.
    """
    asked = list(sizes)
    taken = sum(1 << (size - 1).bit_length() for size in asked if size)
    settings = (environment.get(f"PYTORCH_{kind}ALLOC_CONF", "") for kind in ("", "CUDA_"))
    if taken < 1.1 * sum(asked) or any(_UNROUNDED in setting for setting in settings):
        return ""
    return (
        f"hmt: weights of {sum(asked) / 2**30:.1f} GiB are page-locked in {taken / 2**30:.1f}, for torch rounds each up to a power "
        f"of two; with PYTORCH_ALLOC_CONF={_UNROUNDED}:16 (torch 2.13) it does not"
    )


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
            f"PYTORCH_ALLOC_CONF={_UNROUNDED}:16. Set that, or offload_param.pin_memory to false, or take more "
            "ranks, narrower weights or a smaller model."
        ) from error
