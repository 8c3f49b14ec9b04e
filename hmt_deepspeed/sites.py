"""The shared vocabulary: parameters that no pattern projects; components of a model, choices for each, and what a
choice holds.

A leaf: the JSON block, the optimizer, the planner and the backend speak these names. Components are the HMT paper's
policy table; ``held_bytes`` is what the codecs are tested against and the planner plans with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal, get_args

__all__ = [
    "BLOCK_SIZE",
    "CHOICES",
    "COMPONENTS",
    "LEFT_TO_ADAMW",
    "LEGAL_CHOICES",
    "PAPER_POLICY",
    "POLICY_COMPONENTS",
    "Choice",
    "Component",
    "computing_projection",
    "held_bytes",
    "is_computing_projection",
    "kept_projection",
    "serving_projections",
]

# Names of embeddings, output heads and LoRA's adapters, as regular expressions: AdamW's, whatever target_modules
# says, unless a module rule takes them.
LEFT_TO_ADAMW = ("embed", "lm_head", "lora_")

# What a tensor that backward needs belongs to:
#   embedding         the embedding's output, which enters the first decoder layer
#   attention_qkv     outputs of the query, key and value projections
#   attention_output  output of the attention operation, which enters the output projection
#   mlp_intermediate  outputs of the gate and up projections (of fc1), which enter the activation function
#   residual          the residual stream: what enters each further layer, and what attention adds to it
#                     (recompute: of what attention adds only; what enters a layer is then kept)
#   layernorm         norms: their internals are computed again from their input, which is held
#   projected_inputs  inputs of linears whose backward is projected
#   lm_head           input of the language-model head
Component = Literal[
    "embedding",
    "attention_qkv",
    "attention_output",
    "mlp_intermediate",
    "residual",
    "layernorm",
    "projected_inputs",
    "lm_head",
]

# What becomes of it between forward and backward:
#   keep       held on the device as it is; what is cheap to derive from it is recomputed
#   recompute  not held; computed again in backward from what is held before it
#   int8, fp8  held on the device in 8 bits, in blocks along tokens within a channel
#   project    an input X of a projected linear, held as X [Q | P]; the weight's gradient needs no more
#   swap_host  held in pinned host memory, brought back one layer ahead
#   swap_ssd   in host memory while there is room, else in a file
Choice = Literal["keep", "recompute", "int8", "fp8", "project", "swap_host", "swap_ssd"]

COMPONENTS: tuple[Component, ...] = get_args(Component)
CHOICES: tuple[Choice, ...] = get_args(Choice)
# Those that a policy chooses for: of a norm nothing but its input is worth holding.
POLICY_COMPONENTS: tuple[Component, ...] = tuple(c for c in COMPONENTS if c != "layernorm")

_HELD: tuple[Choice, ...] = ("keep", "int8", "fp8", "swap_host", "swap_ssd")
_ANY: tuple[Choice, ...] = ("keep", "recompute", "int8", "fp8", "swap_host", "swap_ssd")

# What enters a layer must be held in some form, or there is nothing to compute the layer from again; of a
# projected linear's input only what it is projected on is worth holding.
LEGAL_CHOICES: dict[Component, tuple[Choice, ...]] = {
    "embedding": _HELD,
    "attention_qkv": _ANY,
    "attention_output": _ANY,
    "mlp_intermediate": _ANY,
    "residual": _ANY,
    "layernorm": ("keep",),
    "projected_inputs": ("project", "recompute"),
    "lm_head": _HELD,
}

# The HMT paper's table; of projected inputs it says nothing.
PAPER_POLICY: dict[Component, Choice] = {
    "embedding": "keep",
    "attention_qkv": "recompute",
    "attention_output": "int8",
    "mlp_intermediate": "int8",
    "residual": "keep",
    "layernorm": "keep",
    "projected_inputs": "recompute",
    "lm_head": "keep",
}

BLOCK_SIZE = 256  # tokens of a channel that share a scale (int8, fp8)
SCALE_BYTES = 2  # a block's scale is bf16


def held_bytes(
    choice: Choice, tokens: int, channels: int, itemsize: int, block_size: int = BLOCK_SIZE
) -> int:
    """Device bytes that one tensor of tokens x channels occupies until backward.

    Args:
        channels: of ``project``, the columns of ``X [Q | P]``.
        itemsize: bytes of one element as computed (2 for bf16).
        block_size: tokens of a channel that share a scale (``int8``, ``fp8``).
    """
    if choice in ("keep", "project"):
        return tokens * channels * itemsize
    if choice in ("int8", "fp8"):
        return tokens * channels + -(-tokens // block_size) * channels * SCALE_BYTES
    return 0


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
