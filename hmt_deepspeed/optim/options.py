"""The fields of ``hmt.optimizer`` as plain values: legal ranges and published defaults."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from difflib import get_close_matches
from math import inf
from typing import Any, cast

from hmt_deepspeed.config.optimizer_conflicts import OWN_OF_METHOD, conflicts_of
from hmt_deepspeed.optim.settings import (
    DENSE,
    LOW_RANK,
    METHODS,
    SECOND_MOMENTS,
    MatrixSettings,
)
from hmt_deepspeed.optim.state import STATE_DTYPES

__all__ = ["check_group", "check_options", "complete_options", "matrix_settings", "module_rules"]

_CHOICES: dict[str, tuple[object, ...]] = {
    "method": METHODS,
    "projected_backward": ("auto", True, False),
    "master_weights": ("fp32", "none"),
    "share_basis": (True, False),
    "energy_estimate": ("in_sample", "out_of_sample"),
    "state_dtype": STATE_DTYPES,
    "second_moment": SECOND_MOMENTS,
    "weight_dtype": ("auto", "int8"),
}
_RULE_FIELDS = (
    "method",
    "projection",
    "rank",
    "rank_candidates",
    "energy_threshold",
    "range_finder",
    "residual",
    "scale",
)
# Keys of GaLore's and APOLLO's parameter groups, and the fields that do the same.
_OF_OTHERS = {
    "update_proj_gap": "update_interval",
    "proj_type": "projection",
    "proj": "range_finder",
}

DEFAULTS: dict[str, object] = {
    "method": LOW_RANK,
    "projection": "right",
    "rank": "auto",
    "rank_candidates": "auto",
    "energy_threshold": 0.7,
    "energy_estimate": "out_of_sample",
    "rank_budget": "auto",
    "full_rank_budget": 0.0,
    "update_interval": 200,
    "range_finder": "randomized",
    "residual": "probe",
    "probes": "auto",
    "share_basis": False,
    "projected_backward": "auto",
    "scale": "auto",
    "max_full_gradient_bytes": "auto",
    "state_dtype": "fp32",
    "second_moment": "full",
    "master_weights": "fp32",
    "weight_dtype": "auto",
    "target_modules": None,
    "module_rules": {},
    "seed": 0,
}


def complete_options(given: Mapping[str, object]) -> dict[str, Any]:
    """All fields of ``hmt.optimizer``: those given, the others' defaults; lists become tuples.

    Raises:
        TypeError: for an unknown field.
    """
    for name in given:
        if name not in DEFAULTS:
            close = get_close_matches(name, DEFAULTS, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else f"; legal: {', '.join(DEFAULTS)}"
            raise TypeError(f"HMT() got an unexpected field {name!r}{hint}")
    merged = {**DEFAULTS, **given}
    return {k: tuple(v) if isinstance(v, list) else v for k, v in merged.items()}


def matrix_settings(
    options: Mapping[str, object], written: Mapping[str, str] | None = None
) -> MatrixSettings | None:
    """Settings of the matrices from ``HMT.options`` or the fields of ``hmt.optimizer``.

    "auto" becomes None: the matrix decides. None for ``adamw``.
    ``written``: see :class:`MatrixSettings`.

    Raises:
        ValueError: a value out of range.
    """

    def value(field: str) -> Any:
        given = options[field]
        if isinstance(given, str) and given == "auto" and field != "projection":
            return None
        return tuple(given) if isinstance(given, list) else given

    if options["method"] == DENSE:
        return None
    values = {f.name: value(f.name) for f in fields(MatrixSettings) if f.name in options}
    return MatrixSettings(**values, written=written or {})


def module_rules(options: Mapping[str, object]) -> list[tuple[str, MatrixSettings | None]]:
    """``module_rules`` with every field that a rule leaves open taken from the others.

    A rule of another method starts from that method's defaults where fields mean something else
    for it: rank and scale.

    Raises:
        ValueError: a value out of range.
    """
    rules = []
    given = cast("Mapping[str, Mapping[str, object]]", options["module_rules"])
    for pattern, rule in given.items():
        fields_given = {name: value for name, value in rule.items() if value is not None}
        merged = {**options, **fields_given}
        if merged["method"] != options["method"]:
            own = {name: DEFAULTS[name] for name in OWN_OF_METHOD}
            merged.update({k: v for k, v in own.items() if k not in fields_given})
        written = {name: f"module_rules[{pattern!r}].{name}" for name in fields_given}
        rules.append((pattern, matrix_settings(merged, written)))
    return rules


def check_options(options: Mapping[str, object], given: Mapping[str, object]) -> None:
    """Check the fields that are not :class:`MatrixSettings`' own, and what cannot go together.

    Args:
        options: all fields. given: those that were written down.

    Raises:
        ValueError: field, value, legal range, what to do.
    """
    for field, choices in _CHOICES.items():
        value = options[field]
        known = isinstance(value, bool | str) and value in choices  # 0 and 1 equal False and True
        if not known:
            _refuse(field, value, f"one of {choices}", "choose one of them")
    budget = options["max_full_gradient_bytes"]
    whole = isinstance(budget, int) and not isinstance(budget, bool) and budget >= 1
    if not whole and budget != "auto":
        _refuse("max_full_gradient_bytes", budget, '"auto" or an integer >= 1', 'use "auto"')
    patterns = options["target_modules"]
    if patterns not in (None, "all"):
        if not isinstance(patterns, Sequence) or isinstance(patterns, str):
            advice = "put the pattern in a list"
            legal = '"all", None or a list of regular expressions'
            _refuse("target_modules", patterns, legal, advice)
        words = cast("Sequence[object]", patterns)
        if wrong := [pattern for pattern in words if not _is_pattern(pattern)]:
            legal = "a list of non-empty regular expressions"
            _refuse("target_modules", patterns, legal, f"correct {wrong[0]!r}")
        if not words:
            advice = "None takes every linear"
            _refuse("target_modules", patterns, "at least one pattern, or None", advice)
    share, fallback = options["rank_budget"], options["full_rank_budget"]
    if share not in (None, "auto") and not (_is_share(share) and share):
        legal = '"auto", None or a number above 0, at most 1'
        _refuse("rank_budget", share, legal, "None turns it off")
    if not _is_share(fallback):
        _refuse("full_rank_budget", fallback, "a number from 0 to 1", "0 turns it off")
    _check_module_rules(options["module_rules"])
    if conflicts := conflicts_of(given):
        raise ValueError(
            "\n".join(f"hmt.optimizer.{c.key} is {c.value!r}. {c.advice}" for c in conflicts)
        )


def _is_share(value: object) -> bool:
    real = isinstance(value, int | float) and not isinstance(value, bool)
    return real and 0 <= cast(float, value) <= 1


def _is_pattern(value: object) -> bool:
    """Whether it is a regular expression, and not the empty one, which matches everything."""
    if not isinstance(value, str) or not value:
        return False
    try:
        re.compile(value)
    except re.error:
        return False
    return True


def _check_module_rules(rules: object) -> None:
    if not isinstance(rules, Mapping) or not all(isinstance(r, Mapping) for r in rules.values()):
        _refuse("module_rules", rules, "a mapping of patterns and mappings", "use {} for no rules")
    wrong = [pattern for pattern in cast("Mapping[str, object]", rules) if not _is_pattern(pattern)]
    if wrong:
        _refuse("module_rules", rules, "regular expressions as keys", f"correct {wrong[0]!r}")
    for pattern, rule in cast("Mapping[str, Mapping[str, object]]", rules).items():
        for name in rule:
            if name not in _RULE_FIELDS:
                words = f"fields {', '.join(_RULE_FIELDS)}"
                _refuse(f"module_rules[{pattern!r}]", dict(rule), words, f"remove {name!r}")


def check_group(group: Mapping[str, Any]) -> None:
    """Check lr, betas, eps and weight_decay of one parameter group, and that it sets no field of ours: what a
    matrix does goes by its name.

    Raises:
        ValueError: field, value, legal range, what to do.
    """
    for key in group:
        field = _OF_OTHERS.get(key, key)
        if field in DEFAULTS:
            by_module = f', or by module in "module_rules": {{PATTERN: {{"{field}": ...}}}}'
            raise ValueError(
                f"a parameter group has {key!r}: {group[key]!r}, which HMT does not read there; legal in a "
                "group: lr, betas, eps, weight_decay. To do: remove it and set hmt.optimizer."
                f"{field} for all matrices{by_module if field in _RULE_FIELDS else ''}."
            )
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
