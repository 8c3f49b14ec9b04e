"""The small sections of the block: `hmt.fpdt`, `hmt.offload`, `hmt.basis_cache`, `hmt.snapshot`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from hmt_deepspeed.config.conflicts import snapshot_conflicts
from hmt_deepspeed.config.fields import Auto, PositiveInt, StrictModel

__all__ = ["BasisCacheConfig", "FpdtConfig", "OffloadConfig", "SnapshotConfig"]


class FpdtConfig(StrictModel):
    """`hmt.fpdt`: where the block has this section, every stage of the decoder layers, the last norm and the loss
    run in chunks of tokens; a layer keeps its input, and attention's output where `hmt.activations` says so.
    """

    chunk_size: Auto | PositiveInt = Field(
        default=65536,
        description="Tokens of a chunk in attention; projections and MLP take a quarter at once. auto: the "
        "largest power of two that fits the device at the model's longest sequence.",
        json_schema_extra={
            "who": "Less: devices that a chunk overfills; bytes fall as one over the chunks (case layer_memory)."
        },
    )
    offload_kv: bool = Field(
        default=True,
        description="Keep a layer's chunks (keys, values and what backward needs) in pinned host memory "
        "between their uses.",
        json_schema_extra={"who": "false: keys and values that fit the device."},
    )
    sequence_parallel_size: PositiveInt = Field(
        default=1,
        description="Consecutive ranks that share each sequence; they get the same rows, each computes its "
        "part of every chunk.",
        json_schema_extra={"who": "Sequences that are too long, or too slow, for one device."},
    )


class OffloadConfig(StrictModel):
    """`hmt.offload`: how the work on states in host memory or on an SSD goes beside the device's."""

    overlap: Literal["auto", "backward", "forward", "none"] = Field(
        default="auto",
        description="When states that zero_optimization.offload_optimizer keeps in host memory or on an SSD are "
        "updated: during backward, before clipping and overflow are decided; after that, beside the next "
        "forward; or inside step. Every choice gives the same numbers.",
        json_schema_extra={
            "who": "backward: runs that clip, with 12 bytes an element of host memory to spare."
        },
    )


class BasisCacheConfig(StrictModel):
    """`hmt.basis_cache`: bases wait in host memory where the block has this section."""

    history: Annotated[int, Field(ge=0)] = Field(
        default=0,
        description="Bases of each matrix, the last it has left, that are kept with their moments: where the basis "
        "turns back to one, its second moments come back, and where the rank rises again, the range finder starts "
        "from the wider basis before. They make room for current bases. 0: none.",
        json_schema_extra={
            "who": "Gradients that return to old subspaces: second moments were 3 to 4 % off, without it 11 to "
            "12 % (synthetic)."
        },
    )


class SnapshotConfig(StrictModel):
    """`hmt.snapshot`: the state of training to an SSD in the background."""

    path: Annotated[str, Field(min_length=1)] | None = Field(
        default=None,
        description="Folder of this run's snapshots, which all ranks share; the last two are kept, beside those whose "
        "weights they are differences to.",
        json_schema_extra={
            "legal": "null or the path of a folder",
            "who": "Runs that may be killed; with interval.",
        },
    )
    interval: int = Field(
        default=0,
        ge=0,
        description="Optimizer steps between two snapshots; 0: none.",
        json_schema_extra={"who": "Runs that may be killed: the steps that a crash may cost."},
    )

    @model_validator(mode="after")
    def _refuse_conflicts(self) -> SnapshotConfig:
        conflicts = snapshot_conflicts({key: getattr(self, key) for key in self.model_fields_set})
        if conflicts:
            raise ValueError(" ".join(f"{c.key}: {c.advice}" for c in conflicts))
        return self
