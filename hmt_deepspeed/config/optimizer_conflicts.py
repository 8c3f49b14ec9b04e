"""Fields of `hmt.optimizer` that cannot be given together, or that nothing would read.

One table for the JSON's block and for `HMT()`; it knows what was written down, not the defaults.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple, cast

from hmt_deepspeed.rules import DEFAULT, DENSE, RULES, Rule, methods, rule_of

__all__ = ["OWN_OF_METHOD", "Conflict", "Given", "conflicts_of"]

Given = Mapping[str, object]  # the fields that were written down, not the defaults


class Conflict(NamedTuple):
    """key, value: the field to blame. depends_on: the others, whose values make the conflict.

    unread: the field is only ignored, and legal where one of the module rules reads it.
    """

    key: str
    value: object
    depends_on: tuple[str, ...]
    advice: str
    unread: bool = False


class _Pair(NamedTuple):
    """Conflicts of `keys`, each where it is given and `applies`; see :class:`Conflict`."""

    keys: tuple[str, ...]
    depends_on: str
    applies: Callable[[Given], bool]
    advice: str
    unread: bool = False


def _is(key: str, value: object) -> Callable[[Given], bool]:
    return lambda given: given.get(key) == value and type(given.get(key)) is type(value)


def _all(*conditions: Callable[[Given], bool]) -> Callable[[Given], bool]:
    return lambda given: all(condition(given) for condition in conditions)


# What a module rule of another method does not take from the others: it means something else to it.
OWN_OF_METHOD = ("rank", "scale")
_NOT_FOR_RULES = ("method", "module_rules", "target_modules")
# Values that ask for nothing: legal where the field means nothing.
_ASKS_NOTHING = {"second_moment": "full", "full_rank_budget": 0.0}
# What contradicts the field it depends on within one matrix, so that a module rule may bring it about.
_OF_A_MATRIX = ("projection", "range_finder", "second_moment", "residual", "probes")

# Of methods that read both fields; `{}` in an advice is the value of the field it depends on.
_PAIRS = (
    _Pair(
        (
            "rank_candidates",
            "energy_threshold",
            "energy_estimate",
            "rank_budget",
            "full_rank_budget",
        ),
        "rank",
        lambda given: isinstance(given.get("rank"), int | float),
        'With "rank": {} it is ignored: remove it or set "rank": "auto".',
        unread=True,
    ),
    _Pair(
        ("range_finder",),
        "rank",
        lambda given: (
            given["range_finder"] == "random" and not isinstance(given.get("rank"), int | float)
        ),
        'A random basis has no spectrum to choose a rank by: set "rank" to a number.',
    ),
    _Pair(
        ("full_rank_budget",),
        "rank_budget",
        lambda given: (
            bool(given["full_rank_budget"]) and given.get("rank_budget", "auto") is not None
        ),
        'Within a "rank_budget", which there is by default, no matrix falls back to full rank: set '
        '"rank_budget": null, or remove it.',
        unread=True,
    ),
    _Pair(
        ("full_rank_budget",),
        "projection",
        lambda given: given.get("projection") == "two_sided" and bool(given["full_rank_budget"]),
        'A core has no full rank to fall back to: remove it or set "projection": "right".',
        unread=True,
    ),
    _Pair(
        ("second_moment",),
        "projection",
        _all(_is("second_moment", "factored"), _is("projection", "two_sided")),
        'A core is small already and is not factored: set "second_moment": "full".',
    ),
    _Pair(
        ("share_basis",),
        "projection",
        lambda given: given["share_basis"] is True and given.get("projection", "right") != "right",
        'A shared basis is one of the input: set "projection": "right".',
    ),
    _Pair(
        ("share_basis",),
        "projected_backward",
        _all(_is("share_basis", True), _is("projected_backward", False)),
        'Who reads the same input shows only in a projected backward: set that to "auto".',
    ),
    _Pair(
        ("share_basis",),
        "residual",
        _all(_is("share_basis", True), _is("residual", "full")),
        'No projected backward shows who shares: set "residual": "probe".',
    ),
    _Pair(
        ("share_basis",),
        "range_finder",
        _all(_is("share_basis", True), _is("range_finder", "random")),
        "Random bases take no storage to be saved: set it to false.",
    ),
    _Pair(
        ("weight_dtype",),
        "projected_backward",
        _all(_is("weight_dtype", "int8"), _is("projected_backward", False)),
        'Codes are decoded in the projected linears: set "auto", or "weight_dtype": "auto".',
    ),
    _Pair(
        ("weight_dtype",),
        "residual",
        _all(_is("weight_dtype", "int8"), _is("residual", "full")),
        "The full residual has no projected linears, whose forward would decode: use probe.",
        unread=True,
    ),
    _Pair(
        ("projected_backward",),
        "residual",
        _all(_is("residual", "full"), _is("projected_backward", True)),
        '"residual": "full" needs the whole gradient, which it never forms: set "auto".',
    ),
    _Pair(
        ("residual",),
        "projection",
        _all(_is("residual", "full"), _is("projection", "two_sided")),
        'The core of "projection": "two_sided" has the exact residual inside its span already: set "probe" or "none".',
    ),
    _Pair(
        ("probes",),
        "residual",
        _is("residual", "full"),
        'With "residual": "full" there are no probes: remove it or set "probe".',
        unread=True,
    ),
    _Pair(
        ("energy_estimate",),
        "probes",
        lambda given: (
            given["energy_estimate"] == "out_of_sample"
            and given.get("probes") == 0
            and given.get("residual") != "full"
        ),
        'Without probes nothing shows what a basis captures of later gradients: set it to "in_sample".',
        unread=True,
    ),
    _Pair(
        ("energy_estimate",),
        "update_interval",
        _all(_is("energy_estimate", "out_of_sample"), _is("update_interval", 1)),
        'With a basis for every step there is no later gradient to look at: set it to "in_sample", or '
        '"update_interval" to 2 or more.',
    ),
    _Pair(
        ("max_full_gradient_bytes",),
        "range_finder",
        lambda given: (
            given["max_full_gradient_bytes"] != "auto" and given.get("range_finder") == "random"
        ),
        'A random basis needs no gradient: remove it or set "auto".',
        unread=True,
    ),
    _Pair(
        ("probes",),
        "residual",
        lambda given: given["probes"] == 0 and given.get("residual", "probe") == "probe",
        '"residual": "probe" needs at least one probe column: set "auto" or an integer >= 1, '
        'or set "residual": "none".',
    ),
)


def conflicts_of(given: Given) -> list[Conflict]:
    """Explicitly given fields of `hmt.optimizer`, those of its module rules included, that cannot be honoured.

    What nothing reads under the global method is legal where a module rule takes it over and reads it.
    """
    method = _method_of(given, DEFAULT)
    rules = cast("Mapping[str, Given]", given.get("module_rules", {}))
    written = {
        pattern: {key: value for key, value in rule.items() if value is not None}
        for pattern, rule in rules.items()
    }
    read = {key for rule in written.values() for key in _read_by(rule, given, method)}
    found = [c for c in _conflicts(given, method) if not (c.unread and c.key in read)]
    for pattern, rule in written.items():
        where = f"module_rules[{pattern!r}]"
        if not rule:
            advice = 'It sets nothing: give these modules a "method", or remove it.'
            found.append(Conflict(where, dict(rules[pattern]), (), advice))
        found += _conflicts_of_rule(where, rule, given, method)
    return found


def _method_of(given: Given, otherwise: str) -> str:
    """Of fields that may not have been validated yet: an unknown method is reported as such, and nothing else is."""
    method = given.get("method", otherwise)
    return str(method) if method in methods() else DEFAULT


def _taken_over(rule: Given, given: Given, method: str) -> dict[str, object]:
    """Global fields that a module rule takes over."""
    own = _method_of(rule, method)
    left = {*_NOT_FOR_RULES, *rule, *(OWN_OF_METHOD if own != method else ())}
    return {key: value for key, value in given.items() if key not in left}


def _read_by(rule: Given, given: Given, method: str) -> set[str]:
    """Global fields that a module rule takes over and reads."""
    taken = _taken_over(rule, given, method)
    own = _method_of(rule, method)
    return taken.keys() - {c.key for c in _conflicts({**taken, **rule}, own)}


def _conflicts_of_rule(where: str, rule: Given, given: Given, method: str) -> Iterator[Conflict]:
    """`where`: the rule's key. `method`: of a rule that names none."""
    own = _method_of(rule, method)
    for conflict in _conflicts({**_taken_over(rule, given, method), **rule}, own):
        other = conflict.depends_on[0]
        of_a_matrix = conflict.key in _OF_A_MATRIX or other == "method"
        if conflict.key in rule and (conflict.unread or of_a_matrix):
            yield conflict._replace(key=f"{where}.{conflict.key}")
        elif other in rule and not conflict.unread and conflict.key in _OF_A_MATRIX:
            key, depends_on = f"{where}.{other}", (conflict.key, "module_rules")
            yield Conflict(key, rule[other], depends_on, conflict.advice)


