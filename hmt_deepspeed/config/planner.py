"""`hmt.planner`: what a run that plans its own activations may use, and where its plan is."""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError

from hmt_deepspeed.config.codecs import CODECS
from hmt_deepspeed.config.components import Choice, Component, legal_choices
from hmt_deepspeed.config.fields import Auto, StrictModel

__all__ = ["PlannerConfig"]

_MIN_MEMORY = 2**20


def _lossy_schema(schema: dict[str, Any]) -> None:
    """Legal values as they are when asked: codecs may be registered."""
    *first, last = (json.dumps(name) for name, row in CODECS.items() if row.lossy)
    schema["legal"] = f"an object of components and {', '.join(first)} or {last}"
    schema["who"] = "Plans that recompute too much (ds_configs/README.md, 7B on 24 GB)."


class PlannerConfig(StrictModel):
    """`hmt.planner`: read with `"hmt.activations.policy": "plan"`."""

    gpu_memory: Auto | Annotated[int, Field(ge=_MIN_MEMORY)] = Field(
        default="auto",
        description="Bytes of its device that each rank may use, all told; auto: what is free between two "
        "steps, less a twentieth.",
        json_schema_extra={"who": "Devices that something else uses too."},
    )
    lossy: dict[Component, Choice] = Field(
        default={},
        description="Components that may be held in 8 bits, and the codec; the others are held exactly.",
        json_schema_extra=_lossy_schema,
    )
    plan: Annotated[str, Field(min_length=1)] | None = Field(
        default=None,
        description="A file: the plan in it is executed; where there is no such file the run writes the plan that it "
        "makes there, and its profile beside it (FILE.profile.json). launch/run.py writes both to the run's folder too.",
        json_schema_extra={
            "legal": "null or the path of a file",
            "who": "Runs that resume with the choices that they had, without measuring again.",
        },
    )

    @field_validator("lossy")
    @classmethod
    def _has_codec(cls, lossy: dict[Component, Choice]) -> dict[Component, Choice]:
        """Refuse codecs that lose nothing, and components that no other is for."""
        for component, codec in lossy.items():
            if codec not in CODECS or not CODECS[codec].lossy:
                raise PydanticCustomError("unknown_choice", "there is no such codec")
            if codec not in legal_choices(component):
                raise ValueError(f"{component} is never held in 8 bits")
        return lossy
