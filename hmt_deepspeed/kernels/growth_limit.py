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


def limit_growth_reference_(
    squares: Tensor, previous: Tensor, scale: Tensor, limited: tuple[bool, bool] = (False, True)
) -> tuple[Tensor, Tensor]:
    """Torch twin of the kernel; see :func:`limit_growth_`."""
    norm = squares.sqrt()
    limit = (GROWTH_LIMIT * previous / norm.clamp_min(_TINY)).clamp(max=1.0)
    limit = torch.where(previous > 0, limit, 1.0)
    previous.copy_(torch.where(scale != 0, norm * limit, previous))
    of_both = torch.where(scale != 0, scale * limit, 0.0)
    return limit, torch.stack([of_both if own else scale for own in limited], dim=1)


if triton is not None:

    @triton.jit
    def _limit_growth_kernel(  # type: ignore[no-untyped-def]
        squares_ptr, previous_ptr, scale_ptr, limit_ptr, scales_ptr, size,
        GROWTH: tl.constexpr, TINY: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        mask = place < size
        norm = tl.sqrt(tl.load(squares_ptr + place, mask=mask, other=0.0))
        previous = tl.load(previous_ptr + place, mask=mask, other=0.0)
        scale = tl.load(scale_ptr + place, mask=mask, other=0.0)
        limit = tl.minimum(GROWTH * previous / tl.maximum(norm, TINY), 1.0)
        limit = tl.where(previous > 0, limit, 1.0)
        limited = tl.where(scale != 0, scale * limit, 0.0)
        tl.store(limit_ptr + place, limit, mask=mask)
        tl.store(previous_ptr + place, norm * limit, mask=mask & (scale != 0))
        tl.store(scales_ptr + 2 * place, limited if FIRST else scale, mask=mask)
        tl.store(scales_ptr + 2 * place + 1, limited if SECOND else scale, mask=mask)

    @on_its_device
    def limit_growth_triton_(
        squares: Tensor, previous: Tensor, scale: Tensor, limited: tuple[bool, bool] = (False, True)
    ) -> tuple[Tensor, Tensor]:
        """Triton launcher; see :func:`limit_growth_`."""
        limit, size = torch.empty_like(previous), len(previous)
        scales = limit.new_empty(size, 2)
        if size:
            _limit_growth_kernel[(triton.cdiv(size, _BLOCK),)](
                squares, previous, scale, limit, scales, size,
                GROWTH=GROWTH_LIMIT, TINY=_TINY, FIRST=limited[0], SECOND=limited[1], BLOCK=_BLOCK,
            )  # fmt: skip
        return limit, scales


def limit_growth_(
    squares: Tensor, previous: Tensor, scale: Tensor, limited: tuple[bool, bool] = (False, True)
) -> tuple[Tensor, Tensor]:
    """Factor <= 1 that keeps each norm from growing by more than GROWTH_LIMIT over the one before.

    Args:
        squares: (B,) fp32, of the norms. previous: (B,) fp32, limited norms of the step before; 0 means that there was
            none, and nothing is limited. Updated, where a step is taken.
        scale: (B,) fp32, of an update; 0 where no step is taken. limited: whether the limit is a factor on the scale of
            an update's first columns, and of the others.

    Returns:
        The factor, (B,) fp32, and both scales, B x 2 fp32.

    Raises:
        ValueError: for other dtypes or shapes, or tensors that are not contiguous.
    """
    for name, tensor in (("squares", squares), ("previous", previous), ("scale", scale)):
        if (
            tensor.dtype != torch.float32
            or tensor.shape != previous.shape
            or not tensor.is_contiguous()
        ):
            raise ValueError(
                f"{name} must be contiguous fp32 of shape {tuple(previous.shape)}, got {tensor.dtype} {tuple(tensor.shape)}"
            )
    if squares.is_cuda and triton is not None:
        return limit_growth_triton_(squares, previous, scale, limited)
    return limit_growth_reference_(squares, previous, scale, limited)