def _conflicts(given: Given, method: str) -> list[Conflict]:
    """Of the fields of one set of matrices."""
    rule = rule_of(method, given)
    return _method_conflicts(given, rule) + [
        Conflict(
            key,
            given[key],
            (conflict.depends_on, "module_rules") if conflict.unread else (conflict.depends_on,),
            conflict.advice.replace("{}", str(given.get(conflict.depends_on))),
            conflict.unread,
        )
        for conflict in _PAIRS
        for key in conflict.keys
        if rule.reads_field(key) and rule.reads_field(conflict.depends_on)
        if key in given and conflict.applies(given)
    ]


def _of_other_methods(given: Given, rule: Rule) -> dict[str, str]:
    """Fields whose values name a rule of some method, but none of this one; by them that method."""
    own = {pair for other in RULES.values() if other.method == rule.method for pair in other.where}
    return {
        key: other.method
        for other in RULES.values()
        for key, value in other.where
        if (key, value) not in own and given.get(key) == value
        if rule.reads_field(key) or key == "rank"
    }


def _reader(key: str, asked: str) -> str:
    """A method that reads the field, the default one if that does; or another value of the field that asks for a rule."""
    if asked != "method":
        return f'another "{asked}".'
    reading = (m for m in (DEFAULT, *methods()) if rule_of(m).reads_field(key))
    return f'"{next(reading)}" there.'


