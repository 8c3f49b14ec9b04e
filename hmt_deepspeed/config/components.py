"""Components of a model's activations and the choices for each: the HMT paper's policy table.

The JSON block, the planner and the backend speak these names.
"""

from __future__ import annotations

from typing import Literal, get_args

__all__ = [
    "CHOICES",
    "COMPONENTS",
    "LEGAL_CHOICES",
    "PAPER_POLICY",
    "POLICY_COMPONENTS",
    "Choice",
    "Component",
]

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
