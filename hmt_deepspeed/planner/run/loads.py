"""Loads of an iteration on a rank, before any machine: FLOPs, bytes moved and bytes held.

An iteration is ``accumulation`` micro-steps and one pass of the optimizer. It is cut into *phases* that do not
overlap one another, each a vector of amounts; what the choices of a layer's sites add to forward and backward
is such a vector too. `cost.py` turns amounts into seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from hmt_deepspeed.config.codecs import codec_of
from hmt_deepspeed.config.components import Choice, Component, legal_choices
from hmt_deepspeed.planner.model.layer_sites import Site
from hmt_deepspeed.planner.model.workload import Head, Layer, Workload, made_again
from hmt_deepspeed.planner.run.offloaded import HostShare
from hmt_deepspeed.planner.run.problem import Problem, RunSetup

__all__ = [
    "BACKWARD_PASSES",
    "FORWARD_PASSES",
    "MEMORIES",
    "Amount",
    "Choices",
    "LayerLoad",
    "Memory",
    "Phase",
    "amounts",
    "layer_load",
    "model_work",
    "phases",
    "site_choices",
    "static_bytes",
    "sums_before_sending",
    "update_work",
    "updated_on_device",
]

Memory = Literal["gpu", "host", "ssd"]
MEMORIES: tuple[Memory, ...] = ("gpu", "host", "ssd")
Choices = Mapping[Component, Choice]  # of one layer


# How often the tensors that autograd would save pass through the GPU's memory in ops that are no products:
# written and read in forward; in backward read, their gradients written and read, and, because what is cheap
# is always run again under the backend, written and read once more.
FORWARD_PASSES, BACKWARD_PASSES = 2, 5


class Amount(IntEnum):
    """Entries of a vector of amounts, all of one rank."""

    FLOPS = 0
    DEVICE = 1  # bytes through the GPU's own memory: all but products
    TO_HOST = 2  # bytes
    TO_GPU = 3  # bytes
    SSD_READ = 4  # bytes
    SSD_WRITE = 5  # bytes
    ADAM = 6  # elements updated by CPU Adam
    ADDED = 7  # elements of masters in host memory that an update is added to
    NETWORK = 8  # bytes sent
    ATTENTION = 9  # FLOPs of attention ops run again
    ENCODE = 10  # bytes through the GPU's own memory by codecs
    DECODE = 11
    EXACT = 12  # FLOPs of fp32 products in the optimizer's pass


Amounts = NDArray[np.float64]
_INDEX = {amount.name.lower(): int(amount) for amount in Amount}


def amounts(**given: float) -> Amounts:
    """A vector with the entries named, in lower case, and zeros."""
    vector = np.zeros(len(_INDEX))
    for name, value in given.items():
        vector[_INDEX[name]] = value
    return vector


@dataclass(frozen=True)
class Phase:
    """A part of the iteration that ends before the next begins.

    Attributes:
        weight: times per iteration. base: amounts that no choice of a layer changes.
        sites: which of a layer's amounts come on top.
        update: amounts of an optimizer's pass that runs within, one layer after the other.
    """

    name: str
    weight: float
    base: Amounts
    sites: Literal["forward", "backward"] | None
    update: Amounts | None = None


@dataclass(frozen=True)
class LayerLoad:
    """Load that one layer adds under some choices.

    Attributes:
        forward, backward: amounts. held: (gpu, host, ssd) bytes until its backward.
        working: GPU bytes needed only while it runs backward.
        recomputed: FLOPs of its recompute in one micro-step, part of ``backward``.
    """

    forward: Amounts
    backward: Amounts
    held: NDArray[np.float64]
    working: float
    recomputed: float


def phases(problem: Problem) -> tuple[Phase, ...]:
    """The phases of an iteration, of weight above 0."""
    setup, workload = problem.setup, problem.workload
    n = setup.passes
    overheads, fetch = problem.machine.overheads, _fetch(problem)
    forward, backward = (setup.at_once * work for work in model_work(workload))
    forward = fetch + overheads.forward * forward
    backward = fetch + overheads.backward * backward + _each_micro_step(problem)
    last = backward + _last_micro_step(problem)
    early, late = _update(problem)
    overlap = "none" if setup.offload_optimizer == "none" else setup.overlap
    found = [
        Phase("forward", n - (overlap == "forward"), forward, "forward"),
        Phase("backward", n - 1, backward, "backward"),
        Phase("last backward", 1, last, "backward", early if overlap == "backward" else None),
    ]
    if overlap == "forward":
        found.insert(0, Phase("first forward", 1, forward, "forward", early + late))
    if overlap == "none":
        found.append(Phase("update", 1, amounts(), None, early + late))
    if overlap == "backward":
        found.append(Phase("update", float(late.any()), amounts(), None, late))
        found.append(Phase("redo", setup.redo_fraction, amounts(), None, early))
    return tuple(phase for phase in found if phase.weight > 0)


def model_work(workload: Workload) -> tuple[Amounts, Amounts]:
    """Device work of forward and backward in one micro-step, whatever is chosen for activations."""
    saved = workload.head.saved_bytes + sum(x.count * x.saved_bytes for x in workload.layers)
    return (
        amounts(flops=workload.forward_flops, device=FORWARD_PASSES * saved),
        amounts(flops=workload.backward_flops, device=BACKWARD_PASSES * saved),
    )


def updated_on_device(problem: Problem) -> float:
    """Bytes of a rank's weights that are updated on the device."""
    return max(0.0, problem.total.weights * problem.shard - problem.offloaded.whole().returned)


