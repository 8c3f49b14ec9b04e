"""The fields of ``hmt.optimizer`` as plain values: legal ranges and published defaults."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import Any, cast

from hmt_deepspeed.optim.assign import DENSE, LOW_RANK
from hmt_deepspeed.optim.matrix import LowRankSettings

__all__ = ["check_group", "check_options", "low_rank_settings"]

DEFAULT_SCALE = 0.25  # GaLore's published value
DEFAULT_NORM_GROWTH_LIMIT = 1.01  # Fira's published value
_CHOICES: dict[str, tuple[object, ...]] = {
    "method": (LOW_RANK, DENSE),
    "residual": ("probe", "none"),
    "projected_backward": ("auto", True, False),
    "master_weights": ("fp32", "none"),
}


def low_rank_settings(options: Mapping[str, object]) -> LowRankSettings:
    """Settings of the low-rank matrices from ``HMT.options`` or the fields of ``hmt.optimizer``.

    "auto" becomes None where :class:`LowRankMatrix` decides, else the published default.

    Raises:
        ValueError: a value out of range.
    """

    def auto(field: str, default: object = None) -> Any:
        value = options[field]
        return default if isinstance(value, str) and value == "auto" else value

    candidates = options["rank_candidates"]
    return LowRankSettings(
        rank=auto("rank"),
        rank_candidates=tuple(candidates)
        if isinstance(candidates, list)
        else cast(Any, candidates),
        energy_threshold=cast(float, options["energy_threshold"]),
        update_interval=cast(int, options["update_interval"]),
        residual=options["residual"] == "probe",
        probes=auto("probes"),
        residual_scale=auto("residual_scale"),
        scale=auto("scale", DEFAULT_SCALE),
        norm_growth_limit=auto("norm_growth_limit", DEFAULT_NORM_GROWTH_LIMIT),
        seed=cast(int, options["seed"]),
    )


def check_options(options: Mapping[str, object]) -> None:
    """Check the fields that are not :class:`LowRankSettings`' own.

    Raises:
        ValueError: field, value, legal range, what to do.
    """
    for field, choices in _CHOICES.items():
        if options[field] not in choices:
            _refuse(field, options[field], f"one of {choices}", "choose one of them")
    budget = options["max_full_gradient_bytes"]
    whole = isinstance(budget, int) and not isinstance(budget, bool) and budget >= 1
    if not whole and budget != "auto":
        _refuse("max_full_gradient_bytes", budget, '"auto" or an integer >= 1', 'use "auto"')
    for field in ("target_modules", "exclude_modules"):
        patterns = options[field]
        if patterns is None and field == "target_modules":
            continue
        words = isinstance(patterns, Sequence) and not isinstance(patterns, str)
        if not words or not all(isinstance(p, str) for p in cast("Sequence[object]", patterns)):
            _refuse(field, patterns, "a list of regular expressions", "put the pattern in a list")


def check_group(group: Mapping[str, Any]) -> None:
    """Check lr, betas, eps and weight_decay of one parameter group.

    Raises:
        ValueError: field, value, legal range, what to do.
    """
    for field, advice in (("lr", "1e-3"), ("eps", "1e-8"), ("weight_decay", "0.0")):
        if not 0 <= group[field] < inf:
            raise ValueError(f"{field} is {group[field]!r}; legal: >= 0. To do: {advice} is usual.")
    betas = group["betas"]
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ValueError(
            f"betas is {betas!r}; legal: two numbers, 0 <= beta < 1. To do: (0.9, 0.999) is usual."
        )


def _refuse(field: str, value: object, legal: str, advice: str) -> None:
    raise ValueError(f"hmt.optimizer.{field} is {value!r}; legal: {legal}. To do: {advice}.")
