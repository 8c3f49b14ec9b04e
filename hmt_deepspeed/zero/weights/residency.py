"""Access to stage 3's partitions, which DeepSpeed keeps in memory or, between uses, on an SSD.

Under ``offload_param`` on NVMe ``param.ds_tensor`` of a large parameter (from 1 MiB per rank) holds nothing
between uses; DeepSpeed's swapper lends it one of ``buffer_count`` buffers. Everything here is local to a rank.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.swap_tensor.partitioned_param_swapper import PartitionedParamStatus
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum
from deepspeed.runtime.zero.partition_parameters import (
    DS_Z3_GATHERED_PARAM_CONTEXT_DEPTH_ATTR,
    ZeroParamStatus,
)
from torch import Tensor, nn

from hmt_deepspeed.kernels.backward import is_transformed

__all__ = [
    "detach_coordinator",
    "on_ssd",
    "prepare_for_ssd",
    "refuse_transforms",
    "release_buffers",
    "resident",
]


def on_ssd(param: Any) -> bool:
    """Whether this rank's partition of a parameter lives on an SSD."""
    part = getattr(param, "ds_tensor", None)
    return part is not None and part.final_location == OffloadDeviceEnum.nvme


@contextmanager
def resident(param: Any, overwrite: bool = False) -> Iterator[Tensor]:
    """This rank's partition of a stage-3 parameter, flat with its padding, for the duration of a block.

    Args:
        overwrite: the block gives every element a new value: what an SSD holds is not read, but replaced
            when the block ends. Without it, what the block writes to a partition on an SSD is lost.

    Returns:
        1-d, ``ceil(numel / world)`` elements of the model's dtype.
    """
    part = param.ds_tensor
    if not on_ssd(param):
        yield part.detach().view(-1)
        return
    swapper = param.nvme_swapper
    if part.status == PartitionedParamStatus.INFLIGHT:
        swapper.synchronize_reads()
    was_there = (
        part.status == PartitionedParamStatus.AVAILABLE
    )  # fetched ahead, or gathered by the user
    if not was_there and overwrite:
        part.data = swapper.get_buffer(param, part.ds_numel).data
        part.status = PartitionedParamStatus.AVAILABLE
    elif not was_there:
        swapper.swap_in([param], async_op=False)
    try:
        yield part.detach().view(-1)
        if overwrite:
            swapper.swap_out_and_release([param])
            if was_there:
                swapper.swap_in([param], async_op=False)
    finally:
        if not was_there:
            swapper.remove_partition_and_release_buffers([param])


def release_buffers(module: nn.Module) -> None:
    """Give back what was read ahead for a use that did not come."""
    for param in _swapped(module.parameters()):
        if param.ds_status != ZeroParamStatus.NOT_AVAILABLE:
            continue  # gathered, and released after its use
        if param.ds_tensor.status == PartitionedParamStatus.INFLIGHT:
            param.nvme_swapper.synchronize_reads()
        if param.ds_tensor.status == PartitionedParamStatus.AVAILABLE:
            param.nvme_swapper.remove_partition_and_release_buffers([param])


def refuse_transforms(*_: object) -> None:
    """Before a forward at stage 3: the hooks by which DeepSpeed gathers weights take part in none of torch's
    transforms, and end in torch's internals.

    Raises:
        ValueError: within a transform of ``torch.func``, and under forward-mode AD.
    """
    if is_transformed():
        raise ValueError(
            "the model is called by a transform of torch.func or under forward-mode AD, but zero_optimization.stage "
            "is 3, whose hooks on modules have a backward alone. Legal for transforms: stages 0, 1 and 2."
        )


# What DeepSpeedZeRoOffload puts on modules and leaves there; ``_external_params`` may be the user's.
# ``pre_bwd_fn`` and ``post_bwd_fn`` call the coordinator that made them, also in the backward of a later engine,
# which keeps those that it finds.
_ON_MODULES = (
    "pre_bwd_fn",
    "post_bwd_fn",
    "applied_pre_backward_ref_cnt",
    "ds_grads_remaining",
    "ds_id",
    "ds_inflight_param_registry",
    "ds_recompute_parameters",
    "_original_parameters",
)


