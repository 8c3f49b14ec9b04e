"""Partitions and gathers a model's parameters at stage 3, around DeepSpeed's coordinator."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch import Tensor, nn

from hmt_deepspeed.zero.sharding.collectives import Collectives
from hmt_deepspeed.zero.weights.gather_pipeline import GatherPipeline
from hmt_deepspeed.zero.weights.residency import release_buffers

__all__ = ["Partitions"]


class Partitions:
    """The parameters of one model; does nothing below stage 3.

    Args:
        parameter_offload: DeepSpeed's ZeRO-3 coordinator, None below stage 3. module: the model.
        group: of the ranks that share the parameters. overlap: let collectives return before they are done.
        gather_elements: size of a gather's bucket, over all ranks.
    """

    def __init__(
        self,
        parameter_offload: Any | None,
        module: nn.Module,
        group: Any,
        overlap: bool,
        gather_elements: int,
    ) -> None:
        self._coordinator, self._module = parameter_offload, module
        # its bytes count with those of DeepSpeed's gathers, which the optimizer's numbers leave out
        self._collectives = Collectives(group, overlap)
        self._gather_elements = gather_elements

    def order_gathers(self, *_: object) -> None:
        """Make coming gathers wait for the writes to the partitions until now.

        ZeRO-3's coordinator gathers on a stream of its own, which waits for nothing. A rank alone has nothing to
        gather, but DeepSpeed makes its host wait for that stream.
        """
        if self._coordinator is None or self._collectives.world == 1:
            return
        stream = self._coordinator._DeepSpeedZeRoOffload__allgather_stream
        if stream is not None:
            stream.wait_stream(get_accelerator().current_stream())

    def partition(self) -> None:
        """Release all gathered parameters and read-ahead buffers; only the partitions are left."""
        if self._coordinator is not None:
            self._coordinator.partition_all_parameters()
            release_buffers(self._module)

    @property
    def persistent(self) -> list[Any]:
        """The parameters that stay whole between their uses."""
        return [] if self._coordinator is None else self._coordinator.persistent_parameters

    def gather_persistent(self) -> None:
        """Gather the parameters that stay whole between their uses; those with equal shards lie side by side."""
        persistent = self.persistent
        missing = [p for p in persistent if p.ds_status == ZeroParamStatus.NOT_AVAILABLE]
        if self._collectives.world == 1:
            if missing:
                missing[0].all_gather(missing)  # moves nothing
            return
        pipeline = GatherPipeline(self._collectives, self._gather_elements)
        for params in self._alike(missing):
            device = params[0].device
            shards = torch.stack([p.ds_tensor.to(device, non_blocking=True) for p in params])
            pipeline.add(shards.view(-1), shards.numel(), partial(_take_whole, params))
        pipeline.finish()

    def _alike(self, params: Sequence[Any]) -> list[list[Any]]:
        """Parameters in lists of equal shards, each within one bucket."""
        full: list[list[Any]] = []
        filling: dict[tuple[torch.dtype, int], list[Any]] = {}
        for param in params:
            shard = param.ds_tensor
            most = self._gather_elements // max(1, self._collectives.world * shard.numel())
            members = filling.setdefault((shard.dtype, shard.numel()), [])
            members.append(param)
            if len(members) >= most:
                full.append(filling.pop((shard.dtype, shard.numel())))
        return full + list(filling.values())


def _take_whole(params: Sequence[Any], packed: Tensor) -> None:
    """Give parameters the values of all ranks, world x (their equal shards one after the other)."""
    world, length = packed.shape
    each = packed.view(world, len(params), length // len(params)).transpose(0, 1)
    for param, whole in zip(params, each.reshape(len(params), -1), strict=True):
        param.data = whole[: param.ds_numel].view(param.ds_shape)
        param.ds_status = ZeroParamStatus.AVAILABLE
