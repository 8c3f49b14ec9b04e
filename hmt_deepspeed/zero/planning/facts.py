"""Describes a run to the planner: its optimizer, setup, work and memory."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hmt_deepspeed.config import HMTConfig
from hmt_deepspeed.config.components import Choice, Component
from hmt_deepspeed.config.optimizer import ExpertBasis
from hmt_deepspeed.memory.available import free_host_memory
from hmt_deepspeed.optim.bases.rank import SIDE_SHARES
from hmt_deepspeed.optim.rules.projected import ProjectedMatrix
from hmt_deepspeed.planner.hardware import Machine
from hmt_deepspeed.planner.model.listed import ListedShape
from hmt_deepspeed.planner.model.listed_workload import workload_of
from hmt_deepspeed.planner.model.shapes import ModelShape, by_layer
from hmt_deepspeed.planner.model.workload import Workload
from hmt_deepspeed.planner.run.cached_bases import CachedBases, cached_bases
from hmt_deepspeed.planner.run.loads import static_bytes
from hmt_deepspeed.planner.run.memory import (
    MemoryBudget,
    OptimizerMode,
    Sharding,
    temporary_bytes,
)
from hmt_deepspeed.planner.run.offloaded import offloaded_states
from hmt_deepspeed.planner.run.problem import Problem, RunSetup, make_problem
from hmt_deepspeed.rules import DENSE, rule_of
from hmt_deepspeed.zero.planning.memory import engine_memory
from hmt_deepspeed.zero.planning.model_shape import shape_of_model
from hmt_deepspeed.zero.settings import CacheSettings, HostSettings
from hmt_deepspeed.zero.state import ZeroState

__all__ = [
    "KEPT_FREE",
    "RunFacts",
    "Shapes",
    "bytes_at_rest",
    "device_capacity",
    "memory_budget",
    "optimizer_mode",
    "place_of",
    "refreshing_columns",
    "run_facts",
    "shapes_of",
    "ssd_folder",
]

_FP32 = 4  # bytes
KEPT_FREE = 0.05  # of a device: fragmentation, workspaces of kernels


class Shapes(NamedTuple):
    """Shape of a micro-batch on one rank: sequences, and tokens of each."""

    micro_batch: int
    seq_length: int


@dataclass(frozen=True)
class RunFacts:
    """A run, apart from the sizes of its batches.

    Attributes:
        itemsize, gradient_itemsize: bytes of a computed element, of an accumulated gradient.
        update_itemsize: of an element of a low-rank update that is sent to the host.
        eager: attention is no single op.
        bucket_elements: ``reduce_bucket_size``.
        is_chosen: ranks or bases of experts are found in gradients ("auto"); the mode's rank is then the largest candidate.
        ssd_folder: where activations or states may lie in files; None for nowhere.
        inputs: choices of what enters layers that DeepSpeed's ``cpu_checkpointing`` makes.
    """

    shape: ModelShape
    mode: OptimizerMode
    setup: RunSetup
    itemsize: int
    gradient_itemsize: int
    update_itemsize: int
    eager: bool
    bucket_elements: int
    is_chosen: bool
    ssd_folder: str | None
    inputs: Mapping[Component, Choice] = field(default_factory=dict)

    def at_ranks(
        self,
        ranks: tuple[tuple[str, int], ...],
        decided: tuple[tuple[str, ExpertBasis], ...] = (),
    ) -> RunFacts:
        """The same run with its matrices at other ranks, and experts with other bases; see :class:`OptimizerMode`."""
        return replace(self, mode=replace(self.mode, ranks=ranks, decided=decided))

    def workload(self, micro_batch: int, seq_length: int) -> Workload:
        """Workload of one micro-batch on one rank.

        Args:
            micro_batch: sequences. seq_length: tokens of each.
        """
        return workload_of(
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
        """The problem of planning this run.

        Args:
            workload: of one micro-batch on one rank. machine: to run on. budget: bytes of each memory; None for no limit.
        """
        sharding = Sharding(self.setup.zero_stage, self.setup.ranks)
        temporary = temporary_bytes(
            workload,
            self.mode,
            sharding,
            bucket_elements=self.bucket_elements,
            gradient_itemsize=self.gradient_itemsize,
        )
        return make_problem(
            workload,
            machine,
            self.setup.with_buffers(temporary),
            self.mode,
            budget=budget or MemoryBudget(2**62, 2**62, 2**62),
            gradient_itemsize=self.gradient_itemsize,
            update_itemsize=self.update_itemsize,
        )


def run_facts(
    engine: Any,
    hmt: HMTConfig,
    options: Mapping[str, Any] | None,
    stage: int,
    host: HostSettings | None,
    cache: CacheSettings | None = None,
) -> RunFacts:
    """Describe a built engine to the planner.

    Args:
        options: fields of ``hmt.optimizer``; None under another optimizer, which is taken for AdamW.
        stage: of ZeRO. host: of HMT's states in host memory or on an SSD; None for none.
        cache: of bases in host memory, likewise.

    Raises:
        ValueError: a model whose saved tensors are not known; activations and states on unlike disks.
    """
    config, shape = shape_of_model(engine.module)
    dtypes = engine.get_data_types()
    itemsize, gradient_itemsize = (torch.empty(0, dtype=dtype).element_size() for dtype in dtypes)
    overlap: Any = "none" if host is None else host.overlap
    ssd = None if host is None else host.ssd
    pipelined = ssd is None or (ssd.read_ahead and ssd.write_behind)
    vertical = hmt.accumulation == "vertical"
    section = engine.config.get("activation_checkpointing") or {}
    on_host = bool(section.get("cpu_checkpointing"))
    setup = RunSetup(
        ranks=engine.seq_dp_world_size,
        zero_stage=stage,
        offload_param=place_of(engine.zero_offload_param()),
        offload_optimizer=place_of(engine.zero_offload_optimizer()),
        accumulation=engine.gradient_accumulation_steps(),
        vertical=vertical,
        overlap=overlap,
        schedule="optimised" if pipelined else "naive",
        holds_gradients=True,
        engine=engine_memory(engine, hmt, options, host, cache),
    )
    eager = getattr(config, "_attn_implementation", None) == "eager"
    elements = int(engine.zero_reduce_bucket_size()) if stage else 0
    on_gpu = torch.device(engine.device).type == "cuda"
    return RunFacts(
        shape,
        replace(optimizer_mode(options), host_is_ours=host is not None, on_gpu=on_gpu),
        setup,
        itemsize,
        gradient_itemsize,
        _FP32 if dtypes[0] == torch.float16 else itemsize,  # fp16 factors are multiplied in fp32
        eager,
        elements,
        is_chosen=options is not None and _is_chosen(options, shape),
        inputs={"layer_input": "swap_host"} if on_host else {},
        ssd_folder=ssd_folder(hmt.activations.nvme_path, None if ssd is None else ssd.path),
    )


def _is_chosen(options: Mapping[str, Any], shape: ModelShape) -> bool:
    """Whether ranks, or bases of a mixture's experts, are found in gradients."""
    has_experts = isinstance(shape, ListedShape) and bool(shape.experts)
    return options["rank"] == "auto" or (has_experts and options["expert_basis"] == "auto")


