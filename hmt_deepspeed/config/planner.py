"""`hmt.planner`: what a run that plans its own activations may use, and where its profile and plan are."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator

from hmt_deepspeed.config.fields import Auto, StrictModel
from hmt_deepspeed.sites import LEGAL_CHOICES, Component

__all__ = ["PlannerConfig"]

_MIN_MEMORY = 2**20
Path = Annotated[str, Field(min_length=1)]
Lossy = Literal["int8", "fp8"]


class PlannerConfig(StrictModel):
    """`hmt.planner`: read with `"hmt.activations.policy": "plan"`."""

    gpu_memory: Auto | Annotated[int, Field(ge=_MIN_MEMORY)] = Field(
        default="auto",
        description="Bytes of its device that each rank may use, all told; auto: what is free between two "
        "steps, less a twentieth.",
    )
    host_memory: Auto | Annotated[int, Field(ge=_MIN_MEMORY)] = Field(
        default="auto",
        description="Bytes of host memory that each rank may swap activations to; auto: half of what is free, "
        "shared by the ranks of a machine.",
    )
    lossy: dict[Component, Lossy] = Field(
        default={},
        description="Components that may be held in 8 bits, and the codec; the others are held exactly.",
        json_schema_extra={"legal": 'an object of components and "int8" or "fp8"'},
    )
    profile: Path | None = Field(
        default=None,
        description="The machine to plan for: a file that a run wrote, or a name that hmt-plan knows; null "
        "measures it in the first iterations, once for each machine and model.",
        json_schema_extra={"legal": "null, the path of a file or the name of a machine"},
    )
    plan: Path | None = Field(
        default=None,
        description="A saved plan to execute instead of making one.",
        json_schema_extra={"legal": "null or the path of a file"},
    )
    save_plan: Path | None = Field(
        default=None,
        description="Where to write the plan, and beside it the profile (FILE.profile.json). launch/run.py "
        "writes both to the run's folder too.",
        json_schema_extra={"legal": "null or the path of a file"},
    )

    @field_validator("lossy")
    @classmethod
    def _has_codec(cls, lossy: dict[Component, Lossy]) -> dict[Component, Lossy]:
        """Refuse components that no 8-bit codec is for."""
        for component, codec in lossy.items():
            if codec not in LEGAL_CHOICES[component]:
                raise ValueError(f"{component} is never held in 8 bits")
        return lossy
