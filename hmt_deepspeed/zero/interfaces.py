"""Protocols by which parts of an engine and of its optimizer see the whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import nn

from hmt_deepspeed.config import HMTConfig
from hmt_deepspeed.zero.gradients.reducer import GradientReducer
from hmt_deepspeed.zero.state import ZeroState

__all__ = ["Engine", "GatherOrder", "HostUpdates", "Optimizer"]


class HostUpdates(Protocol):
    """Updates in host memory that may be under way.

    Attributes:
        synchronize_copies: waits for copies of weights and states that somebody has under way.
    """

    synchronize_copies: Callable[[], None]

    def synchronize(self) -> None: ...
    def finish(self) -> None: ...
    def when_committed(self, action: Callable[[], None]) -> None: ...


class GatherOrder(Protocol):
    """Partitions of parameters that were written to, and gathers of them to come."""

    def order_gathers(self) -> None: ...


class Optimizer(Protocol):
    """HMT's ZeRO optimizer, as the tools that DeepSpeed finds at parameters need it.

    Attributes:
        parameter_offload: DeepSpeed's ZeRO-3 coordinator, None below stage 3.
    """

    zero: ZeroState
    module: nn.Module
    reducer: GradientReducer
    parameter_offload: Any
    partitions: GatherOrder
    state_access: Any

    def synchronize(self) -> None: ...
    def empty_partition_cache(self) -> None: ...
    def forget_moved(self) -> None: ...
    def checkpoint_event_epilogue(self) -> None: ...
    def metrics(self) -> dict[str, Any]: ...


class Engine(Protocol):
    """An engine of HMT's, as checkpoints, snapshots, metrics and the plan need it; the rest is DeepSpeed's.

    Attributes:
        optimizer: HMT's where ``hmt_enabled``, else DeepSpeed's or None.
        hmt_activations, hmt_planner, hmt_snapshots, hmt_fpdt: parts that are there, else None.
        snapshot_client_state: gives what a snapshot holds of the user's.
    """

    module: nn.Module
    device: torch.device
    optimizer: Any
    monitor: Any
    checkpoint_engine: Any
    param_names: Mapping[nn.Parameter, str]
    snapshot_client_state: Callable[[], Mapping[str, Any]]
    hmt_activations: Any
    hmt_planner: Any
    hmt_snapshots: Any
    hmt_fpdt: Any
    global_rank: int
    local_rank: int
    global_steps: int
    global_samples: int
    skipped_steps: int

    @property
    def hmt_enabled(self) -> bool: ...
    def run_facts(self, hmt: HMTConfig) -> Any: ...
    def get_lr(self) -> list[float]: ...
    def get_global_grad_norm(self) -> Any: ...
    def fp16_enabled(self) -> bool: ...
    def zero_offload_param(self) -> Any: ...
    def zero_offload_optimizer(self) -> Any: ...
    def use_node_local_storage(self) -> bool: ...
    def destroy(self) -> None: ...
    def _get_optimizer_loss_scale(self) -> float: ...
    def _get_all_ckpt_names(self, checkpoints_path: str, tag: str) -> list[str]: ...
    def _get_zero_frozen_param_attributes(self, of: Callable[[Any], Any]) -> dict[str, Any]: ...
    def _get_param_shape_func(self, param: Any) -> Any: ...
    def _backward_post_hook(self, *args: Any) -> Any: ...
