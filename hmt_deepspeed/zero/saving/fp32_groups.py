"""fp32 weights of a checkpoint as DeepSpeed's ``zero_to_fp32.py`` looks for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from hmt_deepspeed.zero.optimizer.optimizer import HMTZeroOptimizer

__all__ = ["stage3_groups", "stage12_groups"]


def stage3_groups(optimizer: HMTZeroOptimizer) -> list[Tensor]:
    """Per group the concatenation of this rank's ``ceil(numel / world)`` part of each parameter."""
    by_param = {p.gradient.param: p for p in optimizer.param_states}
    groups = []
    for params in optimizer.round_robin_bit16_groups:
        param_states = [by_param[p] for p in params]
        flat, offset = _zeros(optimizer, sum(p.gradient.shards.partition for p in param_states)), 0
        for param_state in param_states:
            flat[offset : offset + param_state.weight.num_elements].copy_(
                param_state.weight.master_values()
            )
            offset += param_state.gradient.shards.partition
        groups.append(flat)
    return groups


def _zeros(optimizer: HMTZeroOptimizer, numel: int) -> Tensor:
    """For all masters of a rank; in a file where the masters are, so that host memory need not hold them."""
    ssd = None if optimizer.host is None else optimizer.host.ssd
    return torch.zeros(numel) if ssd is None else ssd.scratch(numel)


def stage12_groups(optimizer: HMTZeroOptimizer) -> list[Tensor]:
    """Per group this rank's equal slice of the concatenated fp32 weights, padded to 2 x world."""
    by_param = {p.gradient.param: p for p in optimizer.param_states}
    world, rank = optimizer.collectives.world, optimizer.collectives.rank
    groups = []
    for params in optimizer.round_robin_bit16_groups:
        param_states = [by_param[p] for p in params]
        total = sum(p.gradient.shards.m * p.gradient.shards.n for p in param_states)
        length = -(-total // (2 * world)) * 2
        begin, own, offset = rank * length, _zeros(optimizer, length), 0
        for param_state in param_states:
            whole = optimizer.state_access.get_full_hp_param(param_state.gradient.param).view(-1)
            first, last = max(begin, offset), min(begin + length, offset + whole.numel())
            if first < last:
                own[first - begin : last - begin] = whole[first - offset : last - offset].cpu()
            offset += whole.numel()
        groups.append(own)
    return groups
