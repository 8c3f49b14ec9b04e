"""The "hmt" block of a DeepSpeed JSON: strict, frozen models, every field bounded and documented.

`HMTConfig.from_block` turns the parsed block into a model, or raises one `ValueError` that lists
every problem by its full key. `read_json_config` reads the file the block came from.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails

BLOCK_NAME = "hmt"
_MAX_SEED = 2**63 - 1  # the largest seed a torch.Generator takes as a signed 64-bit integer

# ----------------------------------------------------------------------------------------------
# field types
# ----------------------------------------------------------------------------------------------

Auto = Literal["auto"]
PositiveInt = Annotated[int, Field(ge=1)]
PositiveFloat = Annotated[float, Field(gt=0)]


def _list_to_tuple(value: object) -> object:
    """A JSON array is a list; a frozen model holds a tuple."""
    return tuple(value) if isinstance(value, list) else value


def _strictly_increasing(ranks: tuple[int, ...]) -> tuple[int, ...]:
    for smaller, larger in pairwise(ranks):
        if larger <= smaller:
            raise ValueError(f"{larger} follows {smaller}")
    return ranks


def _compiles(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"not a regular expression: {error}") from None
    return pattern


Regex = Annotated[str, Field(min_length=1), AfterValidator(_compiles)]
RegexList = Annotated[tuple[Regex, ...], BeforeValidator(_list_to_tuple)]
NonEmptyRegexList = Annotated[
    tuple[Regex, ...], Field(min_length=1), BeforeValidator(_list_to_tuple)
]
RankList = Annotated[
    tuple[PositiveInt, ...],
    Field(min_length=1),
    BeforeValidator(_list_to_tuple),
    AfterValidator(_strictly_increasing),
]


class _StrictModel(BaseModel):
    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False, validate_default=True
    )


# ----------------------------------------------------------------------------------------------
# the models
# ----------------------------------------------------------------------------------------------


Method = Literal["lowrank_adamw", "apollo", "apollo_mini", "adamw"]
Projection = Literal["right", "left", "auto", "two_sided"]
RangeFinder = Literal["randomized", "subspace", "svd", "random"]
Residual = Literal["none", "probe", "full"]
StateDtype = Literal["fp32", "bf16", "int8"]
MomentTransfer = Literal["rotate", "keep", "reset"]


class ModuleRule(_StrictModel):
    """A value of `hmt.optimizer.module_rules`: fields left out are taken from `hmt.optimizer`."""

    method: Method | None = None
    projection: Projection | None = None
    rank: Auto | PositiveInt | None = None
    range_finder: RangeFinder | None = None
    residual: Residual | None = None
    scale: Auto | PositiveFloat | None = None


def _rules_compile(rules: dict[str, ModuleRule]) -> dict[str, ModuleRule]:
    for pattern in rules:
        _compiles(pattern)
    return rules


class OptimizerConfig(_StrictModel):
    """`hmt.optimizer`: what the optimizer does with each linear's gradient.

    lr, betas, eps and weight_decay stay in DeepSpeed's own `optimizer.params`.
    """

    method: Method = Field(
        default="lowrank_adamw",
        description="Update rule of the matrices: AdamW in a low-rank space, APOLLO (a scale per "
        "channel, or one per matrix: Mini) on whole gradients, or plain AdamW.",
    )
    projection: Projection = Field(
        default="right",
        description="Side of the gradient that is projected; auto is GaLore's rule, the smaller side; "
        "two_sided is the HMT paper's r x r core.",
    )
    rank: Auto | PositiveInt = Field(
        default="auto",
        description="Rank of each basis: a fixed number, or chosen per matrix from the candidates.",
    )
    rank_candidates: RankList = Field(
        default=(32, 64, 128, 256),
        description='Ranks that "rank": "auto" chooses from; those above a matrix\'s smaller side '
        "are lowered to it.",
        json_schema_extra={"legal": "a non-empty, strictly increasing list of integers >= 1"},
    )
    energy_threshold: float = Field(
        default=0.95,
        gt=0,
        le=1,
        description='"rank": "auto" takes the smallest candidate that captures this share of the '
        "gradient's squared Frobenius norm.",
    )
    rank_budget: Annotated[float, Field(gt=0, le=1)] | None = Field(
        default=None,
        description="Ranks share a budget of bytes, as a share of what AdamW's moments of the same "
        "matrices take, and are spent where they capture most energy; null: each matrix by its "
        "threshold.",
    )
    full_rank_budget: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="Bytes, as a share of AdamW's moments of all matrices, that matrices may take for "
        "full-rank AdamW when no candidate reaches the threshold.",
    )
    update_interval: int = Field(
        default=200,
        ge=1,
        description="Optimizer steps between two basis refreshes of one matrix.",
    )
    early_refresh: bool = Field(
        default=True,
        description="Refresh a basis before its time when the energy it captures falls.",
    )
    range_finder: RangeFinder = Field(
        default="randomized",
        description="How a basis is found: randomised subspace iteration, one warm-started power step, "
        "a full SVD, or random from a seed, which needs no gradient and stores nothing.",
    )
    moment_transfer: MomentTransfer = Field(
        default="rotate",
        description="What becomes of the moments when a basis changes: rotated into it, kept as they "
        "are, or zeroed.",
    )
    residual: Residual = Field(
        default="probe",
        description="What becomes of the gradient outside the basis: dropped, applied along random "
        "probe columns without states, or applied in full (Fira), which needs the whole gradient.",
    )
    share_basis: bool = Field(
        default=False,
        description="One basis for the linears that read the same input, taken from their stacked "
        "gradients.",
    )
    probes: Auto | Annotated[int, Field(ge=0)] = Field(
        default="auto",
        description='Probe columns per matrix; 0 only with "residual": "none".',
    )
    residual_scale: Auto | PositiveFloat = Field(
        default="auto",
        description="Factor on the probe residual.",
    )
    projected_backward: Auto | bool = Field(
        default="auto",
        description="Backward forms the projected gradient without the full one: wherever it can, "
        "everywhere or it is an error (true), or nowhere (false).",
    )
    scale: Auto | PositiveFloat = Field(
        default="auto",
        description='Factor on the update; "auto" is each method\'s published value: 0.25 (GaLore), '
        "1 (APOLLO, under the root), 128 (Mini).",
    )
    norm_growth_limit: Auto | Annotated[float, Field(ge=1)] | None = Field(
        default="auto",
        description="The residual's norm may grow by at most this factor from step to step; "
        '"auto" is 1.01, Fira\'s published value; null turns the limit off.',
    )
    max_full_gradient_bytes: Auto | PositiveInt = Field(
        default="auto",
        description="Bytes of full gradients alive at once while bases are refreshed.",
    )
    state_dtype: StateDtype = Field(
        default="fp32",
        description="Storage of the moments: fp32, bf16 with stochastic rounding, or 8 bits in blocks "
        "of 256; tensors below 4096 elements stay in fp32.",
    )
    master_weights: Literal["fp32", "none"] = Field(
        default="fp32",
        description="fp32 master copy of 16-bit weights, or none: updates are then written to the "
        "16-bit weights with stochastic rounding.",
    )
    target_modules: NonEmptyRegexList | None = Field(
        default=None,
        description="Regular expressions searched in a parameter's name; the matches get the "
        "low-rank rule. null: every linear.",
        json_schema_extra={"legal": "null or a non-empty list of non-empty regular expressions"},
    )
    exclude_modules: RegexList = Field(
        default=("embed", "lm_head"),
        description="Regular expressions searched in a parameter's name; the matches stay on plain "
        "AdamW, also where target_modules matches.",
        json_schema_extra={"legal": "a list of non-empty regular expressions"},
    )
    module_rules: dict[Annotated[str, Field(min_length=1)], ModuleRule] = Field(
        default={},
        description="Rules of their own for modules, by regular expression: embeddings and head too. "
        "The first match decides, before every other pattern.",
        json_schema_extra={"legal": "an object of regular expressions and objects"},
    )
    seed: int = Field(
        default=0,
        ge=0,
        le=_MAX_SEED,
        description="Seed of the random bases and of the probe columns.",
    )

    @model_validator(mode="after")
    def _refuse_conflicts(self) -> OptimizerConfig:
        conflicts = _conflicts({key: getattr(self, key) for key in self.model_fields_set})
        if conflicts:
            raise ValueError(" ".join(f"{c.key}: {c.advice}" for c in conflicts))
        return self


class HMTConfig(_StrictModel):
    """The whole "hmt" block."""

    optimizer: OptimizerConfig = Field(
        default_factory=OptimizerConfig, description="The optimizer and its projected backward."
    )

    @classmethod
    def from_block(cls, block: object) -> HMTConfig:
        """Validate the parsed value of the DeepSpeed config's "hmt" key.

        Raises:
            ValueError: one message with a line for every problem: the full key, the value given,
                what is legal and what to do.
        """
        if not isinstance(block, dict):
            raise ValueError(
                f'The "{BLOCK_NAME}" key of the DeepSpeed config: got {block!r}. Legal: an object. '
                f'Write "{BLOCK_NAME}": {{}} to use every default.'
            )
        try:
            return cls.model_validate(block)
        except ValidationError as error:
            problems = _field_problems(error)
            problems |= _conflict_problems(block.get("optimizer"), known_bad=problems)
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        lines = [f"  - {key}: {text}" for key, text in problems.items()]
        raise ValueError(
            f'The "{BLOCK_NAME}" block of the DeepSpeed config has {count}:\n' + "\n".join(lines)
        )


# ----------------------------------------------------------------------------------------------
# fields that cannot be given together
# ----------------------------------------------------------------------------------------------

_KEYS_OF_PLAIN_ADAMW = frozenset(
    {"method", "master_weights", "state_dtype", "module_rules", "seed"}
)
_KEYS_OF_APOLLO = _KEYS_OF_PLAIN_ADAMW | {
    "rank",
    "update_interval",
    "scale",
    "norm_growth_limit",
    "projected_backward",
    "target_modules",
    "exclude_modules",
}
_KEYS_OF_FREE_RANK = ("rank_candidates", "energy_threshold", "rank_budget", "full_rank_budget")


class _Conflict(NamedTuple):
    key: str  # the field to blame
    depends_on: str  # the other field whose value makes the conflict
    advice: str


def _conflicts(given: Mapping[str, object]) -> list[_Conflict]:
    """Combinations of explicitly given `hmt.optimizer` fields in which one would be ignored."""
    method = given.get("method")
    if method in ("adamw", "apollo", "apollo_mini"):
        advice = (
            f'It means nothing with "method": "{method}": remove it or set "lowrank_adamw" there.'
        )
        legal = _KEYS_OF_PLAIN_ADAMW if method == "adamw" else _KEYS_OF_APOLLO
        conflicts = [
            _Conflict(key, "method", advice)
            for key in OptimizerConfig.model_fields
            if key in given and key not in legal
        ]
        if method != "adamw" and given.get("projected_backward") is True:
            advice = f'"{method}" scales whole gradients, which a projected backward never forms: '
            conflicts.append(_Conflict("projected_backward", "method", advice + 'set "auto".'))
        if method == "apollo_mini" and given.get("rank") not in (None, "auto", 1):
            advice = '"apollo_mini" is rank 1: remove it, or set "method": "apollo".'
            conflicts.append(_Conflict("rank", "method", advice))
        return conflicts
    conflicts = []
    if isinstance(given.get("rank"), int):
        advice = f'With "rank": {given["rank"]} it is ignored: remove it or set "rank": "auto".'
        conflicts += [_Conflict(key, "rank", advice) for key in _KEYS_OF_FREE_RANK if key in given]
    elif given.get("range_finder") == "random":
        advice = "A random basis has no spectrum to choose a rank by: give a fixed rank."
        conflicts.append(_Conflict("range_finder", "rank", advice))
    if given.get("rank_budget") is not None:
        advice = 'With a "rank_budget" it is ignored: remove one of them.'
        conflicts += [
            _Conflict(key, "rank_budget", advice)
            for key in ("energy_threshold", "full_rank_budget")
            if key in given
        ]
    if given.get("share_basis") is True:
        if given.get("projection", "right") != "right":
            advice = 'A shared basis is one of the input: set "projection": "right".'
            conflicts.append(_Conflict("share_basis", "projection", advice))
        if given.get("projected_backward") is False:
            advice = "Who reads the same input shows only in the projected backward: turn it on."
            conflicts.append(_Conflict("share_basis", "projected_backward", advice))
        if given.get("residual") == "full":
            advice = (
                "The full residual has no projected backward, which shows who shares: use probe."
            )
            conflicts.append(_Conflict("share_basis", "residual", advice))
        if given.get("range_finder") == "random":
            advice = "Random bases cost no storage that sharing would save: remove one of them."
            conflicts.append(_Conflict("share_basis", "range_finder", advice))
    if given.get("residual") == "full":
        if given.get("projected_backward") is True:
            advice = (
                '"residual": "full" needs the whole gradient, which it never forms: set "auto".'
            )
            conflicts.append(_Conflict("projected_backward", "residual", advice))
        if given.get("projection") == "two_sided":
            advice = 'A core has the exact residual inside its span already: set "probe" or "none".'
            conflicts.append(_Conflict("residual", "projection", advice))
        if "probes" in given:
            advice = 'With "residual": "full" there are no probes: remove it or set "probe".'
            conflicts.append(_Conflict("probes", "residual", advice))
    if given.get("residual") == "none":
        advice = 'With "residual": "none" it is ignored: remove it or set "residual": "probe".'
        conflicts += [
            _Conflict(key, "residual", advice)
            for key in ("residual_scale", "norm_growth_limit")
            if key in given
        ]
    elif given.get("probes") == 0:
        advice = (
            '"residual": "probe" needs at least one probe column: set "auto" or an integer >= 1, '
            'or set "residual": "none".'
        )
        conflicts.append(_Conflict("probes", "residual", advice))
    return conflicts


def _conflict_problems(optimizer_block: object, known_bad: Mapping[str, str]) -> dict[str, str]:
    """Conflicts of a raw block, leaving out those that rest on a field already reported."""
    if not isinstance(optimizer_block, dict):
        return {}
    prefix = f"{BLOCK_NAME}.optimizer."
    # the problem of an element (`target_modules[1]`) is its field's problem
    bad_fields = {key.removeprefix(prefix).partition("[")[0] for key in known_bad}
    given = {key: value for key, value in optimizer_block.items() if key not in bad_fields}
    return {
        prefix + conflict.key: f"got {given[conflict.key]!r}. {conflict.advice}"
        for conflict in _conflicts(given)
        if conflict.depends_on not in bad_fields
    }


# ----------------------------------------------------------------------------------------------
# what is legal, and what to say where it is not
# ----------------------------------------------------------------------------------------------


def describe_fields() -> list[tuple[str, str, str, str]]:
    """Rows (key, legal values, default as JSON, description) of every field of the block."""
    return [
        (path, field["legal"], json.dumps(field["default"]), field["description"])
        for path, field in _field_table().items()
    ]


def _field_table() -> dict[str, dict[str, Any]]:
    """Every leaf field by its full key: its JSON schema, with the legal values in words."""
    return dict(_walk_fields(HMTConfig, BLOCK_NAME))


def _walk_fields(model: type[BaseModel], path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    properties = model.model_json_schema()["properties"]
    for name, field in model.model_fields.items():
        nested = _nested_model(field.annotation)
        if nested is not None:
            yield from _walk_fields(nested, f"{path}.{name}")
        else:
            schema = properties[name]
            yield f"{path}.{name}", {**schema, "legal": _legal_values(schema)}


def _nested_model(annotation: object) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return None


def _legal_values(schema: Mapping[str, Any]) -> str:
    """A JSON schema in words, such as `"auto" or an integer >= 1`."""
    if "legal" in schema:
        return schema["legal"]
    *first, last = _alternatives(schema)
    return f"{', '.join(first)} or {last}" if first else last


def _alternatives(schema: Mapping[str, Any]) -> list[str]:
    if "anyOf" in schema:
        return [text for choice in schema["anyOf"] for text in _alternatives(choice)]
    if "const" in schema:
        return [json.dumps(schema["const"])]
    if "enum" in schema:
        return [json.dumps(value) for value in schema["enum"]]
    if schema["type"] == "boolean":
        return ["true", "false"]
    if schema["type"] == "null":
        return ["null"]
    noun = {"integer": "an integer", "number": "a number"}[schema["type"]]
    signs = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<="}
    # pydantic 2.7 writes a float field's bound 1 as 1.0
    style = "d" if schema["type"] == "integer" else "g"
    bounds = [f"{sign} {schema[key]:{style}}" for key, sign in signs.items() if key in schema]
    return [f"{noun} {' and '.join(bounds)}"]


def _field_problems(error: ValidationError) -> dict[str, str]:
    """One text per offending key, in the order found; a union's branches count as one problem."""
    problems: dict[str, str] = {}
    for detail in error.errors(include_url=False):
        path, model, rest = _resolve(detail["loc"])
        if detail["type"] in ("extra_forbidden", "invalid_key"):
            key = str(rest[0])
            text = _unknown_key_text(key, path, model)
            problems.setdefault(f"{path}.{key}", f"got {detail['input']!r}. {text}")
        elif detail["type"] == "model_type":
            text = "Legal: an object. Write {} to use its defaults."
            problems.setdefault(path, f"got {detail['input']!r}. {text}")
        elif rest:
            key, text = _value_problem(path, rest, detail)
            # once an element of a list is wrong, the list is not reported too
            if not any(known.startswith(f"{key}[") for known in problems):
                problems.setdefault(key, text)
        # what is left is `_refuse_conflicts`, whose problems `_conflict_problems` lists
    return problems


