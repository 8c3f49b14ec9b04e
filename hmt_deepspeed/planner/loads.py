"""What an iteration asks of a rank, before any machine: FLOPs, bytes moved and bytes held.

An iteration is ``accumulation`` micro-steps and one pass of the optimizer. It is cut into *phases* that do not
overlap one another, each a vector of amounts; what the choices of a layer's sites add to forward and backward
is such a vector too. `cost.py` turns amounts into seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from hmt_deepspeed.planner.hardware import Machine
from hmt_deepspeed.planner.memory import (
    MemoryBudget,
    ModelStates,
    OptimizerMode,
    Sharding,
    model_states,
)
from hmt_deepspeed.planner.workload import Head, Layer, Site, Workload, recompute_flops
from hmt_deepspeed.sites import LEGAL_CHOICES, Choice, Component

__all__ = [
    "BACKWARD_PASSES",
    "FORWARD_PASSES",
    "MEMORIES",
    "Amount",
    "Choices",
    "LayerLoad",
    "Memory",
    "Phase",
    "Place",
    "Problem",
    "RunSetup",
    "amounts",
    "layer_load",
    "make_problem",
    "phases",
    "site_choices",
    "static_bytes",
]

Memory = Literal["gpu", "host", "ssd"]
MEMORIES: tuple[Memory, ...] = ("gpu", "host", "ssd")
# DeepSpeed's words for where offload_param and offload_optimizer put things; "none": the GPU keeps them.
Place = Literal["none", "cpu", "nvme"]
# Where the optimizer's pass runs: in the last backward, in the next forward, or by itself (DESIGN, section 8).
Overlap = Literal["backward", "forward", "none"]
# optimised: a tensor's write overlaps the update of the next and the read of the one after (LoHan, figure 3b);
# naive: the three follow one another.
Schedule = Literal["optimised", "naive"]
Choices = Mapping[Component, Choice]  # of one layer


# How often the tensors that autograd would save pass through the GPU's memory in ops that are no products:
# written and read in forward; in backward read, their gradients written and read, and, because what is cheap
# is always run again under the backend, written and read once more.
FORWARD_PASSES, BACKWARD_PASSES = 2, 5


class Amount(IntEnum):
    """Entries of a vector of amounts, all of one rank."""

    FLOPS = 0
    DEVICE = (
        1  # bytes through the GPU's own memory: ops that are no products, codecs, the optimizer
    )
    TO_HOST = 2  # bytes
    TO_GPU = 3  # bytes
    SSD_READ = 4  # bytes
    SSD_WRITE = 5  # bytes
    ADAM = 6  # elements updated on the CPU
    NETWORK = 7  # bytes sent


Amounts = NDArray[np.float64]


def amounts(**given: float) -> Amounts:
    """A vector with the entries named, in lower case, and zeros."""
    vector = np.zeros(len(Amount))
    for name, value in given.items():
        vector[Amount[name.upper()]] = value
    return vector


@dataclass(frozen=True)
class RunSetup:
    """How a run trains, apart from what becomes of its activations.

    Attributes:
        ranks: data-parallel ranks; every one runs the workload.
        zero_stage: 0 to 3. offload_param, offload_optimizer: as in DeepSpeed's JSON.
        accumulation: micro-steps in an iteration.
        overlap, schedule: of the optimizer's pass when it runs on the CPU.
        redo_fraction: share of the steps whose overlapped pass is done again because the gradient was clipped
            or overflowed (``overlap: backward`` only; the other two wait for the verdict).
        holds_gradients: gradients stay in host memory until the verdict of clipping and overflow.
        model_parallel: ranks that compute the same layer inputs. partition_activations: each holds its part
            of them (ZeRO-R's P_a).
        block_size: of the 8-bit codecs.
        buffer_bytes: GPU bytes of reduction buckets and full gradients during a backward.
    """

    ranks: int = 1
    zero_stage: int = 2
    offload_param: Place = "none"
    offload_optimizer: Place = "none"
    accumulation: int = 1
    overlap: Overlap = "backward"
    schedule: Schedule = "optimised"
    redo_fraction: float = 0.0
    holds_gradients: bool = False
    model_parallel: int = 1
    partition_activations: bool = False
    block_size: int = 256
    buffer_bytes: float = 0.0

    def __post_init__(self) -> None:
        """Raise ValueError for a setup that cannot run: field, value, legal values, what to do."""
        for field in ("ranks", "accumulation", "model_parallel", "block_size"):
            if getattr(self, field) < 1:
                raise ValueError(
                    f"{field} is {getattr(self, field)}; legal: at least 1. Give that."
                )
        if self.zero_stage not in (0, 1, 2, 3):
            raise ValueError(
                f"zero_stage is {self.zero_stage}; legal: 0, 1, 2, 3. Give one of them."
            )
        if not 0 <= self.redo_fraction <= 1:
            raise ValueError(
                f"redo_fraction is {self.redo_fraction}; legal: 0 to 1. Give a share of the steps."
            )
        if self.offload_param != "none" and self.zero_stage != 3:
            raise ValueError(
                f"offload_param is {self.offload_param!r} at zero_stage {self.zero_stage}; DeepSpeed offloads "
                "parameters at stage 3 only. Set zero_stage 3 or offload_param none."
            )
        if self.offload_optimizer != "none" and self.zero_stage == 0:
            raise ValueError(
                f"offload_optimizer is {self.offload_optimizer!r} at zero_stage 0; DeepSpeed offloads the "
                "optimizer at stages 1 to 3. Set one of them or offload_optimizer none."
            )
        if self.offload_optimizer == "nvme" and self.zero_stage != 3:
            raise ValueError(
                f"offload_optimizer is 'nvme' at zero_stage {self.zero_stage}; DeepSpeed puts states on SSD at "
                "stage 3 only. Set zero_stage 3 or offload_optimizer cpu."
            )
        if self.partition_activations and self.model_parallel == 1:
            raise ValueError(
                "partition_activations with model_parallel 1; every rank's activations are its own then. Set "
                "partition_activations false, or model_parallel to how many ranks compute the same ones."
            )

    def shard(self, stage: int) -> float:
        """The part of a state that a rank holds if ZeRO shards it from ``stage`` on."""
        return 1 / self.ranks if self.zero_stage >= stage else 1.0

    @property
    def others(self) -> float:
        """The part of a sharded tensor that comes from other ranks."""
        return 1 - 1 / self.ranks


@dataclass(frozen=True)
class Problem:
    """Everything that a plan is made for; see :func:`make_problem`.

    Attributes:
        total: bytes of the whole model's states. of_rank: of those on the rank that holds most.
        adam_elements: of the whole model's first moments, which is what CPU Adam walks over.
    """

    workload: Workload
    machine: Machine
    setup: RunSetup
    budget: MemoryBudget
    total: ModelStates
    of_rank: ModelStates
    adam_elements: float

    @property
    def shard(self) -> float:
        """The part of the optimizer's states that one rank has."""
        return self.setup.shard(1)


def make_problem(
    workload: Workload,
    machine: Machine,
    setup: RunSetup,
    mode: OptimizerMode,
    *,
    budget: MemoryBudget | None = None,
    gradient_itemsize: int | None = None,
) -> Problem:
    """The problem of training ``workload`` on ``machine`` with an optimizer.

    Args:
        budget: of one rank, None for all that the machine has.
        gradient_itemsize: of accumulated gradients, None for that of the weights.

    Raises:
        ValueError: offload to SSDs that the machine does not have.
    """
    if "nvme" in (setup.offload_param, setup.offload_optimizer) and machine.num_ssds == 0:
        raise ValueError(
            f"offload to nvme on {machine.name}, which has no SSD; legal: none, cpu. Give num_ssds or offload "
            "to cpu."
        )
    sharded = partial(
        model_states,
        workload.shape,
        mode,
        itemsize=workload.itemsize,
        gradient_itemsize=gradient_itemsize,
    )
    total = sharded(Sharding())
    sharding = Sharding(setup.zero_stage, setup.ranks)
    state_itemsize = {"fp32": 4, "bf16": 2, "int8": 1}[mode.state_dtype]
    return Problem(
        workload=workload,
        machine=machine,
        setup=setup,
        budget=budget or MemoryBudget.of(machine),
        total=total,
        of_rank=sharded(sharding),
        adam_elements=total.moments / (2 * state_itemsize),
    )


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
    """What one layer adds under some choices.

    Attributes:
        forward, backward: amounts. held: (gpu, host, ssd) bytes until its backward.
        working: GPU bytes needed only while it runs backward.
        recomputed: FLOPs of its recompute, part of ``backward``.
    """

    forward: Amounts
    backward: Amounts
    held: NDArray[np.float64]
    working: float
    recomputed: float


def phases(problem: Problem) -> tuple[Phase, ...]:
    """The phases of an iteration, of weight above 0."""
    setup, workload = problem.setup, problem.workload
    n = setup.accumulation
    fetch = _fetch(problem)
    saved = workload.head.saved_bytes + sum(x.count * x.saved_bytes for x in workload.layers)
    forward = fetch + amounts(flops=workload.forward_flops, device=FORWARD_PASSES * saved)
    backward = fetch + amounts(flops=workload.backward_flops, device=BACKWARD_PASSES * saved)
    backward += _each_micro_step(problem)
    last = backward + _last_micro_step(problem)
    update = _update(problem)
    overlap = "none" if setup.offload_optimizer == "none" else setup.overlap
    found = [
        Phase("forward", n - (overlap == "forward"), forward, "forward"),
        Phase("backward", n - 1, backward, "backward"),
        Phase("last backward", 1, last, "backward", update if overlap == "backward" else None),
    ]
    if overlap == "forward":
        found.insert(0, Phase("first forward", 1, forward, "forward", update))
    if overlap == "none":
        found.append(Phase("update", 1, amounts(), None, update))
    if overlap == "backward":
        found.append(Phase("redo", setup.redo_fraction, amounts(), None, update))
    return tuple(phase for phase in found if phase.weight > 0)


def _fetch(problem: Problem) -> Amounts:
    """Weights brought to the GPU for a forward, and again for a backward."""
    setup, shard = problem.setup, problem.of_rank.weights
    found = amounts()
    if setup.offload_param != "none":
        found += amounts(to_gpu=shard, ssd_read=shard if setup.offload_param == "nvme" else 0.0)
    if setup.zero_stage == 3:
        found += amounts(network=problem.total.weights * setup.others)
    return found


def _each_micro_step(problem: Problem) -> Amounts:
    """Gradients that stages 2 and 3 reduce, and hand to the host, in every backward."""
    setup = problem.setup
    if setup.zero_stage < 2:
        return amounts()
    to_host = problem.of_rank.gradients if setup.offload_optimizer != "none" else 0.0
    return amounts(network=problem.total.gradients * setup.others, to_host=to_host)


def _last_micro_step(problem: Problem) -> Amounts:
    """Gradients that stages 0 (all-reduce) and 1 (reduce-scatter) send once per iteration."""
    setup = problem.setup
    if setup.zero_stage >= 2:
        return amounts()
    to_host = problem.total.gradients * problem.shard if setup.offload_optimizer != "none" else 0.0
    times = 2 if setup.zero_stage == 0 else 1
    return amounts(network=times * problem.total.gradients * setup.others, to_host=to_host)


def _update(problem: Problem) -> Amounts:
    """The optimizer's pass: states, gradients and weights, wherever they live."""
    setup, states = problem.setup, problem.of_rank.optimizer
    weights = problem.total.weights * problem.shard
    found = amounts()
    if setup.offload_optimizer == "none":
        found += amounts(device=2 * states + problem.of_rank.gradients + weights)
        if setup.offload_param != "none":
            found += amounts(to_host=weights)
    else:
        found += amounts(adam=problem.adam_elements * problem.shard)
        if setup.offload_param == "none":
            found += amounts(to_gpu=weights)
        if setup.offload_optimizer == "nvme":
            found += amounts(ssd_read=states, ssd_write=states)
    if setup.offload_param == "nvme":
        found += amounts(ssd_write=weights)
    if setup.zero_stage in (1, 2):
        found += amounts(network=problem.total.weights * setup.others)
    return found


def site_choices(layer: Layer | Head, choices: Choices) -> dict[str, Choice]:
    """Choices by component, as the JSON's policy has them, for the sites of a layer by name.

    What enters a layer cannot be made again within it: with ``residual: recompute`` it is kept (`sites.py`).

    Raises:
        ValueError: a component of the layer without a choice, or one not legal there.
    """
    found: dict[str, Choice] = {}
    for site in layer.sites:
        choice = choices.get(site.component)
        if choice is None or choice not in LEGAL_CHOICES[site.component]:
            raise ValueError(
                f"{site.component} of layers {site.layers}: choice is {choice!r}; legal: "
                f"{', '.join(LEGAL_CHOICES[site.component])}. Give every component of the layer one of its own."
            )
        found[site.name] = choice if choice in site.legal else "keep"
    return found


def layer_load(layer: Layer | Head, choices: Choices, setup: RunSetup) -> LayerLoad:
    """What one of ``layer``'s layers adds when its components take ``choices``; the head counts as a layer.

    Raises:
        ValueError: see :func:`site_choices`.
    """
    by_site = site_choices(layer, choices)
    forward, backward = amounts(), amounts()
    held = np.zeros(len(MEMORIES))
    kept, swapped = 0.0, 0.0
    for site in layer.sites:
        choice = by_site[site.name]
        parts = setup.model_parallel if _is_partitioned(site, setup) else 1
        device = site.device_bytes(choice, setup.block_size)
        held[0] += device / parts
        if choice in ("swap_host", "swap_ssd"):
            moved = site.nbytes / parts
            on_ssd = moved if choice == "swap_ssd" else 0.0
            forward += amounts(to_host=moved, ssd_write=on_ssd)
            backward += amounts(to_gpu=moved, ssd_read=on_ssd)
            held += (0.0, moved - on_ssd, on_ssd)
            swapped += moved
        elif choice in (
            "int8",
            "fp8",
        ):  # read and written once by the codec, in forward and in backward
            forward += amounts(device=site.nbytes + device)
            backward += amounts(device=site.nbytes + device)
        elif choice == "keep" and parts == 1:
            kept += device
        if parts > 1:
            backward += amounts(network=site.nbytes * (1 - 1 / parts))
    if isinstance(layer, Head):
        return LayerLoad(forward, backward, held, layer.logits_bytes + swapped, 0.0)
    recomputed = float(recompute_flops(layer, by_site))
    backward += amounts(flops=recomputed)
    held[0] += layer.projected_bytes
    # what is kept is there already; what is swapped comes back one layer ahead
    working = max(0.0, layer.working_bytes - layer.projected_bytes - kept) + swapped
    working += setup.buffer_bytes
    return LayerLoad(forward, backward, held, working, recomputed)


def _is_partitioned(site: Site, setup: RunSetup) -> bool:
    return setup.partition_activations and site.name == "layer_input"


def static_bytes(problem: Problem) -> dict[Memory, dict[str, float]]:
    """Bytes of each memory that a rank needs whatever is chosen for activations, by kind.

    Offloaded or gathered weights pass through two layers' buffers (one computes, one arrives), offloaded
    gradients through two (one is made, one leaves), states on SSD through three in host memory (one is read,
    one updated, one written); states on SSD take two slots each, so that a step can be taken back.
    """
    setup, workload = problem.setup, problem.workload
    total, of_rank = problem.total, problem.of_rank
    largest = max(layer.parameters for layer in workload.layers)
    outside = workload.parameters - sum(x.count * x.parameters for x in workload.layers)
    two_layers = (largest + max(largest, outside)) / workload.parameters  # parts of the model
    one_layer = max(largest, outside) / workload.parameters
    gpu: dict[str, float] = {"outside the layers": workload.shared_bytes}
    host: dict[str, float] = {}
    ssd: dict[str, float] = {}

    homes = {"none": gpu, "cpu": host, "nvme": ssd}
    homes[setup.offload_param]["weights"] = of_rank.weights
    if setup.offload_param != "none" or (setup.zero_stage == 3 and setup.ranks > 1):
        gpu["gathered weights"] = total.weights * two_layers
    if setup.offload_param == "nvme":
        host["weights in passing"] = of_rank.weights * two_layers

    gpu["probes"] = of_rank.probes
    if setup.offload_optimizer == "none":
        gpu["gradients"] = of_rank.gradients
        gpu["optimizer states"] = of_rank.optimizer
    else:
        gpu["gradients"] = total.gradients * two_layers
        on_host = total.gradients * problem.shard
        kept = setup.offload_optimizer == "cpu" or setup.holds_gradients or setup.accumulation > 1
        host["gradients"] = on_host * (1 if kept else min(1.0, two_layers))
    if setup.offload_optimizer == "cpu":
        host["optimizer states"] = of_rank.optimizer
    elif setup.offload_optimizer == "nvme":
        host["states in passing"] = min(1.0, 3 * one_layer) * of_rank.optimizer
        ssd["optimizer states"] = 2 * of_rank.optimizer
    return {"gpu": gpu, "host": host, "ssd": ssd}
