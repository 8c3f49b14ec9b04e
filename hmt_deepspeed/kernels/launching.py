"""Where a Triton kernel is launched."""

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import chain
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

__all__ = ["on_its_device"]

_P = ParamSpec("_P")
_R = TypeVar("_R")


def on_its_device(launcher: Callable[_P, _R]) -> Callable[_P, _R]:
    """Make the device of the launcher's first tensor current while it runs.

    Triton launches on the current device's stream, whatever device its pointers are of.
    """

    @functools.wraps(launcher)
    def launch(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        tensor = next(a for a in chain(args, kwargs.values()) if isinstance(a, Tensor))
        if not tensor.is_cuda:
            return launcher(*args, **kwargs)
        with torch.cuda.device(tensor.device):
            return launcher(*args, **kwargs)

    return launch
