"""How a function of our own is differentiated: whether it can be, and what the backward that runs now is for.

What such a function writes elsewhere than into the gradients it returns, autograd neither drops nor hands to
whoever asked: the function has to ask.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd import forward_ad

__all__ = ["Asked", "asked_of", "computed_again", "computing_again", "is_transformed"]

# What becomes of the gradient of a function's input: it goes on, into a leaf's `.grad` or to the node before; or
# `torch.autograd.grad` returns it, of a leaf. None, where it is asked of: nobody wants it.
Asked = Literal["goes_on", "returned"]


def asked_of(node: Any) -> Asked | None:
    """What the backward that runs now wants of a node, one of its function's ``next_functions``.

    ``loss.backward()`` leaves nothing out; ``torch.autograd.grad`` and ``backward(inputs=...)`` visit only what leads
    to what they were given.
    """
    if node is None:
        return None
    try:
        return "goes_on" if torch._C._will_engine_execute_node(node) else None
    except RuntimeError:  # torch's answer for a leaf whose gradient `autograd.grad` returns
        return "returned"


def is_transformed() -> bool:
    """Whether operations called now are differentiated, or batched, by other means than one backward: within a
    transform of ``torch.func``, or under forward-mode AD. Functions with a backward alone cannot take part."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


_returned: ContextVar[frozenset[int] | None] = ContextVar("returned", default=None)


@contextmanager
def computing_again(returned: Iterable[Tensor]) -> Iterator[None]:
    """Within it, a function's backward computes a part of its forward again, with grad, and then calls
    ``autograd.grad`` for all parameters: what that returns goes to the function, not to the user.

    Args:
        returned: parameters whose gradient the user's own ``autograd.grad`` returns.
    """
    token = _returned.set(frozenset(map(id, returned)))
    try:
        with torch.enable_grad():
            yield
    finally:
        _returned.reset(token)


def computed_again() -> frozenset[int] | None:
    """The ids of the parameters given to :func:`computing_again`, or None outside of it."""
    return _returned.get()
