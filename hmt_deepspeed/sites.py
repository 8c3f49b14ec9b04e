"""What the optimizer, the planner and the backend share: parameters that no pattern projects, the weights of a mixture's
experts, and products ``X [Q | P]`` on their way between the optimizer's linears and the backend.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from inspect import signature
from typing import Any, Literal

__all__ = [
    "ADAPTER",
    "EMBEDDING",
    "LEFT_TO_ADAMW",
    "ExpertWeight",
    "computing_projection",
    "expert_weights",
    "is_computing_projection",
    "kept_projection",
    "serving_projections",
]

# Names of embeddings, output heads and LoRA's adapters, as regular expressions: AdamW's, whatever target_modules
# says, unless a module rule takes them.
ADAPTER, EMBEDDING = "lora_", "embed"
LEFT_TO_ADAMW = (EMBEDDING, "lm_head", ADAPTER)


@dataclass(frozen=True)
class ExpertWeight:
    """The matrices of all experts of a layer, in one weight: count x outputs x inputs, or count x inputs x outputs.

    Attributes:
        role: ``up``, which reads the stream (gate and up, or up alone), or ``down``, which writes to it.
        count: experts. inputs, outputs: channels of one of them; of gate and up both together.
        is_transposed: whether the weight has inputs before outputs.
        is_routed: whether an expert computes the tokens that are sent to it; else all of them (Llama-4).
    """

    role: Literal["up", "down"]
    count: int
    inputs: int
    outputs: int
    is_transposed: bool
    is_routed: bool


def expert_weights(module: Any) -> dict[str, ExpertWeight]:
    """The weights of a module of experts by their names in it; none of any other module.

    Such a module follows the experts' interface of transformers, or has the same parameters: a gated ``gate_up_proj``
    whose shape beside that of ``down_proj`` says which way it is stored.
    """
    shapes = {
        name: tuple(getattr(parameter, "ds_shape", parameter.shape))
        for name, parameter in module._parameters.items()
        if parameter is not None
    }
    up = next((name for name in ("gate_up_proj", "up_proj") if name in shapes), "")
    if [len(shapes.get(name, ())) for name in (up, "down_proj")] != [3, 3]:
        return {}
    first, second = shapes[up][1:], shapes["down_proj"][1:]
    if hasattr(module, "has_gate"):
        is_transposed = bool(module.is_transposed)
    elif up == "gate_up_proj" and first == (2 * second[1], second[0]):
        is_transposed = False
    elif up == "gate_up_proj" and first == (second[1], 2 * second[0]):
        is_transposed = True
    else:
        return {}
    is_routed = len(signature(type(module).forward).parameters) > 2  # self, tokens, where they go
    roles: dict[str, Literal["up", "down"]] = {up: "up", "down_proj": "down"}
    found = {}
    for name, role in roles.items():
        count, *sides = shapes[name]
        outputs, inputs = reversed(sides) if is_transposed else sides
        found[name] = ExpertWeight(role, count, inputs, outputs, is_transposed, is_routed)
    return found


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
