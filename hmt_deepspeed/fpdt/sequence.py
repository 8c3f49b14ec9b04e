"""Sequence parallelism over ranks: sharding of tokens, and the all-to-alls between tokens and heads.

DeepSpeed-Ulysses (2309.14509), chunk by chunk as in FPDT: each global chunk is sharded over all ranks in
order, so that the all-to-all of a chunk yields that chunk, contiguous, on every rank, for a share of the
heads. Every rank then has the same causal work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from hmt_deepspeed.fpdt.visibility import Span, spans_of

__all__ = ["Group", "SequenceParallel", "TokenSharding", "TorchGroup"]


class Group(Protocol):
    """The ranks that share one sequence."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def exchange(self, parts: Sequence[Tensor], shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
        """All-to-all: sends ``parts[r]`` to rank r, returns what rank r sent, of ``shapes[r]``."""

    def gather(self, value: Any) -> list[Any]:
        """All-gather any value that can be pickled; in order of ranks."""


class TorchGroup:
    """The ranks of a process group of ``torch.distributed``; None: all."""

    def __init__(self, group: Any = None) -> None:
        self._group = group

    @property
    def rank(self) -> int:
        return dist.get_rank(self._group)

    @property
    def size(self) -> int:
        return dist.get_world_size(self._group)

    def exchange(self, parts: Sequence[Tensor], shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
        sizes = [torch.Size(shape).numel() for shape in shapes]
        received = parts[0].new_empty(sum(sizes))
        dist.all_to_all_single(
            received,
            torch.cat([part.reshape(-1) for part in parts]),
            sizes,
            [part.numel() for part in parts],
            group=self._group,
        )
        pieces = received.split(sizes)
        return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]

    def gather(self, value: Any) -> list[Any]:
        every: list[Any] = [None] * self.size
        dist.all_gather_object(every, value, group=self._group)
        return every


class _Alone:
    """One rank: nothing is exchanged."""

    rank, size = 0, 1

    def exchange(self, parts: Sequence[Tensor], shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
        return list(parts)

    def gather(self, value: Any) -> list[Any]:
        return [value]


@dataclass(frozen=True)
class TokenSharding:
    """Sharding of a sequence's tokens: each rank holds a contiguous part of every chunk, in order of ranks.

    Attributes:
        length: tokens of the whole sequence; need not divide.
        chunk_size: tokens of a global chunk.
        size: ranks.
    """

    length: int
    chunk_size: int
    size: int

    @cached_property
    def parts(self) -> tuple[tuple[int, ...], ...]:
        """Tokens of each rank, by chunk."""
        return tuple(
            tuple((end - begin + self.size - 1 - rank) // self.size for rank in range(self.size))
            for begin, end in spans_of(self.length, self.chunk_size)
        )

    def local_spans(self, rank: int) -> tuple[Span, ...]:
        """Span of each chunk's part among the tokens that a rank holds."""
        ends = tuple(accumulate(part[rank] for part in self.parts))
        return tuple(zip((0, *ends[:-1]), ends, strict=True))

    def take(self, whole: Tensor, rank: int) -> Tensor:
        """The tokens of ``whole`` [B, S, ...] that a rank holds, [B, T, ...]."""
        begins = [begin for begin, _ in spans_of(self.length, self.chunk_size)]
        pieces = []
        for begin, part in zip(begins, self.parts, strict=True):
            first = begin + sum(part[:rank])
            pieces.append(whole[:, first : first + part[rank]])
        return torch.cat(pieces, dim=1)


class SequenceParallel:
    """Moves a chunk's tensors between [B, all heads, own tokens, D] and [B, own heads, all tokens, D]."""

    def __init__(self, group: Group | None = None) -> None:
        self.group: Group = group or _Alone()
        self._last: _Flag | None = None

    @property
    def rank(self) -> int:
        return self.group.rank

    @property
    def size(self) -> int:
        return self.group.size

    def check_heads(self, query_heads: int, key_heads: int) -> None:
        """Raises ValueError when the heads cannot be shared out."""
        fits = key_heads % self.size == 0 or self.size % key_heads == 0
        if query_heads % self.size or not fits:
            raise ValueError(
                f"fpdt.sequence_parallel_size is {self.size}, but the model has {query_heads} query heads "
                f"and {key_heads} key heads: it must divide the first, and divide the second or be a "
                "multiple of it"
            )

    def heads(self, num_heads: int, rank: int) -> Span:
        """The heads of a rank. With fewer heads than ranks, several ranks have the same one."""
        if num_heads % self.size == 0:
            share = num_heads // self.size
            return rank * share, (rank + 1) * share
        own = rank * num_heads // self.size
        return own, own + 1

    def to_heads(self, local: Tensor, parts: Sequence[int]) -> Tensor:
        """A whole chunk for the own heads.

        Args:
            local: [B, H, parts[rank], D].
            parts: the ranks' tokens of the chunk.
        """
        if self.size == 1:
            return local
        batch, num_heads, _, head_size = local.shape
        ranges = [self.heads(num_heads, rank) for rank in range(self.size)]
        own = ranges[self.rank][1] - ranges[self.rank][0]
        received = self.group.exchange(
            [local[:, begin:end] for begin, end in ranges],
            [(batch, own, tokens, head_size) for tokens in parts],
        )
        return torch.cat(received, dim=2)

    def to_tokens(self, chunk: Tensor, parts: Sequence[int], num_heads: int) -> Tensor:
        """The own tokens for all heads; what several ranks have of one head is added up.

        Args:
            chunk: [B, own heads, sum of parts, D].
            num_heads: of all ranks together, each counted once.
        """
        if self.size == 1:
            return chunk
        batch, _, _, head_size = chunk.shape
        tokens = parts[self.rank]
        ranges = [self.heads(num_heads, rank) for rank in range(self.size)]
        received = self.group.exchange(
            chunk.split(list(parts), dim=2),
            [(batch, end - begin, tokens, head_size) for begin, end in ranges],
        )
        if num_heads >= self.size:
            return torch.cat(received, dim=1)
        local = chunk.new_zeros(batch, num_heads, tokens, head_size)
        for (begin, end), piece in zip(ranges, received, strict=True):
            local[:, begin:end] += piece
        return local

    def check_same(self, tokens: Tensor) -> None:
        """Whether all ranks hold the same tokens [B, S]. The first call waits for the device; each further one
        reads what the call before it found, which the device has computed meanwhile.

        Raises:
            ValueError: they differ, in this call or in the one before; on all ranks alike.
        """
        if self.size == 1:
            return
        is_first, before = self._last is None, self._last
        weights = torch.arange(1, tokens.numel() + 1, device=tokens.device)
        own = (tokens.reshape(-1) * weights).sum().view(1)
        every = self.group.exchange([own] * self.size, [(1,)] * self.size)
        self._last = _Flag((torch.cat(every) != own).any())
        if (before or self._last).read():
            self._last = None
            raise ValueError(
                f"the {self.size} ranks that share a sequence got different rows"
                f"{'' if is_first else ' in the forward before this one'}: give them the same "
                "(a DistributedSampler with num_replicas = ranks / sequence_parallel_size), FPDT takes "
                "each rank's part of them"
            )


class _Flag:
    """A bool of the device on its way to the host, by a copy that nobody waits for before it is read."""

    def __init__(self, value: Tensor) -> None:
        self._value = value.to("cpu", non_blocking=True)  # to pinned memory
        on_gpu = value.is_cuda
        self._copied = torch.cuda.current_stream(value.device).record_event() if on_gpu else None

    def read(self) -> bool:
        if self._copied is not None:
            self._copied.synchronize()
        return bool(self._value)
