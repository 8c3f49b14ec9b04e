"""The arithmetic of one optimizer step over shards: moments, weights, gather."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from itertools import chain
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from hmt_deepspeed.kernels.precision import fp32_products
from hmt_deepspeed.optim.rules.change import Change
from hmt_deepspeed.optim.rules.dense import SmallParameter, dense_adamw_together_
from hmt_deepspeed.optim.rules.numbers import StepNumbers
from hmt_deepspeed.optim.rules.stack import MOST_ALIVE
from hmt_deepspeed.optim.rules.stacks import Stacks
from hmt_deepspeed.zero.offload.weight import HostWeight
from hmt_deepspeed.zero.optimizer.clipping import Clipping
from hmt_deepspeed.zero.optimizer.matrix_updates import MatrixUpdates
from hmt_deepspeed.zero.optimizer.parts import Part
from hmt_deepspeed.zero.parameters.param_state import ParamState
from hmt_deepspeed.zero.sharding.collectives import Collectives
from hmt_deepspeed.zero.state import ZeroState
from hmt_deepspeed.zero.weights.gather_pipeline import GatherPipeline

__all__ = ["ZeroStep"]


class ZeroStep:
    """Steps of one optimizer; the caller keeps the loss scale and opens accumulation windows.

    A step is decided on the device: whether it is taken, and what clips it, are tensors. With states in host memory, or
    a basis to be found, the host has to read the overflow first, see :class:`Clipping`.

    Args:
        zero: the states of the optimizer.
        order: places of the parameters in the order in which their new weights are needed.

    Attributes:
        clipping: whether a step is taken, and what clips it.
        written: called when new weights are in place, by default nothing.
        gathers_apart: whether :meth:`finish` gathers each weight by itself, not in buckets.
    """

    def __init__(self, zero: ZeroState, order: Sequence[int]) -> None:
        self.written: Callable[[], None] = lambda: None
        self.gathers_apart = False
        self.param_states, self.order = zero.param_states, order
        self.bases, self.host = zero.bases, zero.host
        self.settings, self._zero = zero.settings, zero
        self._holders = zero.holders
        self._device = self.param_states[0].weight.device
        self._stacks, self._numbers = Stacks(), StepNumbers()
        in_order = [self.param_states[place] for place in order]
        self._by_matrix = {p.matrix: p for p in in_order if p.matrix is not None}
        self._kinds = [_kind(p) for p in self._by_matrix.values()]
        self._dense: dict[Collectives, list[ParamState]] = {h: [] for h in self._holders}
        for param_state in in_order:
            if param_state.matrix is None:
                self._dense[param_state.gradient.holders].append(param_state)
        self._places = {p.name: place for place, p in enumerate(in_order)}
        self.clipping = Clipping(zero, self._dense)
        # of weights in host memory that are updated on the device
        self._away = next(
            (w.away for w in (p.weight for p in in_order) if w.away is not None), None
        )
        self._unfinished: deque[ParamState] = deque()  # updates begun in host memory, in order
        # what the overflow decision has let pass may be on an SSD, and does not count yet
        self._uncommitted = False
        self._when_committed: list[Callable[[], None]] = []

    def forget_states(self) -> None:
        """Hold no memory of states any more: they have moved elsewhere."""
        self._stacks.forget()
        for param_state in self.param_states:
            param_state.gradient.room = None

    # -- stacks -----------------------------------------------------------------------------------

    def _in_place(self, param_state: ParamState) -> bool:
        """Whether updates of weights like it take the place of projected gradients: these are fp32, and no weight gets its
        own copy."""
        return self.settings.accumulate_dtype == torch.float32 and not param_state.weight.alone

    def parts(self) -> list[Part]:
        """The matrices as they step together."""
        found = []
        for stack in self._stacks.of(list(self._by_matrix), self._kinds):
            members = [self._by_matrix[matrix] for matrix in stack.members]
            stack.largest_rows = members[0].gradient.shards.max_rows
            found.append(Part(stack, members, MOST_ALIVE, self._in_place(members[0])))
        return found

    def make_room(self) -> None:
        """Let gradients of matrices that step together come to lie side by side, in the coming accumulation window."""
        dtype = self.settings.accumulate_dtype
        for part in self.parts():
            whole = part.stack.first.takes_whole  # lies in memory of its own
            for place, param_state in enumerate(part.members):
                gradient = param_state.gradient
                gradient.room = None if whole else partial(part.room, dtype, place)
                if gradient.holders.world == 1 and gradient.linear is not None:
                    gradient.linear.room = gradient.room_of_link

    def _portions(
        self, holders: Collectives, parts: Sequence[Part]
    ) -> Iterator[list[Part | ParamState]]:
        """What is updated of what some ranks share, by order of use; in portions whose updates are alive at once, with one all-reduce of sums each.

        That of a matrix at full rank is as large as its weight. What the host updates is one portion:
        it takes weight by weight in the order of use, whichever stacks they are of.
        """
        units: list[tuple[int, Part | ParamState]] = [
            (self._places[p.name], p) for p in self._dense[holders]
        ]
        units += [
            (self._places[group.members[0].name], group)
            for part in parts
            if part.holders is holders
            for group in part.groups()
        ]
        most = self.settings.gather_elements if self._zero.is_sharded_over(holders) else 0
        portion: list[Part | ParamState] = []
        alive = 0
        for _, unit in sorted(units, key=itemgetter(0)):
            size = 0
            if isinstance(unit, Part) and not isinstance(unit.members[0].weight, HostWeight):
                first = unit.members[0]
                rows = first.gradient.shards.max_rows  # equal on all ranks
                size = rows * unit.stack.held_width(unit.in_place) * len(unit.members)
            if portion and alive + size > most:
                yield portion
                portion, alive = [], 0
            portion.append(unit)
            alive += size
        yield portion

    def _uses(
        self, portion: Sequence[Part | ParamState]
    ) -> list[tuple[Part | ParamState, int, int]]:
        """What is updated by order of use, and which members of a part: a piece, or one that is updated alone."""
        found: list[tuple[int, tuple[Part | ParamState, int, int]]] = []
        for unit in portion:
            if isinstance(unit, ParamState):
                found.append((self._places[unit.name], (unit, 0, 1)))
                continue
            pieces = unit.stack.pieces(MOST_ALIVE)
            if unit.alone:
                pieces = [(place, place + 1) for place in range(len(unit.members))]
            for begin, end in pieces:
                place = self._places[unit.members[begin].name]
                found.append((place, (unit, begin, end)))
        return [use for _, use in sorted(found, key=itemgetter(0))]

    # -- update -----------------------------------------------------------------------------------

    @fp32_products()
    def update(
        self, parts: Sequence[Part], factor: Tensor, taken: Tensor | None, step_count: int
    ) -> None:
        """Moments, weights of the rows held here, and their gather; uses the gradients up.

        Weights in host memory are left to :meth:`finish`.

        Args:
            parts: as there. factor, taken: of :meth:`Clipping.decide`. step_count: number of steps begun, which keys random rounding.
        """
        on_host = any(p.host is not None for p in self.param_states)
        host_factor = float(factor) if on_host else 0.0  # waits for the device, once
        for part in parts:
            self._start(part, factor, step_count)
        portions = [
            (holders, portion)
            for holders in self._holders
            for portion in self._portions(holders, parts)
        ]
        uses = [self._uses(portion) for _, portion in portions]
        pieces = [
            unit.members[begin:end]
            for order in uses
            for unit, begin, end in order
            if isinstance(unit, Part)
        ]
        self.bases.will_use(piece[b:e] for piece in pieces for b, e in self.bases.runs(piece))
        how = self._gather_weights, self._hyper, self._numbers, step_count
        gathers = self._gathers(self.settings.gather_elements)
        updates = {
            holders: MatrixUpdates(self._zero, holders, gather, *how)
            for holders, gather in gathers.items()
        }
        on_device = [p for dense in self._dense.values() for p in dense if p.host is None]
        if self._away is not None:
            weights = (p.weight for p in chain(on_device, *pieces))
            self._away.expect(w.param for w in weights if w.away and not w.has_master)
        self._step_dense(on_device, factor, taken, step_count)
        for (holders, portion), order in zip(portions, uses, strict=True):
            found = self._advance([u for u in portion if isinstance(u, Part)])
            for unit, begin, end in order:
                if isinstance(unit, Part):
                    self._apply(updates[holders], unit, begin, end, found[unit])
                    continue
                if unit.host is not None:
                    unit.host.step(host_factor, unit.rounding_key(step_count), unit.hyper())
                self._gather_weights([unit], gathers[holders])
        for gather in gathers.values():
            gather.finish()
        for part in parts:
            part.stack.end()
        if self._away is not None:
            self._away.finish()
        self.written()
        self._uncommitted = bool(self._unfinished)

    def _start(self, part: Part, factor: Tensor, step_count: int) -> None:
        """Begin the step of a whole stack."""
        assert part.sums is not None
        stack, hyper = part.stack, part.members[0].hyper()
        each, part.sums = stack.taken(factor.repeat(stack.size), part.sums), None
        for param_state in part.members:
            assert param_state.matrix is not None
            param_state.matrix.moments.steps += 1
        number = self._numbers.step(step_count, self._device)
        stack.start(each, betas=hyper["betas"], eps=hyper["eps"], step=number)

    def _apply(
        self,
        updates: MatrixUpdates,
        part: Part,
        begin: int,
        end: int,
        changes: dict[tuple[int, int], Change],
    ) -> None:
        """Change weights of members of one piece; the memory of their update goes with the last of them."""
        first, last = piece = next(key for key in changes if key[0] <= begin < key[1])
        whole, change = part.part(first, last), changes[piece]
        updates.apply(part.part(begin, end), whole.of_part(change, begin - first, end - first))
        if end == last:
            del changes[piece]
            part.stack.free(MOST_ALIVE, begin)

    def _advance(self, parts: Sequence[Part]) -> dict[Part, dict[tuple[int, int], Change]]:
        """Steps of the states of parts of stacks, which the same ranks share: what each changes of its weights, by
        pieces."""
        found: dict[Part, tuple[list[Tensor], Tensor]] = {}
        for part in parts:
            gradients = part.gradients()
            for param_state in part.members:
                param_state.gradient.reduced = None  # used up
            found[part] = part.stack.advance(part.parts, gradients, part.counted)
            del gradients
        self._sum([part for part in parts if part.stack.sums_states], found)
        completed = [part for part in parts if part.stack.sums_updates]
        for part in completed:
            sums = part.stack.complete(part.parts, *found[part], part.counted)
            found[part] = found[part][0], sums
        self._sum(completed, found)
        changes = {}
        for part, (updates, sums) in found.items():
            some = part.stack.finish(part.parts, updates, sums)
            if part.alone:
                how = part.stack.rank, part.stack.first.dtype
                some = [change.multiplied(*how) for change in some]
            changes[part] = dict(zip(part.stack.pieces(MOST_ALIVE), some, strict=True))
        return changes

    def _sum(self, parts: Sequence[Part], found: dict[Part, tuple[list[Tensor], Tensor]]) -> None:
        """Sum what there is of each part, beside its updates, over all that hold rows of it."""
        if not parts or not self._zero.is_sharded_over(parts[0].holders):
            return
        of_all = [part.over_all(found[part][1]) for part in parts]
        total = torch.cat([own.flatten() for own in of_all])
        parts[0].holders.all_reduce(total)
        lengths = [own.numel() for own in of_all]
        for part, own, sums in zip(parts, of_all, total.split(lengths), strict=True):
            found[part] = found[part][0], part.stack.of_held(sums.view_as(own))

    def _step_dense(
        self, dense: Sequence[ParamState], factor: Tensor, taken: Tensor | None, step_count: int
    ) -> None:
        """AdamW's steps on the device: small shards together, others one by one."""
        together: dict[Hashable, list[tuple[ParamState, SmallParameter]]] = {}
        how: dict[str, Any] = {"factor": factor, "taken": taken}
        number = self._numbers.step(step_count, self._device)
        for param_state in dense:
            weight, state = param_state.weight, param_state.dense_state
            assert state is not None
            # unused in this accumulation window: DeepSpeed's ZeRO counts it as zero too
            reduced = param_state.gradient.reduced
            gradient = None if reduced is None else reduced.reshape(-1)
            param_state.gradient.reduced = None  # used up
            small = weight.as_small(gradient, state, param_state.base_key)
            if small is not None and small.fits:
                kind = (id(param_state.group), param_state.assignment.lr_scale)
                together.setdefault(kind, []).append((param_state, small))
            else:
                base, hyper = param_state.base_key, self._hyper(param_state)
                weight.step_dense(gradient, state, base, number, **how, **hyper)
        for members in together.values():
            hyper = self._hyper(members[0][0])
            dense_adamw_together_([small for _, small in members], number=number, **how, **hyper)

    def _hyper(self, param_state: ParamState) -> dict[str, Any]:
        """lr, on the device but for a weight on the host, betas, eps and weight_decay."""
        hyper = param_state.hyper()
        if not isinstance(param_state.weight, HostWeight):
            of = id(param_state.group), param_state.assignment.lr_scale
            hyper["lr"] = self._numbers.lr(hyper["lr"], of, self._device)
        return hyper

    @property
    def has_unfinished(self) -> bool:
        """Whether updates in host memory have begun and not been finished; the same on all ranks."""
        return bool(self._unfinished)

    @torch.no_grad()
    def finish(self, last: ParamState | None = None) -> None:
        """Finish begun updates in host memory, in their order, up to the one of ``last`` (default: all).

        Each weight is gathered as its update ends, while the worker goes on with later ones. Ranks may stop at
        different places where each is gathered by itself: they all gather the same in the same order.
        """
        if not self._unfinished:
            return
        gathers = self._gathers(0 if self.gathers_apart else self.settings.gather_elements)
        while self._unfinished:
            param_state = self._unfinished.popleft()
            assert isinstance(param_state.weight, HostWeight)
            param_state.weight.finish()
            self._gather_weights([param_state], gathers[param_state.gradient.holders])
            if param_state is last:
                break
        for gather in gathers.values():
            gather.finish()
        self.written()

    def commit(self) -> None:
        """Commit a finished step's writes to an SSD; waits for the last of them.

        Called before anything of the next step is written, so that those writes have a forward's time.
        """
        if self._uncommitted and not self._unfinished and self.host is not None:
            self._uncommitted = False
            self.host.commit()
            actions, self._when_committed = self._when_committed, []
            for action in actions:
                action()

    def when_committed(self, action: Callable[[], None]) -> None:
        """Call ``action`` once the last step's writes to an SSD are committed: now or at the commit."""
        if self._uncommitted:
            self._when_committed.append(action)
        else:
            action()

    def _gathers(self, elements: int) -> dict[Collectives, GatherPipeline]:
        """Of weights, by the ranks that share them, in buckets of so many elements."""
        return {holders: GatherPipeline(holders, elements) for holders in self._holders}

    def _gather_weights(self, param_states: Sequence[ParamState], gather: GatherPipeline) -> None:
        """Queue the gather of weights alike whose shards are new, or about to be."""
        first = param_states[0].weight
        if isinstance(first, HostWeight) and first.pending:
            self._unfinished += param_states
        elif first.shards.world > 1 and not first.partitioned:
            for param_state in param_states:
                shards, flat = param_state.weight.shards, param_state.gradient.param.detach()
                deliver = partial(shards.unpack_flat, out=flat.view(-1))
                with param_state.weight.shard() as shard:
                    gather.add(shard, shards.partition, deliver)


def _kind(param_state: ParamState) -> Hashable:
    """Equal for parameters whose matrices may be in one stack."""
    group = id(param_state.group), param_state.assignment.lr_scale, param_state.gradient.holders
    return *group, param_state.weight.together
