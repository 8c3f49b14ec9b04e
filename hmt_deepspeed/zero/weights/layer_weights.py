"""Weights of layers at stage 3, for as long as all micro-batches of a step work in a layer.

DeepSpeed gathers and releases with every call of a module. Here a layer's parameters stay from its first call to the end
of its last. Where one rank holds all weights in host memory, they are brought by copies of our own: all of a layer into one
block of the device, the next layer's while this one computes, and the host waits for neither. DeepSpeed would wait for
each module's.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch import Tensor, nn

from hmt_deepspeed.memory.streams import Direction, Event, Streams

__all__ = ["LayerWeights"]

# Among the modules that DeepSpeed notes as users of a parameter, by number: nothing with a user is released.
_HELD = -1
_ALIGNED = 64  # bytes, of which a parameter's place in a block is a multiple


class LayerWeights:
    """Says to DeepSpeed's coordinator which layers are at work, and brings those that wait in host memory.

    Args:
        modules: in the order of forward; a parameter may be in several. coordinator: of the ZeRO-3 hooks.
        streams: for copies of our own; None: DeepSpeed gathers.

    Attributes:
        brings: whether by copies of our own. brought_bytes: from host memory, by copies of our own.
    """

    def __init__(
        self, modules: Sequence[nn.Module], coordinator: Any, streams: Streams | None
    ) -> None:
        self._modules, self._coordinator, self._streams = list(modules), coordinator, streams
        self._place = {module: place for place, module in enumerate(self._modules)}
        self._coming: dict[nn.Module, list[tuple[Any, Tensor, Event]]] = {}
        self.brings = streams is not None
        self.brought_bytes = 0

    def begin(self, module: nn.Module, backward: bool) -> None:
        """Before the first call of a module in forward, or of backward."""
        if self._streams is not None:
            self._use(module)
            place = self._place[module] + (-1 if backward else 1)
            if 0 <= place < len(self._modules):
                self._bring(self._modules[place])
        for param in _parameters(module):
            param.ds_active_sub_modules.add(_HELD)

    def end(self, module: nn.Module, backward: bool) -> None:
        """After the last call. The last module stays after forward, for backward begins with it."""
        stays = not backward and module is self._modules[-1] and torch.is_grad_enabled()
        for param in _parameters(module):
            # A module that is called more than once leaves more behind than its last call.
            param.ds_active_sub_modules.clear()
            if stays or _stays(param):
                continue
            if self._streams is not None:
                _release(param)
            else:
                self._coordinator._PartitionedParameterCoordinator__release_param(param)

    def end_step(self) -> None:
        """After a backward, or a forward that failed: nothing is on its way or held any more."""
        for module in list(self._coming):
            self._use(module)
        for module in self._modules:
            self.end(module, backward=True)

    # -- copies of our own --------------------------------------------------------------------------

    def _bring(self, module: nn.Module) -> None:
        """Start the copies of what a module's parameters hold on the host."""
        wanted = [
            param
            for param in _parameters(module)
            if param.ds_status is ZeroParamStatus.NOT_AVAILABLE
        ]
        if module in self._coming or not wanted:
            return
        assert self._streams is not None
        # What is not released with its layer must not keep the layer's block.
        blocks = [[p for p in wanted if not _stays(p)], *([p] for p in wanted if _stays(p))]
        rooms = [room for block in blocks for room in self._rooms(block)]
        ready, coming = self._streams.mark(), []
        for param, flat in zip(chain.from_iterable(blocks), rooms, strict=True):
            source = param.ds_tensor.detach().view(-1).view(torch.uint8)[: flat.numel()]
            event = self._streams.copy(Direction.TO_DEVICE, flat, source, [ready])
            coming.append((param, flat, event))
            param.ds_status = ZeroParamStatus.INFLIGHT
            self.brought_bytes += flat.numel()
        self._coming[module] = coming

    def _rooms(self, params: Sequence[Any]) -> list[Tensor]:
        """Device memory for the bytes of whole parameters, flat, side by side."""
        if not params:
            return []
        assert self._streams is not None
        sizes = [param.ds_numel * param.element_size() for param in params]
        places = [-(-size // _ALIGNED) * _ALIGNED for size in sizes]
        block = torch.empty(sum(places), dtype=torch.uint8, device=params[0].device)
        self._streams.scrub(block)
        return [room[:size] for room, size in zip(block.split(places), sizes, strict=True)]

    def _use(self, module: nn.Module) -> None:
        """Let the device wait for a module's parameters, and give them to it."""
        self._bring(module)
        assert self._streams is not None
        home = self._streams.current()
        for param, flat, event in self._coming.pop(module, ()):
            self._streams.use(flat, event, home)
            param.data = flat.view(param.dtype).view(param.ds_shape)
            param.ds_status = ZeroParamStatus.AVAILABLE


def _parameters(module: nn.Module) -> list[Any]:
    return list(module.parameters())


def _stays(param: Any) -> bool:
    """Whether a parameter is on the device from one step to the next."""
    return bool(param.ds_persist or param.is_external_param)


def _release(param: Any) -> None:
    if param.ds_status is ZeroParamStatus.AVAILABLE:
        param.data = torch.empty(0, dtype=param.dtype, device=param.device)
        param.ds_status = ZeroParamStatus.NOT_AVAILABLE
