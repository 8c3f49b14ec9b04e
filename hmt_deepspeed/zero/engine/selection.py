"""Decides whether a config asks for HMT, with which options, and for which parameters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.utils import is_optimized_parameter
from torch import Tensor, nn

from hmt_deepspeed.config import HMTConfig
from hmt_deepspeed.optim.hmt import HMT, MARK
from hmt_deepspeed.zero.engine.inference import is_for_inference

__all__ = ["hmt_options", "listed", "refusing", "trained_parameters"]

OPTIMIZER_NAME = "HMT"


def hmt_options(config: dict[str, Any], client_optimizer: Any) -> dict[str, Any] | None:
    """Validated fields of ``hmt.optimizer``, or None when neither the JSON nor the client asks for HMT.

    A block that holds only ``activations`` goes with any optimizer, and any block without one, see ``inference.py``.

    Raises:
        ValueError: another block beside another optimizer, the HMT optimizer without a block, fields
            given both in the block and to a client's HMT object, or an HMT object that was replaced.
    """
    _check_not_replaced(client_optimizer)
    block = config.get("hmt")
    named = (config.get("optimizer") or {}).get("type")
    client_is_hmt = isinstance(client_optimizer, HMT)
    if block is None:
        if client_is_hmt:
            return dict(client_optimizer.options)
        if named == OPTIMIZER_NAME and client_optimizer is None:
            raise ValueError(
                'optimizer.type is "HMT", but the config has no "hmt" block. Add "hmt": {} for the '
                "defaults."
            )
        return None
    hmt = HMTConfig.from_block(block)
    if is_for_inference(config, client_optimizer):
        return None
    fields = hmt.optimizer
    if client_is_hmt:
        if fields.model_fields_set:
            raise ValueError(
                f"hmt.optimizer gives {sorted(fields.model_fields_set)}, and the HMT object passed to "
                "initialize has options of its own. Give them in one place: empty the block, or let "
                'the JSON build the optimizer with "optimizer": {"type": "HMT"}.'
            )
        return dict(client_optimizer.options)
    if client_optimizer is not None or named != OPTIMIZER_NAME:
        ours = ("optimizer", "fpdt", "offload", "basis_cache", "snapshot")
        of_ours = any(hmt.gives(section) for section in ours)
        if hmt.gives("activations") and not of_ours:
            return None
        other = type(client_optimizer).__name__ if client_optimizer is not None else named
        raise ValueError(
            f'the config has an "hmt" block, but the optimizer is {other!r}. '
            f'Legal is "optimizer": {{"type": "HMT", ...}} or an HMT object. '
            'Change the optimizer, remove the "hmt" block, or leave only "activations" in it.'
        )
    return fields.model_dump()


def _check_not_replaced(client_optimizer: Any) -> None:
    """Accelerate builds ``DeepSpeedCPUAdam`` of an optimizer's groups where the JSON offloads states."""
    groups = getattr(client_optimizer, "param_groups", ())
    if type(client_optimizer).__name__ == "DeepSpeedCPUAdam" and any(MARK in g for g in groups):
        raise ValueError(
            "zero_force_ds_cpu_optimizer is true, its default, so the HMT object was replaced by "
            "DeepSpeedCPUAdam, because the config has offload_optimizer. Legal with an HMT object is "
            '"zero_force_ds_cpu_optimizer": false; HMT takes DeepSpeed\'s CPU Adam kernel itself. Add '
            'the key, or let the JSON build the optimizer with "optimizer": {"type": "HMT"}.'
        )


def listed(model_parameters: Iterable[Any] | None) -> list[Any] | None:
    """``model_parameters`` of ``initialize`` in a form that can be read twice; None stays None."""
    if model_parameters is None:
        return None
    found = list(model_parameters)
    for group in found:
        if isinstance(group, dict) and isinstance(group["params"], Iterator):
            group["params"] = list(group["params"])  # as torch's optimizers do
    return found


def trained_parameters(
    model: nn.Module, model_parameters: list[Any] | None, client_optimizer: Any
) -> list[tuple[str, nn.Parameter]]:
    """Names and parameters that the engine's optimizer will have, in the model's order.

    Args:
        model_parameters: from :func:`listed`. client_optimizer: of ``initialize``.
    """
    given: Iterable[Any] | None = model_parameters
    if hasattr(client_optimizer, "param_groups"):  # not a function that makes one
        given = client_optimizer.param_groups
    if given is None:
        given = model.parameters()
    ids = {id(param) for param in _flat(given)}
    return [
        (name, param)
        for name, param in model.named_parameters()
        if id(param) in ids and is_optimized_parameter(param)
    ]


def _flat(given: Iterable[Any]) -> Iterator[Any]:
    """Parameters of whatever torch's optimizers take: groups, pairs with names, parameters."""
    for item in given:
        if isinstance(item, dict):
            held = item["params"]
            yield from _flat([held] if isinstance(held, Tensor) else held)
        else:
            yield item[1] if isinstance(item, tuple) else item


def refusing(engine_class: type[DeepSpeedEngine], remedy: str) -> type[DeepSpeedEngine]:
    """A subclass of one of DeepSpeed's other engines that refuses configs which ask for HMT."""

    class RefusingEngine(engine_class):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            config = kwargs.get("config")
            if isinstance(config, dict) and (
                config.get("hmt") is not None or hmt_options(config, kwargs.get("optimizer"))
            ):
                raise ValueError(
                    f'the "hmt" block does not work with {engine_class.__name__}. {remedy}'
                )
            super().__init__(*args, **kwargs)

    RefusingEngine.__name__ = RefusingEngine.__qualname__ = engine_class.__name__
    return RefusingEngine
