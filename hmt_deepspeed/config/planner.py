"""`hmt.planner`: what a run that plans its own activations may use, and where its plan is."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator

from hmt_deepspeed.config.components import LEGAL_CHOICES, Component
from hmt_deepspeed.config.fields import Auto, StrictModel

__all__ = ["PlannerConfig"]

_MIN_MEMORY = 2**20
Lossy = Literal["int8", "fp8"]


class PlannerConfig(StrictModel):
    """`hmt.planner`: read with `"hmt.activations.policy": "plan"`."""

    gpu_memory: Auto | Annotated[int, Field(ge=_MIN_MEMORY)] = Field(
        default="auto",
        description="Bytes of its device that each rank may use, all told; auto: what is free between two "
        "steps, less a twentieth.",
        json_schema_extra={"who": "Devices that something else uses too."},
    )
    lossy: dict[Component, Lossy] = Field(
        default={},
        description="Components that may be held in 8 bits, and the codec; the others are held exactly.",
        json_schema_extra={
            "legal": 'an object of components and "int8" or "fp8"',
            "who": "Plans that recompute too much (ds_configs/README.md, 7B on 24 GB).",
        },
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
    def _has_codec(cls, lossy: dict[Component, Lossy]) -> dict[Component, Lossy]:
        """Refuse components that no 8-bit codec is for."""
        for component, codec in lossy.items():
            if codec not in LEGAL_CHOICES[component]:
                raise ValueError(f"{component} is never held in 8 bits")
        return lossy
