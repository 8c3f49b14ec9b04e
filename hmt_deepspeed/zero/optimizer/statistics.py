"""Metrics of an optimizer: bytes on this rank, bytes sent, ranks, captured energies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from hmt_deepspeed.memory.numbers import Measured
from hmt_deepspeed.optim.rules.projected import ProjectedMatrix
from hmt_deepspeed.zero.bases.cache import basis_metrics
from hmt_deepspeed.zero.offload.weight import HostWeight
from hmt_deepspeed.zero.parameters.param_state import ParamState
from hmt_deepspeed.zero.sharding.collectives import gather_bytes, reduce_bytes
from hmt_deepspeed.zero.state import ZeroState

__all__ = ["measure", "state_bytes", "stock_communication_bytes"]


def state_bytes(param_state: ParamState) -> int:
    """Bytes of moments and basis of one parameter on this rank; masters not counted."""
    if param_state.matrix is not None:
        return param_state.matrix.state_bytes()
    assert param_state.dense_state is not None
    return sum(t.nbytes for t in param_state.dense_state)


def _offloaded_bytes(param_state: ParamState) -> int:
    """Bytes of states and master in host memory or on an SSD."""
    if not isinstance(param_state.weight, HostWeight):
        return 0
    moments = (
        0 if param_state.dense_state is None else sum(t.nbytes for t in param_state.dense_state[:2])
    )
    return param_state.weight.master_bytes() + moments


def _host_gradient_bytes(param_state: ParamState) -> int:
    gradient = param_state.gradient.host
    return 0 if gradient is None else gradient.nbytes


def stock_communication_bytes(zero: ZeroState, low_rank_only: bool = False) -> int:
    """Bytes a rank would send per step under stock ZeRO of the same stage for the same parameters.

    Gradients: all-reduce (stage 0), reduce-scatter once (1) or per micro-batch (2, 3). Weights:
    all-gather (1, 2). Stage 3's gathers of parameters in forward and backward are left out on both
    sides: they are the same code.

    Args:
        zero: states of the optimizer. low_rank_only: count the parameters with a matrix rule only.
    """
    settings = zero.settings
    gradient_size = _size(settings.comm_dtype)
    weight_size = _size(settings.model_dtype)
    param_states = zero.low_rank if low_rank_only else zero.param_states
    sizes = Counter[int]()  # by the number of ranks that share them
    for p in param_states:
        sizes[p.gradient.holders.world] += p.gradient.shards.m * p.gradient.shards.n
    if settings.stage == 0:
        return sum(reduce_bytes(numel * gradient_size, world) for world, numel in sizes.items())
    rounds = settings.micro_batches if settings.stage >= 2 else 1
    weight_size = weight_size if settings.stage < 3 else 0
    return sum(
        rounds * gather_bytes(numel * gradient_size, world)
        + gather_bytes(numel * weight_size, world)
        for world, numel in sizes.items()
    )


def measure(zero: ZeroState, gradient_buffer_bytes: int, communication_bytes: int) -> Measured:
    """Bytes on this rank, communication of the last step, rank and captured energy per matrix.

    ``captured_energy_per_matrix`` is smoothed over recent steps, and the device has it.
    Matrices without a basis from a gradient, and those without probes, which see nothing outside theirs, are left out of it.

    Args:
        zero: states of the optimizer.
        gradient_buffer_bytes: most bytes of gradients alive at once so far.
        communication_bytes: that this rank has sent in the last step.
    """
    low_rank = zero.low_rank
    seen = {
        p.name: p.matrix.smoothed_energy()
        for p in low_rank
        if isinstance(p.matrix, ProjectedMatrix) and p.matrix.measures_energy
    }

    def finish(values: Sequence[float]) -> dict[str, Any]:
        return {
            "mean_captured_energy": sum(values) / len(values) if values else None,
            "captured_energy_per_matrix": dict(zip(seen, values, strict=True)),
        }

    known = _known(zero, gradient_buffer_bytes, communication_bytes)
    return Measured(known, torch.stack(list(seen.values())) if seen else torch.zeros(0), finish)


def _known(zero: ZeroState, gradient_buffer_bytes: int, communication_bytes: int) -> dict[str, Any]:
    """What the host knows."""
    low_rank = zero.low_rank
    ranks = {p.name: p.matrix.rank for p in low_rank if p.matrix is not None}
    return {
        "optimizer_state_bytes": sum(map(state_bytes, zero.param_states)),
        "low_rank_state_bytes": sum(map(state_bytes, low_rank)),
        "weight_bytes": sum(p.weight.weight_bytes() for p in zero.param_states),
        "master_weight_bytes": sum(p.weight.master_bytes() for p in zero.param_states),
        "optimizer_host_bytes": 0 if zero.host is None else zero.host.nbytes,
        "offloaded_state_bytes": sum(map(_offloaded_bytes, zero.param_states)),
        "offloaded_gradient_bytes": sum(map(_host_gradient_bytes, zero.param_states)),
        **_ssd_numbers(zero),
        "gradient_buffer_bytes": gradient_buffer_bytes,
        "communication_bytes_per_step": communication_bytes,
        "stock_zero_communication_bytes_per_step": stock_communication_bytes(zero),
        "mean_rank": sum(ranks.values()) / len(ranks) if ranks else None,
        "mean_captured_energy": None,
        "rank_per_matrix": ranks,
        "captured_energy_per_matrix": {},
        "refreshed_matrices": sum(p.gradient.refreshing for p in low_rank),
        **basis_metrics(zero.bases, low_rank),
    }


def _ssd_numbers(zero: ZeroState) -> dict[str, int]:
    """Bytes of states' files, and of what was read and written of them since construction."""
    if zero.host is None or zero.host.ssd is None:
        return {}
    ssd = zero.host.ssd
    return {
        "ssd_state_bytes": ssd.slots.folder.file_bytes,
        "ssd_bytes_read": ssd.counters.bytes_in,
        "ssd_bytes_written": ssd.counters.bytes_out,
    }


def _size(dtype: torch.dtype) -> int:
    return torch.empty(0, dtype=dtype).element_size()
