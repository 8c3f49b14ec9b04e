"""Norms of many matrices kept from growing too fast from step to step, in one pass.

The norm-growth limiter of Fira (2410.01623, section 4.2) and APOLLO (2412.05270): a norm grows by at most a hundredth
per step, against the limited norm of the step before.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hmt_deepspeed.kernels.launching import on_its_device

try:
    import triton
    import triton.language as tl
except ImportError:  # platforms without Triton have no CUDA device to run it on
    triton = None

__all__ = ["limit_growth_", "limit_growth_reference_", "limit_growth_triton_"]

GROWTH_LIMIT = 1.01  # Fira's and APOLLO's published value
_TINY = 1e-30  # a norm below it is none; what is divided by it stays finite
_BLOCK = 256


def limit_growth_reference_(norm: Tensor, previous: Tensor, factor: Tensor) -> Tensor:
    """Torch twin of the kernel; see :func:`limit_growth_`."""
    limit = (GROWTH_LIMIT * previous / norm.clamp_min(_TINY)).clamp(max=1.0)
    limit = torch.where(previous > 0, limit, 1.0)
    previous.copy_(torch.where(factor != 0, norm * limit, previous))
    return limit


if triton is not None:

    @triton.jit
    def _limit_growth_kernel(  # type: ignore[no-untyped-def]
        norm_ptr, previous_ptr, factor_ptr, limit_ptr, size,
        GROWTH: tl.constexpr, TINY: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        mask = place < size
        norm = tl.load(norm_ptr + place, mask=mask, other=0.0)
        previous = tl.load(previous_ptr + place, mask=mask, other=0.0)
        factor = tl.load(factor_ptr + place, mask=mask, other=0.0)
        limit = tl.minimum(GROWTH * previous / tl.maximum(norm, TINY), 1.0)
        limit = tl.where(previous > 0, limit, 1.0)
        tl.store(limit_ptr + place, limit, mask=mask)
        tl.store(previous_ptr + place, norm * limit, mask=mask & (factor != 0))

    @on_its_device
    def limit_growth_triton_(norm: Tensor, previous: Tensor, factor: Tensor) -> Tensor:
        """Triton launcher; see :func:`limit_growth_`."""
        limit = torch.empty_like(previous)
        if limit.numel():
            _limit_growth_kernel[(triton.cdiv(limit.numel(), _BLOCK),)](
                norm, previous, factor, limit, limit.numel(),
                GROWTH=GROWTH_LIMIT, TINY=_TINY, BLOCK=_BLOCK,
            )  # fmt: skip
        return limit


def limit_growth_(norm: Tensor, previous: Tensor, factor: Tensor) -> Tensor:
    """Factor <= 1 that keeps each norm from growing by more than GROWTH_LIMIT over the one before.

    Args:
        norm: (B,) fp32. previous: (B,) fp32, limited norms of the step before; 0 means that there was none, and
            nothing is limited. Updated, where a step is taken.
        factor: (B,) fp32; 0 where no step is taken.

    Returns:
        (B,) fp32.

    Raises:
        ValueError: for other dtypes or shapes, or tensors that are not contiguous.
    """
    for name, tensor in (("norm", norm), ("previous", previous), ("factor", factor)):
        if (
            tensor.dtype != torch.float32
            or tensor.shape != previous.shape
            or not tensor.is_contiguous()
        ):
            raise ValueError(
                f"{name} must be contiguous fp32 of shape {tuple(previous.shape)}, got {tensor.dtype} {tuple(tensor.shape)}"
            )
    if norm.is_cuda and triton is not None:
        return limit_growth_triton_(norm, previous, factor)
    return limit_growth_reference_(norm, previous, factor)
