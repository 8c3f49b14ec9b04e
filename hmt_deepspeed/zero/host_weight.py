"""Weights whose fp32 masters and AdamW moments live in host memory and are updated there.

A chunk's way: what updates it (the gradient's sum, which is on the host already, or a low-rank matrix's
update, formed on the device and sent) -> AdamW or addition on the master -> the model's dtype -> the
device's shard. Chunks follow one another through :class:`HostWorker`.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

import torch
from torch import Tensor, nn

from hmt_deepspeed.kernels.low_rank_update import low_rank_product
from hmt_deepspeed.kernels.stochastic_rounding import stochastic_round
from hmt_deepspeed.memory.transfer import Arrival
from hmt_deepspeed.optim.apply import apply_whole_
from hmt_deepspeed.zero.host_worker import HostWorker, chunks
from hmt_deepspeed.zero.shards import RowShards
from hmt_deepspeed.zero.weights import Weight

__all__ = ["HostWeight"]

Step = Callable[[Tensor, int, int], None]  # fp32 values of a chunk, and its range
ArrivalStep = Callable[[Tensor, Tensor, int, int], None]  # the same with what arrived between


class HostWeight(Weight):
    """One parameter's weights on this rank, updated on the host.

    Args:
        keep_master: False for bf16 weights that are their own master; each step then fetches them.
        worker: does the updates. name: of the parameter.

    Attributes:
        master: flat fp32 master of the shard on the host, or None.
        pending: an update was begun and not finished, on all ranks alike: also of a shard without elements.
    """

    def __init__(
        self,
        param: nn.Parameter,
        shards: RowShards,
        rank: int,
        keep_master: bool,
        worker: HostWorker,
        name: str,
    ) -> None:
        self.param, self.shards, self.rank = param, shards, rank
        self.partitioned, self.device = hasattr(param, "ds_tensor"), param.device
        self.worker, self.name = worker, name
        self.master = None
        self.pending = False
        self._jobs: list[Future[None]] = []
        self._arrivals: list[Arrival] = []
        self._unwritten: tuple[Tensor, int] | None = None
        if keep_master or param.dtype == torch.float32:
            self.master = worker.zeros(self.num_elements, f"the master of {name}")
            self.refresh_master()

    def _master_is_shard(self) -> bool:
        return False

    # -- updates, each ended by finish() ----------------------------------------------------------

    def step_with(self, step: Step, key: int) -> None:
        """Begin an update whose data is on the host: ``step(values, begin, end)``, in jobs, on every chunk.

        Args:
            key: seed of stochastic rounding.
        """
        self._begin(lambda values, _, begin, end: step(values, begin, end), None, key)

    def send_master(self, key: int) -> None:
        """Begin to send what a job has made of the master."""
        self._begin(lambda *_: None, None, key)

    def step_update(self, update: Tensor, lr: float, weight_decay: float, key: int) -> None:
        """Begin ``W <- (1 - lr wd) W - lr update`` on the shard; ``update`` of its rows x n."""
        flat = self.shards.rows_to_shard(update, self.rank)
        self._begin(_addition(lr, weight_decay), lambda begin, end: flat[begin:end], key)

    def step_rows(
        self, update: Tensor, projection: Tensor, lr: float, weight_decay: float, key: int
    ) -> None:
        """Begin ``W <- (1 - lr wd) W - lr (update projection^T)`` on the shard; ``update`` of its rows.

        The product is formed on the device, a few rows at a time, and travels in the dtype of its factors:
        per element 2 (r + k) FLOPs, which the host, busy with AdamW, would take longer for than the link
        takes for two bytes from r + k of about 50 on (1 TFLOP/s against 20 GB/s).
        """
        n = self.shards.n
        offset = self.shards.flat(self.rank)[0] - self.shards.rows(self.rank)[0] * n

        def product(begin: int, end: int) -> Tensor:
            first, last = (offset + begin) // n, -(-(offset + end) // n)
            rows = low_rank_product(update[first:last], projection).reshape(-1)
            return rows[offset + begin - first * n :][: end - begin]

        self._begin(_addition(lr, weight_decay), product, key)

    def finish(self) -> None:
        """Returns when the update is done; what the caller's stream does next sees the new weights.

        Raises:
            RuntimeError: a job failed; the message names its parameter.
        """
        self.pending = False
        jobs, self._jobs = self._jobs, []
        arrivals, self._arrivals = self._arrivals, []
        unwritten, self._unwritten = self._unwritten, None
        self.worker.wait(jobs)
        for arrival in arrivals:
            self.worker.engine.receive(arrival)
        if unwritten is not None:
            values, key = unwritten
            with self.shard(overwrite=True) as shard:
                self._cast(values, key, 0, shard)

    # -- steps ------------------------------------------------------------------------------------

    def _begin(
        self, step: ArrivalStep, incoming: Callable[[int, int], Tensor] | None, key: int
    ) -> None:
        self.pending = True
        if self._offloaded:
            self._begin_beside_host_shard(step, incoming, key)
            return
        with self.shard() as shard:
            for begin, end in chunks(self.num_elements):
                target = shard[begin:end]
                piece = None if incoming is None else incoming(begin, end)
                if self.master is None:  # a dense one: what arrives are the weights themselves
                    piece = target
                arrival = self.worker.engine.into(target, self.name)
                self._arrivals.append(arrival)
                job = partial(self._update, step, begin, end, arrival, key)
                self._jobs.append(self.worker.submit(self.name, job, piece))

    def _begin_beside_host_shard(
        self, step: ArrivalStep, incoming: Callable[[int, int], Tensor] | None, key: int
    ) -> None:
        """``offload_param``: the shard is on the host too, and is written as a whole at the end."""
        if self.master is None:
            with self.shard() as shard:
                values = shard.float()
        else:
            values = self.master
        self._unwritten = (values, key)
        for begin, end in chunks(self.num_elements):
            piece = None if incoming is None else incoming(begin, end)

            def job(arrived: Tensor, begin: int = begin, end: int = end) -> None:
                step(values[begin:end], arrived, begin, end)

            self._jobs.append(self.worker.submit(self.name, job, piece))

    def _update(
        self, step: ArrivalStep, begin: int, end: int, arrival: Arrival, key: int, piece: Tensor
    ) -> None:
        """Worker thread: one chunk."""
        values = piece.float() if self.master is None else self.master[begin:end]
        step(values, piece, begin, end)
        fill = partial(self._cast, values, key, begin)
        self.worker.send(arrival, fill, self.param.dtype)

    def _cast(self, values: Tensor, key: int, begin: int, out: Tensor) -> None:
        """fp32 values of a chunk in the model's dtype; without a master rounded stochastically."""
        if self.master is not None:
            out.copy_(values)
        else:
            stochastic_round(values, out, key, self.shards.flat(self.rank)[0] + begin)


def _addition(lr: float, weight_decay: float) -> ArrivalStep:
    def step(values: Tensor, update: Tensor, begin: int, end: int) -> None:
        apply_whole_(values, update, lr, weight_decay)

    return step
