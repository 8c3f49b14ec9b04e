"""Sharding of matrices by rows over ranks.

ZeRO shards the flat elements of a parameter over ranks in equal parts of ``ceil(numel / world)``. Such a
part may start and end inside a row of the m x n matrix; a rank then holds the optimizer states of every
row it touches. A row that two ranks touch is held by both and counted by the one with its first element.

Dense parameters are the special case of numel rows of one element.

Experts are E matrices one below the other, E m x n. Their states are sharded by experts, so that a rank has as many
rows of each that it holds: where there are more ranks than experts, some share one by rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

__all__ = ["ExpertShards", "RowShards", "Shards", "padded", "whole_shape"]


@dataclass(frozen=True)
class Shards(ABC):
    """Who of ``world`` ranks holds which rows of an m x n matrix. Ranges are ``(begin, end)``, half-open."""

    m: int
    n: int
    world: int

    @abstractmethod
    def rows(self, rank: int) -> tuple[int, int]:
        """Range of rows whose states a rank holds."""

    @abstractmethod
    def owned(self, rank: int) -> tuple[int, int]:
        """Range of rows that a rank owns: every row is owned by exactly one rank."""

    @abstractmethod
    def counted(self, rank: int) -> slice:
        """Of the rows of each matrix held here those that the rank contributes to sums over rows."""

    @cached_property
    def max_rows(self) -> int:
        """Most rows that any rank holds."""
        return max(end - begin for begin, end in map(self.rows, range(self.world)))

    def pack(self, matrix: Tensor, out: Tensor) -> None:
        """Copy the rows of every rank into ``out`` (world x max_rows x width), padding untouched.

        Args:
            matrix: m x width, any width and dtype. out: world x max_rows x width.
        """
        if self.max_rows * self.world == self.m:
            out.copy_(matrix.reshape(self.world, self.max_rows, -1))
            return
        for rank in range(self.world):
            begin, end = self.rows(rank)
            out[rank, : end - begin].copy_(matrix[begin:end])

    def unpack(self, packed: Tensor, out: Tensor) -> None:
        """Inverse of :meth:`pack`: the owned rows of every rank into ``out`` (m x width), of one matrix or of several.

        Args:
            packed: world x max_rows x width, or world x B x max_rows x width. out: m x width, or B x m x width.
        """
        if self.max_rows * self.world == self.m:
            out.unflatten(-2, (self.world, self.max_rows)).copy_(packed.movedim(0, -3))
            return
        for rank in range(self.world):
            first = self.rows(rank)[0]
            begin, end = self.owned(rank)
            out[..., begin:end, :].copy_(packed[rank, ..., begin - first : end - first, :])


@dataclass(frozen=True)
class RowShards(Shards):
    """Partition by flat elements: a rank holds the rows that its elements touch."""

    @property
    def partition(self) -> int:
        """Flat elements per rank, the last ranks padded: ``ceil(m n / world)``."""
        return -(-self.m * self.n // self.world)

    def flat(self, rank: int) -> tuple[int, int]:
        """Range of flat elements of the weight that a rank holds."""
        numel = self.m * self.n
        begin = min(rank * self.partition, numel)
        return begin, min(begin + self.partition, numel)

    def rows(self, rank: int) -> tuple[int, int]:
        """Range of rows that a rank touches: it holds their states."""
        begin, end = self.flat(rank)
        if begin == end:
            return self.m, self.m
        return begin // self.n, -(-end // self.n)

    def owned(self, rank: int) -> tuple[int, int]:
        """Range of rows whose first element a rank holds: every row is owned by exactly one rank."""
        begin, end = self.flat(rank)
        return -(-begin // self.n), -(-end // self.n)

    @cached_property
    def aligned(self) -> bool:
        """Whether every part consists of whole rows."""
        return self.partition % self.n == 0

    def unpack_flat(self, packed: Tensor, out: Tensor) -> None:
        """Flat parts (world x partition) into the whole flat tensor ``out`` (m n).

        Args:
            packed: world x partition. out: m n elements.
        """
        if out.numel() == packed.numel():
            out.view(self.world, self.partition).copy_(packed)
            return
        for rank in range(self.world):
            begin, end = self.flat(rank)
            out[begin:end].copy_(packed[rank, : end - begin])

    def shard_of(self, flat: Tensor, rank: int) -> Tensor:
        """A rank's part of a whole flat tensor.

        Args:
            flat: m n elements, any dtype.

        Returns:
            A view of at most ``partition`` elements.
        """
        begin, end = self.flat(rank)
        return flat[begin:end]

    def rows_to_shard(self, rows: Tensor, rank: int) -> Tensor:
        """A rank's flat part within the rows that it touches.

        Args:
            rows: (rows of :meth:`rows`) x n, contiguous, any dtype.

        Returns:
            A flat view of at most ``partition`` elements.
        """
        begin, end = self.flat(rank)
        offset = self.rows(rank)[0] * self.n
        return rows.reshape(-1)[begin - offset : end - offset]

    def counted(self, rank: int) -> slice:
        """Owned rows relative to the rows held: the rank contributes these to sums over rows."""
        first = self.rows(rank)[0]
        begin, end = self.owned(rank)
        return slice(begin - first, end - first)


@dataclass(frozen=True)
class ExpertShards(Shards):
    """Partition of ``count`` matrices of m / count rows each: a rank holds as many rows of each that it holds.

    Up to as many ranks as experts hold whole ones; of more ranks each expert's share its rows.
    """

    count: int

    @property
    def height(self) -> int:
        """Rows of an expert."""
        return self.m // self.count

    def experts(self, rank: int) -> tuple[int, int]:
        """Range of the experts that a rank holds rows of."""
        begin = rank * self.count // self.world
        return begin, max(begin + 1, (rank + 1) * self.count // self.world)

    def rows_of_each(self, rank: int) -> tuple[int, int]:
        """Range of the rows that a rank holds of each of its experts."""
        if self.world <= self.count:
            return 0, self.height
        expert = rank * self.count // self.world
        first, last = (-(-e * self.world // self.count) for e in (expert, expert + 1))
        place, sharing = rank - first, last - first
        return place * self.height // sharing, (place + 1) * self.height // sharing

    def rows(self, rank: int) -> tuple[int, int]:
        """As of :class:`Shards`, of the experts one below the other."""
        (first, last), (begin, end) = self.experts(rank), self.rows_of_each(rank)
        return first * self.height + begin, (last - 1) * self.height + end

    def owned(self, rank: int) -> tuple[int, int]:
        return self.rows(rank)

    def counted(self, rank: int) -> slice:
        """All: no row is held twice."""
        begin, end = self.rows_of_each(rank)
        return slice(0, end - begin)

    def owns_experts(self, rank: int) -> bool:
        """Whether a rank is the first of those that hold rows of its experts."""
        return self.rows_of_each(rank)[0] == 0

    def are_weights(self, weights: RowShards, transposed: bool) -> bool:
        """Whether each rank's part of the weights is what it holds states of.

        Args:
            weights: of the experts one below the other as they are stored. transposed: these are of their transposes.
        """
        if transposed and self.world > self.count:
            return False
        own = ((begin * self.n, end * self.n) for begin, end in map(self.rows, range(self.world)))
        return list(own) == list(map(weights.flat, range(self.world)))


def padded(flat: Tensor, numel: int) -> Tensor:
    """A flat tensor with zeros appended up to ``numel`` elements; a view when none are missing.

    Args:
        flat: 1-d, of at most ``numel`` elements.
    """
    return (
        flat if flat.numel() == numel else torch.nn.functional.pad(flat, (0, numel - flat.numel()))
    )


def whole_shape(param: nn.Parameter) -> tuple[int, ...]:
    """Shape of the whole parameter, partitioned or not."""
    return tuple(getattr(param, "ds_shape", param.shape))
