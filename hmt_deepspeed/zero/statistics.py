"""Numbers and the start table of a :class:`~hmt_deepspeed.zero.optimizer.HMTZeroOptimizer`."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch

from hmt_deepspeed.report.metrics import format_table
from hmt_deepspeed.zero.collectives import gather_bytes, reduce_bytes

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
    """
    low_rank = optimizer.low_rank
    energies: list[float] = []
    if low_rank:
        stacked = torch.stack(
            [e.matrix.smoothed_energy() for e in low_rank if e.matrix is not None]
        )
        energies = stacked.tolist()
    ranks = {e.name: e.matrix.rank for e in low_rank if e.matrix is not None}
    return {
        "optimizer_state_bytes": sum(map(state_bytes, optimizer.entries)),
        "low_rank_state_bytes": sum(map(state_bytes, low_rank)),
        "weight_bytes": sum(e.weight.weight_bytes() for e in optimizer.entries),
        "master_weight_bytes": sum(e.weight.master_bytes() for e in optimizer.entries),
        "gradient_buffer_bytes": optimizer.reducer.peak_bytes,
        "communication_bytes_per_step": optimizer.communication_bytes,
        "stock_zero_communication_bytes_per_step": stock_communication_bytes(optimizer),
        "mean_rank": sum(ranks.values()) / len(ranks) if ranks else None,
        "mean_captured_energy": sum(energies) / len(energies) if energies else None,
        "rank_per_matrix": ranks,
        "captured_energy_per_matrix": dict(zip(ranks, energies, strict=True)),
        "refreshed_matrices": sum(e.gradient.refreshing for e in low_rank),
    }


def describe(optimizer: HMTZeroOptimizer) -> str:
    """One line per kind of parameter in each group: nothing is silently dense."""
    lines: dict[tuple[Any, ...], list[Entry]] = defaultdict(list)
    numbers = {id(g): i for i, g in enumerate(optimizer.param_groups)}
    for entry in optimizer.entries:
        matrix = entry.matrix
        rank: str | int = "-" if matrix is None else matrix.rank
        if matrix is not None and optimizer.options["rank"] == "auto":
            rank = f"{matrix.candidates[0]}..{matrix.candidates[-1]}"
            wanted = optimizer.options["rank_candidates"]
            if max(wanted) > min(matrix.shape):
                rank += f" (lowered to {min(matrix.shape)})"
        backward = "-"
        if matrix is not None:
            backward = "projected" if entry.gradient.site is not None else "full gradient"
        shape = "x".join(map(str, entry.assignment.shape)) if matrix is not None else "any"
        reason = entry.assignment.reason
        kind = entry.weight.kind
        lines[
            (numbers[id(entry.group)], entry.assignment.rule, rank, backward, shape, reason, kind)
        ].append(entry)
    rows = []
    for (group, rule, rank, backward, shape, reason, kind), entries in lines.items():
        numel = sum(e.gradient.shards.m * e.gradient.shards.n for e in entries)
        held = sum(e.weight.weight_bytes() for e in entries)
        masters = sum(e.weight.master_bytes() for e in entries)
        rows.append(
            [
                group,
                rule,
                shape,
                len(entries),
                f"{numel:,}",
                rank,
                backward,
                f"{held:,} ({kind})",
                f"{sum(map(state_bytes, entries)):,}",
                f"{masters:,}" if masters else _masters_kind(entries[0]),
                _placement(optimizer),
                reason or "linear",
            ]
        )
    headers = [
        "group",
        "rule",
        "shape",
        "tensors",
        "elements",
        "rank",
        "backward",
        "weight bytes",
        "state bytes",
        "master bytes",
        "shard",
        "because",
    ]
    title = f"hmt: ZeRO stage {optimizer.settings.stage}, {optimizer.collectives.world} ranks, bytes per rank"
    return f"{title}\n{format_table(rows, headers)}"


def _masters_kind(entry: Entry) -> str:
    return "weights are fp32" if entry.weight.master is not None else "none"


def _placement(optimizer: HMTZeroOptimizer) -> str:
    world, stage = optimizer.collectives.world, optimizer.settings.stage
    if stage == 0 or world == 1:
        return "whole"
    return f"1/{world} of rows"


def _size(dtype: torch.dtype) -> int:
    return torch.empty(0, dtype=dtype).element_size()