def ssd_folder(of_activations: str | None, of_states: str | None) -> str | None:
    """One of the two folders; the planner knows one array of SSDs.

    Raises:
        ValueError: they are on different file systems.
    """
    given = [path for path in (of_activations, of_states) if path is not None]
    if len({os.stat(_existing(path)).st_dev for path in given}) > 1:
        raise ValueError(
            f'hmt.activations.policy is "plan", but hmt.activations.nvme_path {of_activations!r} and '
            f"zero_optimization.offload_optimizer.nvme_path {of_states!r} are on different file systems; legal: "
            "one SSD or array for both, which is what is measured. Name folders on one, or write the policy out."
        )
    return given[0] if given else None


def shapes_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Shapes:
    """Shapes of the first tensor among a forward's inputs that has a batch and a sequence.

    Raises:
        ValueError: there is none.
    """
    named = [kwargs.get("input_ids"), kwargs.get("inputs_embeds")]
    for tensor in [*named, *args, *kwargs.values()]:
        if isinstance(tensor, Tensor) and tensor.dim() >= 2:
            return Shapes(*map(int, tensor.shape[:2]))
    raise ValueError(
        'hmt.activations.policy is "plan", but no input of the model is a tensor of batch x sequence, so there '
        "is nothing to plan for. Give input_ids, or write the policy out."
    )


def place_of(config: Any) -> Any:
    """ "none", "cpu" or "nvme": an ``offload_param`` or ``offload_optimizer`` of DeepSpeed's, or None."""
    device = "none" if config is None else config.device
    return str(getattr(device, "value", device))


