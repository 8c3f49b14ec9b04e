"""Reading the file that the block comes from."""

from __future__ import annotations

import json
import os
from typing import Any

__all__ = ["read_json_config"]


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
