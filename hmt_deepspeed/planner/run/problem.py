"""The planning problem: work, machine, training setup and optimizer states."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from hmt_deepspeed.planner.hardware import Machine
from hmt_deepspeed.planner.model.workload import Workload
from hmt_deepspeed.planner.run.cached_bases import CachedBases, cached_bases
from hmt_deepspeed.planner.run.host import EngineMemory, early_bytes, snapshot_bytes
from hmt_deepspeed.planner.run.memory import (
    MemoryBudget,
    ModelStates,
    OptimizerMode,
    Sharding,
    TemporaryBytes,
    model_states,
)
from hmt_deepspeed.planner.run.offloaded import Offloaded, offloaded_states
from hmt_deepspeed.planner.run.update_flops import update_flops

__all__ = ["Overlap", "Place", "Problem", "RunSetup", "Schedule", "make_problem"]

# DeepSpeed's words for where offload_param and offload_optimizer put things; "none": the GPU keeps them.
Place = Literal["none", "cpu", "nvme"]
# Where the optimizer's pass runs: in the last backward, in the next forward, or by itself.
Overlap = Literal["backward", "forward", "none"]
# optimised: a tensor's write overlaps the update of the next and the read of the one after (LoHan, figure 3b);
# naive: the three follow one another.
Schedule = Literal["optimised", "naive"]


@dataclass(frozen=True)
class RunSetup:
    """Setup of a run, apart from the choices for its activations.

    Attributes:
        ranks: data-parallel ranks; every one runs the workload.
        zero_stage: 0 to 3. offload_param, offload_optimizer: as in DeepSpeed's JSON.
        accumulation: micro-steps in an iteration. vertical: all of them go through a layer while its weights are there.
        overlap, schedule: of the optimizer's pass when it runs on the CPU.
        redo_fraction: share of the steps whose overlapped pass is done again because the gradient was clipped
            or overflowed (``overlap: backward`` only; the other two wait for the overflow decision).
        holds_gradients: gradients stay in host memory until clipping and overflow are decided.
        model_parallel: ranks that compute the same layer inputs. partition_activations: each holds its part
            of them (ZeRO-R's P_a).
        gradient_buffer_bytes: GPU bytes that gradients take during a backward beyond what accumulates:
            reduction buckets, full gradients of matrices that refresh, and in vertical order sums in fp32; those of embedding
            and head are end_buffer_bytes. refresh_bytes: of the refreshing linears' inputs. All of the worst step.
        engine: what HMT's engine takes of host memory; None for another's, whose buffers are of a few layers.
    """

    ranks: int = 1
    zero_stage: int = 2
    offload_param: Place = "none"
    offload_optimizer: Place = "none"
    accumulation: int = 1
    vertical: bool = False
    overlap: Overlap = "backward"
    schedule: Schedule = "optimised"
    redo_fraction: float = 0.0
    holds_gradients: bool = False
    model_parallel: int = 1
    partition_activations: bool = False
    gradient_buffer_bytes: float = 0.0
    end_buffer_bytes: float = 0.0
    refresh_bytes: float = 0.0
    engine: EngineMemory | None = None

    def __post_init__(self) -> None:
        """Raise ValueError for a setup that cannot run: field, value, legal values, what to do."""
        for field in ("ranks", "accumulation", "model_parallel"):
            if getattr(self, field) < 1:
                raise ValueError(
                    f"{field} is {getattr(self, field)}; legal: at least 1. Give that."
                )
        if self.zero_stage not in (0, 1, 2, 3):
            raise ValueError(
                f"zero_stage is {self.zero_stage}; legal: 0, 1, 2, 3. Give one of them."
            )
        if self.vertical and (self.zero_stage != 3 or self.offload_param == "nvme"):
            raise ValueError(
                f"vertical accumulation at zero_stage {self.zero_stage} with offload_param {self.offload_param!r}; legal: "
                "stage 3 without nvme. Set that, or vertical false."
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
        if self.partition_activations and self.model_parallel == 1:
            raise ValueError(
                "partition_activations with model_parallel 1; every rank's activations are its own then. Set "
                "partition_activations false, or model_parallel to how many ranks compute the same ones."
            )

    def with_buffers(self, temporary: TemporaryBytes) -> RunSetup:
        """The setup with the buffers of its worst step."""
        buffers = temporary.buckets + temporary.full_gradient
        vertical = self.at_once > 1
        return replace(
            self,
            gradient_buffer_bytes=float(buffers + vertical * temporary.layer_sums),
            end_buffer_bytes=float(vertical * temporary.end_sums),
            refresh_bytes=float(temporary.refreshed_inputs),
        )

    @property
    def at_once(self) -> int:
        """Micro-steps that one pass through the layers takes."""
        return self.accumulation if self.vertical else 1

    @property
    def passes(self) -> int:
        """Passes through the layers in an iteration, forward and backward each."""
        return self.accumulation // self.at_once

    def shard(self, stage: int) -> float:
        """The part of a state that a rank holds if ZeRO shards it from ``stage`` on."""
        return 1 / self.ranks if self.zero_stage >= stage else 1.0

    @property
    def others(self) -> float:
        """The part of a sharded tensor that comes from other ranks."""
        return 1 - 1 / self.ranks


@dataclass(frozen=True)
class Problem:
    """The planning problem; see :func:`make_problem`.

    Attributes:
        total: bytes of the whole model's states. of_rank: of those on the rank that holds most.
        offloaded: which of these ``offload_optimizer`` takes off the device, and what is done there.
        cached: bases that ``hmt.basis_cache`` takes off it.
        update_flops: of the optimizer's pass on the device: in the weights' dtype, and in fp32.
        updates_bring_weights: offloaded weights have no masters, so that their updates bring them to the GPU.
        beside: bytes of host memory by kind, beside states and gradients, as HMT's engine takes them.
    """

    workload: Workload
    machine: Machine
    setup: RunSetup
    budget: MemoryBudget
    total: ModelStates
    of_rank: ModelStates
    offloaded: Offloaded
    cached: CachedBases
    beside: Mapping[str, float]
    update_flops: tuple[float, float] = (0.0, 0.0)
    updates_bring_weights: bool = False

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
    update_itemsize: int | None = None,
) -> Problem:
    """The problem of training ``workload`` on ``machine`` with an optimizer.

    Args:
        budget: of one rank, None for all that the machine has.
        gradient_itemsize: of accumulated gradients, None for that of the weights.
        update_itemsize: see :func:`~hmt_deepspeed.planner.run.offloaded.offloaded_states`.

    Raises:
        ValueError: offload to SSDs that the machine does not have.
    """
    if "nvme" in (setup.offload_param, setup.offload_optimizer) and machine.num_ssds == 0:
        raise ValueError(
            f"offload to nvme on {machine.name}, which has no SSD; legal: none, cpu. Give num_ssds or offload "
            "to cpu."
        )
    shape, sharding = workload.shape, Sharding(setup.zero_stage, setup.ranks)
    itemsize = workload.itemsize
    sharded = partial(
        model_states, shape, mode, itemsize=itemsize, gradient_itemsize=gradient_itemsize
    )
    is_offloaded = setup.offload_optimizer != "none"
    offloaded = offloaded_states(
        shape,
        mode,
        sharding,
        itemsize=itemsize,
        gradient_itemsize=gradient_itemsize,
        update_itemsize=update_itemsize,
        is_offloaded=is_offloaded,
    )
    cached, beside = CachedBases(), dict[str, float]()
    if setup.engine is not None:
        if setup.engine.cache is not None:
            room = setup.engine.cache
            cached = cached_bases(shape, mode, sharding, itemsize, room, is_offloaded)
        beside = _beside(setup, setup.engine, offloaded, cached, itemsize)
        if setup.engine.has_snapshots:
            place = setup.offload_optimizer
            beside["snapshots"] = snapshot_bytes(shape, mode, sharding, itemsize, place)
    of_the_device = mode.host_is_ours or not is_offloaded
    flops = update_flops(shape, mode, sharding) if of_the_device else (0.0, 0.0)
    return Problem(
        workload=workload,
        machine=machine,
        setup=setup,
        budget=budget or MemoryBudget.of(machine),
        total=sharded(),
        of_rank=sharded(sharding),
        offloaded=offloaded,
        cached=cached,
        beside=beside,
        update_flops=flops,
        updates_bring_weights=setup.offload_param != "none" and mode.master_weights == "none",
    )


def _beside(
    setup: RunSetup, engine: EngineMemory, offloaded: Offloaded, cached: CachedBases, itemsize: int
) -> dict[str, float]:
    """Host memory of HMT's engine by kind; see ``host.py``."""
    found: dict[str, float] = {
        "pools": engine.pools,
        "state buffers": engine.state_buffers,
        "weight buffers": engine.weight_buffers,
        "bases": cached.pinned,
    }
    if setup.offload_optimizer != "none" and setup.overlap == "backward":
        on_ssd = setup.offload_optimizer == "nvme"
        found["early updates"] = early_bytes(offloaded, on_ssd, engine.undoes, itemsize)
    return {kind: float(size) for kind, size in found.items() if size}
