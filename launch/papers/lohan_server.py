"""LoHan's server and models (2403.06504) as planning problems, calibrated on its forward time and its transfer times.

The text that we have lacks the paper's tables III and IV. Layers and widths of the models are those of GPT-3
and OPT at these sizes, the SSDs those of `planner/hardware.py`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from hmt_deepspeed.planner.hardware import Machine, MatmulRates, named_machine
from hmt_deepspeed.planner.model.shapes import ModelShape, num_parameters, plain_shape
from hmt_deepspeed.planner.model.workload import Workload, build_workload
from hmt_deepspeed.planner.run.loads import FORWARD_PASSES
from hmt_deepspeed.planner.run.memory import MemoryBudget
from hmt_deepspeed.planner.run.problem import Problem, RunSetup, make_problem
from hmt_deepspeed.planner.solve.cost import Estimate, estimate
from hmt_deepspeed.planner.solve.plan import Plan
from hmt_deepspeed.planner.solve.solve import Allowed, allowed_choices, fits, solve
from papers.zero_fpdt import ADAMW, GIB

__all__ = [
    "EVERYTHING_ON_SSD",
    "FORWARD_SECONDS",
    "SHAPES",
    "ZERO_INFINITY_SSD_SECONDS",
    "all_activations",
    "best_estimate",
    "best_plan",
    "largest_batch",
    "problem_of",
    "server",
    "shape_of",
    "workload_of",
    "zero_infinity_server",
]

SHAPES = {  # name -> layers, hidden, heads
    "6B": (28, 4096, 32),
    "13B": (40, 5120, 40),
    "30B": (48, 7168, 56),
    "70B": (80, 8192, 64),
    "135B": (88, 11264, 88),
    "175B": (96, 12288, 96),
    "276B": (112, 14336, 112),
    "412B": (128, 16384, 128),
}
_SEQUENCE = 1024
_TIME = 0.4  # seconds for each plan

# What the paper measured or computed of its machine, and what the rates follow from.
FORWARD_SECONDS = 5.96  # s of GPU compute, 13B, batch 32
_ALL_OUT = 10.0  # s for all activations to leave the GPU
_STATES_BOTH_WAYS = 13.0  # s for 14 P bytes each way between GPU and SSD
ZERO_INFINITY_SSD_SECONDS = 6.25  # s of SSD I/O in ZeRO-Infinity's backward: 2 P in, 2 P out

EVERYTHING_ON_SSD = RunSetup(zero_stage=3, offload_param="nvme", offload_optimizer="nvme")


@cache
def shape_of(name: str) -> ModelShape:
    """Of a name in :data:`SHAPES`."""
    layers, hidden, heads = SHAPES[name]
    return plain_shape(layers=layers, hidden=hidden, heads=heads, vocab=50257)


@cache
def workload_of(name: str, batch: int) -> Workload:
    """The head's loss is taken in pieces: the paper trains batches whose whole logits would not fit."""
    workload = build_workload(shape_of(name), micro_batch=batch, seq_length=_SEQUENCE)
    return replace(workload, head=replace(workload.head, logits_bytes=0))


@cache
def server(ssds: int = 12, host_gib: int = 768, gpu: str = "rtx4090", gpus: int = 1) -> Machine:
    """The paper's server; its rates from its own times, other cards' scaled by their peaks."""
    named = named_machine(gpu, num_gpus=gpus, num_ssds=ssds, host_memory=host_gib * GIB)
    workload, parameters = workload_of("13B", 32), num_parameters(shape_of("13B"))
    measured = named_machine("rtx4090")
    products = FORWARD_SECONDS - FORWARD_PASSES * workload.saved_bytes / measured.gpu_bandwidth
    rate = workload.forward_flops / products * named.peak_flops / measured.peak_flops
    link = all_activations(32) / _ALL_OUT
    return replace(
        named,
        matmul=MatmulRates(rate, rate, rate),
        device_to_host=link,
        host_to_device=link,
        both_directions=2 * link,  # the paper takes the link as duplex
        ssd_array_limit=2 * 14 * parameters / _STATES_BOTH_WAYS,
        cpu_adam_ns=0.26,  # not in the paper, which takes it as shorter than the SSDs
    )


def zero_infinity_server(gpus: int = 1) -> Machine:
    """Its one process keeps the SSDs busy for 4P bytes in 6.25 s; several together up to the array's limit."""
    machine = server(gpus=gpus)
    of_process = 4 * num_parameters(shape_of("13B")) / ZERO_INFINITY_SSD_SECONDS
    assert machine.ssd_array_limit is not None
    return replace(machine, ssd_array_limit=min(gpus * of_process, machine.ssd_array_limit))


def all_activations(batch: int) -> float:
    """Bytes that the layers of 13B save for backward."""
    workload = workload_of("13B", batch)
    return sum(layer.count * layer.saved_bytes for layer in workload.layers)


def problem_of(
    name: str, batch: int, machine: Machine, setup: RunSetup = EVERYTHING_ON_SSD
) -> Problem:
    """Of a GPU's memory 1 GiB is left to the context: the paper fills cards of 16 and 24 GB to the brim."""
    budget = MemoryBudget.of(machine, reserve=GIB)
    setup = replace(setup, ranks=machine.num_gpus)
    return make_problem(workload_of(name, batch), machine, setup, ADAMW, budget=budget)


def best_plan(problem: Problem, allowed: Allowed | None = None) -> Plan | None:
    """None where nothing fits."""
    return solve(problem, allowed or allowed_choices(problem.machine), time_limit=_TIME)


def best_estimate(problem: Problem, allowed: Allowed | None = None) -> Estimate:
    """Of the best plan, which must exist."""
    plan = best_plan(problem, allowed)
    assert plan is not None
    return estimate(problem, plan)


def largest_batch(
    name: str,
    machine: Machine,
    allowed: Allowed | None = None,
    setup: RunSetup = EVERYTHING_ON_SSD,
    most: int = 64,
) -> int:
    """The largest batch per GPU up to ``most`` that some plan fits; 0 if none."""
    low, high = 0, most + 1
    while high - low > 1:
        middle = (low + high) // 2
        problem = problem_of(name, middle, machine, setup)
        found = fits(problem, allowed or allowed_choices(machine))
        low, high = (middle, high) if found else (low, middle)
    return low
