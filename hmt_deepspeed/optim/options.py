"""The fields of ``hmt.optimizer`` as plain values: legal ranges and published defaults."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from difflib import get_close_matches
from math import inf
from typing import Any, cast

from hmt_deepspeed.optim.settings import (
    APOLLO,
    APOLLO_MINI,
    DENSE,
    LOW_RANK,
    METHODS,
    SECOND_MOMENTS,
    MatrixSettings,
)
from hmt_deepspeed.optim.state import STATE_DTYPES

__all__ = ["check_group", "check_options", "complete_options", "matrix_settings", "module_rules"]

DEFAULT_NORM_GROWTH_LIMIT = 1.01  # Fira's and APOLLO's published value
_CHOICES: dict[str, tuple[object, ...]] = {
    "method": METHODS,
    "projected_backward": ("auto", True, False),
    "master_weights": ("fp32", "none"),
    "share_basis": (True, False),
    "refresh": ("staggered", "together"),
    "early_refresh": (True, False),
    "state_dtype": STATE_DTYPES,
    "second_moment": SECOND_MOMENTS,
    "weight_dtype": ("auto", "int8"),
}
_SCALE_TYPES = {APOLLO: ("auto", "channel", "tensor"), APOLLO_MINI: ("auto", "tensor")}
_RULE_FIELDS = ("method", "projection", "rank", "range_finder", "residual", "scale", "scale_type")
_RULE_FIELDS_OF = {
    LOW_RANK: ("method", "projection", "rank", "range_finder", "residual", "scale"),
    APOLLO: ("method", "rank", "scale", "scale_type"),
    APOLLO_MINI: ("method", "rank", "scale"),
    DENSE: ("method",),
}


DEFAULTS: dict[str, object] = {
    "method": LOW_RANK,
    "projection": "right",
    "rank": "auto",
    "rank_candidates": (32, 64, 128, 256),
    "energy_threshold": 0.95,
    "rank_budget": None,
    "full_rank_budget": 0.0,
    "update_interval": 200,
    "refresh": "staggered",
    "early_refresh": True,
    "range_finder": "randomized",
    "moment_transfer": "rotate",
    "residual": "probe",
    "probes": "auto",
    "residual_scale": "auto",
    "share_basis": False,
    "projected_backward": "auto",
    "scale": "auto",
    "scale_type": "auto",
    "norm_growth_limit": "auto",
    "max_full_gradient_bytes": "auto",
    "state_dtype": "fp32",
    "second_moment": "full",
    "master_weights": "fp32",
    "weight_dtype": "auto",
    "target_modules": None,
    "exclude_modules": ("embed", "lm_head", "lora_"),
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


def matrix_settings(options: Mapping[str, object]) -> MatrixSettings | None:
    """Settings of the matrices from ``HMT.options`` or the fields of ``hmt.optimizer``.

    "auto" becomes None where the matrix decides, else the published default. None for ``adamw``.

    Raises:
        ValueError: a value out of range.
    """

    def value(field: str) -> Any:
        given = options[field]
        if isinstance(given, str) and given == "auto" and field != "projection":
            return DEFAULT_NORM_GROWTH_LIMIT if field == "norm_growth_limit" else None
        return tuple(given) if isinstance(given, list) else given

    if options["method"] == DENSE:
        return None
    return MatrixSettings(**{field.name: value(field.name) for field in fields(MatrixSettings)})


def module_rules(options: Mapping[str, object]) -> list[tuple[str, MatrixSettings | None]]:
    """``module_rules`` with every field that a rule leaves open taken from the others.

    A rule of another method starts from that method's defaults where fields mean something else
    for it: rank, scale and its type.

    Raises:
        ValueError: a value out of range.
    """
    rules = []
    given = cast("Mapping[str, Mapping[str, object]]", options["module_rules"])
    for pattern, rule in given.items():
        fields_given = {name: value for name, value in rule.items() if value is not None}
        merged = {**options, **fields_given}
        if merged["method"] != options["method"]:
            own = {name: DEFAULTS[name] for name in ("rank", "scale", "scale_type")}
            merged.update({k: v for k, v in own.items() if k not in fields_given})
        rules.append((pattern, matrix_settings(merged)))
    return rules


def check_options(options: Mapping[str, object]) -> None:
    """Check the fields that are not :class:`MatrixSettings`' own, and what cannot go together.

    Raises:
        ValueError: field, value, legal range, what to do.
    """
    for field, choices in _CHOICES.items():
        if options[field] not in choices:
            _refuse(field, options[field], f"one of {choices}", "choose one of them")
    if options["weight_dtype"] == "int8":
        _check_int8_weights(options)
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
    share, fallback = options["rank_budget"], options["full_rank_budget"]
    if share is not None and not (_is_share(share) and share):
        _refuse("rank_budget", share, "None or a number above 0, at most 1", "None turns it off")
    if not _is_share(fallback):
        _refuse("full_rank_budget", fallback, "a number from 0 to 1", "0 turns it off")
    _check_module_rules(options["module_rules"], str(options["method"]))
    _check_together(options)


def _is_share(value: object) -> bool:
    real = isinstance(value, int | float) and not isinstance(value, bool)
    return real and 0 <= cast(float, value) <= 1


def _check_module_rules(rules: object, method: str) -> None:
    """``method``: of the rules that name none."""
    if not isinstance(rules, Mapping) or not all(isinstance(r, Mapping) for r in rules.values()):
        _refuse("module_rules", rules, "a mapping of patterns and mappings", "use {} for no rules")
    for pattern, rule in cast("Mapping[str, Mapping[str, object]]", rules).items():
        where, own = f"module_rules[{pattern!r}]", str(rule.get("method") or method)
        fields_given = [name for name, value in rule.items() if value is not None]
        for names, legal, whose in (
            (rule, _RULE_FIELDS, ""),
            (fields_given, _RULE_FIELDS_OF.get(own, _RULE_FIELDS), f" with method {own!r}"),
        ):
            for name in names:
                if name not in legal:
                    words = f"fields {', '.join(legal)}{whose}"
                    _refuse(where, dict(rule), words, f"remove {name!r}")
        if own == APOLLO_MINI and rule.get("rank") not in (None, "auto", 1):
            _refuse(where, dict(rule), f'rank "auto" or 1 with method {own!r}', "remove 'rank'")


def _check_together(options: Mapping[str, object]) -> None:
    """Refuse combinations in which one field contradicts another; the first is to blame."""
    method, residual = options["method"], options["residual"]
    low_rank = method == LOW_RANK
    whole = method in (APOLLO, APOLLO_MINI) or (low_rank and residual == "full")
    if whole and options["projected_backward"] is True:
        why = f"method {method!r}" if not low_rank else "residual 'full'"
        _refuse_with("projected_backward", True, why, '"auto" or False', "it needs whole gradients")
    if not low_rank and options["second_moment"] == "factored":
        advice = f"set 'full', or the method to {LOW_RANK!r}"
        _refuse_with("second_moment", "factored", f"method {method!r}", "'full'", advice)
    kinds = _SCALE_TYPES.get(str(method), ("auto",))
    if options["scale_type"] not in kinds:
        words, advice = " or ".join(map(repr, kinds)), f"set 'auto', or the method to {APOLLO!r}"
        _refuse_with("scale_type", options["scale_type"], f"method {method!r}", words, advice)
    if method == APOLLO_MINI and options["rank"] not in ("auto", 1):
        advice = 'set the method to "apollo" for other ranks'
        _refuse_with("rank", options["rank"], f"method {method!r}", '"auto" or 1', advice)
    _check_budgets(options)
    if not options["share_basis"]:
        return
    clashes = {
        "method": (LOW_RANK,),
        "projection": ("right",),
        "projected_backward": ("auto", True),
        "residual": ("probe", "none"),
        "range_finder": ("randomized", "subspace", "svd"),
    }
    for field, legal in clashes.items():
        if options[field] not in legal:
            advice = "share_basis False, or change the other"
            words = f"{field} one of {legal}"
            _refuse_with("share_basis", True, f"{field} {options[field]!r}", words, advice)


def _check_budgets(options: Mapping[str, object]) -> None:
    given = {"rank_budget": options["rank_budget"], "full_rank_budget": options["full_rank_budget"]}
    for field, value in given.items():
        if not value:
            continue
        if options["method"] != LOW_RANK:
            legal = f"a budget with method {LOW_RANK!r}"
            _refuse_with(field, value, f"method {options['method']!r}", legal, "remove one of them")
        if options["rank"] != "auto":
            legal, advice = 'a budget with rank "auto"', "remove one of them"
            _refuse_with(field, value, f"rank {options['rank']!r}", legal, advice)
    if all(given.values()):
        other = f"rank_budget {given['rank_budget']!r}"
        legal, advice = "one of the two", "set full_rank_budget to 0"
        _refuse_with("full_rank_budget", given["full_rank_budget"], other, legal, advice)
    if given["full_rank_budget"] and options["projection"] == "two_sided":
        legal, advice = "a fallback of one-sided projections", "remove one of them"
        value = given["full_rank_budget"]
        _refuse_with("full_rank_budget", value, "projection 'two_sided'", legal, advice)


def _refuse_with(field: str, value: object, other: str, legal: str, advice: str) -> None:
    raise ValueError(
        f"hmt.optimizer.{field} is {value!r} with {other}; legal: {legal}. To do: {advice}."
    )


def _check_int8_weights(options: Mapping[str, object]) -> None:
    """INT8 weights belong to linears whose forward is patched: those with a projected backward."""
    legal: dict[str, tuple[object, ...]] = {
        "method": (LOW_RANK,),
        "projected_backward": ("auto", True),
        "residual": ("probe", "none"),
    }
    for field, choices in legal.items():
        if options[field] not in choices:
            words = " or ".join(map(repr, choices)) + " with weight_dtype 'int8'"
            advice = 'choose one of them, or set weight_dtype to "auto"'
            _refuse(field, options[field], words, advice)


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
