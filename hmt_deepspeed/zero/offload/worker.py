"""The thread that does the optimizer's work in host memory, and the memory it works on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from hmt_deepspeed.memory.threads import OrderedThread
from hmt_deepspeed.memory.transfer import Arrival, Transfer, TransferEngine
from hmt_deepspeed.report.metrics import format_bytes
from hmt_deepspeed.zero.offload.cpu_adam import CpuAdam
from hmt_deepspeed.zero.offload.ssd import Ssd
from hmt_deepspeed.zero.settings import SsdSettings

__all__ = [
    "NUM_MADE",
    "NUM_PIECES",
    "NUM_STAGED",
    "PIECE",
    "HostGradient",
    "HostWorker",
    "chunk_elements",
    "chunks",
    "pieces",
]

# Elements that the kernel takes at once and that a file on an SSD holds: small enough that the worker lets others have
# the interpreter every few milliseconds.
PIECE = 1 << 20
# Pieces of a chunk in fp32, which a job works on and which travels at once: a chunk costs Python as much as a piece would.
NUM_PIECES = 4
NUM_MADE = 2  # chunks that the device makes at once, of updates that it makes for the host
NUM_STAGED = 4  # chunks of fp32 on their way to the host at once, and as many on their way back


class Cancelled(Protocol):
    """Something that a job would use; it is told when the job does not run."""

    def cancel(self) -> None: ...


def chunk_elements(itemsize: int = 4) -> int:
    """Elements of a chunk that travels in ``itemsize`` bytes an element: the bytes are those of fp32 pieces."""
    return NUM_PIECES * PIECE * torch.float32.itemsize // itemsize


def pool_bytes() -> int:
    """Page-locked bytes for what travels, each way."""
    return NUM_STAGED * chunk_elements() * torch.float32.itemsize


def chunks(numel: int, itemsize: int = 4) -> list[tuple[int, int]]:
    """Half-open ranges of at most a chunk that cover ``numel`` elements, in order; see :func:`chunk_elements`."""
    return list(_ranges(0, numel, chunk_elements(itemsize)))


def pieces(begin: int, end: int) -> Iterator[tuple[int, int]]:
    """Half-open ranges of at most :data:`PIECE` elements that cover those from ``begin`` to ``end``, in order."""
    return _ranges(begin, end, PIECE)


def _ranges(begin: int, end: int, size: int) -> Iterator[tuple[int, int]]:
    return ((first, min(first + size, end)) for first in range(begin, end, size))


class HostWorker:
    """Runs jobs on host memory one after another, in order of submission, beside the training thread.

    Copies go through two page-locked pools of constant size: a submission waits while the one
    towards the host is full. After a job has failed the states are no longer those of one step, so everything
    that follows raises too.

    Args:
        device: where gradients come from and weights go to.
        pinned: page-lock the states and gradients too, not only the buffers of copies.
        ssd: where the states live, if not in host memory.

    Attributes:
        engine: copies between device and host. adam: the kernel. scratch: fp32 of one piece, for the running job.
        ssd: the states' files, None when there are none.
        nbytes: host bytes of states and gradients. addition_seconds: spent adding updates to masters.

    Raises:
        StoreError: the folder for the files cannot be made.
    """

    def __init__(self, device: torch.device, pinned: bool, ssd: SsdSettings | None = None) -> None:
        self.adam = CpuAdam()
        self.engine = TransferEngine(device, pool_bytes())
        self.scratch = torch.empty(PIECE)  # for a job's own use
        self._outbound = self.engine.new_pool(pool_bytes(), "pool of updated weights")
        self._pinned = pinned
        self._thread = OrderedThread("hmt-optimizer")
        self._failure: RuntimeError | None = None
        self.nbytes = 0
        self.addition_seconds = 0.0
        self.ssd = None if ssd is None else Ssd(ssd, self.engine, PIECE, self._fail)

    def describe(self) -> list[str]:
        """Lines for the start table: bytes by place."""
        kind = "page-locked" if self._pinned else "not page-locked (pin_memory is false)"
        told = [
            f"{format_bytes(self.nbytes)} of states and gradients in host memory",
            kind,
            f"{format_bytes(2 * pool_bytes())} of page-locked pools for what travels",
        ]
        return told if self.ssd is None else [*told, *self.ssd.describe()]

    # -- memory ---------------------------------------------------------------------------------

    @property
    def pool_bytes(self) -> int:
        """Host bytes for what travels, and for the job that runs."""
        return self.engine.pool.nbytes + self._outbound.nbytes + self.scratch.nbytes

    def zeros(self, numel: int, owner: str, dtype: torch.dtype = torch.float32) -> Tensor:
        """Flat zeros on the host for as long as the worker lives; ``owner`` is for messages.

        Args:
            numel: elements of the tensor.
        """
        size = numel * dtype.itemsize
        self.nbytes += size
        if not self._pinned or not numel:
            return torch.zeros(numel, dtype=dtype)
        pool = self.engine.new_pool(size, f"memory of {owner}")
        return pool.take(size, owner).memory[:size].view(dtype).zero_()

    # -- jobs -----------------------------------------------------------------------------------

    def submit(
        self,
        owner: str,
        rule: Callable[..., object],
        args: tuple[Any, ...] = (),
        incoming: Tensor | None = None,
        uses: Cancelled | None = None,
    ) -> int:
        """Queue ``rule(*args, incoming)``; a device tensor is on the host by then, an absent one is empty.

        Args:
            owner: name of the parameter, for messages. incoming: flat, at most a chunk.
            uses: what the rule uses, cancelled when it does not come to that.

        Returns:
            The job's number, for :meth:`wait`.

        Raises:
            RuntimeError: a job failed, this one's or an earlier one's; the message names its parameter.
        """
        transfer = None
        try:
            self.check()
            if incoming is not None:
                transfer = self.engine.put(incoming, owner, lent=True)
        except BaseException:
            if uses is not None:
                uses.cancel()
            raise
        return self._thread.submit(self._run, owner, rule, args, transfer, uses)

    def check(self) -> None:
        """Raises RuntimeError if a job has failed."""
        if self._failure is not None:
            raise self._failure

    def wait(self, job: int) -> None:
        """Returns when a job and those before it are done. Raises as :meth:`check` does."""
        with self.engine.counters.waiting():
            self._thread.wait(job)
        self.check()

    def drain(self) -> None:
        """Returns when everything submitted is done. Raises as :meth:`check` does."""
        self.wait(self._thread.submit(int))

    def commit(self) -> None:
        """Commit what jobs have written to an SSD. Raises as :meth:`check` does."""
        if self.ssd is not None:
            with self.engine.counters.waiting():
                self.ssd.drain()
            self.check()
            self.ssd.commit()

    def send(
        self,
        arrival: Arrival,
        begin: int,
        end: int,
        dtype: torch.dtype,
        fill: Callable[..., object],
        args: tuple[Any, ...],
    ) -> None:
        """Let ``fill(*args, out)`` write elements of an expected device tensor, and start their way there. In a job.

        Args:
            arrival: the tensor that is expected on the device. begin, end: its elements that ``out``, flat host
                memory, is for. dtype: of them.
        """
        part = slice(begin * dtype.itemsize, end * dtype.itemsize)
        nbytes = part.stop - part.start
        buffer = self._outbound.take(nbytes, arrival.name, lent=True)
        try:
            fill(*args, buffer.memory[:nbytes].view(dtype))
        except BaseException:
            self._outbound.release(buffer)
            raise
        self.engine.deliver(arrival, self._outbound, buffer, part)

    def close(self) -> None:
        """Waits for the jobs and frees the pools. Idempotent."""
        self._thread.shutdown()
        if self.ssd is not None:
            self.ssd.close()
        self.engine.close()

    def _run(
        self,
        owner: str,
        rule: Callable[..., object],
        args: tuple[Any, ...],
        transfer: Transfer | None,
        uses: Cancelled | None,
    ) -> None:
        try:
            if self._failure is None:
                piece = torch.empty(0)
                if transfer is not None:
                    piece = self.engine.host_bytes(transfer).view(transfer.layout.dtype)
                rule(*args, piece)
        except BaseException as error:
            self._fail(owner, error)
        finally:
            if transfer is not None:  # after a failure too: someone may be waiting for its room
                self.engine.drop(transfer)
            if uses is not None:
                uses.cancel()

    def _fail(self, owner: str, error: BaseException) -> None:
        """Any worker thread: from now on everything raises."""
        failure = RuntimeError(
            f"the optimizer's work on {owner} in host memory failed: {error}. Its states may be half "
            "updated: resume from the last checkpoint."
        )
        failure.__cause__ = error
        self._failure = self._failure or failure


class HostGradient:
    """Mean gradient of a dense parameter's shard, summed over micro-batches in fp32 on the host.

    Parts are sent as they come and summed by the worker; the device keeps nothing.

    Args:
        worker: sums. name: of the parameter. num_elements: of the shard.

    Attributes:
        num_elements: of the shard. filled: whether anything has come in this accumulation window.
        complete: called when a part of the last micro-batch has been added, by default nothing.
    """

    def __init__(self, worker: HostWorker, name: str, num_elements: int) -> None:
        self.worker, self.name, self.num_elements = worker, name, num_elements
        self.filled = False
        self.complete: Callable[[], None] = lambda: None
        self._values = worker.zeros(num_elements, f"the gradient of {name}")
        self._norms = torch.zeros(len(list(pieces(0, num_elements))))
        self._job = 0  # the last one

    def add(self, part: Tensor, last: bool) -> None:
        """Add a part of the shard's shape (on the device, nobody else's memory) to the sum.

        Args:
            last: it is of the last micro-batch.
        """
        flat = part.reshape(-1)
        for begin, end in chunks(self.num_elements):
            args = (begin, self.filled)
            self._job = self.worker.submit(self.name, self._sum, args, incoming=flat[begin:end])
        self.filled = True
        if last:
            self.complete()

    def _sum(self, begin: int, filled: bool, arrived: Tensor) -> None:
        target = self._values[begin : begin + arrived.numel()]
        target = target.add_(arrived) if filled else target.copy_(arrived)
        first = begin // PIECE
        for place, piece in enumerate(target.split(PIECE), first):
            self._norms[place] = torch.linalg.vector_norm(piece)

    @property
    def nbytes(self) -> int:
        """Bytes of the sum."""
        return self._values.nbytes

    def square_norm(self) -> Tensor:
        """Squared norm of the sum, 0-dim fp32 on the host; not finite if an element is not."""
        self._arrive()
        if not self.filled:
            return torch.zeros(())
        return self._norms.square().sum()

    def values(self) -> Tensor:
        """The sum, flat fp32 on the host; for jobs, which come after those that sum."""
        return self._values if self.filled else self._values.zero_()

    def read(self) -> Tensor | None:
        """A copy of the sum once it is whole; None when nothing has come."""
        self._arrive()
        return self._values.clone() if self.filled else None

    def replace(self, values: Tensor) -> None:
        """Take flat values of the shard instead.

        Args:
            values: flat, of the shard, on the device, any float dtype; nobody else's memory.
        """
        self.clear()
        self.add(values, last=False)

    def clear(self) -> None:
        """Begin a new accumulation window."""
        self._arrive()
        self.filled = False

    def _arrive(self) -> None:
        self.worker.wait(self._job)
