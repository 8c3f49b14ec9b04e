"""Stores a caller's client state, unchanged where ``torch.load(weights_only=True)`` reads it.

DeepSpeed pickles a client state, and scripts put objects into it. Those are pickled here too, into bytes, so that
every file stays readable without running what a pickle says; only who loads the checkpoint unpickles them.
"""

from __future__ import annotations

import io
from collections import OrderedDict
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

__all__ = ["original", "plain_numbers", "storable"]

_PICKLED = "hmt.pickled"  # the key that tells pickled bytes from a dict of the caller
_LEAVES = {type(None), bool, int, float, complex, str, bytes, Tensor, nn.Parameter}
_LEAVES |= {torch.Size, torch.dtype, torch.device}


def plain_numbers(value: Any) -> Any:
    """NumPy's numbers as Python's: what schedulers and learning rates are made of."""
    if isinstance(value, np.generic):
        return value.item()
    if type(value) in (dict, OrderedDict):
        return type(value)((plain_numbers(k), plain_numbers(v)) for k, v in value.items())
    if type(value) in (list, tuple):
        return type(value)(map(plain_numbers, value))
    return value


def storable(value: Any) -> Any:
    """The value itself, or a record of it in plain types."""
    if _is_plain(value):
        return value
    file = io.BytesIO()
    torch.save(value, file)
    return {_PICKLED: file.getvalue()}


def original(value: Any) -> Any:
    """Undo :func:`storable`; unpickles, which may run what the file says."""
    if isinstance(value, dict) and _PICKLED in value:
        file = io.BytesIO(value[_PICKLED])
        return torch.load(file, map_location="cpu", weights_only=False)
    return value


def _is_plain(value: Any) -> bool:
    """Whether a value consists of plain types. Compares exact types: a NumPy float is a float too."""
    if type(value) in (dict, OrderedDict):
        return all(_is_plain(k) and _is_plain(v) for k, v in value.items())
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))
    return type(value) in _LEAVES
