"""``hmt.basis_cache`` under DeepSpeed: builds the storage of one rank's bases and reports its numbers."""

from __future__ import annotations

from collections.abc import Sequence

from hmt_deepspeed.memory.basis_cache import BasisCache
from hmt_deepspeed.memory.transfer import TransferEngine
from hmt_deepspeed.optim.rules.projected import ProjectedMatrix
from hmt_deepspeed.report.metrics import format_bytes
from hmt_deepspeed.rules import RULES
from hmt_deepspeed.zero.bases.storage import BasisStorage
from hmt_deepspeed.zero.parameters.param_state import ParamState
from hmt_deepspeed.zero.settings import CacheSettings
from hmt_deepspeed.zero.sharding.collectives import Collectives

__all__ = ["basis_metrics", "build_bases", "check_cache", "describe_bases", "staging_bytes"]

# Device bytes that may wait for their copy to the host, and pinned bytes beside the bases.
_STAGING = 2**26


def staging_bytes(settings: CacheSettings) -> int:
    """Page-locked bytes that a cache needs for copies under way."""
    return min(_STAGING, settings.max_bytes)


def build_bases(
    collectives: Collectives,
    stage: int,
    settings: CacheSettings | None,
    param_states: Sequence[ParamState],
) -> BasisStorage:
    """Build the storage of the bases of low-rank parameters.

    Args:
        collectives: of the data-parallel group. stage: of ZeRO. settings: of the cache; None for no cache.
        param_states: parameters with a matrix.

    Raises:
        ValueError: see :func:`check_cache`.
    """
    if settings is None:
        return BasisStorage(collectives, stage)
    check_cache(settings, param_states)
    device = param_states[0].weight.device
    engine = TransferEngine(device, staging_bytes(settings))
    cache = BasisCache(engine, settings.max_bytes)
    return BasisStorage(collectives, stage, cache, settings.history)


def check_cache(settings: CacheSettings, param_states: Sequence[ParamState]) -> None:
    """Refuse a cache that would do nothing.

    Args:
        settings: of the cache. param_states: parameters with a matrix.

    Raises:
        ValueError: nothing could wait in host memory, or no basis that was left would ever be used.
    """
    matrices = [p.matrix for p in param_states if isinstance(p.matrix, ProjectedMatrix)]
    stored = [
        matrix for matrix in matrices if matrix.columns.whole is not None and not matrix.takes_whole
    ]
    if not stored:
        raise ValueError(
            f"hmt.basis_cache is given, but no parameter has a basis that it could hold: {_without_bases()} store "
            'none, nor does "range_finder": "random", and with "residual": "full" they stay beside the '
            "gradients. Remove the section."
        )
    if settings.history and not any(m.recalls_moments or _rises_again(m) for m in stored):
        raise ValueError(
            f"hmt.basis_cache.history is {settings.history}, but no matrix would use what it keeps: legal with a "
            "one-sided projection (right, left or auto), whose moments are carried over, or with several "
            'rank_candidates below the matrices\' sides and a "range_finder" other than "svd", which starts from an '
            "older basis. Remove it."
        )


def _without_bases() -> str:
    """What has none whatever else is set."""
    asked = (next(iter(r.asked_by.items())) for r in RULES.values() if r.bases != "found")
    *first, last = (f'"{field}": "{value}"' for field, value in asked)
    return f"{', '.join(first)} and {last}"


def _rises_again(matrix: ProjectedMatrix) -> bool:
    return len(matrix.candidates) > 1 and matrix.settings.range_finder != "svd"


def device_bytes(bases: BasisStorage, param_states: Sequence[ParamState]) -> int:
    """Device bytes of stored bases: whole ones, this rank's rows, and the copies of groups of linears.

    Args:
        param_states: parameters with a matrix.
    """
    found: dict[int, int] = {}
    for param_state in param_states:
        if not isinstance(param_state.matrix, ProjectedMatrix):
            continue
        linear, columns = param_state.gradient.linear, param_state.matrix.columns
        joined = None if linear is None else linear.group.columns
        for tensor in (columns.whole, columns.local, joined):
            if tensor is not None and not tensor.is_meta:
                storage = tensor.untyped_storage()
                found[storage.data_ptr()] = storage.nbytes()
    cached = 0 if bases.cache is None else bases.cache.device_bytes
    return sum(found.values()) + cached


def basis_metrics(bases: BasisStorage, param_states: Sequence[ParamState]) -> dict[str, object]:
    """Bytes of bases on either side and, with a cache, its counters since the start of the run.

    Args:
        param_states: parameters with a matrix.
    """
    found: dict[str, object] = {"basis_device_bytes": device_bytes(bases, param_states)}
    cache = bases.cache
    if cache is None:
        return found
    counters = cache.engine.counters
    return {
        **found,
        "basis_peak_fetched_bytes": cache.peak_device_bytes + bases.peak_gathered_bytes,
        "basis_host_bytes": cache.host_bytes,
        "basis_pinned_bytes": cache.pinned_bytes,
        "basis_bytes_to_host": counters.bytes_out,
        "basis_bytes_from_host": counters.bytes_in,
        "basis_seconds_waited": counters.seconds_waited,
        "basis_cache_hits": cache.hits.total(),
        "basis_cache_misses": cache.misses.total(),
        "basis_cache_misses_per_matrix": dict(cache.misses),
        "old_basis_hits": cache.old_hits,
        "old_basis_misses": cache.old_misses,
        "old_bases_evicted": cache.num_evicted,
        "old_moment_hits": bases.history.hits,
        "old_moment_misses": bases.history.misses,
        "old_moment_host_bytes": bases.history.nbytes,
    }


def describe_bases(bases: BasisStorage, param_states: Sequence[ParamState]) -> list[str]:
    """Lines about a cache for the start table."""
    cache = bases.cache
    assert cache is not None
    names = {p.matrix.columns.owner for p in param_states if isinstance(p.matrix, ProjectedMatrix)}
    waiting = sum(name in cache for name in names)
    told = [
        f"basis_cache: {waiting} bases, {format_bytes(cache.host_bytes)}, in pinned host memory"
    ]
    left = len(names) - waiting
    if left:
        told.append(f"{left} have no room and stay on the device")
    recalling = sum(
        isinstance(p.matrix, ProjectedMatrix) and p.matrix.recalls_moments for p in param_states
    )
    if bases.history.most and recalling:
        told.append(
            f"moments of {bases.history.most} old bases of {recalling} of {len(param_states)} matrices"
        )
    return told
