"""Reads several device tensors in one copy to the host."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["read_together"]


def read_together(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Host values of flat tensors of one dtype; waits once for each device that holds some of them."""
    found: dict[int, Tensor] = {}
    for device in dict.fromkeys(tensor.device for tensor in tensors):
        places = [place for place, tensor in enumerate(tensors) if tensor.device == device]
        parts = [tensors[place] for place in places]
        read = torch.cat(parts).cpu().split([part.numel() for part in parts])
        found.update(zip(places, read, strict=True))
    return [found[place] for place in range(len(tensors))]
