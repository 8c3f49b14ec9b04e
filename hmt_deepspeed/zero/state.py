"""The states of one optimizer: what a step changes, statistics count and checkpoints save."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from hmt_deepspeed.optim.hmt import HMT
from hmt_deepspeed.zero.bases.groups import BasisGroups
from hmt_deepspeed.zero.bases.storage import BasisStorage
from hmt_deepspeed.zero.offload.worker import HostWorker
from hmt_deepspeed.zero.parameters.param_state import ParamState
from hmt_deepspeed.zero.settings import ZeroSettings
from hmt_deepspeed.zero.sharding.collectives import Collectives
from hmt_deepspeed.zero.sharding.parallel_experts import ParallelExperts
from hmt_deepspeed.zero.sharding.shards import ExpertShards, padded

__all__ = ["ZeroState", "whole_experts", "whole_flat", "whole_rows"]


@dataclass(eq=False)
class ZeroState:
    """All state of one optimizer on this rank that outlives a step.

    Attributes:
        carrier: torch's optimizer, which carries the parameter groups.
        trained: parameters of each group that are trained.
        param_names: of all parameters of the model; of experts those among all, see :class:`ParallelExperts`.
        param_states: one for each trained parameter, in the order of the groups.
        options: fields of ``hmt.optimizer``. settings: what the JSON says.
        collectives: of all ranks.
        host: updates what lives in host memory or on an SSD; None where nothing does.
        bases: stores them between their uses. basis_groups: matrices that share one, of those that all ranks hold.
        parallel_experts: those that not all hold. expert_groups: as ``basis_groups``, of the matrices that some ranks share.
        loss_scaler: DeepSpeed's.
        step_count: optimizer steps begun, skipped ones included.
    """

    carrier: HMT
    trained: Sequence[Sequence[nn.Parameter]]
    param_names: Mapping[nn.Parameter, str]
    param_states: Sequence[ParamState]
    options: Mapping[str, Any]
    settings: ZeroSettings
    collectives: Collectives
    host: HostWorker | None
    bases: BasisStorage
    basis_groups: BasisGroups
    loss_scaler: Any
    parallel_experts: ParallelExperts
    expert_groups: Sequence[BasisGroups]
    step_count: int = 0

    @cached_property
    def low_rank(self) -> list[ParamState]:
        """Those with a matrix rule."""
        return [p for p in self.param_states if p.matrix is not None]

    @property
    def all_basis_groups(self) -> list[BasisGroups]:
        return [self.basis_groups, *self.expert_groups]

    @cached_property
    def holders(self) -> list[Collectives]:
        """Collectives of all ranks, and of those that share some experts with this one; in one order on every rank."""
        each = (param_state.gradient.holders for param_state in self.param_states)
        return list(dict.fromkeys([self.collectives, *each]))

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Groups of torch's optimizer: lr, betas, eps, weight_decay, params."""
        return self.carrier.param_groups

    def is_sharded_over(self, holders: Collectives) -> bool:
        """Whether ranks that share some parameters each hold a part of their states."""
        return self.settings.stage > 0 and holders.world > 1

    def saves_states_of(self, param_state: ParamState) -> bool:
        """Whether this rank saves states of a parameter: at stage 0 all holders have the same, and the first one does."""
        return self.settings.stage > 0 or param_state.gradient.holders.rank == 0


def whole_flat(param_state: ParamState, shard: Tensor) -> Tensor:
    """A parameter's whole flat tensor from its holders' parts of it. A collective.

    Args:
        shard: this rank's flat elements, of any dtype, on the device or on the host.

    Returns:
        Flat tensor of m n elements on the device, in the dtype of the shard; nobody else's memory.
    """
    shards, device = param_state.weight.shards, param_state.weight.device
    if shards.world == 1:
        return shard.to(device, copy=True)
    shard = shard.to(device)  # from the host, if it lives there
    part = padded(shard.contiguous(), shards.partition)
    packed = torch.empty(shards.world, shards.partition, dtype=shard.dtype, device=device)
    param_state.gradient.holders.all_gather(packed, part).wait()
    whole = torch.empty(shards.m * shards.n, dtype=shard.dtype, device=device)
    shards.unpack_flat(packed, whole)
    return whole


def whole_rows(param_state: ParamState, rows: Tensor) -> Tensor:
    """Rows of all holders from those held here, wherever they live. A collective.

    Args:
        param_state: of the matrix. rows: that this rank touches x width, any dtype.

    Returns:
        m x width on the device; nobody else's memory.
    """
    shards = param_state.gradient.shards
    rows = rows.to(param_state.weight.device)
    if shards.world == 1:
        return rows.clone()
    width = rows.shape[1]
    part = padded(rows.reshape(-1), shards.max_rows * width)
    packed = torch.empty(shards.world, part.numel(), dtype=rows.dtype, device=rows.device)
    param_state.gradient.holders.all_gather(packed, part).wait()
    whole = torch.empty(shards.m, width, dtype=rows.dtype, device=rows.device)
    shards.unpack(packed.view(shards.world, shards.max_rows, width), whole)
    return whole


def whole_experts(param_state: ParamState, state: Tensor, by_rows: bool) -> Tensor:
    """A state of all experts from what is held here of some. A collective.

    Args:
        param_state: of the experts. state: of those held here, or of their rows where ``by_rows``, E' x any shape.

    Returns:
        E x that shape, on the device; nobody else's memory.
    """
    matrix, shards = param_state.matrix, param_state.gradient.shards
    assert matrix is not None
    assert isinstance(shards, ExpertShards)
    if by_rows:
        rows = state.reshape(matrix.num_held * matrix.num_rows, state.shape[-1])
        return whole_rows(param_state, rows).unflatten(0, (matrix.count, -1))
    whole = torch.zeros(matrix.count, *state.shape[1:], device=param_state.weight.device)
    if shards.owns_experts(param_state.weight.rank):
        whole[matrix.held] = state
    if shards.world > 1:
        param_state.gradient.holders.all_reduce(whole)
    return whole
