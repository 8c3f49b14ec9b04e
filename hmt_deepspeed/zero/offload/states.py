"""Stores the fp32 states of a shard between steps, in host memory or on an SSD."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hmt_deepspeed.kernels.noise import Key
from hmt_deepspeed.memory.alternate import Piece
from hmt_deepspeed.memory.slot_pipeline import Lease
from hmt_deepspeed.optim.rules.state import StateTensor
from hmt_deepspeed.zero.offload import worker as host_worker

if TYPE_CHECKING:
    from hmt_deepspeed.zero.offload.worker import HostWorker

__all__ = ["MASTER", "MOMENTS", "ChunkStates", "HostMoment", "HostStates", "RamStates", "SsdStates"]

MASTER, MOMENTS = "master", ("exp_avg", "exp_avg_sq")


class ChunkStates(ABC):
    """The states of one chunk during one ``with`` block in the worker: a flat fp32 tensor for each column.

    A block that raises changes nothing of them.
    """

    @abstractmethod
    def __enter__(self) -> Sequence[Tensor]: ...

    @abstractmethod
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...

    @abstractmethod
    def cancel(self) -> None:
        """The block will not begin. Without effect when it has."""


class HostStates(ABC):
    """Columns of flat fp32 values of one length, worked on in chunks.

    Attributes:
        columns: their names, such as "master" and "exp_avg". num_elements: elements of each column.
    """

    def __init__(self, num_elements: int, columns: Sequence[str]) -> None:
        self.num_elements, self.columns = num_elements, tuple(columns)

    @abstractmethod
    def parts(self, begin: int, end: int) -> Iterable[tuple[int, int]]:
        """Element ranges that cover a chunk, in order, each for a job."""

    @property
    @abstractmethod
    def can_undo(self) -> bool:
        """Whether early changes can be undone."""

    @abstractmethod
    def chunk(self, begin: int, end: int, early: bool = False) -> ChunkStates:
        """The states of one part of a chunk, for the job submitted next.

        Args:
            begin, end: element range, one of :meth:`parts`.
            early: the job's changes may be undone.
        """

    @abstractmethod
    def expect(self) -> None:
        """Announce that all chunks are asked for next, in order, if all goes as usual."""

    @abstractmethod
    def undo(self) -> None:
        """Undo the early changes; no job runs or is to come."""

    @abstractmethod
    def read(self, column: str) -> Tensor:
        """The values of a column; in host memory the column itself, not a copy.

        Args:
            column: one of :attr:`columns`.

        Returns:
            Flat fp32 on the host.
        """

    @abstractmethod
    def write(self, values: Mapping[str, Tensor]) -> None:
        """Replace columns; one that was never written is zero.

        Args:
            values: flat, ``num_elements`` each, by column; from any device, of any dtype.
        """


class RamStates(HostStates):
    """In host memory.

    Args:
        worker: gives the memory. name: of the parameter.
        undo: keep what an early change overwrites, as many bytes again.
    """

    def __init__(
        self, worker: HostWorker, name: str, num_elements: int, columns: Sequence[str], undo: bool
    ) -> None:
        super().__init__(num_elements, columns)
        self._worker = worker
        self._values = {c: worker.zeros(num_elements, f"the {c} of {name}") for c in columns}
        self._log: list[Tensor] | None = None
        if undo:
            owner = f"the undo log of {name}"
            self._log = [worker.zeros(num_elements, owner) for _ in columns]

    def parts(self, begin: int, end: int) -> Iterable[tuple[int, int]]:
        return ((begin, end),)

    @property
    def can_undo(self) -> bool:
        return self._log is not None

    def chunk(self, begin: int, end: int, early: bool = False) -> ChunkStates:
        states = [values[begin:end] for values in self._values.values()]
        log = [kept[begin:end] for kept in self._log] if early and self._log is not None else []
        return _Slices(states, log)

    def expect(self) -> None:
        """They are there."""

    def undo(self) -> None:
        assert self._log is not None
        for values, kept in zip(self._values.values(), self._log, strict=True):
            values.copy_(kept)

    def read(self, column: str) -> Tensor:
        return self._values[column]

    def write(self, values: Mapping[str, Tensor]) -> None:
        self._worker.drain()  # jobs that read them come before
        for column, given in values.items():
            self._values[column].copy_(given)


class _Slices(ChunkStates):
    def __init__(self, states: Sequence[Tensor], log: Sequence[Tensor]) -> None:
        self._states, self._log = states, log

    def __enter__(self) -> Sequence[Tensor]:
        for kept, state in zip(self._log, self._states, strict=False):
            kept.copy_(state)
        return self._states

    def __exit__(self, *_: object) -> None:
        pass

    def cancel(self) -> None:
        pass


class SsdStates(HostStates):
    """In files, a piece for each chunk, with its columns one after another; to be written first.

    What jobs write counts once the worker commits it. Early changes can always be undone: what they
    overwrite is in other files.
    """

    def __init__(
        self, worker: HostWorker, name: str, num_elements: int, columns: Sequence[str]
    ) -> None:
        super().__init__(num_elements, columns)
        self._worker = worker
        size = len(self.columns) * torch.float32.itemsize
        self.chunks = list(host_worker.pieces(0, num_elements))
        self.pieces = [Piece(name, size * (end - begin)) for begin, end in self.chunks]
        self._by_begin = {b: p for (b, _), p in zip(self.chunks, self.pieces, strict=True)}

    def parts(self, begin: int, end: int) -> Iterable[tuple[int, int]]:
        return host_worker.pieces(begin, end)

    @property
    def can_undo(self) -> bool:
        return True

    def chunk(self, begin: int, end: int, early: bool = False) -> ChunkStates:
        assert self._worker.ssd is not None
        return _Rows(self._worker.ssd.lease(self._by_begin[begin]), len(self.columns))

    def expect(self) -> None:
        assert self._worker.ssd is not None
        self._worker.ssd.expect(self.pieces)

    def undo(self) -> None:
        assert self._worker.ssd is not None
        self._worker.ssd.roll_back(self.pieces)

    def read(self, column: str) -> Tensor:
        assert self._worker.ssd is not None
        place, found = self.columns.index(column), torch.empty(self.num_elements)
        for (begin, end), piece in zip(self.chunks, self.pieces, strict=True):
            with self._worker.ssd.lease(piece, writes=False) as memory:
                found[begin:end] = memory.view(torch.float32).view(-1, end - begin)[place]
        return found

    def write(self, values: Mapping[str, Tensor]) -> None:
        for begin, end in self.chunks:
            with self.chunk(begin, end) as states:
                for column, given in values.items():
                    states[self.columns.index(column)].copy_(given[begin:end])
        self._worker.commit()


class _Rows(ChunkStates):
    """Columns as rows of a lease."""

    def __init__(self, lease: Lease, num_columns: int) -> None:
        self._lease, self._num_columns = lease, num_columns

    def __enter__(self) -> Sequence[Tensor]:
        states = self._lease.__enter__().view(torch.float32)
        return states.view(self._num_columns, -1).unbind()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._lease.__exit__(kind, error, trace)

    def cancel(self) -> None:
        self._lease.cancel()


class HostMoment(StateTensor):
    """A moment of AdamW that is a column of :class:`HostStates`: fp32, and never moved.

    Args:
        states: of the parameter. column: "exp_avg" or "exp_avg_sq".
    """

    def __init__(self, states: HostStates, column: str) -> None:
        self.shape, self.dtype, self.signed = torch.Size((states.num_elements,)), "fp32", True
        self._states, self._column = states, column

    def read(self) -> Tensor:
        """Its values; those in host memory themselves, not a copy."""
        return self._states.read(self._column)

    def write(self, value: Tensor, key: Key | Tensor | None) -> None:
        """Store values exactly.

        Args:
            value: flat fp32, as many as there are. key: ignored, for storage that rounds.
        """
        self._states.write({self._column: value})

    @property
    def nbytes(self) -> int:
        """Bytes stored."""
        return self._states.num_elements * torch.float32.itemsize
