"""What is on a model beside its weights (attributes, hooks and forwards), and what is said of taking it over."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed.runtime.activation_checkpointing import checkpointing
from deepspeed.utils import logger
from torch import nn

# DeepSpeed leaves on the parameters of stage 3 what zero.Init puts there, and these on their modules; it marks the
# mixtures of experts that it knows as leaves.
STOCK_AT_STAGE_3 = {"_external_params", "ds_external_parameters", "all_parameters", "_z3_leaf"}


def footprint(model: nn.Module, stock_optimizer: bool = False) -> dict[str, Any]:
    """By place; values are compared by :func:`changed`.

    Args:
        stock_optimizer: DeepSpeed's, which leaves attributes on parameters.
    """
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        found[f"{name}: class"] = type(module)
        for key, value in vars(module).items():
            if key in ("_parameters", "_buffers", "_modules"):
                found[f"{name}.{key}"] = (type(value), list(value))
            elif key not in STOCK_AT_STAGE_3:
                found[f"{name}.{key}"] = dict(value) if isinstance(value, dict) else value
    for name, param in model.named_parameters():
        found[f"{name}: shape"] = (
            param.dtype,
            param.shape,
            param.data.stride(),
            param.requires_grad,
        )
        for key, value in vars(param).items():
            if not stock_optimizer and not (key.startswith("ds_") and hasattr(param, "ds_tensor")):
                found[f"{name}.{key}"] = value
        found[f"{name}: hooks"] = (
            dict(param._backward_hooks or {}),
            dict(getattr(param, "_post_accumulate_grad_hooks", None) or {}),
        )
    if hasattr(model, "config"):
        found |= {f"config.{key}": value for key, value in vars(model.config).items()}
    for key in ("CheckpointFunction", "non_reentrant_checkpoint"):
        found[f"deepspeed.checkpointing.{key}"] = getattr(checkpointing, key)
    return found


def changed(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Places that differ, with what is there now."""
    absent = object()
    places = sorted(before.keys() | after.keys())
    return [
        f"{place}: {after.get(place, 'gone')!r:.200}"
        for place in places
        if not _same(before.get(place, absent), after.get(place, absent))
    ]


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return one is other
    return one is other or bool(one == other)


@contextmanager
def warned() -> Iterator[list[str]]:
    """What is warned of taking over."""
    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        yield found
    finally:
        logger.removeHandler(handler)
        found[:] = [text for text in found if "takes the place" in text]


def error_of(call: Any, *args: Any, **keyword: Any) -> str:
    try:
        call(*args, **keyword)
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""
