"""Bytes that ``offload_optimizer`` takes off the device, and the work that it gives to the host.

DeepSpeed's own offload takes masters, moments and gradients of all parameters. HMT's engine takes those of
AdamW's parameters, whose gradients the host sums in fp32, and of low-rank matrices the fp32 masters alone:
their projected gradients, moments and bases stay on the device, where the update ``U Q^T`` is formed and from
where it is sent; the host adds it to the master and sends the new weights back.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from operator import add
from typing import Literal

from hmt_deepspeed.planner.model.shapes import ModelShape, Parameter
from hmt_deepspeed.planner.run.modes import REPLICATED, OptimizerMode, Sharding
from hmt_deepspeed.planner.run.states import (
    FP32,
    ModelStates,
    parameters_by_mode,
    states_by_parameter,
)

__all__ = ["TREATMENTS", "HostShare", "Offloaded", "Treatment", "offloaded_states"]

# dense: CPU Adam, which may begin as a gradient arrives. low_rank: an addition to the master, after the overflow decision.
Treatment = Literal["dense", "low_rank"]
TREATMENTS: tuple[Treatment, ...] = ("dense", "low_rank")


@dataclass(frozen=True)
class HostShare:
    """Bytes off the device and the host's work in a step, for some parameters, on the rank that holds most.

    Attributes:
        states: bytes of masters and moments between two steps. gradients: bytes of the gradients' sums.
        formed: device bytes of the whole gradients that leave, before they are reduced.
        arriving: bytes of gradients that one backward sends to the host.
        adam: elements that CPU Adam updates. added: elements of masters that an update is added to.
        sent: bytes that go to the host in the optimizer's pass: updates of masters, and weights without one.
        returned: bytes of new weights that come back.
    """

    states: float = 0.0
    gradients: float = 0.0
    formed: float = 0.0
    arriving: float = 0.0
    adam: float = 0.0
    added: float = 0.0
    sent: float = 0.0
    returned: float = 0.0

    def __add__(self, other: HostShare) -> HostShare:
        return HostShare(*map(add, vars(self).values(), vars(other).values()))

    def times(self, factor: float) -> HostShare:
        """So many times as much of everything."""
        return HostShare(*(factor * value for value in vars(self).values()))


@dataclass(frozen=True)
class Offloaded:
    """Host shares of a model of ``num_layers`` equal layers, by the treatment of its parameters.

    Attributes:
        layer: of one of them, in the mean. outside: embeddings, head, final norm. resident: the states that stay on the
            device, weights among them.
    """

    num_layers: int
    layer: dict[Treatment, HostShare]
    outside: dict[Treatment, HostShare]
    resident: ModelStates

    def whole(self, *chosen: Treatment) -> HostShare:
        """Host share of the model; by all treatments, or by those given."""
        asked = chosen or TREATMENTS
        layers = sum((self.layer[treatment] for treatment in asked), HostShare())
        return sum((self.outside[treatment] for treatment in asked), layers.times(self.num_layers))

    def passing(self, field: Literal["gradients", "formed", "states"], depth: int) -> float:
        """Bytes of buffers for ``depth`` parts of the model on their way, one of which may be the largest."""
        layer, outside = (
            sum(getattr(part[treatment], field) for treatment in TREATMENTS)
            for part in (self.layer, self.outside)
        )
        largest = max(layer, outside)
        return min(float(getattr(self.whole(), field)), largest + (depth - 1) * layer)


def offloaded_states(
    shape: ModelShape,
    mode: OptimizerMode,
    sharding: Sharding = REPLICATED,
    *,
    itemsize: int = 2,
    gradient_itemsize: int | None = None,
    update_itemsize: int | None = None,
    is_offloaded: bool = True,
) -> Offloaded:
    """States that leave the device of one rank.

    Args:
        itemsize, gradient_itemsize: see :func:`~hmt_deepspeed.planner.run.states.model_states`.
        update_itemsize: of a low-rank update's product, None for that of the weights; 4 for fp16, which is
            multiplied in fp32.
        is_offloaded: whether there is ``offload_optimizer``; without it nothing leaves.
    """
    each = gradient_itemsize or itemsize
    layer: dict[Treatment, HostShare] = dict.fromkeys(TREATMENTS, HostShare())
    outside = dict(layer)
    resident = dict.fromkeys((field.name for field in fields(ModelStates)), 0)
    sizes = states_by_parameter(
        shape, mode, sharding, itemsize=itemsize, gradient_itemsize=gradient_itemsize
    )
    modes = (own for _, own in parameters_by_mode(shape, mode))
    factors = update_itemsize or itemsize
    for (parameter, held), own in zip(sizes, modes, strict=True):
        treatment: Treatment = (
            "low_rank" if mode.host_is_ours and mode.is_low_rank(parameter) else "dense"
        )
        leaving = _leaving(parameter, held, mode, treatment) if is_offloaded else ()
        if leaving:
            part = _share(
                parameter, held, own, sharding, treatment, leaving, itemsize, each, factors
            )
            if parameter.name.startswith(shape.names.layer):
                layer[treatment] += part.times(parameter.count / shape.layers)
            else:
                outside[treatment] += part.times(parameter.count)
        for kind, nbytes in held.items():
            resident[kind] += 0 if kind in leaving else parameter.count * nbytes
    return Offloaded(shape.layers, layer, outside, ModelStates(**resident))


def _leaving(
    parameter: Parameter, held: dict[str, int], mode: OptimizerMode, treatment: Treatment
) -> tuple[str, ...]:
    """Kinds of a parameter's states that are not on the device; none of low-rank matrices without a master."""
    if not parameter.trained:
        return ()
    if treatment == "dense":
        return ("gradients", "masters", "moments")
    return ("masters",) if held["masters"] else ()


def _share(
    parameter: Parameter,
    held: dict[str, int],
    mode: OptimizerMode,
    sharding: Sharding,
    treatment: Treatment,
    leaving: Iterable[str],
    itemsize: int,
    gradient_itemsize: int,
    update_itemsize: int,
) -> HostShare:
    """Host share of one parameter (of one layer, if it is a layer's)."""
    elements = float(-(-parameter.numel // sharding.ranks(1)))
    found = HostShare(
        states=float(sum(held[kind] for kind in leaving if kind != "gradients")),
        returned=elements * itemsize,
    )
    if treatment == "low_rank":
        # formed in fp32; else in the dtype that its factors are multiplied in
        size = FP32 if mode.updates_whole(parameter) else update_itemsize
        return replace(found, added=elements, sent=elements * size)
    travels = itemsize if mode.host_is_ours else gradient_itemsize
    summed = FP32 if mode.host_is_ours else gradient_itemsize
    has_master = held["masters"] > 0 or not mode.host_is_ours or itemsize == FP32
    return replace(
        found,
        adam=elements,
        gradients=elements * summed,
        formed=float(parameter.numel * travels),
        arriving=elements * travels,
        sent=0.0 if has_master else elements * itemsize,
    )
