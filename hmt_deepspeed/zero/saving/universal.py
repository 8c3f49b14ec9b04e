"""Makes DeepSpeed's ``ds_to_universal`` refuse HMT's checkpoints with a helpful message.

It runs without any code of ours, and wants flat moments of full size where ours are low-rank. So the model files
carry, in a field that it checks before it converts and quotes when it refuses, what to use instead. Nobody else reads
these fields where HMT writes them: not ``zero_to_fp32.py``, nor any loading. Those of stage 3 are for models without
DeepSpeed's expert layers, which have no stage 3.
"""

from __future__ import annotations

from typing import Any

from deepspeed.checkpoint.autoep_zero3_metadata import AUTOEP_METADATA_REQUIRED_FIELDS
from deepspeed.checkpoint.constants import (
    AUTOEP_EXPERT_PLACEMENT,
    AUTOEP_LAYERS_KEY,
    AUTOEP_PLACEMENT_VERSION_KEY,
    AUTOTP_UNSUPPORTED_PARAMETER_PATTERNS,
    UNIVERSAL_CHECKPOINT_INFO,
)

__all__ = ["REFUSALS", "refusal_fields"]

REFUSALS = (UNIVERSAL_CHECKPOINT_INFO, AUTOEP_LAYERS_KEY)

_WHOSE = "HMT's checkpoints"
_INSTEAD = (
    "their states are low-rank. No conversion is needed: engine.load_checkpoint loads this folder at any world size and ZeRO "
    "stage as it is, and its zero_to_fp32.py writes the weights alone"
)


def refusal_fields(stage: int) -> dict[str, Any]:
    """Fields of a model file of a ZeRO stage, plain dicts and strings; the converter asks for others at stage 3."""
    if stage < 3:
        return {
            UNIVERSAL_CHECKPOINT_INFO: {AUTOTP_UNSUPPORTED_PARAMETER_PATTERNS: {_WHOSE: _INSTEAD}}
        }
    layer: dict[str, Any] = dict.fromkeys(sorted(AUTOEP_METADATA_REQUIRED_FIELDS), "none")
    placement = f"none: conversion is not supported for {_WHOSE}: {_INSTEAD}"
    layer[AUTOEP_EXPERT_PLACEMENT] = {AUTOEP_PLACEMENT_VERSION_KEY: placement}
    return {AUTOEP_LAYERS_KEY: [layer]}
