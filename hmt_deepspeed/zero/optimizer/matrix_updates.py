"""Applies what a step's stacks have found to weights, wherever these are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hmt_deepspeed.kernels.noise import Stream
from hmt_deepspeed.optim.rules.numbers import StepNumbers
from hmt_deepspeed.optim.rules.stack import Change, Stack, stacked
from hmt_deepspeed.zero.parameters.param_state import ParamState
from hmt_deepspeed.zero.sharding.shards import RowShards
from hmt_deepspeed.zero.sharding.transpose import rows_from_columns
from hmt_deepspeed.zero.state import ZeroState
from hmt_deepspeed.zero.weights.int8_weight import EncodedWeight
from hmt_deepspeed.zero.weights.low_rank_change import LowRankChange
from hmt_deepspeed.zero.weights.weight import GatherPipeline, Weight

__all__ = ["MatrixUpdates", "Part"]


@dataclass(eq=False)
class Part:
    """Matrices that step together, their parameters, and the rows held here that count in sums."""

    stack: Stack
    members: Sequence[ParamState]
    counted: slice

    def gradients(self) -> Tensor:
        """B x rows x width; zeros for a matrix that no backward has reached, as DeepSpeed's ZeRO counts it."""
        first, device = self.stack.first, self.stack.device
        shape = (first.num_rows, first.width)
        found = [p.gradient.reduced for p in self.members]
        return stacked([torch.zeros(shape, device=device) if g is None else g for g in found])

    @property
    def transposed(self) -> bool:
        return self.stack.first.transposed


class MatrixUpdates:
    """Updates of one step.

    Args:
        zero: the states of the optimizer. gather: of weights and updates.
        gather_weight: queues the gather of a weight whose shard is new. hyper: lr, betas, eps, weight_decay of a
            parameter. numbers: on the device. step_count: keys random rounding.
    """

    def __init__(
        self,
        zero: ZeroState,
        gather: GatherPipeline,
        gather_weight: Callable[[ParamState, GatherPipeline], None],
        hyper: Callable[[ParamState], dict[str, Any]],
        numbers: StepNumbers,
        step_count: int,
    ) -> None:
        self.collectives, self.bases, self.settings = zero.collectives, zero.bases, zero.settings
        self.shard_rank, self.sharded = zero.shard_rank, zero.is_sharded
        self._gather, self._gather_weight, self._hyper = gather, gather_weight, hyper
        self._step_count, self._numbers = step_count, numbers

    def apply(self, part: Part, change: Change) -> None:
        """``W <- (1 - lr wd) W - lr D`` on the rows held here of each weight of a part."""
        if part.stack.first.takes_whole:
            for param_state, update, scale in zip(part.members, *change, strict=True):
                self._apply_whole(param_state, part.transposed, update, scale[0])
            return
        with self.bases.all_whole(part.members):
            projections = part.stack.projections()
            if self.sharded and (part.transposed or not part.members[0].weight.by_rows):
                self._send(part, change, projections)
            else:
                self._apply_factors(part, change.update, change.scale, projections)

    def _send(self, part: Part, change: Change, projections: Sequence[Tensor]) -> None:
        """The low-rank update travels: every rank needs all of it for its own rows of the weight."""
        shards, (size, rows, width) = part.members[0].gradient.shards, change.update.shape
        exact = part.transposed and part.members[0].weight.by_rows
        update = change.update if exact else change.update.to(self.settings.comm_dtype)
        missing = shards.max_rows - rows  # of a rank that touches fewer than others
        update = torch.nn.functional.pad(update, (0, 0, 0, missing)) if missing else update

        def deliver(packed: Tensor) -> None:
            each = packed.reshape(shards.world, size, shards.max_rows, width)
            whole = torch.stack([_whole_rows(each[:, b], shards) for b in range(size)])
            self._apply_factors(part, whole, change.scale, projections)

        self._gather.add(update.reshape(-1), update.numel(), deliver)

    def _apply_factors(
        self, part: Part, update: Tensor, scale: Tensor, projections: Sequence[Tensor]
    ) -> None:
        """Low-rank updates; ``update`` of the rows held here, or of all rows."""
        weights = [p.weight for p in part.members]
        hyper, number = (
            self._hyper(part.members[0]),
            self._numbers.step(self._step_count, part.stack.device),
        )
        keys = part.stack.keys(number, Stream.WEIGHT_ROUNDING) if weights[0].rounds else None
        by_rows = weights[0].by_rows
        if by_rows:
            begin, end = weights[0].shards.rows(self.shard_rank)
            if part.transposed:
                projections = [columns[begin:end] for columns in projections]
            elif update.shape[1] != end - begin:
                update = update[:, begin:end]
        change = LowRankChange(
            update,
            projections,
            part.stack.rank,
            scale,
            keys,
            lambda b: part.members[b].rounding_key(self._step_count),
            part.transposed,
            hyper["lr"],
            hyper["weight_decay"],
        )
        step: Callable[[Sequence[Weight], LowRankChange], None]
        step = type(weights[0]).step_rows if by_rows else type(weights[0]).step_whole
        step(weights, change)
        if by_rows:
            for param_state in part.members:
                self._gather_weight(param_state, self._gather)

    # -- whole updates --------------------------------------------------------------------------

    def _apply_whole(
        self, param_state: ParamState, transposed: bool, update: Tensor, scale: Tensor
    ) -> None:
        weight, hyper = param_state.weight, self._hyper(param_state)
        key = param_state.rounding_key(self._step_count)
        if self.sharded and isinstance(weight, EncodedWeight):
            self._exchange_whole(param_state, transposed, update, scale)
            return
        if transposed:
            columns = param_state.gradient.shards
            update = rows_from_columns(update, columns, weight.shards, self.collectives)
        weight.step_update(update, scale, hyper["lr"], hyper["weight_decay"], key)
        self._gather_weight(param_state, self._gather)

    def _exchange_whole(
        self, param_state: ParamState, transposed: bool, update: Tensor, scale: Tensor
    ) -> None:
        """An INT8 weight has no part that is this rank's: the update travels, also a full-rank one."""
        weight, shards, width = param_state.weight, param_state.gradient.shards, update.shape[1]
        hyper, key = self._hyper(param_state), param_state.rounding_key(self._step_count)

        def deliver(packed: Tensor) -> None:
            whole = _whole_rows(packed.reshape(shards.world, shards.max_rows, width), shards)
            found = whole.t() if transposed else whole
            weight.step_update(found, scale, hyper["lr"], hyper["weight_decay"], key)

        part = update.to(self.settings.comm_dtype)
        self._gather.add(part.reshape(-1), shards.max_rows * width, deliver)


def _whole_rows(packed: Tensor, shards: RowShards) -> Tensor:
    """The rows that all ranks sent, in order: m x width, from world x max_rows x width."""
    whole = torch.empty(shards.m, packed.shape[2], dtype=packed.dtype, device=packed.device)
    shards.unpack(packed, whole)
    return whole
