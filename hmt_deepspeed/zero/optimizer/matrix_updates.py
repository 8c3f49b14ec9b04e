"""Applies what a step's stacks have found to weights, wherever these are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hmt_deepspeed.kernels.noise import Stream
from hmt_deepspeed.optim.rules.numbers import StepNumbers
from hmt_deepspeed.optim.rules.stack import Change, Gradients, Stack, alike, stacked
from hmt_deepspeed.zero.offload.weight import HostWeight
from hmt_deepspeed.zero.parameters.param_state import ParamState
from hmt_deepspeed.zero.sharding.collectives import Collectives
from hmt_deepspeed.zero.sharding.shards import RowShards
from hmt_deepspeed.zero.sharding.transpose import rows_from_columns
from hmt_deepspeed.zero.state import ZeroState
from hmt_deepspeed.zero.weights.int8_weight import EncodedWeight
from hmt_deepspeed.zero.weights.low_rank_change import LowRankChange
from hmt_deepspeed.zero.weights.weight import GatherPipeline, Weight

__all__ = ["MatrixUpdates", "Part"]


@dataclass(eq=False)
class Part:
    """Matrices that step together, and their parameters."""

    stack: Stack
    members: Sequence[ParamState]

    def gradients(self) -> Gradients:
        """Of rows x width each; zeros for a matrix that no backward has reached, as DeepSpeed's ZeRO counts it."""
        first, device = self.stack.first, self.stack.device
        shape = (first.num_rows, first.width)
        found = [p.gradient.reduced for p in self.members]
        known = [torch.zeros(shape, device=device) if g is None else g for g in found]
        return alike(known) if self.stack.reads_whole_rows else stacked(known)

    @property
    def counted(self) -> slice:
        """Of the rows held here those that count in sums."""
        return self.members[0].counted

    @property
    def holders(self) -> Collectives:
        return self.members[0].gradient.holders

    @property
    def transposed(self) -> bool:
        return self.stack.first.transposed

    @property
    def on_host(self) -> bool:
        """Whether the host updates their weights."""
        return isinstance(self.members[0].weight, HostWeight)

    def part(self, begin: int, end: int) -> Part:
        """Some of them."""
        return Part(self.stack.part(begin, end), self.members[begin:end])


class MatrixUpdates:
    """Updates of one step.

    Args:
        zero: the states of the optimizer. holders: of the parameters. gather: of weights and updates.
        gather_weight: queues the gather of a weight whose shard is new. hyper: lr, betas, eps, weight_decay of a
            parameter. numbers: on the device. step_count: keys random rounding.
    """

    def __init__(
        self,
        zero: ZeroState,
        holders: Collectives,
        gather: GatherPipeline,
        gather_weight: Callable[[ParamState, GatherPipeline], None],
        hyper: Callable[[ParamState], dict[str, Any]],
        numbers: StepNumbers,
        step_count: int,
    ) -> None:
        self.holders, self.bases, self.settings = holders, zero.bases, zero.settings
        self.sharded = zero.settings.stage > 0 and holders.world > 1
        self._gather, self._gather_weight, self._hyper = gather, gather_weight, hyper
        self._step_count, self._numbers = step_count, numbers

    def apply(self, part: Part, change: Change) -> None:
        """``W <- (1 - lr wd) W - lr D`` on the rows held here of each weight of a part."""
        first = part.members[0].weight
        if change.beside is not None and (
            isinstance(first, (HostWeight, EncodedWeight)) or (self.sharded and part.transposed)
        ):
            self._apply_whole(part, change)
            return
        by_rows = first.by_rows and not part.transposed
        for begin, end in self.bases.runs(part.members):
            some, own = part.part(begin, end), change.part(begin, end)
            with self.bases.all_whole(some.members):
                projections = some.stack.update_columns(own)
                if self.sharded and not by_rows and change.beside is None:
                    self._send(some, own, projections)
                else:
                    self._apply_factors(some, own, projections)

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
            self._apply_factors(part, change._replace(update=whole), projections)

        self._gather.add(update.reshape(-1), update.numel(), deliver)

    def _apply_factors(self, part: Part, change: Change, projections: Sequence[Tensor]) -> None:
        """Updates of the rows held here, or low-rank ones of all rows."""
        weights = [p.weight for p in part.members]
        hyper, number = (
            self._hyper(part.members[0]),
            self._numbers.step(self._step_count, part.stack.device),
        )
        keys = part.stack.keys(number, Stream.WEIGHT_ROUNDING) if weights[0].rounds else None
        # whole rows of an update are those that this rank has
        by_rows, update = weights[0].by_rows or change.beside is not None, change.update
        if by_rows:
            begin, end = weights[0].shards.rows(weights[0].rank)
            if part.transposed:
                projections = [columns[begin:end] for columns in projections]
            elif update.shape[1] != end - begin:
                update = update[:, begin:end]
        low_rank = LowRankChange(
            update,
            projections,
            min(part.stack.rank, update.shape[2]),
            change.scale,
            keys,
            lambda b: part.members[b].rounding_key(self._step_count),
            part.transposed,
            hyper["lr"],
            hyper["weight_decay"],
            change.beside,
        )
        step: Callable[[Sequence[Weight], LowRankChange], None]
        step = type(weights[0]).step_rows if by_rows else type(weights[0]).step_whole
        step(weights, low_rank)
        if by_rows:
            for param_state in part.members:
                self._gather_weight(param_state, self._gather)

    # -- whole updates --------------------------------------------------------------------------

    def _apply_whole(self, part: Part, change: Change) -> None:
        """Updates made whole one by one: to be exchanged between ranks, or for weights of other kinds."""
        columns = part.stack.update_columns(change)
        for b, param_state in enumerate(part.members):
            update, weight = change.whole(b, columns[b]), param_state.weight
            taken = (change.scale[b, 0] != 0).float()
            if self.sharded and isinstance(weight, EncodedWeight):
                self._exchange_whole(param_state, part.transposed, update, taken)
                continue
            if part.transposed:
                shards = param_state.gradient.shards
                update = rows_from_columns(update, shards, weight.shards, self.holders)
            hyper, key = self._hyper(param_state), param_state.rounding_key(self._step_count)
            weight.step_update(update, taken, hyper["lr"], hyper["weight_decay"], key)
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