def _resolve(loc: tuple[int | str, ...]) -> tuple[str, type[BaseModel], tuple[int | str, ...]]:
    """Split an error's location into the enclosing model, its full key, and what is inside."""
    path, rest = BLOCK_NAME, loc
    model: type[BaseModel] = HMTConfig
    while rest and rest[0] in model.model_fields:
        nested = _nested_model(model.model_fields[str(rest[0])].annotation)
        if nested is None:
            break
        path, model, rest = f"{path}.{rest[0]}", nested, rest[1:]
    return path, model, rest


def _value_problem(path: str, rest: tuple[int | str, ...], detail: ErrorDetails) -> tuple[str, str]:
    key = f"{path}.{rest[0]}"
    field = _field_table()[key]
    index = next((f"[{part}]" for part in rest[1:] if isinstance(part, int)), "")
    value = list(detail["input"]) if isinstance(detail["input"], tuple) else detail["input"]
    reason = f" ({detail['ctx']['error']})" if detail["type"] == "value_error" else ""
    return key + index, (
        f"got {value!r}{reason}. Legal: {field['legal']}. {_value_hint(value, field['legal'])}"
        f"Change it, or remove the key to get the default {json.dumps(field['default'])}."
    )


def _value_hint(value: object, legal: str) -> str:
    """What the user probably meant by a string, given the legal values in words."""
    if not isinstance(value, str):
        return ""
    close = difflib.get_close_matches(_normalised(value), re.findall(r'"(\w+)"', legal), n=1)
    if close:
        return f'Did you mean "{close[0]}"? '
    wants_number = "integer" in legal or "number" in legal
    if value.lower() in re.findall(r"\w+", legal) or (wants_number and _is_number(value)):
        return "Write it without quotes. "
    return ""


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _unknown_key_text(key: str, path: str, model: type[BaseModel]) -> str:
    close = difflib.get_close_matches(_normalised(key), model.model_fields, n=1)
    if close:
        return f'Unknown key: did you mean "{path}.{close[0]}"? Rename it or remove it.'
    elsewhere = [full for full in _field_table() if full.endswith(f".{_normalised(key)}")]
    if elsewhere:
        return f'Unknown key here: it belongs at "{elsewhere[0]}". Move it there.'
    return f"Unknown key. Legal: {', '.join(model.model_fields)}. Use one of these or remove it."


