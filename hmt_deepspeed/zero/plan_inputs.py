"""What the planner is told of a run: its optimizer, its setup, its work and the memory that there is."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from hmt_deepspeed.config import HMTConfig
from hmt_deepspeed.planner.families import shape_of_config
from hmt_deepspeed.planner.hardware import Machine
from hmt_deepspeed.planner.loads import static_bytes
from hmt_deepspeed.planner.memory import (
    MemoryBudget,
    OptimizerMode,
    Sharding,
    model_states,
    temporary_bytes,
)
from hmt_deepspeed.planner.problem import Overlap, Problem, RunSetup, make_problem
from hmt_deepspeed.planner.shapes import ModelShape
from hmt_deepspeed.planner.workload import Workload, build_workload
from hmt_deepspeed.zero.swap import free_host_memory

__all__ = [
    "KEPT_FREE",
    "RunFacts",
    "bytes_at_rest",
    "counted_bytes",
    "device_capacity",
    "memory_budget",
    "optimizer_mode",
    "run_facts",
]

KEPT_FREE = 0.05  # of a device: fragmentation, workspaces of kernels


@dataclass(frozen=True)
class RunFacts:
    """A run, apart from the sizes of its batches.

    Attributes:
        itemsize, gradient_itemsize: bytes of a computed element, of an accumulated gradient.
        eager: attention is no single op.
        bucket_elements: ``reduce_bucket_size``.
    """

    shape: ModelShape
    mode: OptimizerMode
    setup: RunSetup
    itemsize: int
    gradient_itemsize: int
    eager: bool
    bucket_elements: int

    def workload(self, micro_batch: int, seq_length: int) -> Workload:
        """Of one micro-batch on one rank."""
        return build_workload(
            self.shape,
            micro_batch=micro_batch,
            seq_length=seq_length,
            itemsize=self.itemsize,
            attention="eager" if self.eager or self.shape.soft_cap else "fused",
            projected=self.mode.backward(),
        )

    def problem(
        self, workload: Workload, machine: Machine, budget: MemoryBudget | None = None
    ) -> Problem:
        """Of planning this run."""
        sharding = Sharding(self.setup.zero_stage, self.setup.ranks)
        temporary = temporary_bytes(
            workload, self.mode, sharding, bucket_elements=self.bucket_elements
        )
        buffers = float(temporary.buckets + temporary.full_gradient)
        return make_problem(
            workload,
            machine,
            replace(self.setup, buffer_bytes=buffers),
            self.mode,
            budget=budget or MemoryBudget(2**62, 2**62, 2**62),
            gradient_itemsize=self.gradient_itemsize,
        )


def run_facts(
    engine: Any, hmt: HMTConfig, options: Mapping[str, Any] | None, stage: int, overlap: Overlap
) -> RunFacts:
    """What an engine has been built to do.

    Args:
        stage: of ZeRO. overlap: of the update of states in host memory.
        options: fields of ``hmt.optimizer``; None under another optimizer, which is taken for AdamW.

    Raises:
        ValueError: a model whose saved tensors are not known.
    """
    config = getattr(engine.module, "config", None)
    if config is None:
        raise ValueError(
            f"{type(engine.module).__name__} has no config to plan by; legal: a model of transformers. Write "
            'out what is "plan" or "auto" in the hmt block.'
        )
    try:
        shape = shape_of_config(config)
    except ValueError as error:
        raise ValueError(
            f'The planner does not know the model: {error} Or write out what is "plan" or "auto" in the hmt '
            "block."
        ) from error
    itemsize, gradient_itemsize = (
        torch.empty(0, dtype=dtype).element_size() for dtype in engine.get_data_types()
    )
    setup = RunSetup(
        ranks=engine.seq_dp_world_size,
        zero_stage=stage,
        offload_param=_place(engine.zero_offload_param()),
        offload_optimizer=_place(engine.zero_offload_optimizer()),
        accumulation=engine.gradient_accumulation_steps(),
        overlap=overlap,
        holds_gradients=overlap != "backward",
        block_size=hmt.activations.block_size,
        projected_inputs=hmt.activations.projected_inputs,
    )
    eager = getattr(config, "_attn_implementation", None) == "eager"
    elements = int(engine.zero_reduce_bucket_size()) if stage else 0
    mode = optimizer_mode(options)
    return RunFacts(shape, mode, setup, itemsize, gradient_itemsize, eager, elements)


def _place(config: Any) -> Any:
    device = "none" if config is None else config.device
    return str(getattr(device, "value", device))


def optimizer_mode(options: Mapping[str, Any] | None) -> OptimizerMode:
    """``hmt.optimizer`` in the planner's words; ``"rank": "auto"`` as the largest candidate."""
    if options is None:
        return OptimizerMode(method="adamw")
    rank, probes = options["rank"], options["probes"]
    return OptimizerMode(
        method=options["method"],
        projection=options["projection"],
        rank=max(options["rank_candidates"]) if rank == "auto" else rank,
        probes=None if probes == "auto" else probes,
        residual=options["residual"],
        state_dtype=options["state_dtype"],
        master_weights=options["master_weights"],
        weight_dtype=options["weight_dtype"],
        target_modules=options["target_modules"],
        exclude_modules=tuple(options["exclude_modules"]),
        projected_backward=options["projected_backward"] is not False,
        redrawn=options["range_finder"] == "random",
        share_basis=options["share_basis"],
    )