def optimizer_mode(options: Mapping[str, Any] | None) -> OptimizerMode:
    """``hmt.optimizer`` in the planner's words; ``"rank": "auto"`` as the largest candidate.

    Of module rules those that leave their matches to AdamW, see :func:`~hmt_deepspeed.zero.engine.support.has_other_rules`.
    """
    if options is None:
        return OptimizerMode(method=DENSE)
    rank, probes, budget = (options[name] for name in ("rank", "probes", "max_full_gradient_bytes"))
    if rank == "auto" and not rule_of(options["method"], options).chooses_rank:
        rank = None
    elif rank == "auto":
        candidates = options["rank_candidates"]
        rank = SIDE_SHARES[-1] if candidates == "auto" else max(candidates)
    return OptimizerMode(
        method=options["method"],
        projection=options["projection"],
        rank=rank,
        probes=None if probes == "auto" else probes,
        residual=options["residual"],
        state_dtype=options["state_dtype"],
        second_moment=options["second_moment"],
        master_weights=options["master_weights"],
        weight_dtype=options["weight_dtype"],
        target_modules=options["target_modules"],
        adamw_modules=tuple(
            pattern
            for pattern, rule in options["module_rules"].items()
            if rule.get("method") == DENSE
        ),
        projected_backward=options["projected_backward"] is not False,
        redrawn=options["range_finder"] == "random",
        share_basis=options["share_basis"],
        expert_basis=options["expert_basis"],
        max_full_gradient_bytes=None if budget == "auto" else budget,
    )


def refreshing_columns(zero: ZeroState, shape: ModelShape) -> dict[int, int]:
    """Columns of ``X [Q | P]``, by layer, that no linear forms in this accumulation window, because their matrices refresh.

    Args:
        zero: states of the optimizer. shape: of the model.
    """
    experts = shape.experts if isinstance(shape, ListedShape) else {}
    widths = {  # by owner, since matrices that share columns have one product
        p.matrix.columns.owner: (p.name, p.matrix)
        for p in zero.low_rank
        if isinstance(p.matrix, ProjectedMatrix)
        if p.gradient.refreshing and p.gradient.linear is not None and not p.matrix.takes_whole
        if p.matrix.count > 1 or not p.matrix.transposed
    }
    by_name = dict(widths.values())

    def columns(starred: str, matrix: ProjectedMatrix) -> int:
        if matrix.count == 1:
            return matrix.width
        product = experts.get(starred)  # down projections save none
        rows = product.images(matrix.own_bases) if product and product.role == "up" else 0
        return round(rows * matrix.width)

    return {
        layer: sum(columns(starred, by_name[name]) for starred, name in names.items())
        for layer, names in by_layer(shape.names.layer, by_name).items()
    }


# -- memory -----------------------------------------------------------------------------------------


def _local_ranks() -> int:
    """Ranks of this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("LOCAL_SIZE", "1")))


def bytes_at_rest(facts: RunFacts) -> int:
    """Device bytes of weights, gradients and states between two steps, on the rank that holds most."""
    setup, sharding = facts.setup, Sharding(facts.setup.zero_stage, facts.setup.ranks)
    states = offloaded_states(
        facts.shape,
        facts.mode,
        sharding,
        itemsize=facts.itemsize,
        gradient_itemsize=facts.gradient_itemsize,
        is_offloaded=setup.offload_optimizer != "none",
    ).resident
    weights = states.weights if setup.offload_param == "none" else 0
    cached = CachedBases()
    if setup.engine is not None and setup.engine.cache is not None:
        room, is_offloaded = setup.engine.cache, setup.offload_optimizer != "none"
        cached = cached_bases(facts.shape, facts.mode, sharding, facts.itemsize, room, is_offloaded)
    away = cached.bases + cached.probes - cached.resting
    return weights + states.probes + states.gradients + states.optimizer - int(away)


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
    on_ssd: float = 0.0,
) -> MemoryBudget:
    """Memory that the plan of this rank may use.

    The plan may not use memory that the process has taken between two steps and the planner does not know of (a
    CUDA library's workspace, a user's own tensors). A quarter of host memory is left for copies under way and for
    the unused ends of page-locked pieces (``zero/activations/swap.py``).

    Args:
        problem: what is planned. hmt: the block.
        taken, capacity: bytes, see :func:`device_capacity`. on_ssd: bytes of states in files by now.

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
    host = hmt.activations.host_memory
    if host == "auto":
        host = free_host_memory() // 2 // _local_ranks()
    path = hmt.activations.nvme_path
    ssd = 0
    if path is not None:  # less what states will take, whose second slots come with the first step
        free = shutil.disk_usage(_existing(path)).free // _local_ranks()
        ssd = max(0, free - max(0, static["ssd"] - int(on_ssd)))
    staging = 0 if problem.setup.engine is None else problem.setup.engine.staging
    activations = host * 3 // 4 + staging
    return MemoryBudget(max(1, gpu), static["host"] + activations, static["ssd"] + ssd)


def _existing(path: str) -> str:
    """The folder, or the nearest above it that there is."""
    path = os.path.abspath(path)
    while not os.path.exists(path):
        path = os.path.dirname(path)
    return path
