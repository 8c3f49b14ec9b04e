"""Cost model in closed form: time and memory of an iteration of any plan on a machine.

Each phase takes as long as the busiest resource (LoHan, equations 2 and 5, with more resources), and then
what it takes to fill and drain the pipeline of layers:

    T = max_r t_r + (sum_r t_r - max_r t_r) / L,    t_r before any choice of a layer

because the first layer cannot compute before its weights are there, nor the last gradient be updated before
it is made. With few layers, or layers that differ much, that is not exact; `simulate.py` is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from hmt_deepspeed.planner.hardware import Machine
from hmt_deepspeed.planner.model.workload import Layer, Workload
from hmt_deepspeed.planner.run.loads import (
    MEMORIES,
    Amount,
    Amounts,
    LayerLoad,
    Memory,
    Phase,
    layer_load,
    phases,
    static_bytes,
)
from hmt_deepspeed.planner.run.memory import MemoryBudget
from hmt_deepspeed.planner.run.problem import Problem, RunSetup
from hmt_deepspeed.planner.solve.plan import LayerChoices, Plan
from hmt_deepspeed.planner.solve.program import FEASIBILITY

__all__ = [
    "ADDED_SHARE",
    "RESOURCES",
    "Estimate",
    "PhaseTime",
    "Resource",
    "device_seconds",
    "estimate",
    "fill_seconds",
    "grouped_layers",
    "phase_seconds",
    "rates",
]

# ssd_reading and ssd_writing are two bounds of the SSDs' one queue; see `rates`.
Resource = Literal[
    "gpu", "gpu_to_host", "host_to_gpu", "ssd_reading", "ssd_writing", "cpu", "network"
]
RESOURCES: tuple[Resource, ...] = (
    "gpu",
    "gpu_to_host",
    "host_to_gpu",
    "ssd_reading",
    "ssd_writing",
    "cpu",
    "network",
)
# Stages that a layer passes one after another; the rest of RESOURCES bound the same bytes in another way.
_STAGES: tuple[Resource, ...] = (
    "gpu",
    "gpu_to_host",
    "host_to_gpu",
    "ssd_reading",
    "cpu",
    "network",
)
_DTYPES = {2: "bf16", 4: "fp32"}  # by itemsize
# An addition to a master reads and writes it and reads the update, 10 to 12 bytes an element; AdamW reads four
# fp32 and writes three, 28. The host's memory bounds both.
ADDED_SHARE = 0.4
_INDEX = {resource: index for index, resource in enumerate(RESOURCES)}


def ranks_per_node(machine: Machine, setup: RunSetup) -> int:
    """Ranks that share a node's host memory, CPU and SSDs."""
    return min(setup.ranks, machine.num_gpus)


def rates(problem: Problem) -> NDArray[np.float64]:
    """(amounts, resources) seconds of one rank per unit of an amount, with its share of what ranks share.

    Ranks beyond a node's GPUs are on nodes like it, and the network among them is taken to be as fast as the
    node's own. The two directions of a link run at the part ``f`` of their speeds while both are busy, so one that needs
    t seconds alone needs ``t + (1/f - 1) u`` beside the other's u.

    SSDs reading r and writing w bytes at once, of which alone they move R or W and mixed half and half M per
    second, take the larger of

        r / R + w (2 / M - 1 / R)    and    w / W + r (2 / M - 1 / W),

    the sides of the region of rates spanned by (R, 0), (M/2, M/2) and (0, W). Where the mix is slower than
    taking turns (2 / M > 1 / R + 1 / W), that region is not convex and both bounds are r / R + w / W, scaled
    so that the mix comes out as measured.
    """
    machine = problem.machine
    sharing = ranks_per_node(machine, problem.setup)
    per_link = min(sharing, machine.gpus_per_link)
    found = np.zeros((len(Amount), len(RESOURCES)))
    per_flop = 1 / getattr(machine.matmul, _DTYPES[problem.workload.itemsize])
    per_byte = 1 / machine.gpu_bandwidth
    found[Amount.FLOPS, _INDEX["gpu"]] = per_flop
    found[Amount.ATTENTION, _INDEX["gpu"]] = machine.overheads.attention * per_flop
    found[Amount.EXACT, _INDEX["gpu"]] = 1 / machine.matmul.fp32
    found[Amount.DEVICE, _INDEX["gpu"]] = per_byte
    found[Amount.ENCODE, _INDEX["gpu"]] = machine.overheads.encode * per_byte
    found[Amount.DECODE, _INDEX["gpu"]] = machine.overheads.decode * per_byte
    out, back = per_link / machine.device_to_host, per_link / machine.host_to_device
    both = min(1.0, machine.both_directions / (machine.device_to_host + machine.host_to_device))
    found[Amount.TO_HOST, _INDEX["gpu_to_host"]] = out
    found[Amount.TO_GPU, _INDEX["gpu_to_host"]] = back * (1 / both - 1)
    found[Amount.TO_GPU, _INDEX["host_to_gpu"]] = back
    found[Amount.TO_HOST, _INDEX["host_to_gpu"]] = out * (1 / both - 1)
    if not machine.copies_beside:
        found[Amount.TO_HOST, _INDEX["gpu"]] = out
        found[Amount.TO_GPU, _INDEX["gpu"]] = back
    found[Amount.ADAM, _INDEX["cpu"]] = sharing * machine.cpu_adam_ns * 1e-9
    found[Amount.ADDED, _INDEX["cpu"]] = ADDED_SHARE * sharing * machine.cpu_adam_ns * 1e-9
    found[Amount.NETWORK, _INDEX["network"]] = 1 / machine.interconnect
    if machine.num_ssds:
        read, write = sharing / machine.total_ssd_read, sharing / machine.total_ssd_write
        mixed = 2 * sharing / machine.total_ssd_mixed
        if mixed > read + write:
            read, write = read * mixed / (read + write), write * mixed / (read + write)
            mixed = read + write
        found[Amount.SSD_READ, _INDEX["ssd_reading"]] = read
        found[Amount.SSD_WRITE, _INDEX["ssd_reading"]] = mixed - read
        found[Amount.SSD_READ, _INDEX["ssd_writing"]] = mixed - write
        found[Amount.SSD_WRITE, _INDEX["ssd_writing"]] = write
    return found


