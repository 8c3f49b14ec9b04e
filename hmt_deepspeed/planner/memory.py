"""Bytes that a run occupies on one rank, by kind, whatever the machine.

Model states follow ZeRO (1910.02054, section 5): stage 1 divides masters and optimizer states over the
ranks, stage 2 gradients too, stage 3 weights too. HMT's states are those of ``optim``: what is divided are
rows of a matrix, so a rank holds every row that its flat part touches, and a row that two ranks touch is
held by both. The numbers are those of the rank that holds most.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Literal, get_args

from hmt_deepspeed.planner.flops import Projected
from hmt_deepspeed.planner.hardware import Machine
from hmt_deepspeed.planner.shapes import (
    Linear,
    ModelShape,
    Parameter,
    layer_linears,
    num_parameters,
    parameters,
)
from hmt_deepspeed.planner.workload import Site, Workload
from hmt_deepspeed.sites import Choice, Component

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

Method = Literal["adamw", "lowrank_adamw", "apollo", "apollo_mini"]
Projection = Literal["right", "left", "auto", "two_sided"]
Residual = Literal["none", "probe", "full"]
StateDtype = Literal["fp32", "bf16", "int8"]

FP32 = 4
STATE_BLOCK = (
    256  # elements of an int8 state, or of a row of an int8 weight, that share an fp32 scale
)
LEAST_INT8 = 4096  # smaller states stay in fp32


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


@dataclass(frozen=True)
class Sharding:
    """How model states are divided: ZeRO's stage over ``world_size`` ranks."""

    stage: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        """Raise ValueError for another stage or no ranks: field, value, legal range, what to do."""
        if self.stage not in (0, 1, 2, 3):
            raise ValueError(
                f"ZeRO stage is {self.stage!r}; legal: 0, 1, 2 or 3. Choose one of them."
            )
        if not isinstance(self.world_size, int) or self.world_size < 1:
            raise ValueError(
                f"world_size is {self.world_size!r}; legal: an integer >= 1. Give the number of ranks."
            )

    def ranks(self, stage: int) -> int:
        """Over how many ranks is divided what ZeRO divides from ``stage`` on."""
        return self.world_size if self.stage >= stage else 1