def update_work(problem: Problem) -> Amounts:
    """Device work of an optimizer's pass; updates for the host are written and read."""
    resident, weights = problem.offloaded.resident, updated_on_device(problem)
    formed = 2 * problem.offloaded.whole("low_rank").sent
    flops, exact = problem.update_flops
    traffic = 2 * resident.optimizer + resident.gradients + weights + formed
    return amounts(device=traffic, flops=flops, exact=exact)


def _fetch(problem: Problem) -> Amounts:
    """Weights brought to the GPU for a forward, and again for a backward."""
    setup, shard = problem.setup, problem.of_rank.weights
    found = amounts()
    if setup.offload_param != "none":
        found += amounts(to_gpu=shard, ssd_read=shard if setup.offload_param == "nvme" else 0.0)
    if setup.zero_stage == 3:
        found += amounts(network=problem.total.weights * setup.others)
    return found


def sums_before_sending(setup: RunSetup) -> bool:
    """Whether gradients are summed over micro-steps on the device before they are reduced and sent."""
    return setup.zero_stage < 2 and setup.accumulation > 1


def _each_micro_step(problem: Problem) -> Amounts:
    """Gradients that stages 2 and 3 reduce, and hand to the host, in every backward."""
    setup = problem.setup
    if setup.zero_stage < 2:
        return amounts()
    arriving = problem.offloaded.whole().arriving
    return amounts(network=problem.total.gradients * setup.others, to_host=arriving)


def _last_micro_step(problem: Problem) -> Amounts:
    """Gradients that stages 0 (all-reduce) and 1 (reduce-scatter) send once per iteration."""
    setup = problem.setup
    if setup.zero_stage >= 2:
        return amounts()
    times = 2 if setup.zero_stage == 0 else 1
    network = times * problem.total.gradients * setup.others
    return amounts(network=network, to_host=problem.offloaded.whole().arriving)


def _update(problem: Problem) -> tuple[Amounts, Amounts]:
    """The optimizer's pass, wherever states live: (AdamW's on the host, which may begin early, all the rest)."""
    setup, dense = problem.setup, problem.offloaded.whole("dense")
    early = _on_host(dense, setup)
    late = _on_host(problem.offloaded.whole("low_rank"), setup)
    late += problem.machine.overheads.update * update_work(problem)
    if setup.offload_param != "none":
        weights, on_ssd = updated_on_device(problem), setup.offload_param == "nvme"
        late += amounts(to_host=weights, ssd_write=weights * on_ssd)
        if problem.updates_bring_weights:
            late += amounts(to_gpu=weights, ssd_read=weights * on_ssd)
    if setup.zero_stage in (1, 2):
        gathered = dense.returned / problem.shard
        early += amounts(network=gathered * setup.others)
        late += amounts(network=max(0.0, problem.total.weights - gathered) * setup.others)
    return early, late


def _on_host(share: HostShare, setup: RunSetup) -> Amounts:
    """Work of updating a share on the links, the SSDs and the CPU."""
    found = amounts(adam=share.adam, added=share.added)
    if setup.offload_param == "none":
        found += amounts(to_host=share.sent, to_gpu=share.returned)
    else:  # weights are on the host already, what is added to them is not
        found += amounts(to_host=share.sent * (share.added > 0))
    if setup.offload_param == "nvme":
        found += amounts(ssd_write=share.returned)
    if setup.offload_optimizer == "nvme":
        found += amounts(ssd_read=share.states, ssd_write=share.states)
    return found


def site_choices(layer: Layer | Head, choices: Choices) -> dict[str, Choice]:
    """Choices by component, as the JSON's policy has them, for the sites of a layer by name.

    A router's output is kept whatever is chosen for experts.

    Raises:
        ValueError: a component of the layer without a choice, or one not legal there.
    """
    found: dict[str, Choice] = {}
    for site in layer.sites:
        choice = choices.get(site.component)
        if choice is None or choice not in legal_choices(site.component):
            raise ValueError(
                f"{site.component} of layers {site.layers}: choice is {choice!r}; legal: "
                f"{', '.join(legal_choices(site.component))}. Give every component of the layer one of its own."
            )
        found[site.name] = choice if choice in site.legal else "keep"
    return found


