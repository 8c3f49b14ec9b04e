"""Configs with `hmt.activations`, and the checkpointing that Hugging Face models are left with."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn


def with_activations(config: dict[str, Any], section: dict[str, Any] | None) -> dict[str, Any]:
    if section is not None:
        config.setdefault("hmt", {})["activations"] = copy.deepcopy(section)
    return config


def checkpointing_flags(model: nn.Module) -> list[tuple[str, Any, Any]]:
    return [
        (name, module.gradient_checkpointing, vars(module).get("_gradient_checkpointing_func"))
        for name, module in model.named_modules()
        if hasattr(module, "gradient_checkpointing")
    ]
