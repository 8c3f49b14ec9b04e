"""What the backward that runs now was asked for."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["goes_on_to"]


def goes_on_to(node: Any) -> bool:
    """Whether the backward that runs now goes on to a node, one of its function's ``next_functions``.

    ``loss.backward()`` leaves nothing out; ``torch.autograd.grad`` and ``backward(inputs=...)`` visit only what leads
    to what they were given. Autograd drops a gradient that goes nowhere, but not what a function writes
    elsewhere: that has to ask.
    """
    if node is None:
        return False
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # torch says neither of a leaf whose gradient `autograd.grad` returns
        return True