def layer_load(layer: Layer | Head, choices: Choices, setup: RunSetup) -> LayerLoad:
    """Load that one of ``layer``'s layers adds to a pass when its components take ``choices``; the head counts as a
    layer.

    Raises:
        ValueError: see :func:`site_choices`.
    """
    by_site = site_choices(layer, choices)
    again = () if isinstance(layer, Head) else made_again(layer, by_site)
    forward, backward = amounts(), amounts()
    held = np.zeros(len(MEMORIES))
    kept, swapped = 0.0, 0.0
    for site in layer.sites:
        choice = by_site[site.name]
        parts = setup.model_parallel if _is_partitioned(site, setup) else 1
        device = site.device_bytes(choice)
        if choice != "recompute" and site in again:
            device -= site.raw_bytes  # its pair is made again too
        held[0] += device / parts
        row = codec_of(choice)
        if (
            row is not None and row.passes
        ):  # encoding reads one and writes the other, decoding likewise
            coded = site.nbytes + (site.moved_bytes(choice) if row.is_moved else device)
            forward[Amount.ENCODE] += row.passes * coded
            backward[Amount.DECODE] += row.passes * coded
        if row is not None and row.is_moved:
            moved = site.moved_bytes(choice) / parts
            on_ssd = moved if row.place == "ssd" else 0.0
            forward[Amount.TO_HOST] += moved
            forward[Amount.SSD_WRITE] += on_ssd
            backward[Amount.TO_GPU] += moved
            backward[Amount.SSD_READ] += on_ssd
            held[1] += moved - on_ssd
            held[2] += on_ssd
            swapped += moved
        elif row is not None and not row.passes and parts == 1:
            kept += device
        if parts > 1:
            backward[Amount.NETWORK] += site.nbytes * (1 - 1 / parts)
    times = setup.at_once
    if isinstance(layer, Head):
        working = layer.logits_bytes + swapped + setup.end_buffer_bytes
        return LayerLoad(times * forward, times * backward, times * held, working, 0.0)
    for site in again:
        is_attention = site.name == "attention_output"
        backward[Amount.ATTENTION if is_attention else Amount.FLOPS] += site.flops
    recomputed = float(backward[Amount.FLOPS] + backward[Amount.ATTENTION])
    # what is kept is there already; what is swapped comes back one layer ahead
    working = max(0.0, layer.working_bytes - kept) + swapped
    working += setup.gradient_buffer_bytes + setup.refresh_bytes
    return LayerLoad(times * forward, times * backward, times * held, working, recomputed)


def _is_partitioned(site: Site, setup: RunSetup) -> bool:
    return setup.partition_activations and site.name == "layer_input"


def static_bytes(problem: Problem) -> dict[Memory, dict[str, float]]:
    """Bytes of each memory that a rank needs whatever is chosen for activations, by kind.

    Offloaded or gathered weights pass through two layers' buffers (one computes, one arrives), gradients that
    leave through two (one is made, one leaves) unless they are summed on the device first. What passes through
    host memory has buffers there of the size that HMT's engine has; of another's weights on SSD those of two
    layers, of its states there those of three (one is read, one updated, one written). States on SSD take two
    slots each, so that a step can be undone.
    """
    setup, workload = problem.setup, problem.workload
    total, of_rank, offloaded = problem.total, problem.of_rank, problem.offloaded
    largest = max(layer.parameters for layer in workload.layers)
    outside = workload.parameters - sum(x.count * x.parameters for x in workload.layers)
    one_layer = max(largest, outside) / workload.parameters  # parts of the model
    two_layers = min(1.0, one_layer + largest / workload.parameters)
    gpu: dict[str, float] = {"outside the layers": setup.at_once * workload.shared_bytes}
    if setup.at_once > 1:
        stream = workload.tokens * workload.shape.hidden * workload.itemsize
        gpu["between layers"] = float(setup.at_once * stream)
    host: dict[str, float] = {}
    ssd: dict[str, float] = {}

    homes = {"none": gpu, "cpu": host, "nvme": ssd}
    homes[setup.offload_param]["weights"] = of_rank.weights
    if setup.offload_param != "none" or (setup.zero_stage == 3 and setup.ranks > 1):
        gpu["gathered weights"] = total.weights * two_layers
    if setup.offload_param == "nvme" and setup.engine is None:
        host["weights in passing"] = of_rank.weights * two_layers

    gpu["probes"] = of_rank.probes - problem.cached.probes
    gpu["gradients"] = offloaded.resident.gradients
    gpu["optimizer states"] = offloaded.resident.optimizer - problem.cached.bases
    if problem.cached.passing:
        gpu["bases in passing"] = problem.cached.passing
    host |= problem.beside
    if setup.offload_optimizer != "none":
        formed = offloaded.whole().formed
        gpu["gradients in passing"] = (
            formed if sums_before_sending(setup) else offloaded.passing("formed", 2)
        )
        kept = setup.offload_optimizer == "cpu" or setup.holds_gradients or setup.accumulation > 1
        kept = kept or setup.engine is not None
        host["gradients"] = (
            offloaded.whole().gradients if kept else offloaded.passing("gradients", 2)
        )
    states = offloaded.whole().states
    if setup.offload_optimizer == "cpu":
        host["optimizer states"] = states
    elif setup.offload_optimizer == "nvme":
        if setup.engine is None:
            host["states in passing"] = offloaded.passing("states", 3)
        ssd["optimizer states"] = 2 * states
    return {"gpu": gpu, "host": host, "ssd": ssd}
