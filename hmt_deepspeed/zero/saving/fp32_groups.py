"""Lays out a checkpoint's fp32 weights as DeepSpeed's ``zero_to_fp32.py`` expects them."""

from __future__ import annotations

import torch
from torch import Tensor

from hmt_deepspeed.zero.parameters.param_state import ParamState
from hmt_deepspeed.zero.state import ZeroState, whole_flat
from hmt_deepspeed.zero.weights.int8_weight import EncodedWeight

__all__ = ["stage3_groups", "stage12_groups"]


def stage3_groups(zero: ZeroState) -> list[Tensor]:
    """Per group the concatenation of this rank's ``ceil(numel / world)`` part of each parameter.

    Args:
        zero: states of the optimizer.

    Returns:
        Flat fp32 tensors on the host, or in a file where the masters are.
    """
    by_param = {p.gradient.param: p for p in zero.param_states}
    groups = []
    for params in zero.trained:
        param_states = [by_param[p] for p in params]
        flat, offset = _zeros(zero, sum(p.weight.shards.partition for p in param_states)), 0
        for param_state in param_states:
            flat[offset : offset + param_state.weight.num_elements].copy_(
                param_state.weight.master_values()
            )
            offset += param_state.weight.shards.partition
        groups.append(flat)
    return groups


def _zeros(zero: ZeroState, numel: int) -> Tensor:
    """For all masters of a rank; in a file where the masters are, so that host memory need not hold them."""
    ssd = None if zero.host is None else zero.host.ssd
    return torch.zeros(numel) if ssd is None else ssd.scratch(numel)


def _whole_master(param_state: ParamState) -> Tensor:
    """fp32 values of a whole weight, flat, on the device. A collective."""
    weight = param_state.weight
    if isinstance(weight, EncodedWeight):
        return weight.whole_values().view(-1)
    return whole_flat(param_state, weight.master_values())


def stage12_groups(zero: ZeroState) -> list[Tensor]:
    """Per group this rank's equal slice of the concatenated fp32 weights, padded to 2 x world.

    Args:
        zero: states of the optimizer.

    Returns:
        Flat fp32 tensors on the host, or in a file where the masters are. A collective.
    """
    by_param = {p.gradient.param: p for p in zero.param_states}
    world, rank = zero.collectives.world, zero.collectives.rank
    groups = []
    for params in zero.trained:
        param_states = [by_param[p] for p in params]
        # experts that not all ranks hold are saved by name
        param_states = [p for p in param_states if p.gradient.holders is zero.collectives]
        total = sum(p.gradient.shards.m * p.gradient.shards.n for p in param_states)
        length = -(-total // (2 * world)) * 2
        begin, own, offset = rank * length, _zeros(zero, length), 0
        for param_state in param_states:
            whole = _whole_master(param_state)
            first, last = max(begin, offset), min(begin + length, offset + whole.numel())
            if first < last:
                own[first - begin : last - begin] = whole[first - offset : last - offset].cpu()
            offset += whole.numel()
        groups.append(own)
    return groups
