"""Host memory that HMT's engine takes beside gradients, states and swapped activations.

What is of constant size is the engine's own; a run hands it in, and without a run it is :func:`usual_memory`.
The rest follows from model and optimizer: what updates that begin during backward keep until the decision on
clipping and overflow, the copies that ``hmt.snapshot`` stages, and the bases of :mod:`cached_bases`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from hmt_deepspeed.planner.model.shapes import ModelShape, Parameter, parameters
from hmt_deepspeed.planner.run.cached_bases import CacheRoom, whole_pages
from hmt_deepspeed.planner.run.modes import OptimizerMode, Sharding
from hmt_deepspeed.planner.run.offloaded import Offloaded
from hmt_deepspeed.planner.run.states import (
    FP32,
    kept_bytes,
    parameters_by_mode,
    projection_bytes,
    states_by_parameter,
)

__all__ = [
    "WEIGHT_BUFFERS",
    "EngineMemory",
    "early_bytes",
    "largest_part",
    "snapshot_bytes",
    "usual_memory",
    "what_rounding_takes",
]

PIECE = 2**20  # elements that the host updates at once
_STAGED = 16  # pieces of fp32 on their way, each way
_STATE_BUFFERS, _STATES = 4, 3  # offload_optimizer's buffer_count; master and moments
WEIGHT_BUFFERS = 5  # offload_param's buffer_count
_STAGING, _SSD_STAGING = 2**26, 2**30  # of activations on their way to the host, and on to an SSD


@dataclass(frozen=True)
class EngineMemory:
    """Bytes of host memory that do not depend on the model, and what asks for those that do.

    Attributes:
        pools: for gradients, updates and weights on their way, where anything is updated on the host.
        state_buffers: for pieces of states on an SSD. weight_buffers: for weights on one.
        staging: for swapped activations on their way, taken where there are some. ssd_staging: in its place
            where some are swapped to an SSD.
        undoes: whether an update that begins during backward may have to be undone.
        cache: None without a basis cache. has_snapshots: ``hmt.snapshot`` has a path.
    """

    pools: int = 0
    state_buffers: int = 0
    weight_buffers: int = 0
    staging: int = 0
    ssd_staging: int = 0
    undoes: bool = False
    cache: CacheRoom | None = None
    has_snapshots: bool = False


def usual_memory(
    shape: ModelShape,
    ranks: int,
    *,
    states: Literal["none", "cpu", "nvme"],
    weights: Literal["none", "cpu", "nvme"],
    host_memory: int,
    itemsize: int = 2,
) -> EngineMemory:
    """Memory of a run by the JSON that ``hmt-plan`` writes.

    Args:
        states, weights: where ``offload_optimizer`` and ``offload_param`` put them.
        host_memory: bytes that the rank may take.
    """
    travelling = (2 * _STAGED + 1) * PIECE * FP32  # both ways, and one piece to work on
    buffer = largest_part(shape, ranks) * itemsize
    return EngineMemory(
        pools=travelling if states != "none" else 0,
        state_buffers=_STATE_BUFFERS * _STATES * PIECE * FP32 if states == "nvme" else 0,
        weight_buffers=WEIGHT_BUFFERS * buffer if weights == "nvme" else 0,
        staging=min(_STAGING, host_memory // 4),
        ssd_staging=min(_SSD_STAGING, host_memory // 4),
    )


def largest_part(shape: ModelShape, ranks: int) -> int:
    """Elements of the largest parameter's part on one of ``ranks``: a buffer of ``offload_param``."""
    return max(-(-p.numel // ranks) for p in parameters(shape))


def early_bytes(offloaded: Offloaded, on_ssd: bool, undoes: bool, itemsize: int) -> float:
    """Bytes that AdamW's updates begun before the overflow decision keep until it.

    In host memory what they overwrite, where they may be undone. On an SSD the old states are in other
    files; the new weights wait in host memory, since masters are out of reach then.
    """
    share = offloaded.whole("dense")
    if share.sent:  # weights that are their own masters are updated after it
        return 0.0
    if on_ssd:
        return share.adam * itemsize
    return share.states if undoes else 0.0


def snapshot_bytes(
    shape: ModelShape,
    mode: OptimizerMode,
    sharding: Sharding,
    itemsize: int,
    states: Literal["none", "cpu", "nvme"],
) -> float:
    """Bytes that a snapshot stages on rank 0, which writes what all ranks have alike.

    Weights and what updates them, moments in fp32, each tensor in whole pages; what is in host memory is
    copied there as it is, what is in files on an SSD is linked.
    """
    total = 0.0
    sizes = states_by_parameter(shape, mode, sharding, itemsize=itemsize)
    modes = (own for _, own in parameters_by_mode(shape, mode))
    for (parameter, held), own in zip(sizes, modes, strict=True):
        low_rank = mode.is_low_rank(parameter)
        elements = -(-parameter.numel // sharding.ranks(1))
        master, moments = held["masters"], 0 if low_rank else 2 * FP32 * elements
        on_host = states != "none" and (master > 0 or not low_rank)
        tensors: list[int] = []
        if on_host:
            copied = master + moments if states == "cpu" else 0
            total += parameter.count * copied
            tensors += [] if master else [elements * itemsize]
        else:
            size = FP32 if master or itemsize == FP32 else itemsize
            tensors += [elements * size, *([FP32 * elements] * 2 if moments else [])]
        tensors += [FP32]  # a count of steps, or a norm
        if low_rank:
            tensors += _matrix_tensors(parameter, own, sharding, itemsize)
        if held["weights"] and mode.is_encoded(parameter):
            tensors += [parameter.numel, held["weights"] - parameter.numel]
        total += parameter.count * sum(map(whole_pages, tensors))
    return total


def _matrix_tensors(
    parameter: Parameter, mode: OptimizerMode, sharding: Sharding, itemsize: int
) -> Iterable[int]:
    """States in fp32, the whole basis; two averages more, and their weight."""
    kept = kept_bytes(parameter, mode, sharding, itemsize, in_fp32=True)
    basis, _ = projection_bytes(parameter, mode, Sharding(), itemsize)
    return [*kept.values(), FP32, FP32, FP32, *([basis] if basis else [])]


_UNROUNDED = "pinned_max_round_threshold_mb"


def what_rounding_takes(sizes: Iterable[int], environment: Mapping[str, str]) -> str:
    """A line where page-locking weights takes a tenth more than they are, else "".

    Args:
        sizes: bytes of each, which torch rounds up to a power of two. environment: of the process, that may say not to.
    """
    asked = list(sizes)
    taken = sum(1 << (size - 1).bit_length() for size in asked if size)
    settings = (environment.get(f"PYTORCH_{kind}ALLOC_CONF", "") for kind in ("", "CUDA_"))
    if taken < 1.1 * sum(asked) or any(_UNROUNDED in setting for setting in settings):
        return ""
    return (
        f"weights of {sum(asked) / 2**30:.1f} GiB are page-locked in {taken / 2**30:.1f}, for torch rounds each up to a power "
        f"of two; with PYTORCH_ALLOC_CONF={_UNROUNDED}:16 (torch 2.13) it does not"
    )