def detach_coordinator(parameter_offload: Any) -> None:
    """Take DeepSpeed's coordinator off its modules; parameters stay in parts, as zero.Init makes them."""
    parameter_offload.destroy()
    parameter_offload.partition_all_parameters()
    for module in parameter_offload.module.modules():
        for name in _ON_MODULES:
            vars(module).pop(name, None)
        module._parameters = dict(module._parameters)
        for param in module.parameters(recurse=False):
            vars(param).pop("ds_z3_leaf_module", None)


def prepare_for_ssd(parameter_offload: Any, max_in_cpu: int, pin_memory: bool) -> None:
    """Do what DeepSpeed's coordinator leaves to DeepSpeed's own optimizer on NVMe, and correct what it gets wrong.

    Args:
        parameter_offload: the coordinator. max_in_cpu: elements that stay in host memory.
        pin_memory: page-lock those.
    """
    _keep_in_memory(parameter_offload.module, max_in_cpu, pin_memory)
    swapped = _swapped(parameter_offload.module.parameters())
    if swapped:
        _read_each_once(swapped[0].nvme_swapper)  # all share it
        _never_persist(parameter_offload)
        parameter_offload.forward_hooks += _hooks(parameter_offload)


def _keep_in_memory(module: nn.Module, max_elements: int, pin_memory: bool) -> None:
    """``offload_param.max_in_cpu``: the first partitions that fit stay in host RAM, their files go.

    Partitions too small to be swapped do not count.
    """
    for param in _swapped(module.parameters()):
        part = param.ds_tensor
        if part.ds_numel > max_elements:
            continue
        max_elements -= part.ds_numel
        with resident(param) as held:
            copy = held.to("cpu", copy=True)
        part.data = get_accelerator().pin_memory(copy) if pin_memory else copy
        part.status, part.final_location = PartitionedParamStatus.AVAILABLE, None
        os.remove(param.nvme_swapper.get_path(param, must_exist=True))


def _read_each_once(swapper: Any) -> None:
    """Reading ahead, DeepSpeed 0.19 may name a parameter twice, once for forward and once for backward, and
    then asserts that it has no buffer yet."""
    read = swapper.swap_in

    def swap_in(params: Iterable[Any], *args: Any, **keyword: Any) -> None:
        read(list(dict.fromkeys(params)), *args, **keyword)

    swapper.swap_in = swap_in


def _never_persist(parameter_offload: Any) -> None:
    """Parameters on an SSD are released after use, below the persistence threshold too.

    A persistent one would occupy a swap buffer for good, and DeepSpeed's ``GatheredParameters`` asserts on it.
    """
    for param in _swapped(parameter_offload.persistent_parameters):
        param.ds_persist = False
    parameter_offload.persistent_parameters = [
        p for p in parameter_offload.persistent_parameters if p.ds_persist
    ]


def _hooks(parameter_offload: Any) -> list[Any]:
    """Forwards without a backward: what they read and gathered ahead for it would leave the next one without
    buffers."""
    module = parameter_offload.module

    def before(module: nn.Module, *_: Any) -> None:
        release_buffers(module)

    def after(module: nn.Module, *_: Any) -> None:
        users = DS_Z3_GATHERED_PARAM_CONTEXT_DEPTH_ATTR  # of GatheredParameters around this forward
        in_use = any(getattr(p, users, 0) for p in module.parameters())
        if not torch.is_grad_enabled() and not in_use:
            parameter_offload.partition_all_parameters()
            release_buffers(module)

    return [
        module.register_forward_pre_hook(before, prepend=True),
        module.register_forward_hook(after),
    ]


def _swapped(params: Iterable[Any]) -> list[Any]:
    return [param for param in params if on_ssd(param)]
