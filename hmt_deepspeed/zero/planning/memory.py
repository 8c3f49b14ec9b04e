"""Counts an engine's memory by kind, under the planner's names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum

from hmt_deepspeed.config import HMTConfig
from hmt_deepspeed.memory.available import host_memory_share
from hmt_deepspeed.memory.basis_cache import SLAB_BYTES
from hmt_deepspeed.memory.fetch_ahead import PREFETCH
from hmt_deepspeed.optim.rules.projected import ProjectedMatrix
from hmt_deepspeed.optim.rules.stack import MOST_ALIVE
from hmt_deepspeed.planner.run.cached_bases import CacheRoom
from hmt_deepspeed.planner.run.host import EngineMemory
from hmt_deepspeed.zero.activations.swap import staging_bytes
from hmt_deepspeed.zero.bases import cache as basis_cache
from hmt_deepspeed.zero.bases.storage import MOST_WHOLE
from hmt_deepspeed.zero.interfaces import Optimizer
from hmt_deepspeed.zero.offload import ssd
from hmt_deepspeed.zero.offload import worker as host_worker
from hmt_deepspeed.zero.settings import CacheSettings, HostSettings, checks_overflow
from hmt_deepspeed.zero.state import ZeroState

__all__ = ["counted_bytes", "engine_memory"]

_FP32 = 4


def engine_memory(
    engine: Any,
    hmt: HMTConfig,
    options: Mapping[str, Any] | None,
    host: HostSettings | None,
    cache: CacheSettings | None,
) -> EngineMemory | None:
    """Host memory that an engine takes beside what follows from its model.

    Args:
        options, host, cache: see :func:`~hmt_deepspeed.zero.planning.facts.run_facts`.

    Returns:
        None where DeepSpeed's own optimizer is offloaded, whose buffers are another's.
    """
    if options is None and engine.zero_offload_optimizer() is not None:
        return None
    limit = hmt.activations.host_memory
    staging = staging_bytes(
        host_memory_share() if limit == "auto" else limit, hmt.activations.nvme_path
    )
    pools = buffers = 0
    if host is not None:
        pools = 2 * host_worker.pool_bytes() + host_worker.PIECE * _FP32
    if host is not None and host.ssd is not None:
        buffers = host.ssd.num_buffers * ssd.NUM_STATES * host_worker.PIECE * _FP32
    weights, weight_buffers = engine.zero_offload_param(), 0
    if weights is not None and weights.device == OffloadDeviceEnum.nvme:
        itemsize = next(engine.module.parameters()).element_size()
        weight_buffers = weights.buffer_count * weights.buffer_size * itemsize
    return EngineMemory(
        pools=pools,
        state_buffers=buffers,
        weight_buffers=weight_buffers,
        staging=staging,
        ssd_staging=staging,
        undoes=engine.gradient_clipping() > 0 or checks_overflow(engine._config),
        cache=None if cache is None or options is None else _room(cache, options),
        has_snapshots=options is not None and hmt.snapshot.path is not None,
    )


def _room(cache: CacheSettings, options: Mapping[str, Any]) -> CacheRoom:
    return CacheRoom(
        cache.max_bytes,
        PREFETCH,
        MOST_WHOLE,
        MOST_ALIVE,
        cache.history,
        cache.history > 0 and options["range_finder"] != "svd",
        basis_cache.staging_bytes(cache),
        SLAB_BYTES,
    )


def counted_bytes(
    optimizer: Optimizer, snapshot_bytes: int | None = None
) -> dict[tuple[str, str], float]:
    """Bytes on this rank by (memory, kind), as the planner names them.

    Args:
        optimizer: HMT's. snapshot_bytes: of host memory that snapshots take; None where there are none.
    """
    zero, found = optimizer.zero, optimizer.metrics()
    states = found["optimizer_state_bytes"] + found["master_weight_bytes"]
    away = found["offloaded_state_bytes"]
    counted = {
        ("gpu", "weights"): found["weight_bytes"],
        ("gpu", "gradients"): found["gradient_buffer_bytes"],
        ("gpu", "optimizer states"): states - away - _cached_bytes(zero),
    }
    in_ram = 0
    if "ssd_state_bytes" in found:
        counted["ssd", "optimizer states"] = found["ssd_state_bytes"]
    elif away:
        counted["host", "optimizer states"] = in_ram = away
    gradients = found["offloaded_gradient_bytes"]
    if gradients:
        counted["host", "gradients"] = gradients
    if zero.host is not None:
        early = found["optimizer_host_bytes"] - in_ram - gradients
        if early:
            counted["host", "early updates"] = early
        counted["host", "pools"] = zero.host.pool_bytes
        if zero.host.ssd is not None:
            counted["host", "state buffers"] = zero.host.ssd.buffer_bytes
    if zero.bases.cache is not None:
        counted["gpu", "bases in passing"] = found["basis_peak_fetched_bytes"]
        counted["host", "bases"] = found["basis_pinned_bytes"]
    if snapshot_bytes is not None:
        counted["host", "snapshots"] = snapshot_bytes
    return counted


def _cached_bytes(zero: ZeroState) -> int:
    """Bytes of bases, probes not counted, that a cache holds in the device's place."""
    matrices = [p.matrix for p in zero.low_rank if isinstance(p.matrix, ProjectedMatrix)]
    return sum(
        m.columns.local[:, : m.rank].nbytes
        for m in matrices
        if m.columns.owner == m.name and m.columns.local is not None and m.columns.local.is_meta
    )
