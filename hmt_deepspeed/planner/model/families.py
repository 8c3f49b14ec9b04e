"""Reads a :class:`~hmt_deepspeed.planner.model.shapes.ModelShape` off a Hugging Face config.

Nothing is built: a config's numbers and the family's row are enough. Tests build small models of each family and
compare parameters, FLOPs and saved tensors.
"""

from __future__ import annotations

from typing import Any

from hmt_deepspeed.families.family import Family
from hmt_deepspeed.families.table import FAMILIES, family_of
from hmt_deepspeed.planner.model.names import names_of
from hmt_deepspeed.planner.model.shapes import Activation, ModelShape

__all__ = ["shape_of_config"]

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "gelu_new": "new_gelu",
}
# Traits that a row says of all models of its family, under the names that a shape has for them.
_TRAITS = (
    "gated",
    "fused_up",
    "shared_norm",
    "sandwich",
    "rms_norm",
    "offset_norm",
    "rotary_cat",
    "conv1d",
    "fp32_softmax",
)


def shape_of_config(config: Any) -> ModelShape:
    """The shape of a ``transformers`` config of a causal model; nothing of it is built.

    Raises:
        ValueError: a family or an activation that is not known.
    """
    row = family_of(config)
    if row is None or row.sizes is None:
        name = getattr(config, "model_type", type(config).__name__)
        known = (name for name, row in FAMILIES.items() if row.sizes is not None)
        raise ValueError(
            f"the model's family is {name!r}; legal: {', '.join(known)}. Use one of them, or give the plain sizes "
            "(plain_shape)."
        )
    sizes = dict(row.sizes(config))
    names = names_of(
        row,
        has_final_norm=sizes.pop("final_norm", True),
        has_head_norms=sizes.get("head_norm", False),
    )
    traits = {name: getattr(row, name) for name in _TRAITS}
    return ModelShape(
        config.model_type, names=names, activation=_activation(config, row), **traits, **sizes
    )


def _activation(config: Any, row: Family) -> Activation:
    name = getattr(config, row.activation)
    if name not in _ACTIVATIONS:
        raise ValueError(
            f"{config.model_type}: {row.activation} is {name!r}; legal: {', '.join(_ACTIVATIONS)}. What autograd saves "
            "of another activation is not known: choose one of them."
        )
    return _ACTIVATIONS[name]
