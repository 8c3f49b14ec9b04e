"""Applies what a step's stacks have found to weights, wherever these are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hmt_deepspeed.kernels.low_rank_factors import ScaledRows
from hmt_deepspeed.kernels.noise import Stream
from hmt_deepspeed.optim.rules.change import Change
from hmt_deepspeed.optim.rules.numbers import StepNumbers
from hmt_deepspeed.zero.offload.weight import HostWeight
from hmt_deepspeed.zero.optimizer.parts import Part
from hmt_deepspeed.zero.parameters.param_state import ParamState
from hmt_deepspeed.zero.sharding.collectives import Collectives
from hmt_deepspeed.zero.sharding.shards import RowShards, Shards
from hmt_deepspeed.zero.sharding.transpose import rows_from_columns
from hmt_deepspeed.zero.state import ZeroState, whole_rows
from hmt_deepspeed.zero.weights.gather_pipeline import GatherPipeline
from hmt_deepspeed.zero.weights.int8_weight import EncodedWeight
from hmt_deepspeed.zero.weights.low_rank_change import Experts, LowRankChange
from hmt_deepspeed.zero.weights.weight import Weight

__all__ = ["MatrixUpdates"]


class MatrixUpdates:
    """Updates of one step.

    Args:
        zero: the states of the optimizer. holders: of the parameters. gather: of weights and updates.
        gather_weights: queues the gather of weights alike whose shards are new. hyper: lr, betas, eps, weight_decay
            of a parameter. numbers: on the device. step_count: keys random rounding.
    """

    def __init__(
        self,
        zero: ZeroState,
        holders: Collectives,
        gather: GatherPipeline,
        gather_weights: Callable[[Sequence[ParamState], GatherPipeline], None],
        hyper: Callable[[ParamState], dict[str, Any]],
        numbers: StepNumbers,
        step_count: int,
    ) -> None:
        self.holders, self.bases, self.settings = holders, zero.bases, zero.settings
        self.sharded = zero.is_sharded_over(holders)
        self._gather, self._gather_weights, self._hyper = gather, gather_weights, hyper
        self._step_count, self._numbers = step_count, numbers

    def apply(self, part: Part, change: Change) -> None:
        """``W <- (1 - lr wd) W - lr D`` on the rows held here of each weight of a part."""
        if part.is_of_experts:
            self._apply_experts(part, change)
            return
        first, size = part.members[0].weight, len(part.members)
        whole, of_codes = change.beside is not None, isinstance(first, EncodedWeight)
        if whole and self.sharded and of_codes:
            self._send_whole(part, change)
            return
        if whole and self.sharded and part.transposed:
            width = part.members[0].gradient.shards.max_rows * part.stack.shape[1]
            most = max(1, self.settings.gather_elements // width)
            for begin in range(0, size, most):
                end = min(begin + most, size)
                self._apply_exchanged(part.part(begin, end), change.part(begin, end))
            return
        if whole and isinstance(first, HostWeight):
            self._apply_whole(part, change, part.transposed)
            return
        by_rows = first.by_rows and not part.transposed
        for begin, end in self.bases.runs(part.members):
            some, own = part.part(begin, end), part.of_part(change, begin, end)
            with self.bases.all_whole(some.members):
                projections = some.stack.update_columns(own)
                if self.sharded and not by_rows and not whole:
                    self._send(some, own, projections)
                else:
                    self._apply_factors(some, own, projections, part.transposed)

    def _apply_exchanged(self, part: Part, change: Change) -> None:
        """Whole updates of the columns held here of each weight, as such of its rows held here."""
        first, columns = part.members[0], part.stack.update_columns(change)
        found = torch.stack([change.whole(b, each) for b, each in enumerate(columns)])
        shards = first.gradient.shards
        assert isinstance(shards, RowShards)
        rows = rows_from_columns(found, shards, first.weight.shards, self.holders)
        taken = (change.scale != 0).float()
        beside = ScaledRows(list(rows), torch.ones_like(rows[..., 0])).times(taken[:, 0])
        change = Change(rows[..., :0], taken, beside)
        if isinstance(first.weight, HostWeight):
            self._apply_whole(part, change, transposed=False)
        else:
            columns = part.stack.update_columns(change)
            self._apply_factors(part, change, columns, transposed=False)

    def _send(self, part: Part, change: Change, projections: Sequence[Tensor]) -> None:
        """The low-rank update travels: every rank needs all of it for its own rows of the weight."""
        shards, (size, rows, width) = part.members[0].gradient.shards, change.update.shape
        exact = part.transposed and part.members[0].weight.by_rows
        update = change.update if exact else change.update.to(self.settings.comm_dtype)
        missing = shards.max_rows - rows  # of a rank that touches fewer than others
        update = torch.nn.functional.pad(update, (0, 0, 0, missing)) if missing else update

        def deliver(packed: Tensor) -> None:
            whole = _whole_rows(packed.reshape(shards.world, size, shards.max_rows, width), shards)
            changed = change._replace(update=whole)
            self._apply_factors(part, changed, projections, part.transposed)

        self._gather.add(update.reshape(-1), update.numel(), deliver)

    def _apply_factors(
        self, part: Part, change: Change, projections: Sequence[Tensor], transposed: bool
    ) -> None:
        """Updates of the rows held here, or low-rank ones of all rows."""
        weights = [p.weight for p in part.members]
        hyper, number = (
            self._hyper(part.members[0]),
            self._numbers.step(self._step_count, part.stack.device),
        )
        keys = part.stack.keys(number, Stream.WEIGHT_ROUNDING) if weights[0].rounds else None
        by_rows, update = self._takes_rows(part, change), change.update
        if by_rows:
            begin, end = weights[0].shards.rows(weights[0].rank)
            if transposed:
                projections = [columns[begin:end] for columns in projections]
            elif update.shape[1] != end - begin:
                update = update[:, begin:end]
        low_rank = LowRankChange(
            update,
            projections,
            min(part.stack.rank, update.shape[2]),
            change.scale,
            keys,
            part.members[0].rounding_key(self._step_count),
            transposed,
            hyper["lr"],
            hyper["weight_decay"],
            change.beside,
        )
        step: Callable[[Sequence[Weight], LowRankChange], None]
        step = type(weights[0]).step_rows if by_rows else type(weights[0]).step_whole
        step(weights, low_rank)
        if by_rows:
            self._gather_weights(part.members, self._gather)

    # -- experts --------------------------------------------------------------------------------

    def _apply_experts(self, part: Part, change: Change) -> None:
        """Each rank has its own part of the weights, or all; it may not be of the experts that it holds states of."""
        first = part.members[0].weight
        is_own, by_rows = True, self._takes_rows(part, change)
        if self.sharded:
            is_own = by_rows and part.expert_shards.are_weights(first.shards, part.transposed)
        for begin, end in self.bases.runs(part.members):
            some, own = part.part(begin, end), part.of_part(change, begin, end)
            with self.bases.all_whole(some.members):
                if is_own:
                    self._step_experts(some, own, some.stack.update_columns(own), False)
                elif change.beside is None:
                    self._send_experts(some, own, exact=by_rows)
                else:
                    self._send_whole_experts(some, own)

    def _send_experts(self, part: Part, change: Change, exact: bool) -> None:
        """The low-rank update travels to all ranks, exact or in the dtype of communication."""
        shards, size, width = part.expert_shards, len(part.members), change.update.shape[2]
        projections = part.stack.update_columns(change, of_all=True)
        update = change.update if exact else change.update.to(self.settings.comm_dtype)
        begin, end = shards.rows(self.holders.rank)
        update = update.reshape(size, end - begin, width)
        missing = shards.max_rows - update.shape[1]
        update = torch.nn.functional.pad(update, (0, 0, 0, missing)) if missing else update
        scale = self._scale_of_all(part, change)

        def deliver(packed: Tensor) -> None:
            whole = _whole_rows(packed.reshape(shards.world, size, shards.max_rows, width), shards)
            of_all = Change(whole.view(-1, shards.height, width), scale)
            self._step_experts(part, of_all, projections, True)

        self._gather.add(update.reshape(-1), update.numel(), deliver)

    def _send_whole_experts(self, part: Part, change: Change) -> None:
        """Whole updates travel one by one to all ranks."""
        columns, each = part.stack.update_columns(change), part.stack.first.num_held
        shards, scale = part.expert_shards, self._scale_of_all(part, change)
        for b, param_state in enumerate(part.members):
            own = [change.whole(b * each + e, columns[b][e]) for e in range(each)]
            rows = whole_rows(param_state, torch.cat(own)).view(-1, shards.height, shards.n)
            of_one = scale[b * shards.count : (b + 1) * shards.count]
            taken = (of_one[:, :1] != 0).float().expand(-1, shards.height).contiguous()
            beside = ScaledRows([rows], taken)
            whole = Change(rows[..., :0], of_one, beside)
            alone = part.part(b, b + 1)
            self._step_experts(alone, whole, alone.stack.update_columns(whole, of_all=True), True)

    def _scale_of_all(self, part: Part, change: Change) -> Tensor:
        """Factors of a change of all experts, (B E) x 2. A collective."""
        shards = part.expert_shards
        own = change.scale if shards.owns_experts(self.holders.rank) else change.scale * 0
        scale = part.over_all(own).contiguous()
        self.holders.all_reduce(scale)
        return scale

    def _step_experts(
        self, part: Part, change: Change, projections: Sequence[Tensor], of_all: bool
    ) -> None:
        """Updates of the weights held here, from those of the experts held here or ``of_all``."""
        weights, first = [p.weight for p in part.members], part.stack.first
        hyper = self._hyper(part.members[0])
        number = self._numbers.step(self._step_count, part.stack.device)
        keys = None
        if weights[0].rounds:
            keys = part.stack.keys(number, Stream.WEIGHT_ROUNDING, of_all)
        by_rows = self._takes_rows(part, change)
        held = slice(0, first.count) if of_all else first.held
        row = 0 if of_all or part.transposed else first.rows[0]
        shape = part.members[0].assignment.matrix_shape
        low_rank = LowRankChange(
            change.update,
            projections,
            min(part.stack.rank, change.update.shape[2]),
            change.scale,
            keys,
            part.members[0].rounding_key(self._step_count),
            part.transposed,
            hyper["lr"],
            hyper["weight_decay"],
            change.beside,
            Experts(shape, held.start, held.stop - held.start, row),
        )
        step: Callable[[Sequence[Weight], LowRankChange], None]
        step = type(weights[0]).step_rows if by_rows else type(weights[0]).step_whole
        step(weights, low_rank)
        if by_rows:
            self._gather_weights(part.members, self._gather)

    def _takes_rows(self, part: Part, change: Change) -> bool:
        """Whether each rank updates its own part of the weights; else every rank all of them, as of INT8 weights."""
        first = part.members[0].weight
        whole = change.beside is not None and not isinstance(first, EncodedWeight)
        return first.by_rows or whole

    # -- whole updates --------------------------------------------------------------------------

    def _apply_whole(self, part: Part, change: Change, transposed: bool) -> None:
        """Updates made whole one by one, for weights in host memory."""
        columns = part.stack.update_columns(change)
        for b, param_state in enumerate(part.members):
            update, weight = change.whole(b, columns[b]), param_state.weight
            taken = (change.scale[b, 0] != 0).float()
            hyper, key = self._hyper(param_state), param_state.rounding_key(self._step_count)
            update = update.t() if transposed else update
            weight.step_update(update, taken, hyper["lr"], hyper["weight_decay"], key)
            self._gather_weights([param_state], self._gather)

    def _send_whole(self, part: Part, change: Change) -> None:
        """Whole updates of INT8 weights, of which no part is this rank's, travel one by one to all ranks."""
        columns, dtype = part.stack.update_columns(change), self.settings.comm_dtype
        for b, param_state in enumerate(part.members):
            own = change.whole(b, columns[b]).to(dtype)
            length = param_state.gradient.shards.max_rows * own.shape[1]
            taken = (change.scale[b : b + 1] != 0).float()
            deliver = partial(self._apply_sent, part.part(b, b + 1), taken)
            self._gather.add(own.reshape(-1), length, deliver)

    def _apply_sent(self, part: Part, taken: Tensor, packed: Tensor) -> None:
        """The update of one weight that all ranks have sent rows of; ``taken``: 1 x 2, ones or zeros."""
        shards = part.members[0].gradient.shards
        sent = packed.reshape(shards.world, 1, shards.max_rows, -1)
        rows = _whole_rows(sent, shards)
        beside = ScaledRows([rows[0]], taken[:, :1].expand(-1, shards.m).contiguous())
        change = Change(rows[..., :0], taken, beside)
        self._apply_factors(part, change, part.stack.update_columns(change), part.transposed)


def _whole_rows(packed: Tensor, shards: Shards) -> Tensor:
    """The rows that all ranks sent, in order: B x m x width, from world x B x max_rows x width."""
    whole = packed.new_empty(packed.shape[1], shards.m, packed.shape[3])
    shards.unpack(packed, whole)
    return whole
