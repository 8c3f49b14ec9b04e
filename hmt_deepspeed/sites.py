"""What the optimizer, the planner and the backend share: parameters that no pattern projects, and products
``X [Q | P]`` on their way between the optimizer's linears and the backend.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

__all__ = [
    "ADAPTER",
    "LEFT_TO_ADAMW",
    "computing_projection",
    "is_computing_projection",
    "kept_projection",
    "serving_projections",
]

# Names of embeddings, output heads and LoRA's adapters, as regular expressions: AdamW's, whatever target_modules
# says, unless a module rule takes them.
ADAPTER = "lora_"
LEFT_TO_ADAMW = ("embed", "lm_head", ADAPTER)

_projecting: ContextVar[bool] = ContextVar("projecting", default=False)


@contextmanager
def computing_projection() -> Iterator[None]:
    """Marks the product ``X [Q | P]`` of a projected linear, so that a backend can tell it from ``X W^T``."""
    token = _projecting.set(True)
    try:
        yield
    finally:
        _projecting.reset(token)


def is_computing_projection() -> bool:
    """Whether the caller runs within :func:`computing_projection`."""
    return _projecting.get()


_keeper: ContextVar[Callable[[], Any] | None] = ContextVar("keeper", default=None)


@contextmanager
def serving_projections(keeper: Callable[[], Any]) -> Iterator[None]:
    """Within it, ``keeper`` is asked for each product that would be computed; it returns what it kept of
    the same product in forward, or None."""
    token = _keeper.set(keeper)
    try:
        yield
    finally:
        _keeper.reset(token)


def kept_projection() -> Any:
    """The product ``X [Q | P]`` that the caller is about to compute again, or None where nobody kept it."""
    keeper = _keeper.get()
    return None if keeper is None else keeper()
