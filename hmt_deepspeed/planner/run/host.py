"""Host memory that HMT's engine takes beside gradients, states and swapped activations.

What is of constant size is the engine's own; a run hands it in, and without a run it is :func:`usual_memory`.
The rest follows from model and optimizer: what updates that begin during backward keep until the decision on
clipping and overflow, the bases of ``hmt.basis_cache``, the copies that ``hmt.snapshot`` stages.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Literal, NamedTuple

from hmt_deepspeed.planner.model.shapes import ModelShape, Parameter, parameters
from hmt_deepspeed.planner.run.modes import OptimizerMode, Sharding
from hmt_deepspeed.planner.run.offloaded import Offloaded
from hmt_deepspeed.planner.run.states import (
    FP32,
    borrowers,
    gradient_columns,
    kept_bytes,
    most_rows,
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
        prefetch: bases on their way to the device. together: bytes of bases that are in use at once, if not those of
            one matrix are more. elements: of the gradients of matrices that step together. old_moments: bases left whose
            moments each matrix keeps.
        old_bases: whether a wider basis is kept.
        staging: page-locked bytes for what is on its way. slab: the others are page-locked by so many.
    """

    max_bytes: int
    prefetch: int
    together: int
    elements: int
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
        bases, probes: bytes that are not on the device. passing: bytes of the bases in use and of those on
            their way, at most; stage 3 has the rows of one in use, and others whole. resting: of those on the device
            between two steps. pinned: page-locked, once matrices have left as many bases as may be kept.
    """

    bases: float = 0.0
    probes: float = 0.0
    passing: float = 0.0
    resting: float = 0.0
    pinned: float = 0.0


def cached_bases(
    shape: ModelShape,
    mode: OptimizerMode,
    sharding: Sharding,
    itemsize: int,
    room: CacheRoom,
    is_offloaded: bool,
) -> CachedBases:
    """Bytes of the bases that wait in host memory.

    Where not all have room there, the same part of each is taken to be. What has once been page-locked stays:
    at first every matrix has a basis of its own, also where linears are found to share one, and a new one is
    put beside the one before.

    Args:
        is_offloaded: masters are in host memory; such weights are updated one by one.
    """
    if mode.residual == "full":  # they stay beside the gradients
        return CachedBases()
    borrowing = borrowers(shape, mode)
    bases = probes = pages = first_pages = largest = 0
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
        largest = max(largest, basis + beside)
    if not pages:
        return CachedBases()
    alone = is_offloaded and (mode.master_weights == "fp32" or itemsize == FP32)
    matrices = _in_order(shape, mode, sharding, itemsize, room)
    fetched, gathered, resting = _passing_bytes(matrices, room, alone)
    part = min(1.0, room.max_bytes / pages)
    held = max(part * first_pages, part * pages + old + _pages(largest))
    slab = min(room.slab, room.max_bytes)
    pinned = min(float(room.max_bytes), -(-held // slab) * slab)
    return CachedBases(
        part * bases,
        part * probes,
        min(part * (bases + probes), fetched) + gathered,
        min(part * (bases + probes), resting),
        room.staging + pinned,
    )


class _Matrix(NamedTuple):
    """A matrix whose columns wait in host memory.

    Attributes:
        basis: whose it is. alike: equal for matrices that step together, at most ``most`` of them at once.
        rows: bytes that this rank holds of the columns. whole: of all where ranks hold parts of them, else 0.
    """

    basis: Hashable
    alike: Hashable
    most: int
    rows: int
    whole: int


def _in_order(
    shape: ModelShape,
    mode: OptimizerMode,
    sharding: Sharding,
    itemsize: int,
    room: CacheRoom,
) -> list[_Matrix]:
    """All matrices of a model with a basis, those of a layer behind those of the layer before."""
    layer, names, borrowing = shape.names.layer, shape.names, borrowers(shape, mode)
    leaders = {f"{layer}.{n}.weight": group[0] for group in (names.qkv, names.up) for n in group}
    found: dict[str, list[_Matrix]] = defaultdict(list)
    for parameter, own in parameters_by_mode(shape, mode):
        if not own.is_low_rank(parameter):
            continue
        rows = sum(projection_bytes(parameter, own, sharding, itemsize))
        if not rows:
            continue
        m, width = gradient_columns(parameter, own)
        held = most_rows(m, own.oriented(parameter)[1], sharding.ranks(1))
        whole = sum(projection_bytes(parameter, own, Sharding(), itemsize))
        name, of_name = parameter.name, found[parameter.name]
        if name in borrowing:
            name = f"{layer}.{leaders[name]}.weight"
        of_name += [
            _Matrix(
                (name, len(of_name) + number),
                (parameter.shape, width),
                max(1, room.elements // (held * width)),
                rows,
                0 if whole == rows else whole,
            )
            for number in range(parameter.count)
        ]
    placed = [
        ((number / len(of_name), place) if name.startswith(layer) else (1.0, place), matrix)
        for place, (name, of_name) in enumerate(found.items())
        for number, matrix in enumerate(of_name)
    ]
    return [matrix for _, matrix in sorted(placed, key=itemgetter(0))]


def _passing_bytes(
    matrices: Sequence[_Matrix], room: CacheRoom, alone: bool
) -> tuple[int, int, int]:
    """Most bytes of bases on the device: from host memory, gathered there, and those between two steps, where one is in
    use.

    While probes are drawn those in use follow one another, of those in parts the rows held here. While weights are
    updated they are whole, of matrices alike or of one that is updated ``alone``.
    """
    owners = list({matrix.basis: matrix for matrix in matrices}.values())
    held = [matrix._replace(whole=0) for matrix in owners]
    draws = _runs(held, room.together)
    stacks: dict[Hashable, list[int]] = defaultdict(list)
    for place, matrix in enumerate(matrices):
        stacks[matrix.alike].append(place)
    parts = sorted(
        places[begin : begin + matrices[places[0]].most]
        for places in stacks.values()
        for begin in range(0, len(places), matrices[places[0]].most)
    )
    updates = [
        run for part in parts for run in _runs([matrices[place] for place in part], room.together)
    ]
    if alone:
        updates = [[matrix] for matrix in matrices]
    of_draws, of_updates = (_most_in_use(each, room.prefetch) for each in (draws, updates))
    one_by_one, _ = _most_in_use([[matrix] for matrix in held], room.prefetch)
    return max(of_draws[0], of_updates[0]), max(of_draws[1], of_updates[1]), one_by_one


def _runs(matrices: Sequence[_Matrix], most: int) -> list[list[_Matrix]]:
    """Matrices in their order, cut where the whole bases would be more than ``most`` bytes."""
    runs: list[list[_Matrix]] = []
    bases: dict[Hashable, int] = {}
    for matrix in matrices:
        whole = matrix.whole or matrix.rows
        if not runs or (matrix.basis not in bases and sum(bases.values()) + whole > most):
            runs.append([])
            bases.clear()
        bases[matrix.basis] = whole
        runs[-1].append(matrix)
    return runs


def _most_in_use(parts: Sequence[Sequence[_Matrix]], prefetch: int) -> tuple[int, int]:
    """(bytes from host memory, gathered bytes) at most, where those of a part stay in use together."""
    order = [matrix for part in parts for matrix in part]
    fetched = gathered = place = 0
    for part in parts:
        stay: dict[Hashable, int] = {}
        for matrix in part:
            place += 1
            in_use = {**stay, matrix.basis: matrix.rows}
            coming: dict[Hashable, int] = {}
            for ahead in range(place, len(order)):
                if len(coming) == prefetch:
                    break
                if order[ahead].basis not in in_use:
                    coming[order[ahead].basis] = order[ahead].rows
            fetched = max(fetched, sum(in_use.values()) + sum(coming.values()))
            stay = stay if matrix.whole else in_use
        gathered = max(gathered, sum({matrix.basis: matrix.whole for matrix in part}.values()))
    return fetched, gathered


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
    widest = mode.rule.rank_at(mode.rank, *parameter.shape[-2:])
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
        if held["weights"] and mode.is_encoded(parameter):
            tensors += [parameter.numel, held["weights"] - parameter.numel]
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
