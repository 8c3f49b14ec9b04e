"""The step of :class:`~hmt_deepspeed.optim.hmt.HMT`: matrices in stacks, other parameters by AdamW."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hmt_deepspeed.kernels.launching import upload
from hmt_deepspeed.kernels.low_rank_update import low_rank_updates_
from hmt_deepspeed.kernels.noise import Stream
from hmt_deepspeed.kernels.precision import fp32_products
from hmt_deepspeed.optim.backward.int8_linear import update_together_
from hmt_deepspeed.optim.rules.change import Change
from hmt_deepspeed.optim.rules.dense import SmallParameter, dense_adamw_together_
from hmt_deepspeed.optim.rules.numbers import StepNumbers
from hmt_deepspeed.optim.rules.side_by_side import alike, joined, stacked
from hmt_deepspeed.optim.rules.stack import MOST_ALIVE, Gradients, Stack
from hmt_deepspeed.optim.rules.stacks import Stacks
from hmt_deepspeed.optim.slot import Slot

__all__ = ["StackedStep"]


class StackedStep:
    """Steps of the slots of one optimizer."""

    def __init__(self) -> None:
        self._stacks, self._numbers = Stacks(), StepNumbers()

    def _together(self, slots: Sequence[Slot]) -> Iterator[tuple[Stack, list[Slot]]]:
        """Stacks, with the slots of their members."""
        by_matrix = {slot.matrix: slot for slot in slots if slot.matrix is not None}
        kinds = [slot.kind for slot in by_matrix.values()]
        for stack in self._stacks.of(list(by_matrix), kinds):
            yield stack, [by_matrix[matrix] for matrix in stack.members]

    def make_room(self, slots: Sequence[Slot]) -> None:
        """Let the coming backwards leave their products side by side."""
        for stack, members in self._together(slots):
            for place, slot in enumerate(members):
                if slot.linear is not None:
                    slot.linear.room = partial(stack.room, torch.float32, MOST_ALIVE, place)

    @fp32_products()
    def square_norms(self, slots: Sequence[Slot]) -> list[Tensor]:
        """Squared norms of the gradients that are there, estimated when projected; of the matrices (B,), of others
        0-dim; fp32."""
        found = []
        for stack, members in self._together(slots):
            if given := _Given.of(stack, members):
                norms = stack.square_norms(given.measure())
                found.append(torch.where(given.factor != 0, norms, 0.0))
        for slot in slots:
            if slot.matrix is None and slot.param.grad is not None:
                norm = torch.linalg.vector_norm(slot.param.grad, dtype=torch.float32)
                found.append(norm.square())
        return found

    @fp32_products()
    def take(self, slots: Sequence[Slot], step: int, clipped: Tensor | float) -> None:
        """Update the weights; a parameter without a gradient stays as it is.

        Args:
            step: number of the step. clipped: what clipping has multiplied the gradients by.
        """
        for stack, members in self._together(slots):
            given = _Given.of(stack, members)
            if given is None:
                continue
            for slot, matrix in zip(members, stack.members, strict=True):
                matrix.moments.steps += slot.has_gradient
                if slot.linear is not None:
                    slot.linear.take()
            seen = given.measure()
            clip = clipped.to(stack.device) if isinstance(clipped, Tensor) else clipped
            stack.observe(seen, clip)
            hyper, number = self._hyper(members[0]), self._numbers.step(step, stack.device)
            factor = stack.taken(given.factor, seen)
            stack.start(factor, betas=hyper["betas"], eps=hyper["eps"], step=number)
            for begin, end in given.groups:
                group, own = stack.part(begin, end), members[begin:end]
                parts = group.parts(MOST_ALIVE)
                updates, sums = group.advance(parts, given.by_parts(begin, end, used_up=True))
                if group.sums_updates:
                    sums = group.complete(parts, updates, sums, slice(None))
                changes = group.finish(parts, updates, sums)
                del updates
                for (first, last), change in zip(group.pieces(MOST_ALIVE), changes, strict=True):
                    self._apply(group.part(first, last), own[first:last], change, hyper, step)
                    group.free(MOST_ALIVE, first)
                del changes, change
            stack.end()
        self._take_dense([s for s in slots if s.matrix is None and s.param.grad is not None], step)

    def _apply(
        self,
        stack: Stack,
        members: Sequence[Slot],
        change: Change,
        hyper: Mapping[str, Any],
        step: int,
    ) -> None:
        """``W <- (1 - lr wd) W - lr D`` of every weight of a stack, together."""
        lr, decay, transposed = hyper["lr"], hyper["weight_decay"], stack.first.transposed
        encoded = [slot.encoded for slot in members if slot.encoded is not None]
        keys = None
        if encoded or members[0].rounded:
            number = self._numbers.step(step, stack.device)
            keys = stack.keys(number, Stream.WEIGHT_ROUNDING)
        columns = stack.update_columns(change)
        factors: dict[str, Any] = {
            "rank": min(stack.rank, columns[0].shape[-1]),
            "column_scale": change.scale,
            "keys": keys,
            "transposed": transposed,
            "beside": change.beside,
        }
        if encoded:
            update_together_(encoded, change.update, columns, lr, decay, **factors)
            return
        weights, copies = [slot.writable() for slot in members], None
        if members[0].has_master:
            copies = [slot.param.detach().contiguous() for slot in members]
        low_rank_updates_(weights, change.update, columns, lr, decay, copies=copies, **factors)
        for slot, new in zip(members, copies or weights, strict=True):
            slot.write_back(new)

    def _hyper(self, slot: Slot) -> dict[str, Any]:
        """lr, on the device, betas, eps and weight_decay."""
        hyper, of = slot.hyper, (id(slot.group), slot.assigned.lr_scale)
        return {**hyper, "lr": self._numbers.lr(hyper["lr"], of, slot.param.device)}

    def _take_dense(self, slots: Sequence[Slot], step: int) -> None:
        """AdamW's steps: small parameters together, others one by one."""
        together: dict[Hashable, list[tuple[Slot, SmallParameter]]] = {}
        for slot in slots:
            small = slot.as_small()
            if small.fits:
                kind = (id(slot.group), slot.assigned.lr_scale, slot.param.device)
                together.setdefault(kind, []).append((slot, small))
            else:
                number = self._numbers.step(step, slot.param.device)
                slot.step_dense(number, self._hyper(slot))
        for members in together.values():
            small_ones, hyper = [small for _, small in members], self._hyper(members[0][0])
            number = self._numbers.step(step, small_ones[0].weight.device)
            dense_adamw_together_(small_ones, number=number, **hyper)
            for slot, small in members:
                slot.write_back(small.weight if small.copy is None else small.copy)


