"""The whole "hmt" block as one strict, frozen model."""

from __future__ import annotations

import json
from typing import Any, Literal

from pydantic import Field, ValidationError, model_validator

from hmt_deepspeed.config.activations import ActivationsConfig, activation_conflicts
from hmt_deepspeed.config.conflicts import conflict_problems, snapshot_conflicts
from hmt_deepspeed.config.fields import BLOCK_NAME, StrictModel
from hmt_deepspeed.config.optimizer import OptimizerConfig
from hmt_deepspeed.config.optimizer_conflicts import conflicts_of
from hmt_deepspeed.config.planner import PlannerConfig
from hmt_deepspeed.config.presets import Preset, overridden, with_preset
from hmt_deepspeed.config.problems import field_problems, walk_fields
from hmt_deepspeed.config.sections import (
    BasisCacheConfig,
    FpdtConfig,
    OffloadConfig,
    SnapshotConfig,
)

__all__ = ["HMTConfig", "describe_fields"]

_NOTHING_PLANS = 'Nothing is planned: remove it, or set "activations": {"policy": "plan"}.'


_PLANNED_CHUNKS = (
    "A layer in chunks (hmt.fpdt) holds its input only, so there is nothing to plan: write the policy out, or "
    "remove hmt.fpdt."
)


_PLANNED_VERTICAL = (
    'A plan counts micro-batches one after the other (hmt.accumulation "horizontal"): write the policy out, or remove '
    "hmt.accumulation."
)


def _planner_problems(block: dict[str, Any], known_bad: dict[str, str]) -> dict[str, str]:
    """Of a raw block whose planner section nobody reads, or whose plan FPDT would not follow."""
    activations = block.get("activations")
    if any(".activations.policy" in key for key in known_bad):
        return {}
    if isinstance(activations, dict) and activations.get("policy") == "plan":
        key = f"{BLOCK_NAME}.activations.policy"
        reason = _PLANNED_VERTICAL if block.get("accumulation") == "vertical" else None
        reason = _PLANNED_CHUNKS if "fpdt" in block else reason
        return {} if reason is None else {key: f'got "plan". {reason}'}
    if block.get("planner", {}) == {} or any(".planner" in key for key in known_bad):
        return {}
    if PlannerConfig.model_validate(block["planner"]) == PlannerConfig():
        return {}
    return {f"{BLOCK_NAME}.planner": f"got {block['planner']!r}. {_NOTHING_PLANS}"}


class HMTConfig(StrictModel):
    """The whole "hmt" block."""

    preset: Preset = Field(
        default="balanced",
        description="Whole settings by one word, which the fields beside it override: balanced, the defaults; "
        "memory, the least bytes; paper, the HMT paper's settings.",
        json_schema_extra={
            "who": "Everyone who wants one word instead of a dozen fields: the README's first table measures them."
        },
    )
    optimizer: OptimizerConfig = Field(
        default_factory=OptimizerConfig,
        description="What the optimizer does with each linear's gradient, and how it stores its states.",
    )
    activations: ActivationsConfig = Field(
        default_factory=ActivationsConfig,
        description="What is held between forward and backward. The section turns this on; {} is the HMT paper's table.",
    )
    planner: PlannerConfig = Field(
        default_factory=PlannerConfig,
        description='Limits and the file of a run that plans its activations ("policy": "plan").',
    )
    fpdt: FpdtConfig = Field(
        default_factory=FpdtConfig,
        description="Decoder layers in chunks of tokens. The section turns this on.",
    )
    offload: OffloadConfig = Field(
        default_factory=OffloadConfig,
        description="When states that zero_optimization.offload_optimizer keeps off the device are updated.",
    )
    basis_cache: BasisCacheConfig = Field(
        default_factory=BasisCacheConfig,
        description="Bases wait in host memory between their uses. The section turns this on.",
    )
    accumulation: Literal["horizontal", "vertical"] = Field(
        default="horizontal",
        description="Order of the micro-batches that engine.train_batch() accumulates: one after the other, or all of them "
        "through each layer while its weights are there (ZeRO stage 3).",
        json_schema_extra={
            "who": "vertical: weights in host memory or shared by ranks, and several micro-batches a step."
        },
    )
    snapshot: SnapshotConfig = Field(
        default_factory=SnapshotConfig,
        description="The state of training, written to a disk in the background.",
    )

    @model_validator(mode="after")
    def _refuse_idle_planner(self) -> HMTConfig:
        if self.planner != PlannerConfig() and not self.activations.is_planned:
            raise ValueError(_NOTHING_PLANS)
        if self.activations.is_planned and self.gives("fpdt"):
            raise ValueError(_PLANNED_CHUNKS)
        if self.activations.is_planned and self.accumulation == "vertical":
            raise ValueError(_PLANNED_VERTICAL)
        return self

    def describe_preset(self) -> str:
        """The preset's name and, a line each, what of it is not in force; nothing under the default one."""
        if self.preset == "balanced":
            return ""
        lost = [f"  {line}" for line in overridden(self.preset, self.model_dump())]
        return "\n".join([f'hmt.preset "{self.preset}"' + (", but for:" if lost else ""), *lost])

    def gives(self, section: str) -> bool:
        """Whether the block has the section, if only as {}."""
        return section in self.model_fields_set

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
        block = with_preset(block)
        try:
            return cls.model_validate(block)
        except ValidationError as error:
            problems = field_problems(error, cls, BLOCK_NAME)
        for section, find in (
            ("optimizer", conflicts_of),
            ("activations", activation_conflicts),
            ("snapshot", snapshot_conflicts),
        ):
            prefix = f"{BLOCK_NAME}.{section}"
            problems |= conflict_problems(block.get(section), prefix, problems, find)
        problems |= _planner_problems(block, problems)
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        lines = [f"  - {key}: {text}" for key, text in problems.items()]
        raise ValueError(
            f'The "{BLOCK_NAME}" block of the DeepSpeed config has {count}:\n' + "\n".join(lines)
        )


def describe_fields() -> list[tuple[str, str, str, str, str]]:
    """Rows (key, legal values, default as JSON, description, who needs it) of every field of the block."""
    return [
        (path, field["legal"], json.dumps(field["default"]), field["description"], field["who"])
        for path, field in walk_fields(HMTConfig, BLOCK_NAME)
    ]
