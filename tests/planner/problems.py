"""Small problems for the tests of the planner: models of a few layers on machines with round rates."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hmt_deepspeed.planner.command import main
from hmt_deepspeed.planner.hardware import Machine, MatmulRates
from hmt_deepspeed.planner.model.shapes import ModelShape, parameters, plain_shape
from hmt_deepspeed.planner.model.workload import build_workload
from hmt_deepspeed.planner.run.memory import MemoryBudget, OptimizerMode
from hmt_deepspeed.planner.run.problem import Problem, RunSetup, make_problem

ADAMW = OptimizerMode(method="adamw")
ON_SSD = RunSetup(zero_stage=3, offload_param="nvme", offload_optimizer="nvme")
MACHINE = Machine(
    name="test",
    peak_flops=1.2e14,
    matmul=MatmulRates(1e14, 1e14, 2e13),
    gpu_memory=24 * 10**9,
    gpu_bandwidth=1e12,
    device_to_host=2e10,
    host_to_device=2e10,
    both_directions=3e10,
    interconnect=1e10,
    cpu_adam_ns=0.3,
    host_memory=10**12,
    num_ssds=4,
    ssd_capacity=10**12,
    ssd_read=6e9,
    ssd_write=3e9,
    ssd_mixed=4e9,
)


def small_problem(
    *,
    layers: int = 4,
    hidden: int = 1024,
    batch: int = 8,
    seq_length: int = 512,
    setup: RunSetup = ON_SSD,
    budget: MemoryBudget | None = None,
    mode: OptimizerMode = ADAMW,
    **machine: Any,
) -> Problem:
    """A GPT-3-like model; ``machine`` replaces fields of MACHINE."""
    shape = plain_shape(layers=layers, hidden=hidden, heads=hidden // 64, vocab=1000, dropout=0.0)
    workload = build_workload(
        shape, micro_batch=batch, seq_length=seq_length, projected=mode.backward()
    )
    return make_problem(workload, replace(MACHINE, **machine), setup, mode, budget=budget)


def with_budget(problem: Problem, **bytes_of: float) -> Problem:
    """The problem with other limits."""
    given = {name: int(size) for name, size in bytes_of.items()}
    return replace(problem, budget=replace(problem.budget, **given))


def linear_shapes(shape: ModelShape) -> list[tuple[int, ...]]:
    """(rows, columns) of every linear layer's weight, layer by layer of the decoder."""
    return [p.shape for p in parameters(shape) if p.kind == "linear" for _ in range(p.count)]


def answer_of(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What `hmt-plan` prints."""
    main(arguments)
    return capsys.readouterr().out
