"""Fields that cannot be given together: in each pair one would be ignored. The table is of `hmt.optimizer`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

__all__ = [
    "Conflict",
    "conflict_problems",
    "conflicts_of",
    "conflicts_of_rule",
    "snapshot_conflicts",
]

Given = Mapping[str, object]  # the fields that were written down, not the defaults


class Conflict(NamedTuple):
    """key, value: the field to blame. depends_on: the others, whose values make the conflict."""

    key: str
    value: object
    depends_on: tuple[str, ...]
    advice: str


class _Rule(NamedTuple):
    """Conflicts of `keys`, each where it is given and `applies`."""

    keys: tuple[str, ...]
    depends_on: str
    applies: Callable[[Given], bool]
    advice: str


def _is(key: str, value: object) -> Callable[[Given], bool]:
    return lambda given: given.get(key) == value and type(given.get(key)) is type(value)


def _all(*conditions: Callable[[Given], bool]) -> Callable[[Given], bool]:
    return lambda given: all(condition(given) for condition in conditions)


_WITH_ANY_METHOD = frozenset({"method", "master_weights", "state_dtype", "module_rules", "seed"})
_WITH_APOLLO = _WITH_ANY_METHOD | {
    "rank",
    "update_interval",
    "scale",
    "scale_type",
    "norm_growth_limit",
    "projected_backward",
    "target_modules",
    "exclude_modules",
}

# Rules of the low-rank methods; `{}` in an advice is the value of the field it depends on.
_SCALE_TYPE = 'It is APOLLO\'s: remove it or set "method": "apollo" there.'
_RULES = (
    _Rule(("scale_type",), "method", lambda given: given["scale_type"] != "auto", _SCALE_TYPE),
    _Rule(
        ("rank_candidates", "energy_threshold", "rank_budget", "full_rank_budget"),
        "rank",
        lambda given: isinstance(given.get("rank"), int),
        'With "rank": {} it is ignored: remove it or set "rank": "auto".',
    ),
    _Rule(
        ("range_finder",),
        "rank",
        lambda given: given["range_finder"] == "random" and not isinstance(given.get("rank"), int),
        'A random basis has no spectrum to choose a rank by: set "rank" to a number.',
    ),
    _Rule(
        ("energy_threshold", "full_rank_budget"),
        "rank_budget",
        lambda given: given.get("rank_budget") is not None,
        'With a "rank_budget" it is ignored: remove it or set "rank_budget": null.',
    ),
    _Rule(
        ("full_rank_budget",),
        "projection",
        lambda given: given.get("projection") == "two_sided" and bool(given["full_rank_budget"]),
        'A core has no full rank to fall back to: remove it or set "projection": "right".',
    ),
    _Rule(
        ("second_moment",),
        "projection",
        _all(_is("second_moment", "factored"), _is("projection", "two_sided")),
        'A core is small already and is not factored: set "second_moment": "full".',
    ),
    _Rule(
        ("share_basis",),
        "projection",
        lambda given: given["share_basis"] is True and given.get("projection", "right") != "right",
        'A shared basis is one of the input: set "projection": "right".',
    ),
    _Rule(
        ("share_basis",),
        "projected_backward",
        _all(_is("share_basis", True), _is("projected_backward", False)),
        'Who reads the same input shows only in a projected backward: set that to "auto".',
    ),
    _Rule(
        ("share_basis",),
        "residual",
        _all(_is("share_basis", True), _is("residual", "full")),
        'No projected backward shows who shares: set "residual": "probe".',
    ),
    _Rule(
        ("share_basis",),
        "range_finder",
        _all(_is("share_basis", True), _is("range_finder", "random")),
        "Random bases take no storage to be saved: set it to false.",
    ),
    _Rule(
        ("weight_dtype",),
        "projected_backward",
        _all(_is("weight_dtype", "int8"), _is("projected_backward", False)),
        'Codes are decoded in the projected linears: set "auto", or "weight_dtype": "auto".',
    ),
    _Rule(
        ("weight_dtype",),
        "residual",
        _all(_is("weight_dtype", "int8"), _is("residual", "full")),
        "The full residual has no projected linears, whose forward would decode: use probe.",
    ),
    _Rule(
        ("projected_backward",),
        "residual",
        _all(_is("residual", "full"), _is("projected_backward", True)),
        '"residual": "full" needs the whole gradient, which it never forms: set "auto".',
    ),
    _Rule(
        ("residual",),
        "projection",
        _all(_is("residual", "full"), _is("projection", "two_sided")),
        'A core has the exact residual inside its span already: set "probe" or "none".',
    ),
    _Rule(
        ("probes",),
        "residual",
        _is("residual", "full"),
        'With "residual": "full" there are no probes: remove it or set "probe".',
    ),
    _Rule(
        ("residual_scale", "norm_growth_limit"),
        "residual",
        _is("residual", "none"),
        'With "residual": "none" it is ignored: remove it or set "residual": "probe".',
    ),
    _Rule(
        ("early_refresh",),
        "probes",
        _all(_is("early_refresh", True), _is("probes", 0)),
        "Without probes nothing shows that a basis captures less: set it to false.",
    ),
    _Rule(
        ("probes",),
        "residual",
        lambda given: given["probes"] == 0 and given.get("residual", "probe") == "probe",
        '"residual": "probe" needs at least one probe column: set "auto" or an integer >= 1, '
        'or set "residual": "none".',
    ),
)


def conflicts_of(given: Given) -> list[Conflict]:
    """Combinations of explicitly given `hmt.optimizer` fields in which one would be ignored."""
    method = given.get("method")
    if method in ("adamw", "apollo", "apollo_mini"):
        return _conflicts_of_method(str(method), given)
    return [
        Conflict(
            key,
            given[key],
            (rule.depends_on,),
            rule.advice.replace("{}", str(given.get(rule.depends_on))),
        )
        for rule in _RULES
        for key in rule.keys
        if key in given and rule.applies(given)
    ]


def conflicts_of_rule(given: Given, method: str) -> list[Conflict]:
    """Fields of a module rule that mean nothing to its method; `method`: of a rule that names none."""
    written = {key: value for key, value in given.items() if value is not None}
    own = str(written.get("method", method))
    if own != "lowrank_adamw":
        return _conflicts_of_method(own, written)
    key = "scale_type"
    return [Conflict(key, written[key], ("method",), _SCALE_TYPE)] if key in written else []


def _conflicts_of_method(method: str, given: Given) -> list[Conflict]:
    def conflict(key: str, advice: str) -> Conflict:
        return Conflict(key, given[key], ("method",), advice)

    legal = _WITH_ANY_METHOD if method == "adamw" else _WITH_APOLLO
    advice = f'It means nothing with "method": "{method}": remove it or set "lowrank_adamw" there.'
    conflicts = [conflict(key, advice) for key in given if key not in legal]
    if method != "adamw" and given.get("projected_backward") is True:
        advice = f'"{method}" scales whole gradients, which a projected backward never forms: '
        conflicts.append(conflict("projected_backward", advice + 'set "auto".'))
    if method == "apollo_mini" and given.get("rank") not in (None, "auto", 1):
        advice = '"apollo_mini" is rank 1: remove it, or set "method": "apollo".'
        conflicts.append(conflict("rank", advice))
    if method == "apollo_mini" and given.get("scale_type") == "channel":
        advice = '"apollo_mini" has one scale per tensor: remove it, or set "method": "apollo".'
        conflicts.append(conflict("scale_type", advice))
    return conflicts


def conflict_problems(
    section: object,
    prefix: str,
    known_bad: Mapping[str, str],
    find: Callable[[Given], list[Conflict]],
) -> dict[str, str]:
    """Conflicts of a raw section, leaving out those that rest on a field already reported.

    Args:
        section: as parsed. prefix: its full key. known_bad: problems by key. find: lists its conflicts.
    """
    if not isinstance(section, dict):
        return {}
    # the problem of an element (`target_modules[1]`, `policy.residual`) is its field's problem
    bad_fields = {
        re.split(r"[.\[]", key.removeprefix(f"{prefix}."))[0]
        for key in known_bad
        if key.startswith(f"{prefix}.")
    }
    given = {key: value for key, value in section.items() if key not in bad_fields}
    return {
        f"{prefix}.{conflict.key}": f"got {conflict.value!r}. {conflict.advice}"
        for conflict in find(given)
        if not bad_fields & set(conflict.depends_on)
    }


def snapshot_conflicts(given: Given) -> list[Conflict]:
    """Explicitly given `hmt.snapshot` fields without which, or with which alone, nothing is saved."""
    path, interval = given.get("path"), given.get("interval", 0)
    if path is not None and interval == 0:
        advice = 'Nothing would be saved: set "interval" to a number of steps, or remove it.'
        return [Conflict("path", path, ("interval",), advice)]
    if path is None and interval != 0:
        advice = 'It needs a folder: set "path", or remove it.'
        return [Conflict("interval", interval, ("path",), advice)]
    return []