def _method_conflicts(given: Given, rule: Rule) -> list[Conflict]:
    """What the method does not read, and the values that its rule cannot have."""

    ruled, method = bool(given.get("module_rules")), rule.method
    asked, value = next(iter(rule.asked_by.items()))

    def conflict(key: str, advice: str) -> Conflict:
        return Conflict(key, given[key], (asked,), advice)

    of_others = _of_other_methods(given, rule)
    nothing = f'It means nothing with "{asked}": "{value}": remove it or set '
    own = "it in the rules of another method, which do not take it over."
    conflicts = [
        Conflict(
            key,
            given[key],
            (asked, "module_rules"),
            nothing + (own if ruled and key in OWN_OF_METHOD else _reader(key, asked)),
            unread=True,
        )
        for key in given
        if not rule.reads_field(key) and key not in of_others
        if key not in _ASKS_NOTHING or given[key] != _ASKS_NOTHING[key]
    ]
    if (
        rule.reads_field("projected_backward")
        and rule.gradient == "whole"
        and given.get("projected_backward") is True
    ):
        advice = f'"{value}" takes whole gradients, which a projected backward never forms: '
        conflicts.append(conflict("projected_backward", advice + 'set "auto".'))
    for key, other in of_others.items():
        advice = f'"{method}" has no rule for it: remove it, or set "method": "{other}".'
        if key == "rank" and not rule.is_dense:
            advice += f' AdamW of whole matrices is "method": "{DENSE}".'
        conflicts.append(Conflict(key, given[key], ("method",), advice))
    fixed = rule.fixed_rank
    if fixed is not None and given.get("rank") not in (None, "auto", "full", fixed):
        others = (rule_of(name) for name in methods())
        free = [f'"{r.method}"' for r in others if r.reads_field("rank") and not r.fixed_rank]
        advice = f'"{method}" is rank {fixed}: remove it, or set "method" to {" or ".join(free)}.'
        conflicts.append(conflict("rank", advice))
    return conflicts