@dataclass(frozen=True)
class OptimizerMode:
    """``hmt.optimizer`` as far as bytes depend on it; the defaults are its own.

    Attributes:
        rank: r of every matrix, or the one assumed for ``"auto"``. probes: k, None for "auto".
        target_modules, exclude_modules: regular expressions searched in a parameter's name.
        projected_backward: of linears that can have it. redrawn: bases are redrawn from a seed, not stored.
    """

    method: Method = "lowrank_adamw"
    projection: Projection = "right"
    rank: int = 128
    probes: int | None = None
    residual: Residual = "probe"
    state_dtype: StateDtype = "fp32"
    master_weights: Literal["fp32", "none"] = "fp32"
    weight_dtype: Literal["auto", "int8"] = "auto"
    target_modules: tuple[str, ...] | None = None
    exclude_modules: tuple[str, ...] = ("embed", "lm_head")
    projected_backward: bool = True
    redrawn: bool = False
    share_basis: bool = False

    def __post_init__(self) -> None:
        """Raise ValueError for an illegal value: field, value, legal values, what to do."""
        for field, legal in _LEGAL.items():
            if getattr(self, field) not in legal:
                raise ValueError(
                    f"hmt.optimizer.{field} is {getattr(self, field)!r}; legal: {legal}. Choose one of them."
                )
        for field, least in (("rank", 1), ("probes", 0)):
            value = getattr(self, field)
            if value is not None and (not isinstance(value, int) or value < least):
                raise ValueError(
                    f"hmt.optimizer.{field} is {value!r}; legal: an integer >= {least}. Give that."
                )

    def is_low_rank(self, parameter: Parameter) -> bool:
        """Whether a parameter has a matrix rule."""
        if self.method == "adamw" or parameter.kind in ("vector", "embedding"):
            return False
        if any(re.search(pattern, parameter.name) for pattern in self.exclude_modules):
            return False
        targets = self.target_modules
        return targets is None or any(re.search(pattern, parameter.name) for pattern in targets)

    def is_projected(self, parameter: Parameter) -> bool:
        """Whether its backward forms the projected gradient only."""
        takes = self.method == "lowrank_adamw" and self.residual != "full"
        patched = parameter.kind != "conv1d" and self.projected_backward
        return takes and patched and self.is_low_rank(parameter)

    def backward(self) -> Projected | None:
        """What projected backward does to the layers' linears, None without it.

        ``auto`` projects the smaller side, matrix by matrix; the workload counts it as ``right``.
        """
        if self.method != "lowrank_adamw" or self.residual == "full" or not self.projected_backward:
            return None
        side: Literal["right", "left"] = "left" if self.projection == "left" else "right"
        return Projected(self.rank, self.probes_at(self.rank), side, self.share_basis)

    def probes_at(self, rank: int) -> int:
        """k at a rank: a quarter of it and at least 8, when not given."""
        return max(8, rank // 4) if self.probes is None else self.probes


_LEGAL: dict[str, tuple[object, ...]] = {
    "method": get_args(Method),
    "projection": get_args(Projection),
    "residual": get_args(Residual),
    "state_dtype": get_args(StateDtype),
    "master_weights": ("fp32", "none"),
    "weight_dtype": ("auto", "int8"),
}


# -- model states -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelStates:
    """Bytes of the model's states on the rank that holds most, between two steps.

    Attributes:
        weights: as computed with. gradients: accumulated over a window. masters: fp32 copies of 16-bit weights.
        moments: the optimizer's, with scales and evidence. bases: of low-rank matrices. probes: columns
            beside the bases, redrawn every step.
    """

    weights: int
    gradients: int
    masters: int
    moments: int
    bases: int
    probes: int

    @property
    def total(self) -> int:
        """All of them."""
        return sum(getattr(self, field.name) for field in fields(self))

    @property
    def optimizer(self) -> int:
        """What the optimizer reports: masters, moments and bases."""
        return self.masters + self.moments + self.bases


def model_states(
    shape: ModelShape,
    mode: OptimizerMode,
    sharding: Sharding = Sharding(),
    *,
    itemsize: int = 2,
    gradient_itemsize: int | None = None,
) -> ModelStates:
    """Bytes of weights, gradients, masters and optimizer states on one rank.

    Args:
        itemsize: of the weights. gradient_itemsize: of accumulated gradients, None for that of the weights.

    Raises:
        ValueError: int8 weights at stage 3.
    """
    if mode.weight_dtype == "int8" and sharding.stage == 3:
        raise ValueError(
            "hmt.optimizer.weight_dtype is 'int8' at ZeRO stage 3; legal: stages 0, 1 and 2, since every "
            "rank holds all codes. Lower the stage, or use 'auto'."
        )
    sizes = dict.fromkeys((field.name for field in fields(ModelStates)), 0)
    each = gradient_itemsize or itemsize
    for parameter in parameters(shape):
        for kind, nbytes in _states_of(parameter, mode, sharding, itemsize, each).items():
            sizes[kind] += parameter.count * nbytes
    return ModelStates(**sizes)


def _states_of(
    parameter: Parameter,
    mode: OptimizerMode,
    sharding: Sharding,
    itemsize: int,
    gradient_itemsize: int,
) -> dict[str, int]:
    """Bytes by kind of one parameter."""
    encoded = mode.weight_dtype == "int8" and mode.is_projected(parameter)
    masters = itemsize != FP32 and mode.master_weights == "fp32" and not encoded
    sizes = {
        "weights": _part(parameter.numel, sharding.ranks(3)) * itemsize,
        "masters": _part(parameter.numel, sharding.ranks(1)) * FP32 if masters else 0,
    }
    if encoded:
        rows, columns = parameter.shape
        sizes["weights"] = rows * (columns + -(-columns // STATE_BLOCK) * FP32)
    if mode.is_low_rank(parameter):
        return sizes | _matrix_states(parameter, mode, sharding, itemsize, gradient_itemsize)
    dtype = mode.state_dtype if parameter.numel >= LEAST_INT8 else "fp32"
    return sizes | {
        "gradients": _part(parameter.numel, sharding.ranks(2)) * gradient_itemsize,
        "moments": 2 * _state_bytes(_part(parameter.numel, sharding.ranks(1)), dtype),
    }


def _part(numel: int, ranks: int) -> int:
    return -(-numel // ranks)


def _state_bytes(numel: int, dtype: str) -> int:
    """One moment: fp32, bf16, or uint8 codes with a scale for each block."""
    if dtype == "int8":
        return numel + -(-numel // STATE_BLOCK) * FP32
    return numel * (FP32 if dtype == "fp32" else 2)


def _most_rows(rows: int, columns: int, ranks: int) -> int:
    """Most rows that a rank's flat part of ``ceil(rows columns / ranks)`` elements touches."""
    part = _part(rows * columns, ranks)
    starts = range(0, rows * columns, part)
    ends = (min(start + part, rows * columns) for start in starts)
    return max(
        -(-end // columns) - start // columns for start, end in zip(starts, ends, strict=True)
    )


def _matrix_states(
    parameter: Parameter,
    mode: OptimizerMode,
    sharding: Sharding,
    itemsize: int,
    gradient_itemsize: int,
) -> dict[str, int]:
    """Gradients, moments, bases and probes of one matrix; m x n as its rule sees it."""
    m, n = parameter.shape
    apollo = mode.method in ("apollo", "apollo_mini")
    transposed = m < n if apollo or mode.projection == "auto" else mode.projection == "left"
    if transposed:
        m, n = n, m
    rows, reduced_rows = _most_rows(m, n, sharding.ranks(1)), _most_rows(m, n, sharding.ranks(2))
    if apollo:
        rank = 1 if mode.method == "apollo_mini" else min(mode.rank, m, n)
        dtype = mode.state_dtype if m * rank >= LEAST_INT8 else "fp32"
        return {
            "gradients": reduced_rows * n * gradient_itemsize,
            "moments": 2 * _state_bytes(rows * rank, dtype) + rank * FP32,
        }
    rank, two_sided = min(mode.rank, m, n), mode.projection == "two_sided"
    full = (
        rank == n and not two_sided
    )  # plain AdamW takes the place of a basis that spans everything
    probes = 0 if full or mode.residual == "full" else min(mode.probes_at(rank), n - rank)
    width = n if full or mode.residual == "full" else rank + probes
    core = rank * rank if two_sided else rows * rank
    evidence = (rank * rank if two_sided else rank) * FP32
    held = 0 if full or mode.redrawn else n
    if sharding.stage == 3 and mode.is_projected(parameter) and not transposed:
        held = _part(held, sharding.world_size)
    left = rows if two_sided else 0
    return {
        "gradients": reduced_rows * width * gradient_itemsize,
        "moments": 2 * _state_bytes(core, mode.state_dtype) + evidence,
        "bases": (held + left) * rank * itemsize,
        "probes": held * probes * itemsize,
    }


def communication_volume(shape: ModelShape, sharding: Sharding) -> int:
    """Elements that a rank sends per step with AdamW (1910.02054, section 7), for many ranks.

    An all-reduce of the gradients, or a reduce-scatter of them and a gather of the weights: 2 Psi. Stage 3
    gathers the weights in forward and in backward: 3 Psi.
    """
    if sharding.world_size == 1:
        return 0
    return (3 if sharding.stage == 3 else 2) * num_parameters(shape)


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

    ``residual: recompute`` is of what attention adds, ``layernorm: recompute`` of a norm's internals: what
    enters a layer or the final norm is then kept (``sites.py``).

    Raises:
        ValueError: a component without a choice.
    """
    missing = {site.component for site in workload.sites} - set(policy)
    if missing:
        raise ValueError(
            f"the policy has no choice for {sorted(missing)}; legal: one for every component of the model. "
            "Add them."
        )
    return {
        site: "keep"
        if policy[site.component] == "recompute" and "recompute" not in site.legal
        else policy[site.component]
        for site in workload.sites
    }


def activation_bytes(
    workload: Workload,
    choices: Mapping[Site, Choice] | None,
    *,
    block_size: int = 256,
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
        sizes["device"] += site.count * _part(site.device_bytes(choice, block_size), parts)
        if choice in ("swap_host", "swap_ssd"):
            sizes[choice.removeprefix("swap_")] += site.count * _part(site.nbytes, parts)
    sizes["device"] += sum(layer.count * layer.projected_bytes for layer in workload.layers)
    return ActivationBytes(**sizes)


@dataclass(frozen=True)
class TemporaryBytes:
    """Device bytes alive for a moment; the peak has the largest of the moments, not their sum.

    Attributes:
        logits: at the loss. layer: one layer's backward, its recomputed activations and their gradients.
        weight_gradient: of one linear, before it is added to what has accumulated.
        gathered: weights of the layer computed and of the one prefetched, at stage 3 on several ranks.
        buckets: gradients on their way between ranks.
        full_gradient: of the matrices that refresh their basis together.
    """

    logits: int
    layer: int
    weight_gradient: int
    gathered: int
    buckets: int
    full_gradient: int

    @property
    def peak(self) -> int:
        """At the loss nothing else is alive but gathered weights; in a layer's backward all but the logits."""
        backward = self.layer + self.weight_gradient + self.buckets + self.full_gradient
        return self.gathered + max(self.logits, backward)


def temporary_bytes(
    workload: Workload,
    mode: OptimizerMode,
    sharding: Sharding = Sharding(),
    *,
    bucket_elements: int = 500_000_000,
) -> TemporaryBytes:
    """Device bytes alive for a moment.

    Args:
        bucket_elements: DeepSpeed's ``reduce_bucket_size``; two buckets are on their way at most.
    """
    layer = max(workload.layers, key=lambda group: group.parameters)
    itemsize, linears = workload.itemsize, layer_linears(workload.shape)
    reduced = min(2 * bucket_elements, workload.parameters) if sharding.world_size > 1 else 0
    return TemporaryBytes(
        workload.head.logits_bytes,
        max(group.working_bytes for group in workload.layers),
        max(_gradient_size(linear, workload.projected) for linear in linears) * itemsize,
        2 * layer.parameters * itemsize if sharding.ranks(3) > 1 else 0,
        reduced * itemsize,
        _full_gradient_bytes(parameters(workload.shape), mode, itemsize),
    )


def _gradient_size(linear: Linear, projected: Projected | None) -> int:
    """Elements of one linear's weight gradient, projected or whole."""
    if projected is None:
        return linear.inputs * linear.outputs
    kept = linear.outputs if projected.side == "right" else linear.inputs
    return kept * projected.width(linear)


def _full_gradient_bytes(of_model: Sequence[Parameter], mode: OptimizerMode, itemsize: int) -> int:
    """``max_full_gradient_bytes: auto``: a 32nd of all low-rank gradients, at least the largest matrix."""
    if mode.redrawn or mode.method != "lowrank_adamw" or not mode.projected_backward:
        return 0
    sizes = [(p.numel * itemsize, p.count) for p in of_model if mode.is_projected(p)]
    largest = max((size for size, _ in sizes), default=0)
    return max(largest, -(-sum(size * count for size, count in sizes) // 32))
