"""What the models of the block are made of: the strict base and the types that several fields share."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

from hmt_deepspeed.rules import methods

__all__ = [
    "BLOCK_NAME",
    "Auto",
    "Full",
    "Method",
    "NonEmptyRegexList",
    "PositiveFloat",
    "PositiveFraction",
    "PositiveInt",
    "RankList",
    "Regex",
    "StrictModel",
]

BLOCK_NAME = "hmt"  # the key of the DeepSpeed config

Auto = Literal["auto"]
Full = Literal["full"]
PositiveInt = Annotated[int, Field(ge=1)]
PositiveFloat = Annotated[float, Field(gt=0)]
PositiveFraction = Annotated[float, Field(gt=0, lt=1)]


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
NonEmptyRegexList = Annotated[
    tuple[Regex, ...], Field(min_length=1), BeforeValidator(_list_to_tuple)
]
RankList = Annotated[
    tuple[PositiveInt, ...],
    Field(min_length=1),
    BeforeValidator(_list_to_tuple),
    AfterValidator(_strictly_increasing),
]


def _in_the_table(method: str) -> str:
    if method not in methods():
        raise PydanticCustomError("literal_error", "no rule has this method")
    return method


class _LegalMethods:
    """Lists the methods of the table as it is when the schema is asked for."""

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> dict[str, Any]:
        return {"enum": list(methods()), "type": "string"}


Method = Annotated[str, AfterValidator(_in_the_table), _LegalMethods()]


class StrictModel(BaseModel):
    """Nothing unknown, nothing converted, nothing changed later."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False, validate_default=True
    )

    def __hash__(self) -> int:
        values = (value for _, value in self)
        return hash(tuple(frozenset(v.items()) if isinstance(v, dict) else v for v in values))
