"""Tensors of many owners side by side in one."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from operator import attrgetter, is_

import torch
from torch import Tensor

__all__ = ["Stacked", "alike", "joined", "stacked"]


def stacked(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors of one shape as one with a leading dimension: the one they are views of, side by side, or a copy of the
    widest of their dtypes."""
    first = tensors[0]
    if len(tensors) == 1:
        return first.unsqueeze(0)
    whole, step, start = first._base, first.numel(), first.storage_offset()
    if (
        whole is None
        or not first.is_contiguous()
        or any(
            tensor._base is not whole or tensor.storage_offset() != start + place * step
            for place, tensor in enumerate(tensors)
        )
    ):
        return torch.stack(list(tensors))
    return whole.as_strided((len(tensors), *first.shape), (step, *first.stride()), start)


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors of parts of a stack, B x ... each, as one."""
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))


def alike(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Matrices of one shape in one dtype and of equal strides: themselves, or fp32 copies."""
    kinds = {(tensor.dtype, tensor.stride()) for tensor in tensors}
    return list(tensors) if len(kinds) == 1 else [t.float().contiguous() for t in tensors]


class Stacked:
    """One tensor of each of several owners, side by side: ``whole`` is B x ..., each owner's attribute a view.

    An owner may replace its attribute; :meth:`gather` then takes the new values over.

    Args:
        path: of attributes from an owner to its tensor, dotted.
    """

    def __init__(self, owners: Sequence[object], path: str) -> None:
        self._owners, self._read = list(owners), attrgetter(path)
        self._holder, _, self._name = path.rpartition(".")
        self.whole = torch.stack(list(map(self._read, owners)))
        self.views = list(self.whole.unbind())
        for owner, view in zip(owners, self.views, strict=True):
            self._place(owner, view)

    def _place(self, owner: object, view: Tensor) -> None:
        setattr(attrgetter(self._holder)(owner) if self._holder else owner, self._name, view)

    def gather(self) -> None:
        """Take over what owners have replaced."""
        found = list(map(self._read, self._owners))
        if all(map(is_, found, self.views)):
            return
        changed = [place for place, view in enumerate(self.views) if found[place] is not view]
        views = [self.views[place] for place in changed]
        torch._foreach_copy_(views, [found[place] for place in changed])
        for place, view in zip(changed, views, strict=True):
            self._place(self._owners[place], view)

    def part(self, begin: int, end: int) -> Stacked:
        """Some of them, of the same memory."""
        other = copy(self)
        other.whole, other.views = self.whole[begin:end], self.views[begin:end]
        other._owners = self._owners[begin:end]
        return other
