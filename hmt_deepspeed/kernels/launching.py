"""Where a Triton kernel is launched, for which architecture, and what it finds many tensors by."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

__all__ = [
    "addresses_of",
    "capability_of",
    "count_of",
    "device_table",
    "matrices_in",
    "multiplies_in_fp32",
    "on_its_device",
    "tile_for",
    "upload",
]

_P = ParamSpec("_P")
_R = TypeVar("_R")
_T = TypeVar("_T")


def on_its_device(launcher: Callable[_P, _R]) -> Callable[_P, _R]:
    """Make the device of the launcher's first tensor current while it runs.

    Triton launches on the current device's stream, whatever device its pointers are of. The first tensor may
    be that of a sequence.
    """

    @functools.wraps(launcher)
    def launch(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        firsts = (
            a[0] if isinstance(a, (list, tuple)) and a else a for a in chain(args, kwargs.values())
        )
        tensor = next(a for a in firsts if isinstance(a, Tensor))
        if not tensor.is_cuda:
            return launcher(*args, **kwargs)
        with torch.cuda.device(tensor.device):
            return launcher(*args, **kwargs)

    return launch


@functools.cache
def capability_of(device: torch.device) -> int:
    """Compute capability as two digits, 80 for sm_80; 0 of the CPU, where kernels are interpreted."""
    if device.type != "cuda":
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def multiplies_in_fp32(dtype: torch.dtype, capability: int) -> bool:
    """Whether ``tl.dot`` takes operands of this dtype widened: Triton knows no 16-bit matrix instructions of
    Turing, and its interpreter's bf16 arithmetic is wrong."""
    return dtype == torch.float32 or capability < 80


def tile_for(tiles: Mapping[int, _T], capability: int) -> _T:
    """The entry of the newest architecture that is not newer than the device's; of one older than all, the
    oldest's."""
    return tiles[max((c for c in tiles if c <= capability), default=min(tiles))]


def count_of(tensors: Sequence[Tensor]) -> int:
    """How many matrices they hold: each one, rows x n, or E of them, E x rows x n."""
    return sum(len(tensor) if tensor.dim() == 3 else 1 for tensor in tensors)


def matrices_in(tensors: Sequence[Tensor]) -> list[Tensor]:
    """These matrices one by one."""
    return [
        one for tensor in tensors for one in (tensor.unbind() if tensor.dim() == 3 else (tensor,))
    ]


def addresses_of(tensors: Sequence[Tensor]) -> list[int]:
    """Their addresses, without a view of each."""
    found: list[int] = []
    for tensor in tensors:
        first, step = tensor.data_ptr(), 0
        if tensor.dim() == 3:
            step = tensor.stride(0) * tensor.element_size()
        found += [first + step * place for place in range(count_of([tensor]))]
    return found


@functools.lru_cache(maxsize=1024)
def device_table(addresses: tuple[int, ...], device: torch.device) -> Tensor:
    """The addresses on a device, int64: uploaded from pinned memory without a wait, once for as long as they
    are asked for.

    Its memory is the cache's. What holds a table beyond the next 1,024 others, such as a CUDA graph, keeps it.
    """
    return upload(addresses, torch.int64, device)


def upload(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers on a device, (N,); from pinned memory, without a wait."""
    table = torch.tensor(values, dtype=dtype)
    if device.type != "cuda":
        return table.to(device)
    return table.pin_memory().to(device, non_blocking=True)
