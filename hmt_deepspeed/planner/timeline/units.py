"""Units computed one after the other: the layers and the head, each with the load of a plan's choices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hmt_deepspeed.planner.model.workload import Layer
from hmt_deepspeed.planner.run.loads import LayerLoad, layer_load
from hmt_deepspeed.planner.run.offloaded import HostShare, Treatment
from hmt_deepspeed.planner.run.problem import Problem
from hmt_deepspeed.planner.solve.cost import grouped_layers
from hmt_deepspeed.planner.solve.plan import Plan

__all__ = ["Unit", "units_of"]


@dataclass(frozen=True)
class Unit:
    """A layer or the head.

    Attributes:
        saved: bytes that autograd would save. share: its part of the model's weights. load: of its choices.
        host: what of it ``offload_optimizer`` takes off the device, by rule.
    """

    name: str
    forward_flops: float
    backward_flops: float
    saved: float
    share: float
    load: LayerLoad
    host: Mapping[Treatment, HostShare]

    @property
    def off_device(self) -> HostShare:
        """Host share of all rules."""
        return sum(self.host.values(), HostShare())


def units_of(problem: Problem, plan: Plan) -> list[Unit]:
    """In order of computation, the head last."""
    workload = problem.workload
    units = []
    found: dict[int, tuple[Layer, LayerLoad]] = {}
    for layer, group in grouped_layers(workload, plan):
        load = layer_load(layer, group.choices, problem.setup)
        found |= dict.fromkeys(group.layers, (layer, load))
    for number, (layer, load) in sorted(found.items()):
        share = layer.parameters / workload.parameters
        work = (
            layer.forward_flops + layer.projection_flops,
            layer.backward_flops,
            layer.saved_bytes,
        )
        units.append(Unit(f"layer {number}", *work, share, load, problem.offloaded.layer))
    head = workload.head
    outside = 1 - sum(unit.share for unit in units)
    load = layer_load(head, plan.head, problem.setup)
    work = (head.forward_flops, head.backward_flops, head.saved_bytes)
    return [*units, Unit("head", *work, outside, load, problem.offloaded.outside)]
