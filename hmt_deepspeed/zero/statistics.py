"""Numbers and the start table of a :class:`~hmt_deepspeed.zero.optimizer.HMTZeroOptimizer`."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch

from hmt_deepspeed.optim.low_rank import LowRankMatrix
from hmt_deepspeed.optim.state import MIN_INT8_ELEMENTS
from hmt_deepspeed.report.metrics import format_table
from hmt_deepspeed.zero.basis_cache import basis_metrics, describe_bases
from hmt_deepspeed.zero.collectives import gather_bytes, reduce_bytes
from hmt_deepspeed.zero.host_states import RamStates
from hmt_deepspeed.zero.host_weight import HostWeight

if TYPE_CHECKING:
    from hmt_deepspeed.zero.entries import Entry
    from hmt_deepspeed.zero.optimizer import HMTZeroOptimizer

__all__ = ["describe", "metrics", "stock_communication_bytes"]


def state_bytes(entry: Entry) -> int:
    """Bytes of moments and basis of one parameter on this rank; masters not counted."""
    if entry.matrix is not None:
        return entry.matrix.state_bytes()
    assert entry.dense_state is not None
    return sum(t.nbytes for t in entry.dense_state)


def _offloaded_bytes(entry: Entry) -> int:
    """Of these, and of the master, what is in host memory or on an SSD."""
    if not isinstance(entry.weight, HostWeight):
        return 0
    moments = 0 if entry.dense_state is None else sum(t.nbytes for t in entry.dense_state[:2])
    return entry.weight.master_bytes() + moments


def _host_gradient_bytes(entry: Entry) -> int:
    gradient = entry.gradient.host
    return 0 if gradient is None else gradient.nbytes


def stock_communication_bytes(optimizer: HMTZeroOptimizer, low_rank_only: bool = False) -> int:
    """Bytes a rank would send per step under stock ZeRO of the same stage for the same parameters.

    Gradients: all-reduce (stage 0), reduce-scatter once (1) or per micro-batch (2, 3). Weights:
    all-gather (1, 2). Stage 3's gathers of parameters in forward and backward are left out on both
    sides: they are the same code.
    """
    settings, world = optimizer.settings, optimizer.collectives.world
    gradient_size = _size(settings.comm_dtype)
    weight_size = _size(settings.model_dtype)
    entries = optimizer.low_rank if low_rank_only else optimizer.entries
    numel = sum(e.gradient.shards.m * e.gradient.shards.n for e in entries)
    if settings.stage == 0:
        return reduce_bytes(numel * gradient_size, world)
    rounds = settings.micro_batches if settings.stage >= 2 else 1
    sent = rounds * gather_bytes(numel * gradient_size, world)
    return sent + (gather_bytes(numel * weight_size, world) if settings.stage < 3 else 0)


def metrics(optimizer: HMTZeroOptimizer) -> dict[str, Any]:
    """Bytes on this rank, communication of the last step, rank and captured energy per matrix.

    ``captured_energy_per_matrix`` is smoothed over recent steps; reading it waits for the device.
    APOLLO, which has no basis, and matrices without probes, which see nothing outside theirs, are left out of it.
    """
    low_rank = optimizer.low_rank
    energies: dict[str, float] = {}
    matrices = [
        (e.name, e.matrix)
        for e in low_rank
        if isinstance(e.matrix, LowRankMatrix) and e.matrix.measures_energy
    ]
    if matrices:
        stacked = torch.stack([matrix.smoothed_energy() for _, matrix in matrices])
        energies = dict(zip([name for name, _ in matrices], stacked.tolist(), strict=True))
    ranks = {e.name: e.matrix.rank for e in low_rank if e.matrix is not None}
    return {
        "optimizer_state_bytes": sum(map(state_bytes, optimizer.entries)),
        "low_rank_state_bytes": sum(map(state_bytes, low_rank)),
        "weight_bytes": sum(e.weight.weight_bytes() for e in optimizer.entries),
        "master_weight_bytes": sum(e.weight.master_bytes() for e in optimizer.entries),
        "optimizer_host_bytes": 0 if optimizer.host is None else optimizer.host.nbytes,
        "offloaded_state_bytes": sum(map(_offloaded_bytes, optimizer.entries)),
        "offloaded_gradient_bytes": sum(map(_host_gradient_bytes, optimizer.entries)),
        **_ssd_numbers(optimizer),
        "gradient_buffer_bytes": optimizer.reducer.peak_bytes,
        "communication_bytes_per_step": optimizer.communication_bytes,
        "stock_zero_communication_bytes_per_step": stock_communication_bytes(optimizer),
        "mean_rank": sum(ranks.values()) / len(ranks) if ranks else None,
        "mean_captured_energy": sum(energies.values()) / len(energies) if energies else None,
        "rank_per_matrix": ranks,
        "captured_energy_per_matrix": energies,
        "refreshed_matrices": sum(e.gradient.refreshing for e in low_rank),
        **basis_metrics(optimizer.bases, low_rank),
    }


def _ssd_numbers(optimizer: HMTZeroOptimizer) -> dict[str, int]:
    """Bytes of states' files, and of what was read and written of them since construction."""
    if optimizer.host is None or optimizer.host.ssd is None:
        return {}
    ssd = optimizer.host.ssd
    return {
        "ssd_state_bytes": ssd.slots.folder.file_bytes,
        "ssd_bytes_read": ssd.counters.bytes_in,
        "ssd_bytes_written": ssd.counters.bytes_out,
    }


