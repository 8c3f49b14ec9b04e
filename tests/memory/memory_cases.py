"""Tensors of every kind that can be moved, and what all tests of this room share."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from hmt_deepspeed.memory.counters import Counters
from hmt_deepspeed.memory.pool import GRANULE

PAGE = GRANULE


def pattern(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Random bytes as a tensor of any dtype; no NaN among floats."""
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(*shape, generator=generator).to(dtype)
    high = 2 if dtype == torch.bool else 100
    return torch.randint(0, high, shape, generator=generator).to(dtype)


def entered(counters: Counters) -> threading.Event:
    """Set when somebody begins to wait from now on."""
    event, plain = threading.Event(), counters.waiting

    @contextmanager
    def waiting() -> Iterator[None]:
        event.set()
        with plain():
            yield

    counters.waiting = waiting  # type: ignore[method-assign]
    return event


def tensors() -> dict[str, Tensor]:
    """By what is special about them."""
    return {
        "fp32": pattern(7, 33),
        "bf16": pattern(5, 4, 3, dtype=torch.bfloat16),
        "fp16": pattern(1025, dtype=torch.float16),
        "fp64": pattern(3, 3, dtype=torch.float64),
        "int8": pattern(4097, dtype=torch.int8),
        "uint8": pattern(4096, dtype=torch.uint8),
        "int64": pattern(2, 9, dtype=torch.int64),
        "bool": pattern(3, 77, dtype=torch.bool),
        "fp8": pattern(64, 3).to(torch.float8_e4m3fn),
        "complex, conjugated": pattern(4, 5, dtype=torch.complex64).conj(),
        "imaginary part": pattern(4, dtype=torch.complex64).conj().imag,
        "negated view": torch._neg_view(pattern(4)),
        "scalar": torch.tensor(3.5),
        "scalar bool": torch.tensor(True),
        "empty": torch.empty(0),
        "empty rows": torch.empty(4, 0, 3, dtype=torch.bfloat16),
        "transposed": pattern(8, 5).t(),
        "permuted": pattern(2, 3, 4, 5).permute(3, 0, 2, 1),
        "channels last": pattern(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "columns": pattern(16, 12)[:, 2:7],
        "transposed columns": pattern(16, 12).t()[2:7],
        "every other": pattern(31)[::2],
        "inner slice": pattern(6, 8, 10)[1:4, ::3, 5],
        "overlapping": pattern(12).unfold(0, 4, 1),
        "rows": pattern(9, 4)[3:6],
        "expanded": pattern(1, 6).expand(1000, 6),
        "expanded inside": pattern(4, 1, 6).expand(4, 50, 6),
        "expanded scalar": torch.tensor(2.0, dtype=torch.bfloat16).expand(3, 4),
        "expanded slice": pattern(4, 1, 9)[:, :, 2:5].expand(4, 7, 3),
        "parameter": torch.nn.Parameter(pattern(3, 4)),
        "computed with grad": torch.nn.Parameter(pattern(3, 4)) * 2,
    }


def keeps_strides(tensor: Tensor) -> bool:
    """Whether the elements of a tensor, repetitions apart, fill their memory."""
    first = tensor[tuple(slice(0, 1) if s == 0 else slice(None) for s in tensor.stride())]
    return first.numel() == 0 or first.untyped_storage().nbytes() == first.numel() * first.itemsize


def assert_same(found: Tensor, expected: Tensor) -> None:
    """Bit-equal, with dtype and shape, and strides where there were no gaps; detached."""
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    assert not found.requires_grad
    same = found.view(torch.uint8) if found.dtype == torch.float8_e4m3fn else found
    want = expected.view(torch.uint8) if found.dtype == torch.float8_e4m3fn else expected
    assert torch.equal(same, want.detach())
    if keeps_strides(expected):
        assert found.stride() == expected.stride()
