"""`hmt.preset`: whole settings by one word, and how the fields written beside it override them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

from hmt_deepspeed.config.activations import activation_conflicts
from hmt_deepspeed.config.optimizer_conflicts import Conflict, Given, conflicts_of

__all__ = ["PRESETS", "Preset", "overridden", "with_preset"]

Preset = Literal["balanced", "memory", "paper"]
Block = dict[str, Any]

PRESETS: dict[Preset, Block] = {
    # AdamW's learning rate and loss at no more than half of its moments: the fields' own defaults
    "balanced": {},
    # the least bytes: 8-bit states at an eighth of the width, of embeddings and head too, no masters, the HMT
    # paper's table of activations
    "memory": {
        "optimizer": {
            "rank": 0.125,
            "state_dtype": "int8",
            "master_weights": "none",
            "target_modules": "all",
        },
        "activations": {},
    },
    # the HMT paper's: cores, ranks by the energy of the very gradient that a basis is made from, no
    # residual, the low-rank update as it is, bf16 where it has fp16 states, weights without masters, old bases in host memory
    "paper": {
        "optimizer": {
            "method": "lowrank_adamw",
            "projection": "two_sided",
            "rank_candidates": [32, 64, 128, 256],
            "energy_threshold": 0.95,
            "energy_estimate": "in_sample",
            "rank_budget": None,
            "residual": "none",
            "scale": 1.0,
            "state_dtype": "bf16",
            "master_weights": "none",
        },
        "activations": {},
        "basis_cache": {"history": 1},
    },
}

_CONFLICTS: dict[str, Callable[[Given], list[Conflict]]] = {
    "optimizer": conflicts_of,
    "activations": activation_conflicts,
}


def with_preset(block: Block) -> Block:
    """The parsed block with its preset's fields where it has none of its own.

    A field of the preset that cannot go together with the block's own fields is left out: what a user writes down
    decides. A block without a known preset, or with a section that is no object, is given back as it is: its
    validation says what is wrong.
    """
    preset = PRESETS.get(block.get("preset", "balanced")) if _is_word(block.get("preset")) else None
    if not preset:
        return block
    merged = dict(block)
    for section, fields in preset.items():
        own = block.get(section, {})
        if isinstance(own, dict):
            merged[section] = {**fields, **own}
            _leave_out(section, merged[section], own)
    return merged


def _is_word(preset: object) -> bool:
    return isinstance(preset, str)


def _leave_out(section: str, merged: Block, own: Block) -> None:
    """Drop, in place, the preset's fields that conflict with the block's ``own``, or that nothing would read."""
    find = _CONFLICTS.get(section)
    while find is not None:
        named = [key for c in find(merged) for key in (c.key, *c.depends_on)]
        presets = [key for key in named if key in merged and key not in own]
        if not presets:
            return
        del merged[
            presets[0]
        ]  # the field itself comes first: others may read what it conflicts with


def overridden(preset: Preset, block: Mapping[str, Any]) -> Iterator[str]:
    """What of a preset is not in force, a line each: key, the value that won, the preset's.

    Args:
        block: every field of the validated block, as plain values by section.
    """
    for section, fields in PRESETS[preset].items():
        for key, value in fields.items():
            won = block[section][key]
            if (list(won) if isinstance(won, tuple) else won) != value:
                yield (
                    f"hmt.{section}.{key}: {json.dumps(won)}, which the block or its other fields ask for, "
                    f"instead of {json.dumps(value)}"
                )
