"""Weights whose fp32 masters and AdamW moments live in host memory or on an SSD and are updated on the host.

A chunk passes through these steps, one chunk after another, in :class:`HostWorker`::

    the gradient's sum, on the host   ->  AdamW on the master     ->  the model's dtype  ->  the device's shard
    a low-rank update, from the device ->  addition to the master  ->  the model's dtype  ->  the device's shard
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from hmt_deepspeed.kernels.low_rank_factors import as_factors, low_rank_product
from hmt_deepspeed.kernels.noise import Key
from hmt_deepspeed.kernels.stochastic_rounding import stochastic_round
from hmt_deepspeed.memory.transfer import Arrival
from hmt_deepspeed.optim.rules.apply import apply_whole_
from hmt_deepspeed.zero.offload.states import MASTER, ChunkStates, HostStates, RamStates
from hmt_deepspeed.zero.offload.worker import NUM_MADE, HostWorker, chunks
from hmt_deepspeed.zero.sharding.shards import RowShards
from hmt_deepspeed.zero.weights.low_rank_change import LowRankChange
from hmt_deepspeed.zero.weights.weight import Weight

__all__ = ["HostWeight"]

# fp32 values of a chunk and its moments, and its range
Step = Callable[[Sequence[Tensor], int, int], None]
# the same with what arrived between
ArrivalStep = Callable[[Sequence[Tensor], Tensor, int, int], None]


class HostWeight(Weight):
    """One parameter's weights on this rank, updated on the host.

    Args:
        param: m x n, or any shape of as many elements. shards: which of its flat elements each rank holds.
        rank: this process's place in them.
        states: its master, or bf16 weights are their own and each step fetches them; and moments.
        worker: does the updates. name: of the parameter.
        keeps: early steps leave the new weights in host memory, for want of a master there.

    Attributes:
        master: flat fp32 master of the shard in host memory; None where there is none, or it is on an SSD.
        pending: an update was begun and not finished, on all ranks alike: also of a shard without elements.
    """

    def __init__(
        self,
        param: nn.Parameter,
        shards: RowShards,
        rank: int,
        states: HostStates,
        worker: HostWorker,
        name: str,
        keeps: bool = False,
    ) -> None:
        self.param, self.shards, self.rank = param, shards, rank
        self.partitioned, self.device = hasattr(param, "ds_tensor"), param.device
        self.states, self.worker, self.name = states, worker, name
        self.pending = False
        self._job = 0  # the last one
        self._arrivals: list[Arrival] = []
        self.master = None
        if self.has_master and isinstance(states, RamStates):
            self.master = states.read(MASTER)
        self._kept: Tensor | None = None
        if keeps:
            owner = f"the new weights of {name}"
            self._kept = worker.zeros(self.num_elements, owner, param.dtype)
        with self.shard() as shard:
            states.write({MASTER: shard} if self.has_master else {})

    @property
    def alone(self) -> bool:
        return True

    @property
    def has_master(self) -> bool:
        return MASTER in self.states.columns

    def master_bytes(self) -> int:
        """Bytes of the master, wherever it lives."""
        return self.num_elements * torch.float32.itemsize if self.has_master else 0

    def master_values(self) -> Tensor:
        """fp32 values of the shard: the master, or a copy of weights that are their own."""
        return self.states.read(MASTER) if self.has_master else super().master_values()

    def set_values(self, values: Tensor) -> None:
        """Overwrite master and shard.

        Args:
            values: flat fp32 values of the shard, from any device.
        """
        if self.has_master:
            self.states.write({MASTER: values})
        with self.shard(overwrite=True) as shard:
            shard.copy_(values)

    def refresh_master(self) -> None:
        """Take the shard's values into the master, after someone loaded weights."""
        if self.has_master:
            with self.shard() as shard:
                self.states.write({MASTER: shard})

    def _master_is_shard(self) -> bool:
        return False

    def move_master(self, place: Callable[[Tensor], Tensor]) -> None:
        """It is on the host for good."""

    # -- updates, each ended by finish() ----------------------------------------------------------

    def step_with(self, step: Step, key: Key) -> None:
        """Begin an update whose data is on the host: ``step(states, begin, end)``, in jobs, on every chunk.

        Args:
            key: seed of stochastic rounding.
        """
        self._begin(lambda states, _, begin, end: step(states, begin, end), None, key)

    def keep(self, values: Tensor, begin: int) -> None:
        """Worker thread: what :meth:`send_master` will send of a chunk, where its master will be out of reach.

        Args:
            values: fp32, of a chunk's master. begin: first element of the chunk.
        """
        if self._kept is not None:
            self._kept[begin : begin + values.numel()].copy_(values)

    def send_master(self) -> None:
        """Begin to send what early jobs have made of the master."""
        source = self.master if self._kept is None else self._kept
        assert source is not None
        self.pending = True
        with self.shard() as shard:
            arrival = self._expect(shard)
            for begin, end in chunks(self.num_elements):
                args = (arrival, shard, source, begin, end)
                self._job = self.worker.submit(self.name, self._send, args)

    def step_update(
        self, update: Tensor, scale: Tensor, lr: float | Tensor, weight_decay: float, key: Key
    ) -> None:
        """Begin ``W <- (1 - lr wd) W - lr scale update`` on the shard, in a step that is known to be taken.

        Args:
            update: fp32 on the device, rows that this rank touches x n. scale: 0-dim.
            lr, weight_decay: of this step. key: seed of stochastic rounding.
        """
        flat = self.shards.rows_to_shard(update, self.rank)
        incoming = lambda begin, end: flat[begin:end] * scale  # noqa: E731
        self._begin(self._addition(lr, weight_decay), incoming, key)

    @staticmethod
    def step_rows(weights: Sequence[Weight], change: LowRankChange) -> None:
        """Begin the low-rank update of a shard, in a step that is known to be taken.

        The product is formed on the device, a few rows at a time, and travels in the dtype of its factors:
        per element 2 (r + k) FLOPs, which the host, busy with AdamW, would take longer for than the link
        takes for two bytes from r + k of about 50 on (1 TFLOP/s against 20 GB/s).

        Args:
            change: of the rows that this rank touches.
        """
        (weight,) = weights
        assert isinstance(weight, HostWeight)
        if change.experts is None:
            weight._begin_rows(change)
        else:
            weight._begin_experts(change)

    def _begin_experts(self, change: LowRankChange) -> None:
        """Waits for the device, to know which experts take a step."""
        assert change.experts is not None
        (height, n), first = change.experts.shape, self.shards.flat(self.rank)[0]
        pieces, size, own = change.experts.pieces, height * n, change.scale[:, 0].tolist()
        taken = [(change.experts.first + e) * size - first for e, s in enumerate(own) if s != 0]

        def product(begin: int, end: int) -> Tensor:
            row, last = (first + begin) // n, -(-(first + end) // n)
            parts = []
            for experts, rows in pieces(row, last):
                for expert in range(experts.start, experts.stop):
                    one = change.of_experts(slice(expert, expert + 1), rows)
                    alone = replace(one, projections=[one.projections[0][0]])
                    parts.append(alone.whole().reshape(-1))
            return torch.cat(parts)[first + begin - row * n :][: end - begin]

        add = self._addition(change.lr, change.weight_decay)

        def step(states: Sequence[Tensor], arrived: Tensor, begin: int, end: int) -> None:
            for start in taken:
                part = slice(max(start - begin, 0), min(start + size, end) - begin)
                if part.start < part.stop:
                    add([state[part] for state in states], arrived[part], begin, end)

        self._begin(step, product, change.host_key)

    def _begin_rows(self, change: LowRankChange) -> None:
        n, (left, right) = self.shards.n, change.factors()
        offset = self.shards.flat(self.rank)[0] - self.shards.rows(self.rank)[0] * n
        left, right = as_factors(left, right)  # once, not for each chunk

        def product(begin: int, end: int) -> Tensor:
            first, last = (offset + begin) // n, -(-(offset + end) // n)
            rows = low_rank_product(left[first:last], right).reshape(-1)
            return rows[offset + begin - first * n :][: end - begin]

        step = self._addition(change.lr, change.weight_decay)
        self._begin(step, product, change.host_key, left.itemsize)

    def finish(self) -> None:
        """Returns when the update is done; what the caller's stream does next sees the new weights.

        Raises:
            RuntimeError: a job failed; the message names its parameter.
        """
        self.pending = False
        arrivals, self._arrivals = self._arrivals, []
        self.worker.wait(self._job)
        for arrival in arrivals:
            self.worker.engine.receive(arrival)

    # -- steps ------------------------------------------------------------------------------------

    def _begin(
        self,
        step: ArrivalStep,
        incoming: Callable[[int, int], Tensor] | None,
        key: Key,
        itemsize: int = 4,
    ) -> None:
        """``incoming``: makes what the device sends of a range of elements, ``itemsize`` bytes each."""
        self.pending = True
        with self.shard() as shard:
            arrival, arriving, made = self._expect(shard), None, 0
            ranges = chunks(self.num_elements, itemsize)
            for number, (begin, end) in enumerate(ranges):
                if incoming is not None and number % NUM_MADE == 0:
                    made = begin
                    arriving = incoming(begin, ranges[number : number + NUM_MADE][-1][1])
                for first, last in self.states.parts(begin, end):
                    piece = None if arriving is None else arriving[first - made : last - made]
                    if not self.has_master and not self._offloaded:
                        piece = shard[first:last]  # a dense one: the weights themselves
                    chunk = self.states.chunk(first, last)
                    args = (step, first, last, chunk, arrival, shard, key)
                    self._job = self.worker.submit(self.name, self._update, args, piece, chunk)

    def _addition(self, lr: float | Tensor, weight_decay: float) -> ArrivalStep:
        assert not isinstance(lr, Tensor)  # a number of the host's, which does the work

        def step(states: Sequence[Tensor], update: Tensor, begin: int, end: int) -> None:
            start = perf_counter()
            apply_whole_(states[0], update, lr, weight_decay)
            self.worker.addition_seconds += perf_counter() - start

        return step

    def _expect(self, shard: Tensor) -> Arrival | None:
        """Where new weights go: a copy to the device, in parts; None for the shard itself, where that is on the host
        too (``offload_param``)."""
        if self._offloaded or not self.num_elements:
            return None
        arrival = self.worker.engine.into(shard, self.name)
        self._arrivals.append(arrival)
        return arrival

    def _update(
        self,
        step: ArrivalStep,
        begin: int,
        end: int,
        chunk: ChunkStates,
        arrival: Arrival | None,
        shard: Tensor,
        key: Key,
        piece: Tensor,
    ) -> None:
        """Worker thread: one chunk."""
        with chunk as states:
            if not self.has_master:
                states = [(shard[begin:end] if arrival is None else piece).float(), *states]
            step(states, piece, begin, end)
            values = states[0]
            if self.has_master:
                self._deliver(arrival, shard, begin, end, _copy, (values,))
            else:
                position = self.shards.flat(self.rank)[0] + begin
                self._deliver(arrival, shard, begin, end, _round, (values, key, position))

    def _send(
        self,
        arrival: Arrival | None,
        shard: Tensor,
        source: Tensor,
        begin: int,
        end: int,
        _: Tensor,
    ) -> None:
        """Worker thread: one chunk of weights that are there already."""
        self._deliver(arrival, shard, begin, end, _copy, (source[begin:end],))

    def _deliver(
        self,
        arrival: Arrival | None,
        shard: Tensor,
        begin: int,
        end: int,
        fill: Callable[..., object],
        args: tuple[Any, ...],
    ) -> None:
        if arrival is None:
            fill(*args, shard[begin:end])
        else:
            self.worker.send(arrival, begin, end, self.param.dtype, fill, args)


def _copy(values: Tensor, out: Tensor) -> None:
    """fp32 or the model's values into the model's dtype."""
    out.copy_(values)


def _round(values: Tensor, key: Key, position: int, out: Tensor) -> None:
    """fp32 values in the model's dtype, rounded stochastically: there is no master."""
    stochastic_round(values, out, key, position)
