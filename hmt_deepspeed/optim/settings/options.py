"""Converts the fields of ``hmt.optimizer``, which `hmt_deepspeed.config` declares, to settings of matrices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from math import inf
from typing import Any, cast

from hmt_deepspeed.config import ModuleRule as RuleFields
from hmt_deepspeed.config import OptimizerConfig
from hmt_deepspeed.config.optimizer_conflicts import OWN_OF_METHOD
from hmt_deepspeed.optim.settings.assign import ModuleRule
from hmt_deepspeed.optim.settings.matrix import MatrixSettings
from hmt_deepspeed.rules import rule_of

__all__ = ["check_group", "complete_options", "matrix_settings", "module_rules"]

# Keys of GaLore's and APOLLO's parameter groups, and the fields that do the same.
_OF_OTHERS = {
    "update_proj_gap": "update_interval",
    "proj_type": "projection",
    "proj": "range_finder",
}


def complete_options(given: Mapping[str, object]) -> dict[str, Any]:
    """All fields of ``hmt.optimizer``: those given, the others' defaults; lists become tuples.

    Raises:
        TypeError, ValueError: as :meth:`OptimizerConfig.from_fields`.
    """
    return OptimizerConfig.from_fields(given).model_dump()


def matrix_settings(
    options: Mapping[str, object], written: Mapping[str, str] | None = None
) -> MatrixSettings | None:
    """Settings of the matrices from ``HMT.options`` or the fields of ``hmt.optimizer``.

    "auto" becomes None: the matrix decides. None where the method is that of dense parameters.
    ``written``: see :class:`MatrixSettings`.
    """

    plain = ("projection", "state_dtype")  # of which "auto" is a value like others

    def value(field: str) -> Any:
        given = options[field]
        return None if field not in plain and given == "auto" else given

    if rule_of(str(options["method"])).is_dense:
        return None
    values = {f.name: value(f.name) for f in fields(MatrixSettings) if f.name in options}
    return MatrixSettings(**values, written=written or {})


def module_rules(options: Mapping[str, object]) -> list[ModuleRule]:
    """``module_rules`` with every field that a rule leaves open taken from the others.

    A rule of another method starts from that method's defaults where fields mean something else
    for it: rank and scale.
    """
    rules = []
    given = cast("Mapping[str, Mapping[str, object]]", options["module_rules"])
    for pattern, rule in given.items():
        fields_given = {name: value for name, value in rule.items() if value is not None}
        merged = {**options, **fields_given}
        if merged["method"] != options["method"]:
            own = {name: OptimizerConfig.model_fields[name].default for name in OWN_OF_METHOD}
            merged.update({k: v for k, v in own.items() if k not in fields_given})
        written = {name: f"module_rules[{pattern!r}].{name}" for name in fields_given}
        settings, lr_scale = (
            matrix_settings(merged, written),
            cast("float | None", rule.get("lr_scale")),
        )
        rules.append(ModuleRule(pattern, settings, lr_scale, fields_given.keys() == {"lr_scale"}))
    return rules


def check_group(group: Mapping[str, Any]) -> None:
    """Check lr, betas, eps and weight_decay of one parameter group, and that it sets no field of ours: what a
    matrix does goes by its name.

    Raises:
        ValueError: field, value, legal range, what to do.
    """
    for key in group:
        field = _OF_OTHERS.get(key, key)
        if field in OptimizerConfig.model_fields:
            by_module = f', or by module in "module_rules": {{PATTERN: {{"{field}": ...}}}}'
            raise ValueError(
                f"a parameter group has {key!r}: {group[key]!r}, which HMT does not read there; legal in a "
                "group: lr, betas, eps, weight_decay. To do: remove it and set hmt.optimizer."
                f"{field} for all matrices{by_module if field in RuleFields.model_fields else ''}."
            )
    for field, advice in (("lr", "1e-3"), ("eps", "1e-8"), ("weight_decay", "0.0")):
        if not 0 <= group[field] < inf:
            raise ValueError(f"{field} is {group[field]!r}; legal: >= 0. To do: {advice} is usual.")
    betas = group["betas"]
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ValueError(
            f"betas is {betas!r}; legal: two numbers, 0 <= beta < 1. To do: (0.9, 0.999) is usual."
        )