def _normalised(key: str) -> str:
    return key.lower().replace("-", "_")


# ----------------------------------------------------------------------------------------------
# reading the file
# ----------------------------------------------------------------------------------------------


def read_json_config(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a DeepSpeed JSON config.

    Raises:
        ValueError: the file cannot be read, is not valid JSON (with line and column), gives a key
            twice in one object, or holds something else than an object.
    """
    name = os.fspath(path)
    try:
        with open(name, encoding="utf-8") as file:
            text = file.read()
    except FileNotFoundError:
        raise ValueError(
            f"DeepSpeed config {name!r} does not exist (looked from {os.getcwd()!r}). Give the "
            "path of a JSON file."
        ) from None
    except IsADirectoryError:
        raise ValueError(
            f"DeepSpeed config {name!r} is a directory. Give the path of the JSON file in it."
        ) from None
    except OSError as error:
        raise ValueError(
            f"DeepSpeed config {name!r} cannot be read: {error.strerror}. Give the path of a "
            "readable JSON file."
        ) from None
    except UnicodeDecodeError as error:
        raise ValueError(
            f"DeepSpeed config {name!r} is not UTF-8 text: {error.reason} at byte {error.start}. "
            "Save it as UTF-8."
        ) from None
    config = _parse_json(name, text)
    if not isinstance(config, dict):
        raise ValueError(
            f"DeepSpeed config {name!r} holds {_json_kind(config)} at its top level. Legal: an "
            "object. Put the settings in { }."
        )
    return config


def _parse_json(name: str, text: str) -> object:
    def refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        twice = sorted({key for key in keys if keys.count(key) > 1})
        if twice:
            names = ", ".join(f'"{key}"' for key in twice)
            raise ValueError(
                f"DeepSpeed config {name!r} gives {names} more than once in the same object, and "
                "JSON readers keep only the last one. Remove all but one."
            )
        return dict(pairs)

    try:
        return json.loads(text, object_pairs_hook=refuse_duplicates)
    except json.JSONDecodeError as error:
        line = text.split("\n")[error.lineno - 1].replace("\t", " ")
        raise ValueError(
            f"DeepSpeed config {name!r} is not valid JSON: {error.msg} at line {error.lineno}, "
            f"column {error.colno}:\n  {line}\n  {' ' * (error.colno - 1)}^\n"
            "Correct it there or just before; JSON has no comments and no trailing commas."
        ) from None


def _json_kind(value: object) -> str:
    names = {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
