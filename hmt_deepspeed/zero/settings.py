"""Plain values of an engine's JSON. The rooms of zero see a config in no other form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

__all__ = [
    "CacheSettings",
    "HostSettings",
    "ReductionScale",
    "SsdSettings",
    "ZeroSettings",
    "checks_overflow",
    "resolved_overlap",
]


@dataclass(frozen=True)
class SsdSettings:
    """``offload_optimizer`` on "nvme".

    Attributes:
        path: ``nvme_path``. num_buffers: ``buffer_count``.
        read_ahead, write_behind: whether reads and writes run beside the updates.
        aio: DeepSpeed's ``aio`` section, None where the JSON has none.
    """

    path: str
    num_buffers: int
    read_ahead: bool
    write_behind: bool
    aio: dict[str, Any] | None


@dataclass(frozen=True)
class HostSettings:
    """``zero_optimization.offload_optimizer`` and ``hmt.offload``.

    Attributes:
        pinned: ``pin_memory``. overlap: "none", "backward" or "forward".
        ssd: settings of the SSD that masters and moments live on; None for host memory.
    """

    pinned: bool
    overlap: str
    ssd: SsdSettings | None = None


@dataclass(frozen=True)
class CacheSettings:
    """``hmt.basis_cache``.

    Attributes:
        max_bytes: of pinned host memory for bases. history: previous bases of each matrix to remember.
    """

    max_bytes: int
    history: int


@dataclass(frozen=True)
class ReductionScale:
    """Factors before and after the sum over ranks; their product makes it a mean."""

    before: float
    after: float


@dataclass(frozen=True)
class ZeroSettings:
    """Plain values the engine takes from the DeepSpeed JSON.

    Attributes:
        stage: 0..3. model_dtype: of the weights. accumulate_dtype, comm_dtype: of gradients.
        clip: ``gradient_clipping``, 0 for none.
        micro_batches: of an accumulation window, which one optimizer step ends.
        check_overflow: look for inf and NaN and skip such steps. overlap: asynchronous collectives.
        reduce_elements, gather_elements: sizes of the buckets over all ranks; as many elements of updates are
            alive at once as are gathered.
        ignore_unused: a step goes on though a parameter has got no gradient on this rank.
        scale: factors that make a sum a mean.
        host: offload of masters and dense states to host memory, else None.
        cache: cache of bases in host memory, else None.
        weights_on_host: parameters of stage 3 wait in host memory.
    """

    stage: int
    model_dtype: torch.dtype
    accumulate_dtype: torch.dtype
    comm_dtype: torch.dtype
    clip: float
    micro_batches: int
    check_overflow: bool
    overlap: bool
    reduce_elements: int
    gather_elements: int
    ignore_unused: bool
    scale: ReductionScale
    host: HostSettings | None = None
    cache: CacheSettings | None = None
    weights_on_host: bool = False

    @property
    def may_clip_or_skip(self) -> bool:
        """Whether an update may turn out other than it looks before all gradients are known."""
        return self.clip > 0 or self.check_overflow

    @property
    def steps_early(self) -> bool:
        """Whether updates in host memory begin before clipping and overflow are decided."""
        return self.host is not None and self.host.overlap == "backward"

    @property
    def undoes(self) -> bool:
        """Whether updates begun before that may have to be undone."""
        return self.steps_early and self.may_clip_or_skip


def resolved_overlap(parsed: Any, offload: dict[str, str]) -> str:
    """Resolve ``hmt.offload.overlap`` for a config: "none", "backward" or "forward".

    "auto" never doubles the states' memory, as "backward" does where an update may have to be undone, and
    never lets weights be read that a gate does not see, as "forward" does below stage 3.

    Args:
        parsed: DeepSpeed's parsed config. offload: fields of ``hmt.offload``, those that are given.
    """
    wanted = offload.get("overlap", "auto")
    if wanted != "auto":
        return wanted
    if not (parsed.gradient_clipping or checks_overflow(parsed)):
        return "backward"
    return "forward" if parsed.zero_optimization_stage == 3 else "none"


def checks_overflow(parsed: Any) -> bool:
    """Whether a step whose gradients are not finite is skipped: unless bf16's ``check_grad_overflow`` is false.

    In fp32 too, as by DeepSpeed's own ZeRO optimizers, which look at the norm.

    Args:
        parsed: DeepSpeed's parsed config.
    """
    bf16 = parsed.bfloat16_config
    return not bf16.enabled or bool(bf16.check_grad_overflow)
