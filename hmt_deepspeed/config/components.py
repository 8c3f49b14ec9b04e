"""Components of a model's activations and the choices for each: the HMT paper's policy table.

The JSON block, the planner and the backend speak these names.
"""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

from hmt_deepspeed.config.codecs import CODECS

__all__ = [
    "COMPONENTS",
    "PAPER_POLICY",
    "POLICY_COMPONENTS",
    "WITHOUT_CODEC",
    "Choice",
    "Component",
    "all_choices",
    "legal_choices",
]

# What a tensor that backward needs belongs to:
#   layer_input       what enters a decoder layer: the embedding's output, or the layer's before
#   attention_qkv     outputs of the query, key and value projections
#   attention_output  output of the attention operation, which enters the output projection
#   mlp_intermediate  outputs of the gate and up projections (of fc1), which enter the activation function
#   experts           outputs of a mixture's experts, of both projections; what its router puts out is always kept
#   residual          the residual stream within a layer: what attention adds to what enters it
#   layernorm         norms: their internals are computed again from their input, which is held
#   projected_inputs  inputs of linears whose backward is projected
#   lm_head           input of the language-model head
Component = Literal[
    "layer_input",
    "attention_qkv",
    "attention_output",
    "mlp_intermediate",
    "experts",
    "residual",
    "layernorm",
    "projected_inputs",
    "lm_head",
]

# What becomes of it between forward and backward: held in the form of a codec, by its name in
# :data:`~hmt_deepspeed.config.codecs.CODECS`, or one of the two of WITHOUT_CODEC.
Choice: TypeAlias = str

# What becomes of the tensor, and what that costs, in words.
WITHOUT_CODEC: dict[Choice, tuple[str, str]] = {
    "recompute": ("not held; the operation runs again", "its FLOPs"),
    "project": (
        "`projected_inputs` only: `X [Q | P]`, r + k columns for each input X",
        "memory; loses nothing",
    ),
}

COMPONENTS: tuple[Component, ...] = get_args(Component)
# Those that a policy chooses for: of a norm nothing but its input is worth holding.
POLICY_COMPONENTS: tuple[Component, ...] = tuple(c for c in COMPONENTS if c != "layernorm")

# What enters a layer, or the head, must be held in some form, or there is nothing to compute from again.
_HELD: tuple[Component, ...] = ("layer_input", "lm_head")


def all_choices() -> tuple[Choice, ...]:
    """Every word of a policy."""
    return (*CODECS, *WITHOUT_CODEC)


def legal_choices(component: Component) -> tuple[Choice, ...]:
    """What may become of a component."""
    if component == "layernorm":
        return ("keep",)
    if component == "projected_inputs":  # nothing else of such an input is worth holding
        return ("project", "recompute")
    keep, *others = CODECS
    return (keep, *others) if component in _HELD else (keep, "recompute", *others)


# The HMT paper's table, whose embedding and residual stream, all kept, are layer_input and residual here; of projected
# inputs it says nothing, of experts what it says of any MLP.
PAPER_POLICY: dict[Component, Choice] = {
    "layer_input": "keep",
    "attention_qkv": "recompute",
    "attention_output": "int8",
    "mlp_intermediate": "int8",
    "experts": "int8",
    "residual": "keep",
    "layernorm": "keep",
    "projected_inputs": "recompute",
    "lm_head": "keep",
}