def counted_bytes(optimizer: Any) -> dict[tuple[str, str], float]:
    """Bytes on this rank by (memory, kind), as the planner names them."""
    found = optimizer.metrics()
    on_host = "host" if found["optimizer_host_bytes"] else "gpu"
    states = found["optimizer_state_bytes"] + found["master_weight_bytes"]
    return {
        ("gpu", "weights"): found["weight_bytes"],
        ("gpu", "gradients"): found["gradient_buffer_bytes"],
        (on_host, "optimizer states"): states,
    }


# -- memory -----------------------------------------------------------------------------------------


def _local_ranks() -> int:
    """Ranks of this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("LOCAL_SIZE", "1")))


def bytes_at_rest(facts: RunFacts) -> int:
    """Device bytes of weights, gradients and states between two steps, on the rank that holds most."""
    setup = facts.setup
    states = model_states(
        facts.shape,
        facts.mode,
        Sharding(setup.zero_stage, setup.ranks),
        itemsize=facts.itemsize,
        gradient_itemsize=facts.gradient_itemsize,
    )
    weights = states.weights if setup.offload_param == "none" else 0
    if setup.offload_optimizer != "none":
        return weights + states.probes
    return weights + states.probes + states.gradients + states.optimizer


def device_capacity(accelerator: Any) -> tuple[int, int]:
    """(bytes that this process has taken of its device, bytes that it could have)."""
    taken = int(accelerator.memory_allocated())
    if accelerator.device_name() == "cpu":
        return taken, taken + free_host_memory() // _local_ranks()
    free, _ = torch.cuda.mem_get_info()
    return taken, int(accelerator.memory_reserved()) + int(free)


def memory_budget(
    problem: Problem,
    hmt: HMTConfig,
    taken: int,
    capacity: int,
) -> MemoryBudget:
    """What the plan of this rank may use.

    What the process has taken between two steps beyond what the planner knows of (a CUDA library's workspace,
    a user's own tensors) is not the plan's to use. Of host memory a quarter is staging (``zero/swap.py``).

    Args:
        taken, capacity: see :func:`device_capacity`.

    Raises:
        ValueError: ``hmt.planner.gpu_memory`` above what the device has.
    """
    static = {memory: int(sum(kinds.values())) for memory, kinds in static_bytes(problem).items()}
    gpu = hmt.planner.gpu_memory
    if gpu == "auto":
        gpu = int((1 - KEPT_FREE) * capacity) - max(0, taken - static["gpu"])
    elif gpu > capacity:
        raise ValueError(
            f"hmt.planner.gpu_memory is {gpu}; legal: up to {capacity} bytes, which is what this rank can have. "
            'Lower it, or use "auto".'
        )
    host = hmt.planner.host_memory
    if host == "auto":
        host = free_host_memory() // 2 // _local_ranks()
    path = hmt.activations.nvme_path
    ssd = 0 if path is None else shutil.disk_usage(_existing(path)).free // _local_ranks()
    return MemoryBudget(max(1, gpu), static["host"] + host * 3 // 4, static["ssd"] + ssd)


def _existing(path: str) -> str:
    """The folder, or the nearest above it that there is."""
    path = os.path.abspath(path)
    while not os.path.exists(path):
        path = os.path.dirname(path)
    return path