def describe(optimizer: HMTZeroOptimizer) -> str:
    """One line per kind of parameter in each group: nothing is silently dense."""
    kinds: dict[tuple[Any, ...], list[Entry]] = defaultdict(list)
    numbers = {id(g): i for i, g in enumerate(optimizer.param_groups)}
    for entry in optimizer.entries:
        shape = "any" if entry.matrix is None else "x".join(map(str, entry.assignment.shape))
        kind = (
            numbers[id(entry.group)],
            entry.assignment.rule,
            _projection(entry),
            shape,
            _rank(entry),
            _backward(entry),
            _state_dtype(entry, optimizer.options["state_dtype"]),
            entry.weight.kind,
            _placement(optimizer, entry),
            entry.assignment.reason or "linear",
        )
        kinds[kind].append(entry)
    rows = []
    for (*leading, backward, dtype, kept, placement, reason), entries in kinds.items():
        group, rule, projection, shape, rank = leading
        numel = sum(e.gradient.shards.m * e.gradient.shards.n for e in entries)
        held = sum(e.weight.weight_bytes() for e in entries)
        masters = sum(e.weight.master_bytes() for e in entries)
        counts = [len(entries), f"{numel:,}"]
        states = [f"{held:,} ({kept})", dtype, f"{sum(map(state_bytes, entries)):,}"]
        states += [f"{masters:,}" if masters else _masters_kind(entries[0]), placement]
        rows.append([group, rule, projection, shape, *counts, rank, backward, *states, reason])
    headers = ["group", "rule", "projection", "shape", "tensors", "elements", "rank", "backward"]
    headers += ["weight bytes", "states", "state bytes", "master bytes", "shard", "because"]
    title = f"hmt: ZeRO stage {optimizer.settings.stage}, {optimizer.collectives.world} ranks, bytes per rank"
    lines = [title, format_table(rows, headers)]
    if optimizer.host is not None:
        assert optimizer.settings.host is not None
        overlap = optimizer.settings.host.overlap
        lines.append(f"offload_optimizer, overlap {overlap}: {optimizer.host.describe()}")
    if optimizer.bases.cache is not None:
        lines.append(describe_bases(optimizer.bases, optimizer.low_rank))
    return "\n".join(lines)


def _projection(entry: Entry) -> str:
    """The projected side; of a matrix whose rule chose it, the one it chose."""
    settings = entry.assignment.settings
    if settings is None or entry.matrix is None:
        return "-"
    if settings.projection == "two_sided" and not settings.is_apollo:
        return "two-sided"
    side = "left" if entry.matrix.transposed else "right"
    return f"{side}, random" if entry.matrix.redraws else side


def _rank(entry: Entry) -> str:
    """The rank, or the candidates that it is chosen from, and the one that the matrix is too narrow for."""
    matrix, settings = entry.matrix, entry.assignment.settings
    if matrix is None or settings is None:
        return "-"
    first, last = matrix.candidates[0], matrix.candidates[-1]
    chosen = f"{first}..{last}" if first < last else str(first)
    wanted = settings.lowered_from(*matrix.shape)
    return chosen if wanted is None else f"{chosen} (lowered from {wanted})"


def _backward(entry: Entry) -> str:
    if entry.matrix is None:
        return "-"
    return "projected" if entry.gradient.site is not None else "full gradient"


def _state_dtype(entry: Entry, wanted: str) -> str:
    """Storage of the moments; small tensors stay in fp32, and the table says so."""
    if entry.matrix is not None:
        stored = entry.matrix.moments.dtype
    else:
        assert entry.dense_state is not None
        stored = entry.dense_state[0].dtype
    if stored != wanted:
        stored = f"{stored} (under {MIN_INT8_ELEMENTS} elements)"
    settings = entry.assignment.settings
    factored = settings is not None and settings.is_factored
    return f"{stored}, factored" if factored else stored


def _masters_kind(entry: Entry) -> str:
    return "weights are fp32" if entry.weight.has_master else "none"


def _placement(optimizer: HMTZeroOptimizer, entry: Entry) -> str:
    world, stage = optimizer.collectives.world, optimizer.settings.stage
    part = "whole" if stage == 0 or world == 1 else f"1/{world} of rows"
    if not isinstance(entry.weight, HostWeight):
        return part
    home = "host" if isinstance(entry.weight.states, RamStates) else "SSD"
    return f"{part}, on {home}" if entry.matrix is None else f"{part}, masters on {home}"


def _size(dtype: torch.dtype) -> int:
    return torch.empty(0, dtype=dtype).element_size()
