"""A run's model in the planner's words."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from hmt_deepspeed.architectures import meta_twin
from hmt_deepspeed.families.table import family_of
from hmt_deepspeed.planner.model.families import shape_of_config
from hmt_deepspeed.planner.model.shapes import ModelShape
from hmt_deepspeed.planner.model.structure import listed_shape

__all__ = ["shape_of_model"]

# Read module by module from a model on the meta device, which takes seconds of a large one.
_LISTED: WeakKeyDictionary[nn.Module, ModelShape] = WeakKeyDictionary()


def shape_of_model(module: Any) -> tuple[Any, ModelShape]:
    """A model's config and its shape: by its family's sizes, else, as of mixtures of experts, read from its modules.

    Raises:
        ValueError: it has no config, or the planner does not know it.
    """
    config = getattr(module, "config", None)
    if config is None:
        raise ValueError(
            f"{type(module).__name__} has no config to plan by; legal: a model of transformers. Write "
            'out what is "plan" or "auto" in the hmt block.'
        )
    row = family_of(config)
    try:
        if row is not None and row.sizes is not None:
            return config, shape_of_config(config)
        if module not in _LISTED:
            _LISTED[module] = listed_shape(meta_twin(module), module)
        return config, _LISTED[module]
    except ValueError as error:
        raise ValueError(
            f'The planner does not know the model: {error} Or write out what is "plan" or "auto" in the hmt '
            "block."
        ) from error
