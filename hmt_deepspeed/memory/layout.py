"""Layout of a tensor: what turns its bytes into the same tensor again."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Layout", "bytes_layout", "flatten", "new_like", "view_of"]


@dataclass(frozen=True)
class Layout:
    """Type and geometry of a stored tensor.

    Attributes:
        shape, strides: of the tensor that comes back, strides in elements (0 in expanded dimensions).
        core_shape: ``shape`` with expanded dimensions at 1: what is stored, without gaps.
        nbytes: bytes stored.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    core_shape: tuple[int, ...]
    nbytes: int


def flatten(tensor: Tensor) -> tuple[Layout, Tensor]:
    """Layout of ``tensor``, and its values as flat bytes (uint8), without gaps or repetitions.

    A tensor without gaps, in whatever order of dimensions, is aliased; an expanded one is aliased once;
    any other view is copied on the caller's current stream, and comes back in the same order of
    dimensions without the gaps.

    Raises:
        ValueError: sparse, quantized, nested or meta tensors, and wrapper subclasses (DTensor and the like).
    """
    if type(tensor) not in (Tensor, torch.nn.Parameter):
        raise ValueError(f"only plain tensors can be moved, not {type(tensor).__name__}")
    special = tensor.is_quantized or tensor.is_nested or tensor.is_meta
    if special or tensor.layout != torch.strided:
        raise ValueError(
            f"only dense plain tensors can be moved, not layout {tensor.layout}, dtype "
            f"{tensor.dtype} on {tensor.device}"
        )
    if tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg()):
        flat = tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
        shape = tuple(tensor.shape)
        return Layout(tensor.dtype, shape, tensor.stride(), shape, flat.numel()), flat
    core = tensor.detach().resolve_conj().resolve_neg()
    expanded = [
        size > 1 and stride == 0 for size, stride in zip(core.shape, core.stride(), strict=True)
    ]
    for dim, repeated in enumerate(expanded):
        if repeated:
            core = core.narrow(dim, 0, 1)
    if not _without_gaps(core):
        core = core.clone(memory_format=torch.preserve_format)
    strides = tuple(0 if e else s for e, s in zip(expanded, core.stride(), strict=True))
    flat = core.as_strided((core.numel(),), (1,)).view(torch.uint8)
    shape, core_shape = tuple(tensor.shape), tuple(core.shape)
    return Layout(tensor.dtype, shape, strides, core_shape, flat.numel()), flat


def bytes_layout(nbytes: int) -> Layout:
    """Of flat bytes (uint8)."""
    return Layout(torch.uint8, (nbytes,), (1,), (nbytes,), nbytes)


def view_of(flat: Tensor, layout: Layout) -> Tensor:
    """The tensor of a layout in its flat bytes (uint8), which lie at a multiple of its itemsize; with versions of its
    own."""
    return flat.view(layout.dtype).as_strided(layout.shape, layout.strides).data


def new_like(layout: Layout, device: torch.device) -> tuple[Tensor, Tensor]:
    """An uninitialised tensor of this layout, and its ``layout.nbytes`` flat bytes (uint8)."""
    core = torch.empty_strided(
        layout.core_shape, layout.strides, dtype=layout.dtype, device=device
    )  # strides of dimensions of size 1 do not matter
    flat = core.as_strided((core.numel(),), (1,)).view(torch.uint8)
    if layout.core_shape != layout.shape:
        core = core.expand(layout.shape)
    return core, flat


def _without_gaps(tensor: Tensor) -> bool:
    """Whether the elements fill their piece of memory exactly, in any order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return tensor.numel() == 0
        expected *= size
    return True