class _Given:
    """Gradients of the members of a stack, at least one of which has one.

    Attributes:
        factor: 1 for each matrix that has one, 0 for the others, whose gradients count as zeros.
        groups: see :meth:`Stack.groups`.
    """

    def __init__(self, stack: Stack, members: Sequence[Slot], reduced: list[Tensor | None]) -> None:
        self._stack = stack
        self.groups = stack.groups(MOST_ALIVE, all(slot.has_room for slot in members))
        there = [gradient for gradient in reduced if gradient is not None]
        if len(there) == len(reduced):
            self.factor, self._each = torch.ones(stack.size, device=stack.device), there
            return
        known = stack.of_each([float(gradient is not None) for gradient in reduced])
        self.factor = upload(known, torch.float32, stack.device)
        zeros = torch.zeros_like(there[0])
        self._each = [zeros if gradient is None else gradient for gradient in reduced]

    @classmethod
    def of(cls, stack: Stack, members: Sequence[Slot]) -> _Given | None:
        """None where no member has a gradient."""
        if not any(slot.has_gradient for slot in members):
            return None
        return cls(stack, members, [slot.reduced() for slot in members])

    def measure(self) -> Tensor:
        """See :meth:`Stack.measure`; by groups where a gradient has to be copied beside others."""
        stack = self._stack
        ranges = [(0, len(self._each))] if stack.reads_whole_rows else self.groups
        groups = [(stack.part(*of), self.by_parts(*of)) for of in ranges]
        found = [g.measure(g.parts(MOST_ALIVE), own, slice(None)) for g, own in groups]
        return joined(found)

    def by_parts(self, begin: int, end: int, used_up: bool = False) -> list[Gradients]:
        """Of each part of a group, fp32 where they lie side by side; ``used_up``: for the last time."""
        group, given = self._stack.part(begin, end), self._each[begin:end]
        if used_up:
            self._each[begin:end] = [self.factor] * len(given)
        if group.reads_whole_rows:
            return list(group.by_parts(alike(given), MOST_ALIVE))
        # whole ones are the user's, and are used up
        beside = torch.stack if group.first.takes_whole else stacked
        parts = [beside(own).flatten(0, -3).float() for own in group.by_parts(given, MOST_ALIVE)]
        return [part.contiguous() for part in parts]