def device_seconds(problem: Problem, work: Amounts) -> float:
    """Seconds of the device for ``work``, without overheads that are not in it."""
    return float(work @ rates(problem)[:, _INDEX["gpu"]])


def phase_seconds(
    phase: Phase, per_unit: NDArray[np.float64], setup: RunSetup
) -> NDArray[np.float64]:
    """(resources,) seconds of a phase before any choice of a layer, without fill.

    On the naive schedule a tensor's read, update and write follow one another, so the SSDs stand still while
    the CPU updates: its seconds are added to theirs.
    """
    total = phase.base if phase.update is None else phase.base + phase.update
    seconds = total @ per_unit
    if phase.update is not None and setup.schedule == "naive":
        for resource in ("ssd_reading", "ssd_writing"):
            if seconds[_INDEX[resource]] > 0:
                seconds[_INDEX[resource]] += seconds[_INDEX["cpu"]]
    return seconds


def fill_seconds(seconds: NDArray[np.float64], num_layers: int) -> float:
    """Filling and draining a pipeline of ``num_layers`` whose stages take ``seconds`` (resources,) in all."""
    stages = seconds[[_INDEX[stage] for stage in _STAGES]]
    return float(stages.sum() - stages.max()) / num_layers


@dataclass(frozen=True)
class PhaseTime:
    """One phase of an iteration, ``weight`` of which there are.

    Attributes:
        by_resource: busy seconds of each. fill: seconds of filling and draining.
        load: amounts of the phase once, choices of layers and the optimizer's pass included.
    """

    name: str
    weight: float
    by_resource: Mapping[Resource, float]
    fill: float
    load: Mapping[Amount, float]

    @property
    def seconds(self) -> float:
        """Seconds of the phase once."""
        return max(self.by_resource.values()) + self.fill

    @property
    def bottleneck(self) -> Resource:
        """The busiest resource."""
        return max(self.by_resource, key=lambda resource: self.by_resource[resource])


