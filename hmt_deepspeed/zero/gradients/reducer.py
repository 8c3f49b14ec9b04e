"""Accumulation and reduction of projected and dense gradients.

Every trainable parameter has one :class:`Gradient`. Backward leaves a contribution in it: ``[A | S]``
(m x (r + k)) for a low-rank matrix, the flat gradient for a dense parameter, the full gradient for a
matrix that refreshes its basis. Contributions travel in buckets of constant size whose contents are
fixed before backward starts, so all ranks reduce the same things in the same order whatever a rank's
own graph touched; a bucket is launched as soon as its last member has arrived, while backward goes on. With one rank
a bucket is one gradient. A window is an accumulation window: the micro-batches between two optimizer steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

import torch
from deepspeed.comm import ReduceOp
from torch import Tensor, nn

from hmt_deepspeed.zero.gradients.buckets import Bucket, InFlight, build_buckets
from hmt_deepspeed.zero.gradients.gradient import Accumulated, Gradient
from hmt_deepspeed.zero.settings import ReductionScale
from hmt_deepspeed.zero.sharding.collectives import Collectives

__all__ = ["GradientReducer"]


class GradientReducer:
    """Moves gradients from backward to their shards.

    Args:
        gradients: of all trainable parameters, in order of registration.
        collectives: of all ranks; a gradient is reduced over its holders.
        sharded: False at stage 0, where every rank keeps everything.
        bucket_elements: size of a bucket, in elements over all ranks.
        comm_dtype: of the buckets. accumulate_dtype: of the accumulators.
        scale: see :class:`ReductionScale`.

    Attributes:
        events: ("arrive", name), ("launch", index), ("wait", index) in order, when recorded.
        peak_bytes: most bytes of gradient alive at once so far, buckets included.
        last: whether gradients that arrive now are of the window's last micro-batch.
        reached: places of the gradients that this rank's backwards have given in the window.
    """

    MAX_IN_FLIGHT = 2

    def __init__(
        self,
        gradients: Sequence[Gradient],
        collectives: Collectives,
        *,
        sharded: bool,
        bucket_elements: int,
        comm_dtype: torch.dtype,
        accumulate_dtype: torch.dtype,
        scale: ReductionScale,
    ) -> None:
        self.gradients = list(gradients)
        self.collectives, self.sharded = collectives, sharded
        self.bucket_elements = bucket_elements
        self.comm_dtype, self.accumulate_dtype = comm_dtype, accumulate_dtype
        self.scale = scale
        self.events: list[tuple[str, str | int]] | None = None
        self.peak_bytes = 0
        self._counted = {gradient.index: 0 for gradient in self.gradients}  # bytes alive
        self._alive = 0
        self.last = False
        self.reached: set[int] = set()
        self._pool: list[Tensor] = []
        self._pooled = 0  # elements of each buffer in it
        self._in_flight: list[InFlight] = []
        self._holds = False  # gradients, or a round that has begun
        self._is_open = self._has_own = self._has_means = False
        self._repeats: bool | None = None  # see _any_late; None before the first backward's end
        self._repeated = False
        self.plan()

    # -- plan -----------------------------------------------------------------------------------

    def plan(self) -> None:
        """Fix the buckets of the coming window: last parameters first, as backward will meet them."""
        signature = [
            (None if g.matrix is None else g.matrix.alike, g.refreshing) for g in self.gradients
        ]
        if getattr(self, "_signature", None) != signature:
            self._signature = signature
            self._buckets = build_buckets(self.gradients, self.sharded, self.bucket_elements)
            self._home = {g.index: b for b in self._buckets for g in b.members}
            self._in_order = {
                holders: [bucket for bucket in self._buckets if bucket.holders is holders]
                for holders in {bucket.holders for bucket in self._buckets}
            }
            self._size_pool()
            self._begin_round()

    def _size_pool(self) -> None:
        """Buffers of the pool are as large as the largest bucket within ``bucket_elements``.

        A parameter above that has a bucket of its own, whose buffer is exact and freed after use: pooled, an
        embedding's would stay for good.
        """
        sizes = [bucket.holders.world * bucket.chunk for bucket in self._buckets]
        pooled = max((size for size in sizes if size <= self.bucket_elements), default=0)
        if pooled != self._pooled:
            self._pooled = pooled
            self._pool.clear()

    def _begin_round(self) -> None:
        """A round reduces every bucket once."""
        for bucket in self._buckets:
            bucket.waiting = {g if g.leaf is None else g.leaf for g in bucket.members}
            bucket.launched = False
        self._count(self.gradients)  # the step between two rounds has taken some

    @property
    def accumulated(self) -> Accumulated:
        """How far the accumulation window has come."""
        if self._is_open:
            return Accumulated.PART
        if self._has_own:
            return Accumulated.BOTH if self._has_means else Accumulated.OWN
        return Accumulated.MEAN if self._has_means else Accumulated.NOTHING

    # -- during backward ------------------------------------------------------------------------

    def arrive(self, gradient: Gradient, reduce_now: bool) -> None:
        """Take what backward left of one parameter; reduce its bucket if it was the last one.

        Args:
            gradient: of the parameter. reduce_now: this micro-batch's gradients are reduced; else they add up on this rank.
        """
        contribution = gradient.collect()
        if contribution is None:
            return
        self._holds = True
        self.reached.add(gradient.index)
        if self.events is not None:
            self.events.append(("arrive", gradient.name))
        bucket = self._home[gradient.index]
        if reduce_now:
            self._is_open = True
        else:
            self._has_own = True
        self._repeated |= reduce_now and (bucket.launched or gradient.arrived is not None)
        if not reduce_now or bucket.launched:
            # A parameter that fires again after its bucket was launched waits for the end of the backward.
            if reduce_now and self._repeats is False:
                raise RuntimeError(_late_message(gradient.name))
            gradient.local = self._accumulated(gradient.local, contribution)
            self._count([gradient])
            return
        gradient.arrived = (
            contribution if gradient.arrived is None else gradient.arrived + contribution
        )
        self._count([gradient])
        bucket.waiting.discard(gradient)
        # of several ranks, in an order that all share
        alone = bucket.holders.world == 1
        self._launch_ready([bucket] if alone else self._in_order[bucket.holders])

    def arrive_leaf(self, leaf: nn.Module, reduce_now: bool) -> None:
        """A leaf's backward has ended: all of its gradients are there, none where this rank used no weight.

        Only now do they leave, on every rank between the same two gathers of weights.

        Args:
            reduce_now: as of :meth:`arrive`.
        """
        if not reduce_now:
            return
        self._is_open = self._holds = True
        waiting = [bucket for bucket in self._buckets if leaf in bucket.waiting]
        # Called more than once: its gradients come at the end of the first call, the last in backward.
        self._repeated |= not waiting
        for bucket in waiting:
            bucket.waiting.discard(leaf)
        self._launch_ready(self._buckets)

    def _launch_ready(self, buckets: Sequence[Bucket]) -> None:
        remaining = (bucket for bucket in buckets if not bucket.launched)
        for ready in takewhile(lambda bucket: not bucket.waiting, remaining):
            self._launch(ready)

    def flush(self) -> None:
        """End of a backward: reduce what has not been launched yet, then wait for everything.

        Members that no backward reached count as zero. A second round carries what arrived late, on any rank.
        """
        self.flush_own()
        if self._any_late():
            self.flush_own()

    def flush_own(self) -> None:
        """Reduce what every backward until now has given on this rank: one round, in which nothing comes late."""
        for bucket in self._buckets:
            if not bucket.launched:
                self._launch(bucket)
        while self._in_flight:
            self._land()
        self._begin_round()
        self._is_open = self._has_own = False
        self._has_means = True

    def _any_late(self) -> bool:
        """Whether some rank holds what came after its bucket was launched.

        Ranks ask each other at the end of the first backward whether any gradient came more than once, and go on
        asking if one says yes. Other programs' backwards end without another collective, whose answer would have
        to be read from the device.
        """
        late = any(gradient.local is not None for gradient in self.gradients)
        if self.collectives.world == 1:
            return late
        if self._repeats is None:
            self._repeats = self._any_rank(self._repeated)
        return self._repeats and self._any_rank(late)

    def _any_rank(self, own: bool) -> bool:
        answer = torch.full((), float(own), device=self.gradients[0].param.device)
        self.collectives.all_reduce(answer, ReduceOp.MAX)
        return bool(answer > 0)  # waits for the device

    def free_pool(self) -> None:
        """Free the buffers that wait for the next reduction, which makes new ones."""
        self._pool.clear()

    def reset(self) -> None:
        """Drop everything accumulated and in flight."""
        for flight in self._in_flight:
            flight.work.wait()
        self._in_flight.clear()
        for gradient in self.gradients:
            if self._holds:
                gradient.clear()
            gradient.param.grad = None
        self._is_open = self._has_own = self._has_means = False
        self.reached.clear()
        if self._holds:
            self._holds = False
            self._begin_round()

    def _launch(self, bucket: Bucket) -> None:
        if self.events is not None:
            self.events.append(("launch", bucket.index))
        bucket.launched = self._holds = True
        self._watch()
        for gradient in bucket.members:
            if gradient.local is not None:
                gradient.arrived = self._accumulated(gradient.local, gradient.arrived)
                gradient.local = None
        if bucket.holders.world == 1:
            parts = [gradient.arrived for gradient in bucket.members]
            for place, (gradient, part) in enumerate(zip(bucket.members, parts, strict=True)):
                gradient.arrived = None
                if part is not None and self.scale.before != 1.0:
                    parts[place] = part.to(self.accumulate_dtype).mul_(self.scale.before)
            self._deliver(bucket.members, parts)
        elif bucket.members[0].refreshing:
            self._launch_full(bucket)
        else:
            if len(self._in_flight) >= self.MAX_IN_FLIGHT:
                self._land()
            self._launch_rows(bucket)
        self._count(bucket.members)

    def _launch_full(self, bucket: Bucket) -> None:
        gradient = bucket.members[0]
        shape = (gradient.shards.m, gradient.shards.n)
        if gradient.arrived is None:
            buffer = torch.zeros(shape, dtype=self.comm_dtype, device=gradient.param.device)
        else:
            buffer = gradient.arrived.to(self.comm_dtype).mul(self.scale.before).contiguous()
        gradient.arrived = None
        work = bucket.holders.reduce(buffer, gradient.owner)
        self._in_flight.append(InFlight(bucket, work, buffer))

    def _launch_rows(self, bucket: Bucket) -> None:
        world = bucket.holders.world if self.sharded else 1
        device = bucket.members[0].param.device
        buffer = self._buffer(world * bucket.chunk, device)
        packed = buffer[: world * bucket.chunk].view(world, bucket.chunk)
        packed.zero_()  # padding, and members that no backward reached
        for gradient, offset in zip(bucket.members, bucket.offsets, strict=True):
            if gradient.arrived is not None:
                rows = gradient.shards.max_rows if self.sharded else gradient.shards.m
                region = packed[:, offset : offset + rows * gradient.width]
                region = region.view(world, rows, gradient.width)
                if self.sharded:
                    gradient.shards.pack(gradient.arrived, region)
                else:
                    region[0].copy_(gradient.arrived)
            gradient.arrived = None
        if self.scale.before != 1.0:
            packed.mul_(self.scale.before)
        if self.sharded:
            result = torch.empty(bucket.chunk, dtype=self.comm_dtype, device=device)
            work = bucket.holders.reduce_scatter(result, packed)
            self._in_flight.append(InFlight(bucket, work, result, buffer))
        else:
            work = bucket.holders.all_reduce(packed, wait=not bucket.holders.overlap)
            self._in_flight.append(InFlight(bucket, work, packed.view(-1)))

    def _land(self) -> None:
        """Wait for the oldest collective and add its result to the shards."""
        flight = self._in_flight.pop(0)
        if self.events is not None:
            self.events.append(("wait", flight.bucket.index))
        flight.work.wait()
        result, members = flight.result, flight.bucket.members
        rank = flight.bucket.holders.rank
        if members[0].refreshing:
            if rank == members[0].owner:
                self._deliver(members, [result])
                self._count(members)
            return
        parts: list[Tensor | None] = []
        for gradient, offset in zip(members, flight.bucket.offsets, strict=True):
            rows = gradient.shards.rows(rank) if self.sharded else None
            count = gradient.shards.m if rows is None else rows[1] - rows[0]
            part = result[offset : offset + count * gradient.width]
            parts.append(part.view(count, gradient.width))
        self._deliver(members, parts)
        self._count(members)
        if flight.buffer is not None and flight.buffer.numel() == self._pooled:
            self._pool.append(flight.buffer)

    # -- accumulators ---------------------------------------------------------------------------

    def _deliver(self, gradients: Sequence[Gradient], parts: Sequence[Tensor | None]) -> None:
        """Add reduced parts (nobody else's memory) to the accumulators of their gradients."""
        rooms, given = [], []
        for gradient, part in zip(gradients, parts, strict=True):
            if part is None:
                continue
            scaled = part if self.scale.after == 1.0 else part.mul_(self.scale.after)
            if gradient.host is not None:
                gradient.host.add(scaled, self.last)
            elif gradient.refreshing:
                gradient.full = self._accumulated(gradient.full, scaled)
            elif self._stays(gradient, part) or (room := gradient.free_room()) is None:
                gradient.reduced = self._accumulated(gradient.reduced, scaled)
            else:
                gradient.reduced = room
                rooms.append(room)
                given.append(scaled)
        if rooms:
            torch._foreach_copy_(rooms, given)

    def _stays(self, gradient: Gradient, part: Tensor) -> bool:
        """Whether a reduced part may be an accumulator: of one rank it is memory of its own, perhaps its room."""
        return gradient.holders.world == 1 and part.dtype == self.accumulate_dtype

    def _accumulated(self, total: Tensor | None, part: Tensor | None) -> Tensor | None:
        if part is None:
            return total
        return part.to(self.accumulate_dtype) if total is None else total.add_(part)

    def _buffer(self, numel: int, device: torch.device) -> Tensor:
        """A flat buffer of at least ``numel`` elements: one from the pool, or a new one.

        Stage 0 keeps the result of the all-reduce, so its buffers are exact and never pooled.
        """
        if not self.sharded or numel > self._pooled:
            return torch.empty(numel, dtype=self.comm_dtype, device=device)
        if self._pool:
            return self._pool.pop()
        return torch.empty(self._pooled, dtype=self.comm_dtype, device=device)

    def _count(self, changed: Sequence[Gradient]) -> None:
        """Bytes alive, brought up to date for those that changed: a sum over all would be paid per bucket."""
        for gradient in changed:
            nbytes = gradient.nbytes()
            self._alive += nbytes - self._counted[gradient.index]
            self._counted[gradient.index] = nbytes

    def _watch(self) -> None:
        pooled = sum(b.numel() * b.element_size() for b in self._pool)
        flying = sum(f.buffer.nbytes for f in self._in_flight if f.buffer is not None)
        self.peak_bytes = max(self.peak_bytes, self._alive + pooled + flying)


def _late_message(name: str) -> str:
    return (
        f"{name} has got a gradient again after its bucket was reduced. In the first backward no gradient of any "
        "rank came more than once, so the other ranks do not know that there is more to reduce. Checkpoint its module "
        "with use_reentrant=False, where all of its calls give one gradient, or call it more than once from the first "
        "backward on."
    )
