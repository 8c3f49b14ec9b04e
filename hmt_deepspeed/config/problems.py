"""What is legal for each field, in words, and what to tell the user where a value is not."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from hmt_deepspeed.config.removed import REMOVED

__all__ = ["field_problems", "unknown_key_text", "walk_fields"]


def walk_fields(model: type[BaseModel], path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(full key, JSON schema with "default" and the "legal" values in words) of every leaf field."""
    properties = model.model_json_schema()["properties"]
    for name, field in model.model_fields.items():
        nested = _nested_model(field.annotation)
        schema = properties[name]
        if nested is not None and "legal" in schema:  # something else than the object is legal too
            yield f"{path}.{name}", {"default": {}, **schema}
        if nested is not None:
            yield from walk_fields(nested, f"{path}.{name}")
        else:
            default = field.get_default(call_default_factory=True)
            yield f"{path}.{name}", {"default": default, **schema, "legal": _legal_values(schema)}


def _nested_model(annotation: object) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return None


def _value_model(annotation: object) -> type[BaseModel] | None:
    """The model of a dict's values."""
    return _nested_model(get_args(annotation)[1]) if get_origin(annotation) is dict else None


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
    signs = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    # pydantic 2.7 writes a float field's bound 1 as 1.0
    style = "d" if schema["type"] == "integer" else "g"
    bounds = [f"{sign} {schema[key]:{style}}" for key, sign in signs.items() if key in schema]
    return [f"{noun} {' and '.join(bounds)}"]


def field_problems(error: ValidationError, root: type[BaseModel], name: str) -> dict[str, str]:
    """One text per offending key, in the order found; a union's branches count as one problem.

    Args:
        root: the model that was validated. name: its full key.
    """
    problems: dict[str, str] = {}
    for detail in error.errors(include_url=False):
        path, model, rest = _resolve(detail["loc"], root, name)
        if detail["type"] in ("extra_forbidden", "invalid_key"):
            key = str(rest[0])
            text = unknown_key_text(key, path, model, root, name)
            problems.setdefault(f"{path}.{key}", f"got {detail['input']!r}. {text}")
        elif detail["type"] == "model_type":
            legal = dict(walk_fields(root, name)).get(path, {}).get("legal", "an object")
            text = f"Legal: {legal}. Write {{}} to use its defaults."
            problems.setdefault(path, f"got {detail['input']!r}. {text}")
        elif rest:
            key, text = _value_problem(path, model, rest, detail)
            # once an element of a list is wrong, the list is not reported too
            if not any(known.startswith(f"{key}[") for known in problems):
                problems.setdefault(key, text)
        # what is left are conflicts, which `conflict_problems` lists
    return problems


def _resolve(
    loc: tuple[int | str, ...], model: type[BaseModel], path: str
) -> tuple[str, type[BaseModel], tuple[int | str, ...]]:
    """Split an error's location into the enclosing model's full key, that model, and what is inside."""
    rest = loc
    while rest and rest[0] in model.model_fields:
        annotation = model.model_fields[str(rest[0])].annotation
        nested, values = _nested_model(annotation), _value_model(annotation)
        if nested is not None:
            path, model, rest = f"{path}.{rest[0]}", nested, rest[1:]
        elif values is not None and len(rest) > 1 and rest[-1] != "[key]":
            path, model, rest = f"{path}.{rest[0]}[{rest[1]!r}]", values, rest[2:]
        else:
            break
    return path, model, rest


def _value_problem(
    path: str, model: type[BaseModel], rest: tuple[int | str, ...], detail: ErrorDetails
) -> tuple[str, str]:
    key = f"{path}.{rest[0]}"
    field = dict(walk_fields(model, path))[key]
    index = _index(
        rest[1:], in_dict=get_origin(model.model_fields[str(rest[0])].annotation) is dict
    )
    value = list(detail["input"]) if isinstance(detail["input"], tuple) else detail["input"]
    reason = f" ({detail['ctx']['error']})" if detail["type"] == "value_error" else ""
    return key + index, (
        f"got {value!r}{reason}. Legal: {field['legal']}. {_value_hint(value, field['legal'])}"
        f"Change it, or remove the key to get the default {json.dumps(field['default'])}."
    )


def _index(inside: tuple[int | str, ...], in_dict: bool) -> str:
    """`[1]` of a list's element, `['q_proj']` of a dict's value; nothing for a dict's bad key."""
    if in_dict and len(inside) == 1:
        return f"[{inside[0]!r}]"
    return next((f"[{part}]" for part in inside if isinstance(part, int)), "")


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


def unknown_key_text(
    key: str, path: str, model: type[BaseModel], root: type[BaseModel], name: str
) -> str:
    """What to do about a key that ``model``, whose full key is ``path``, does not have.

    Args:
        root: the model around it, and ``name`` that model's full key.
    """
    written = _normalised(key)
    section = path.partition("[")[0].rpartition(".")[0]  # around an object of patterns
    removed = REMOVED.get(f"{section if '[' in path else path}.{written}")
    if removed is not None:
        return f"This key was removed: {removed}"
    full_keys = [full for full, _ in walk_fields(root, name)]
    if "[" in path and written not in model.model_fields and f"{section}.{written}" in full_keys:
        return (
            f'Unknown key here: it is set for all modules, at "{section}.{written}". Move it there.'
        )
    close = difflib.get_close_matches(written, model.model_fields, n=1)
    if close:
        return f'Unknown key: did you mean "{path}.{close[0]}"? Rename it or remove it.'
    elsewhere = [full for full in full_keys if full.endswith(f".{written}")]
    if elsewhere:
        nearest = max(elsewhere, key=lambda full: full.startswith(f"{path}."))
        return f'Unknown key here: it belongs at "{nearest}". Move it there.'
    return f"Unknown key. Legal: {', '.join(model.model_fields)}. Use one of these or remove it."


def _normalised(key: str) -> str:
    return key.lower().replace("-", "_")