@dataclass(frozen=True)
class Estimate:
    """An iteration of a plan, of one rank.

    Attributes:
        memory: bytes by memory and kind. budget: bytes there are.
        tokens: of all ranks. model_flops, hardware_flops: of one rank: of ordinary training
            (:attr:`Workload.model_flops`), and what is computed, recompute included.
        ssd_written: bytes that one rank writes to SSD.
        peak_flops: of one GPU by its datasheet.
    """

    phases: tuple[PhaseTime, ...]
    memory: Mapping[Memory, Mapping[str, float]]
    budget: MemoryBudget
    tokens: int
    model_flops: float
    hardware_flops: float
    ssd_written: float
    peak_flops: float

    @property
    def seconds(self) -> float:
        """Seconds of an iteration."""
        return sum(phase.weight * phase.seconds for phase in self.phases)

    @property
    def bottleneck(self) -> Resource:
        """The busiest resource of the phase that takes longest."""
        return max(self.phases, key=lambda phase: phase.weight * phase.seconds).bottleneck

    def peak(self, memory: Memory) -> float:
        """Bytes of a memory at its fullest."""
        return sum(self.memory[memory].values())

    def excess(self) -> dict[Memory, float]:
        """Bytes over the limit of each memory that overflows; empty if the plan fits."""
        over = {memory: self.peak(memory) - getattr(self.budget, memory) for memory in MEMORIES}
        return {
            memory: size
            for memory, size in over.items()
            if size > FEASIBILITY * (1 + self.peak(memory))
        }

    @property
    def fits(self) -> bool:
        """Whether every memory holds what it must."""
        return not self.excess()

    @property
    def tokens_per_second(self) -> float:
        """Tokens/s of all ranks."""
        return self.tokens / self.seconds

    @property
    def tflops(self) -> float:
        """Model FLOPs of ordinary training on one GPU, in 10^12 per second."""
        return self.model_flops / self.seconds / 1e12

    @property
    def mfu(self) -> float:
        """FLOPs of ordinary training over the datasheet's peak; above ``hfu`` where less is computed."""
        return self.model_flops / self.seconds / self.peak_flops

    @property
    def hfu(self) -> float:
        """FLOPs computed over the datasheet's peak: how busy the GPU is, at most 1."""
        return self.hardware_flops / self.seconds / self.peak_flops


def estimate(problem: Problem, plan: Plan) -> Estimate:
    """Time and memory of an iteration of ``plan`` by the closed form.

    Raises:
        ValueError: a plan of other layers, or a choice that is not legal.
    """
    workload, setup = problem.workload, problem.setup
    if plan.partition_activations != setup.partition_activations:
        setup = replace(setup, partition_activations=plan.partition_activations)
    loads = [
        (len(group.layers), layer_load(layer, group.choices, setup))
        for layer, group in grouped_layers(workload, plan)
    ]
    loads.append((1, layer_load(workload.head, plan.head, setup)))
    memory = static_bytes(problem)
    held = sum((count * load.held for count, load in loads), np.zeros(len(MEMORIES)))
    for name, size in zip(MEMORIES, held, strict=True):
        memory[name]["activations"] = float(size)
    memory["gpu"]["working"] = max(load.working for _, load in loads)
    if setup.engine is not None and held[1:].any():
        staging = setup.engine.ssd_staging if held[2] else setup.engine.staging
        memory["host"]["staging"] = float(staging)

    per_unit = rates(problem)
    times = []
    for phase in phases(problem):
        base = phase_seconds(phase, per_unit, setup)
        chosen = _of_sites(loads, phase.sites)
        seconds = base + chosen @ per_unit
        named = {resource: float(seconds[_INDEX[resource]]) for resource in RESOURCES}
        total = phase.base + chosen + (0.0 if phase.update is None else phase.update)
        load = {amount: float(total[amount]) for amount in Amount}
        fill = fill_seconds(base, plan.num_layers)
        times.append(PhaseTime(phase.name, phase.weight, named, fill, load))
    recomputed = sum(count * load.recomputed for count, load in loads)
    done = workload.forward_flops + workload.backward_flops + recomputed
    return Estimate(
        phases=tuple(times),
        memory=memory,
        budget=problem.budget,
        tokens=workload.tokens * setup.accumulation * setup.ranks,
        model_flops=float(workload.model_flops * setup.accumulation),
        hardware_flops=float(done * setup.accumulation),
        ssd_written=sum(time.weight * time.load[Amount.SSD_WRITE] for time in times),
        peak_flops=problem.machine.peak_flops,
    )


def grouped_layers(workload: Workload, plan: Plan) -> list[tuple[Layer, LayerChoices]]:
    """For each group of a plan's layers one layer's work and choices.

    Raises:
        ValueError: layers that the model does not have, that are missing, or that are not equal.
    """
    found = []
    for group in plan.layers:
        layer = next((x for x in workload.layers if set(group.layers) <= set(x.layers)), None)
        if layer is None:
            raise ValueError(
                f"layers {group.layers} take the same choices; legal: some of one of "
                f"{[x.layers for x in workload.layers]}, which are equal. Plan again for this model."
            )
        found.append((layer, group))
    if plan.num_layers != workload.shape.layers:
        raise ValueError(
            f"the plan has {plan.num_layers} layers; legal: {workload.shape.layers}, the model's. Plan again "
            "for this model."
        )
    return found


def _of_sites(
    loads: list[tuple[int, LayerLoad]], sites: Literal["forward", "backward"] | None
) -> Amounts:
    total = np.zeros(len(Amount))
    for count, load in loads if sites else ():
        total += count * (load.forward if sites == "forward" else load.backward)
    return total
