"""Matrices that step together, with their parameters under ZeRO."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hmt_deepspeed.optim.rules.change import Change
from hmt_deepspeed.optim.rules.side_by_side import alike, joined, stacked
from hmt_deepspeed.optim.rules.stack import Gradients, Stack
from hmt_deepspeed.zero.parameters.param_state import ParamState
from hmt_deepspeed.zero.sharding.collectives import Collectives
from hmt_deepspeed.zero.sharding.shards import ExpertShards

__all__ = ["Part"]


@dataclass(eq=False)
class Part:
    """Matrices that step together, and their parameters.

    Attributes:
        most: elements of an update of a part of the stack. in_place: whether updates take the place of gradients. sums:
            what was measured of their gradients over all rows, of the matrices held here, until they step.
    """

    stack: Stack
    members: Sequence[ParamState]
    most: int
    in_place: bool
    sums: Tensor | None = None

    @property
    def parts(self) -> list[Stack]:
        """Of the stack, whose gradients lie side by side."""
        return self.stack.parts(self.most)

    def gradients(self) -> list[Gradients]:
        """Of each part, of rows x width each; zeros for a matrix that no backward has reached, as DeepSpeed's ZeRO counts
        it."""
        first, device = self.stack.first, self.stack.device
        shape = (first.num_held * first.num_rows, first.width)
        reduced = [p.gradient.reduced for p in self.members]
        known = [torch.zeros(shape, device=device) if g is None else g for g in reduced]
        size = first.num_held, first.num_rows, first.width
        if self.stack.reads_whole_rows:
            known = alike(known)
            if first.count > 1:
                known = [gradient.view(size) for gradient in known]
            return list(self.stack.by_parts(known, self.most))
        found = alike([stacked(own) for own in self.stack.by_parts(known, self.most)])
        return [part.reshape(len(part) * size[0], *size[1:]) for part in found]

    def room(self, dtype: torch.dtype, place: int) -> Tensor:
        """Memory for the gradient of one member, see :meth:`Stack.room`; experts' rows one below the other."""
        room = self.stack.room(dtype, self.most, place)
        return room.flatten(0, 1) if self.is_of_experts else room

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
    def alone(self) -> bool:
        """Whether their weights are updated one by one, see :attr:`Weight.alone`."""
        return self.members[0].weight.alone

    def part(self, begin: int, end: int) -> Part:
        """Some of them."""
        stack, members = self.stack.part(begin, end), self.members[begin:end]
        return Part(stack, members, self.most, self.in_place)

    def groups(self) -> list[Part]:
        """Those whose updates are alive at once."""
        return [self.part(*of) for of in self.stack.groups(self.most, self.in_place)]

    def measure(self) -> Tensor:
        """See :meth:`Stack.measure`; one after the other where gradients have to be copied beside others."""
        copied = self.stack.first.takes_whole and not self.stack.reads_whole_rows
        groups = self.groups() if copied else [self]
        return joined([g.stack.measure(g.parts, g.gradients(), g.counted) for g in groups])

    def of_part(self, change: Change, begin: int, end: int) -> Change:
        """The change of some of the members."""
        if (begin, end) == (0, len(self.members)):
            return change
        each = self.stack.first.num_held
        return change.part(begin * each, end * each)

    @property
    def is_of_experts(self) -> bool:
        return self.stack.first.count > 1

    @property
    def expert_shards(self) -> ExpertShards:
        """Who holds which experts."""
        shards = self.members[0].gradient.shards
        assert isinstance(shards, ExpertShards)
        return shards

    def over_all(self, own: Tensor) -> Tensor:
        """What there is of each matrix held here, B x any length, with zeros for experts that others hold: to be summed."""
        first = self.stack.first
        if first.num_held == first.count:
            return own
        whole = own.new_zeros(len(self.members), first.count, own.shape[1])
        whole[:, first.held] = own.view(len(self.members), first.num_held, own.shape[1])
        return whole.flatten(0, 1)
