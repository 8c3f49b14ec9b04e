"""Bases that wait in host memory (``hmt.basis_cache``): bytes there, and of those that pass through the device."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

from hmt_deepspeed.planner.model.shapes import ModelShape, Parameter
from hmt_deepspeed.planner.run.modes import OptimizerMode, Sharding
from hmt_deepspeed.planner.run.states import (
    FP32,
    borrowers,
    gradient_columns,
    kept_bytes,
    most_rows,
    parameters_by_mode,
    projection_bytes,
)

__all__ = ["CacheRoom", "CachedBases", "cached_bases", "whole_pages"]

PAGE = 4096  # bytes; page-locked memory is taken in whole ones


def whole_pages(nbytes: float) -> int:
    """Bytes of the pages that hold so many, at least one."""
    return max(1, -(-int(nbytes) // PAGE)) * PAGE


@dataclass(frozen=True)
class CacheRoom:
    """``hmt.basis_cache``.

    Attributes:
        prefetch: bases on their way to the device, and what comes with the last of them. together: bytes of bases that
            are in use at once, if not those of one matrix are more. elements: of the gradients of matrices that step
            together. old_moments: bases left whose moments each matrix keeps. old_bases: whether a wider basis is kept.
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
    at first every matrix has a basis of its own, also where linears are found to share one.

    Args:
        is_offloaded: masters are in host memory; such weights are updated one by one.
    """
    if mode.residual == "full":  # they stay beside the gradients
        return CachedBases()
    borrowing = borrowers(shape, mode)
    bases = probes = 0
    old = 0.0
    for parameter, own in parameters_by_mode(shape, mode):
        if not own.is_low_rank(parameter):
            continue
        basis, beside = projection_bytes(parameter, own, sharding, itemsize)
        if not basis:
            continue
        borrows = parameter.name in borrowing
        old += parameter.count * _left_bytes(parameter, own, sharding, itemsize, room, borrows)
        if borrows:
            continue
        bases += parameter.count * basis
        probes += parameter.count * beside
    if not bases:
        return CachedBases()
    alone = is_offloaded and (mode.master_weights == "fp32" or itemsize == FP32)
    matrices = _in_order(shape, mode, sharding, itemsize, room)
    apart = [matrix._replace(basis=place) for place, matrix in enumerate(matrices)]
    fetched, gathered, resting = _passing_bytes(matrices, room, alone)
    slab = min(room.slab, room.max_bytes)
    pages = _pages_of_blocks(matrices, room.together, slab)
    part = min(1.0, room.max_bytes / pages)
    held = max(part * _pages_of_blocks(apart, room.together, slab), part * pages + old)
    pinned = min(float(room.max_bytes), -(-held // slab) * slab)
    return CachedBases(
        part * bases,
        part * probes,
        min(part * sum(matrix.rows for matrix in apart), fetched) + gathered,
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
    updated they are whole, of matrices alike or of one that is updated ``alone``; at first each matrix has a basis of its
    own.
    """
    draws = _drawn_together(matrices, room.together)
    apart = [matrix._replace(basis=place) for place, matrix in enumerate(matrices)]
    updates = [_updated_together(each, room, alone) for each in (matrices, apart)]
    most = [_most_in_use(runs, room.prefetch) for runs in (draws, *updates)]
    one_by_one, _ = _most_in_use([[m] for run in draws for m in run], room.prefetch)
    return max(fetched for fetched, _ in most), max(gathered for _, gathered in most), one_by_one


def _updated_together(
    matrices: Sequence[_Matrix], room: CacheRoom, alone: bool
) -> list[list[_Matrix]]:
    """Matrices in runs, as their weights are updated."""
    if alone:
        return [[matrix] for matrix in matrices]
    stacks: dict[Hashable, list[int]] = defaultdict(list)
    for place, matrix in enumerate(matrices):
        stacks[matrix.alike].append(place)
    parts = sorted(
        places[begin : begin + matrices[places[0]].most]
        for places in stacks.values()
        for begin in range(0, len(places), matrices[places[0]].most)
    )
    return [run for part in parts for run in _runs([matrices[p] for p in part], room.together)]


def _drawn_together(matrices: Sequence[_Matrix], most: int) -> list[list[_Matrix]]:
    """Owners of bases in runs, matrices alike one after the other, with the rows that are held here."""
    alike: dict[Hashable, list[_Matrix]] = defaultdict(list)
    for matrix in {matrix.basis: matrix for matrix in matrices}.values():
        alike[matrix.alike].append(matrix._replace(whole=0))
    return _runs([matrix for some in alike.values() for matrix in some], most)


def _pages_of_blocks(matrices: Sequence[_Matrix], together: int, most: int) -> int:
    """Whole pages of all bases, of which those of equal bytes in a run lie side by side, at most so many bytes."""
    pages = 0
    for run in _drawn_together(matrices, together):
        for nbytes, alike in groupby(matrix.rows for matrix in run):
            full, rest = divmod(len(list(alike)), max(1, most // nbytes))
            pages += full * whole_pages(max(1, most // nbytes) * nbytes) + (
                rest and whole_pages(rest * nbytes)
            )
    return pages


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
    """(bytes from host memory, gathered bytes) at most, where those of a part are in use together and the next come."""
    fetched = gathered = 0
    for place, part in enumerate(parts, 1):
        in_use = {matrix.basis: matrix.rows for matrix in part}
        coming: dict[Hashable, int] = {}
        for later in parts[place:]:
            if len(coming) >= prefetch:
                break
            coming |= {m.basis: m.rows for m in later if m.basis not in in_use}
        fetched = max(fetched, sum(in_use.values()) + sum(coming.values()))
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
    sharded = 0.0 if borrows else whole_pages(basis) / sharding.world_size
    found, rank = 0.0, mode.rank_of(parameter)
    kept = kept_bytes(parameter, mode, sharding, itemsize)
    recalled = [size for state, size in kept.items() if state.recalled]
    if recalled:
        found += room.old_moments * (sharded + sum(map(whole_pages, recalled)))
    widest = mode.rule.rank_at(mode.rank, *parameter.shape[-2:])
    if room.old_bases and rank < widest:  # which it may have left
        found += sharded * widest / rank
    return found
