"""Partitions and gathers a model's parameters at stage 3, around DeepSpeed's coordinator."""

from __future__ import annotations

from typing import Any

from deepspeed.accelerator import get_accelerator
from torch import nn

from hmt_deepspeed.zero.weights.residency import release_buffers

__all__ = ["Partitions"]


class Partitions:
    """The parameters of one model; does nothing below stage 3.

    Args:
        parameter_offload: DeepSpeed's ZeRO-3 coordinator, None below stage 3. module: the model.
        world: ranks that share the parameters.
    """

    def __init__(self, parameter_offload: Any | None, module: nn.Module, world: int) -> None:
        self._coordinator, self._module, self._world = parameter_offload, module, world

    def order_gathers(self, *_: object) -> None:
        """Make coming gathers wait for the writes to the partitions until now.

        ZeRO-3's coordinator gathers on a stream of its own, which waits for nothing. A rank alone has nothing to
        gather, but DeepSpeed makes its host wait for that stream.
        """
        if self._coordinator is None or self._world == 1:
            return
        stream = self._coordinator._DeepSpeedZeRoOffload__allgather_stream
        if stream is not None:
            stream.wait_stream(get_accelerator().current_stream())

    def partition(self) -> None:
        """Release all gathered parameters and read-ahead buffers; only the partitions are left."""
        if self._coordinator is not None:
            self._coordinator.partition_all_parameters()
            release_buffers(self._module)

    def gather_persistent(self) -> None:
        """Gather the parameters that stay whole between their uses."""
        if self._coordinator is not None and self._coordinator.persistent_parameters:
            persistent = self._coordinator.persistent_parameters
            persistent[0].all_gather(persistent)
