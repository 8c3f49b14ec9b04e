"""Host memory that HMT's engine takes beside gradients, states and swapped activations.

What is of constant size is the engine's own; a run hands it in, and without a run it is :func:`usual_memory`.
The rest follows from model and optimizer: what updates that begin during backward keep until the decision on
clipping and overflow, the bases of ``hmt.basis_cache``, the copies that ``hmt.snapshot`` stages.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from hmt_deepspeed.planner.model.shapes import ModelShape, Parameter, parameters
from hmt_deepspeed.planner.run.modes import OptimizerMode, Sharding
from hmt_deepspeed.planner.run.offloaded import Offloaded
from hmt_deepspeed.planner.run.states import (
    FP32,
    borrowers,
    kept_bytes,
    parameters_by_mode,
    projection_bytes,
    states_by_parameter,
)

__all__ = [
    "WEIGHT_BUFFERS",
    "CacheRoom",
    "CachedBases",
    "EngineMemory",
    "cached_bases",
    "early_bytes",
    "largest_part",
    "snapshot_bytes",
    "usual_memory",
]

PAGE = 4096  # bytes; page-locked memory is taken in whole ones
PIECE = 2**20  # elements that the host updates at once
_STAGED = 16  # pieces of fp32 on their way, each way
_STATE_BUFFERS, _STATES = 4, 3  # offload_optimizer's buffer_count; master and moments
WEIGHT_BUFFERS = 5  # offload_param's buffer_count
_STAGING, _SSD_STAGING = 2**26, 2**30  # of activations on their way to the host, and on to an SSD


@dataclass(frozen=True)
class CacheRoom:
    """``hmt.basis_cache``.

    Attributes:
        prefetch: bases on their way to the device. old_moments: bases left whose moments each matrix keeps.
        old_bases: whether a wider basis is kept.
        staging: page-locked bytes for what is on its way. slab: the others are page-locked by so many.
    """

    max_bytes: int
    prefetch: int
    old_moments: int
    old_bases: bool
    staging: int
    slab: int


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


# -- bases --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CachedBases:
    """Bytes of a basis cache.

    Attributes:
        bases, probes: bytes that are not on the device. passing: bytes of the basis in use and of those on
            their way. pinned: page-locked, once matrices have left as many bases as may be kept.
    """

    bases: float = 0.0
    probes: float = 0.0
    passing: float = 0.0
    pinned: float = 0.0


def cached_bases(
    shape: ModelShape, mode: OptimizerMode, sharding: Sharding, itemsize: int, room: CacheRoom
) -> CachedBases:
    """Bytes of the bases that wait in host memory.

    Where not all have room there, the same part of each is taken to be. What has once been page-locked stays:
    at first every matrix has a basis of its own, also where linears are found to share one, and a new one is
    put beside the one before.
    """
    if mode.residual == "full":  # they stay beside the gradients
        return CachedBases()
    borrowing = borrowers(shape, mode)
    bases = probes = pages = first_pages = 0
    in_layer, outside = list[int](), list[int]()  # bytes of the columns, in the order of their use
    old = 0.0
    for parameter, own in parameters_by_mode(shape, mode):
        if not own.is_low_rank(parameter):
            continue
        basis, beside = projection_bytes(parameter, own, sharding, itemsize)
        if not basis:
            continue
        first_pages += parameter.count * _pages(basis + beside)
        borrows = parameter.name in borrowing
        old += parameter.count * _left_bytes(parameter, own, sharding, itemsize, room, borrows)
        if borrows:
            continue
        bases += parameter.count * basis
        probes += parameter.count * beside
        pages += parameter.count * _pages(basis + beside)
        is_layers = parameter.name.startswith(shape.names.layer)
        (in_layer if is_layers else outside).append(basis + beside)
    if not pages:
        return CachedBases()
    in_order = in_layer * min(shape.layers, room.prefetch + 2) + outside
    passing = max(sum(in_order[i : i + 1 + room.prefetch]) for i in range(len(in_order)))
    part = min(1.0, room.max_bytes / pages)
    held = max(part * first_pages, part * pages + old + _pages(max(in_order)))
    slab = min(room.slab, room.max_bytes)
    pinned = min(float(room.max_bytes), -(-held // slab) * slab)
    return CachedBases(
        part * bases,
        part * probes,
        min(part * (bases + probes), float(passing)),
        room.staging + pinned,
    )


def _left_bytes(
    parameter: Parameter,
    mode: OptimizerMode,
    sharding: Sharding,
    itemsize: int,
    room: CacheRoom,
    borrows: bool,
) -> float:
    """Bytes of the bases that one matrix has left, sharded over the ranks that find them, and of its moments."""
    basis, _ = projection_bytes(parameter, mode, Sharding(), itemsize)
    sharded = 0.0 if borrows else _pages(basis) / sharding.world_size
    found, rank = 0.0, mode.rank_of(parameter)
    kept = kept_bytes(parameter, mode, sharding, itemsize)
    recalled = [size for state, size in kept.items() if state.recalled]
    if recalled:
        found += room.old_moments * (sharded + sum(map(_pages, recalled)))
    widest = mode.rule.rank_at(mode.rank, *parameter.shape)
    if room.old_bases and rank < widest:  # which it may have left
        found += sharded * widest / rank
    return found


# -- snapshots ----------------------------------------------------------------------------------------


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
        if held["weights"] and mode.weight_dtype == "int8" and mode.is_projected(parameter):
            rows, columns = parameter.shape
            tensors += [rows * columns, held["weights"] - rows * columns]
        total += parameter.count * sum(map(_pages, tensors))
    return total


def _matrix_tensors(
    parameter: Parameter, mode: OptimizerMode, sharding: Sharding, itemsize: int
) -> Iterable[int]:
    """States in fp32, the whole basis; two averages more, and their weight."""
    kept = kept_bytes(parameter, mode, sharding, itemsize, in_fp32=True)
    basis, _ = projection_bytes(parameter, mode, Sharding(), itemsize)
    return [*kept.values(), FP32, FP32, FP32, *([basis] if basis else [])]


def _pages(nbytes: float) -> int:
    return max(1, -(-int(nbytes) // PAGE)) * PAGE
