"""A parameter's rule, gradient, weights and states."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import nn

from hmt_deepspeed.kernels.noise import Stream, base_key, host_step_key
from hmt_deepspeed.optim.rules.dense import DenseState
from hmt_deepspeed.optim.rules.matrix import MatrixRule
from hmt_deepspeed.optim.rules.projected import ProjectedMatrix
from hmt_deepspeed.optim.settings.assign import Assignment
from hmt_deepspeed.zero.gradients.gradient import Gradient
from hmt_deepspeed.zero.offload.adamw import HostAdamW
from hmt_deepspeed.zero.sharding.collectives import Collectives
from hmt_deepspeed.zero.sharding.shards import ExpertShards
from hmt_deepspeed.zero.weights.weight import Weight

__all__ = ["ParamState", "Placed"]

# name, parameter, its group, collectives of the ranks that share it
Placed = tuple[str, nn.Parameter, dict[str, Any], Collectives]


@dataclass(eq=False)
class ParamState:
    """Everything of one parameter: rule, gradient, weights, and the states of its rule."""

    assignment: Assignment
    group: dict[str, Any]
    gradient: Gradient
    weight: Weight
    matrix: MatrixRule | None
    dense_state: DenseState | None  # exp_avg, exp_avg_sq, step
    seed: int
    host: HostAdamW | None = None  # steps the dense state where that lives in host memory

    @property
    def name(self) -> str:
        return self.assignment.name

    @cached_property
    def counted(self) -> slice:
        """Of the rows held here those that this rank contributes to sums over rows."""
        return self.gradient.shards.counted(self.weight.rank)

    @cached_property
    def base_key(self) -> int:
        """Of what is random in its steps, see :func:`hmt_deepspeed.kernels.noise.base_key`."""
        return base_key(self.seed, self.name)

    def rounding_key(self, step: int) -> tuple[int, int]:
        """Halves of the key of the rounding of its weights at a step."""
        return host_step_key(self.base_key, step, Stream.WEIGHT_ROUNDING)

    def have_own_bases(self) -> None:
        """Experts leave their shared basis, see :meth:`ProjectedMatrix.decide`: it is the other side's rows that ranks hold."""
        matrix, gradient, old = self.matrix, self.gradient, self.gradient.shards
        assert isinstance(matrix, ProjectedMatrix)
        assert isinstance(old, ExpertShards)
        shards = ExpertShards(old.count * old.n, old.height, old.world, old.count)
        matrix.decide(True, shards.rows_of_each(self.weight.rank))
        if gradient.full is not None:
            turned = gradient.full.unflatten(0, (old.count, old.height)).mT
            gradient.full = turned.reshape(shards.m, shards.n)
        gradient.shards = shards
        vars(self).pop("counted", None)

    def hyper(self) -> dict[str, Any]:
        """lr, betas, eps and weight_decay of its step."""
        return self.assignment.hyper(self.group)
