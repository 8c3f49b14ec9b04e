"""Bytes that a run occupies on one rank, by kind: activations and what is alive for a moment.

What is there between two steps is in ``states.py``, whose names are here too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from hmt_deepspeed.config.codecs import place_of
from hmt_deepspeed.config.components import Choice, Component, legal_choices
from hmt_deepspeed.planner.hardware import Machine
from hmt_deepspeed.planner.model.layer_sites import Site
from hmt_deepspeed.planner.model.listed import ListedShape
from hmt_deepspeed.planner.model.shapes import parameters
from hmt_deepspeed.planner.model.workload import Workload
from hmt_deepspeed.planner.run.modes import REPLICATED, OptimizerMode, Sharding, StateDtype
from hmt_deepspeed.planner.run.refresh import WorstRefresh, worst_refresh
from hmt_deepspeed.planner.run.states import (
    ModelStates,
    communication_volume,
    gradient_columns,
    model_states,
    parameters_by_mode,
)

__all__ = [
    "ActivationBytes",
    "MemoryBudget",
    "ModelStates",
    "OptimizerMode",
    "Sharding",
    "StateDtype",
    "TemporaryBytes",
    "activation_bytes",
    "choices_of",
    "communication_volume",
    "model_states",
    "temporary_bytes",
]

_WIDE = 4  # bytes of an element in fp32


@dataclass(frozen=True)
class MemoryBudget:
    """Bytes that a plan may use on one rank: device memory, its part of host memory and of the SSDs."""

    gpu: int
    host: int
    ssd: int

    def __post_init__(self) -> None:
        """Raise ValueError for limits that nothing fits in: field, value, legal range, what to do."""
        for field, least in (("gpu", 1), ("host", 0), ("ssd", 0)):
            value = getattr(self, field)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(
                    f"memory limit {field} is {value!r}; legal: an integer of bytes >= {least}. Raise it, "
                    "or leave it to the machine."
                )

    @classmethod
    def of(cls, machine: Machine, reserve: int = 2 * 2**30) -> MemoryBudget:
        """All that a machine has for one of its ranks.

        Args:
            reserve: device bytes left to the CUDA context, kernels' workspaces and fragmentation (the
                playbook: 1 to 2 GB).
        """
        ranks = machine.num_gpus
        return cls(
            machine.gpu_memory - reserve, machine.host_memory // ranks, machine.ssd_memory // ranks
        )


# -- activations --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ActivationBytes:
    """Activations held until backward, by where they are.

    Attributes:
        device: held on the device. host, ssd: swapped out, as computed.
    """

    device: int
    host: int
    ssd: int


def choices_of(workload: Workload, policy: Mapping[Component, Choice]) -> dict[Site, Choice]:
    """Choice of every site under one policy by component.

    A router's output is kept whatever is chosen for experts.

    Raises:
        ValueError: a component without a choice.
    """
    missing = {site.component for site in workload.sites} - set(policy)
    if missing:
        raise ValueError(
            f"the policy has no choice for {sorted(missing)}; legal: one for every component of the model. "
            "Add them."
        )
    found = {}
    for site in workload.sites:
        choice = policy[site.component]
        is_of_others = choice == "recompute" or choice in legal_choices(site.component)
        found[site] = "keep" if is_of_others and choice not in site.legal else choice
    return found


def activation_bytes(
    workload: Workload,
    choices: Mapping[Site, Choice] | None,
    *,
    partition: int = 1,
) -> ActivationBytes:
    """Bytes held between forward and backward of one micro-batch.

    Args:
        choices: of every site; None for no checkpointing at all.
        partition: ranks over which what enters each layer is divided (ZeRO-R's P_a).

    Raises:
        ValueError: a choice that is not legal for its site, or a partition without ranks.
    """
    if not isinstance(partition, int) or partition < 1:
        raise ValueError(
            f"partition is {partition!r}; legal: an integer >= 1. Give the number of ranks."
        )
    if choices is None:
        return ActivationBytes(workload.saved_bytes, 0, 0)
    sizes = {"device": workload.shared_bytes, "host": 0, "ssd": 0}
    for site, choice in choices.items():
        parts = partition if site.name == "layer_input" else 1
        sizes["device"] += site.count * -(-site.device_bytes(choice) // parts)
        if moved := site.moved_bytes(choice):
            sizes[place_of(choice) or "device"] += site.count * -(-moved // parts)
    return ActivationBytes(**sizes)


@dataclass(frozen=True)
class TemporaryBytes:
    """Device bytes alive for a moment; the peak has the largest of the moments, not their sum.

    Attributes:
        logits: at the loss. layer: one layer's backward, its recomputed activations and their gradients.
        weight_gradient: of one linear, before it is added to what has accumulated.
        decoded: the largest INT8 weight, for one product.
        gathered: weights of the layer computed and of the one prefetched, at stage 3 on several ranks.
        buckets: gradients on their way between ranks.
        full_gradient: of the matrices that refresh their basis together, beyond their projected ones.
        refreshed_inputs: of their linears in the layer that keeps most.
        layer_sums, end_sums: where all micro-batches of a step go through a layer at once: of whole gradients that autograd
            sums in fp32, beyond what is kept of them, with one on its way; in a layer, and of embedding or head.
    """

    logits: int
    layer: int
    weight_gradient: int
    decoded: int
    gathered: int
    buckets: int
    full_gradient: int
    refreshed_inputs: int
    layer_sums: int
    end_sums: int

    @property
    def peak(self) -> int:
        """At the loss nothing else is alive but gathered weights; in a layer's backward all but the logits."""
        backward = self.layer + self.weight_gradient + self.decoded + self.buckets
        backward += self.full_gradient + self.refreshed_inputs
        return self.gathered + max(self.logits, backward)


def temporary_bytes(
    workload: Workload,
    mode: OptimizerMode,
    sharding: Sharding = REPLICATED,
    *,
    bucket_elements: int = 500_000_000,
    gradient_itemsize: int | None = None,
) -> TemporaryBytes:
    """Device bytes alive for a moment.

    Args:
        bucket_elements: DeepSpeed's ``reduce_bucket_size``.
        gradient_itemsize: of accumulated gradients, None for that of the weights.
    """
    layer = max(workload.layers, key=lambda group: group.parameters)
    itemsize = workload.itemsize
    refresh = worst_refresh(workload.shape, mode, gradient_itemsize or itemsize)
    encoded = (
        parameter.numel
        for parameter, own in parameters_by_mode(workload.shape, mode)
        if own.is_encoded(parameter)
    )
    reduced = _on_their_way(workload, mode, bucket_elements) if sharding.world_size > 1 else 0
    return TemporaryBytes(
        workload.head.logits_bytes,
        max(group.working_bytes for group in workload.layers),
        max(group.weight_gradient_bytes for group in workload.layers),
        itemsize * max(encoded, default=0),
        2 * layer.parameters * itemsize if sharding.ranks(3) > 1 else 0,
        reduced * itemsize,
        refresh.full_gradients,
        max(
            (
                sum(group.freed_inputs.get(role, 0) for role in roles)
                for group in workload.layers
                for roles in refresh.inputs
            ),
            default=0,
        ),
        *_sums(workload, mode, refresh, gradient_itemsize or itemsize),
    )


def _sums(
    workload: Workload, mode: OptimizerMode, refresh: WorstRefresh, kept: int
) -> tuple[int, int]:
    """Bytes of sums of whole gradients in fp32 beyond ``kept`` an element, in a layer and at the model's ends.

    A gradient on its way is there as it was computed and in fp32, and added in place.
    """
    shape, itemsize = workload.shape, workload.itemsize
    arriving = _WIDE + (itemsize if itemsize < _WIDE else 0)

    def of(numels: list[int], refreshing: int = 0, largest: int = 0) -> int:
        each = max(0, _WIDE - kept) * (sum(numels) + refreshing)
        return each + arriving * max([largest, *numels])

    whole = [
        p
        for p in parameters(shape)
        if p.trained and (not mode.is_low_rank(p) or mode.updates_whole(p))
    ]
    in_layers = [p for p in whole if p.name.startswith(f"{shape.names.layer}.")]
    groups = [in_layers]
    if isinstance(shape, ListedShape):
        groups = [[p for p in in_layers if p in group.parameters] for group in shape.groups]
    layer = max(of([p.numel for p in g], refresh.elements, refresh.largest) for g in groups)
    return layer, max((of([p.numel]) for p in whole if p not in in_layers), default=0)


def _on_their_way(workload: Workload, mode: OptimizerMode, bucket_elements: int) -> int:
    """Elements of gradients being reduced: of two buckets, one of which may hold a single one above their size."""
    gradients = (
        prod(gradient_columns(parameter, own) if own.is_low_rank(parameter) else parameter.shape)
        for parameter, own in parameters_by_mode(workload.shape, mode)
    )
    return min(bucket_elements + max(bucket_elements, *gradients), workload.parameters)
