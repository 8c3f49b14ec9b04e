"""Collectives of one data-parallel group, with the bytes each rank sends counted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from deepspeed import comm as dist
from torch import Tensor

__all__ = ["Collectives", "Work", "gather_bytes", "reduce_bytes"]


class Work(Protocol):
    """Handle of a collective in flight."""

    def wait(self) -> object: ...


class _Done:
    def wait(self) -> None:
        return None


def gather_bytes(nbytes: int, world: int) -> int:
    """Bytes a rank sends in a ring all-gather or reduce-scatter of ``nbytes`` in total.

    Args:
        world: ranks in the ring.
    """
    return nbytes * (world - 1) // world


def reduce_bytes(nbytes: int, world: int) -> int:
    """Bytes a rank sends in a ring all-reduce of ``nbytes``: a reduce-scatter and an all-gather.

    Args:
        world: ranks in the ring.
    """
    return 2 * gather_bytes(nbytes, world)


class Collectives:
    """Asynchronous collectives over ``group``; of one rank they move nothing.

    Args:
        group: torch's process group. overlap: let collectives return before they are done.

    Attributes:
        world, rank: size of the group and this process's place in it.
        sent_bytes: bytes this rank has sent since :meth:`reset_counter`, by ring algorithms' volume.
        overlap: whether collectives return before they are done.
    """

    def __init__(self, group: Any, overlap: bool) -> None:
        self.group = group
        self.world: int = dist.get_world_size(group=group)
        self.rank: int = dist.get_rank(group=group)
        self.overlap = overlap
        self.sent_bytes = 0

    def reset_counter(self) -> int:
        """Bytes counted so far; counting starts anew."""
        sent, self.sent_bytes = self.sent_bytes, 0
        return sent

    def all_reduce(self, tensor: Tensor, op: Any = dist.ReduceOp.SUM, wait: bool = True) -> Work:
        """Sum (or ``op``) over ranks, in place.

        Args:
            tensor: of one shape and dtype on all ranks. wait: return when the sum is there.
        """
        if self.world == 1:
            return _Done()
        self.sent_bytes += reduce_bytes(_nbytes(tensor), self.world)
        return self._finish(
            dist.all_reduce(tensor, op=op, group=self.group, async_op=not wait), wait
        )

    def reduce_scatter(self, out: Tensor, packed: Tensor) -> Work:
        """Sum of every rank's ``packed[rank]`` into ``out``.

        Args:
            out: part of one rank, any shape. packed: world x that shape.
        """
        self.sent_bytes += gather_bytes(_nbytes(packed), self.world)
        work = dist.reduce_scatter_tensor(
            out.view(-1), packed.view(-1), group=self.group, async_op=self.overlap
        )
        return self._finish(work, not self.overlap)

    def all_gather(self, packed: Tensor, part: Tensor) -> Work:
        """Every rank's ``part`` into ``packed`` (world x ...).

        Args:
            packed: world x the shape of ``part``, overwritten. part: of one shape on all ranks.
        """
        self.sent_bytes += gather_bytes(_nbytes(packed), self.world)
        work = dist.all_gather_into_tensor(
            packed.view(-1), part.view(-1), group=self.group, async_op=self.overlap
        )
        return self._finish(work, not self.overlap)

    def reduce(self, tensor: Tensor, owner: int) -> Work:
        """Sum over ranks into the owner's ``tensor``; the others' contents are lost.

        Args:
            tensor: of one shape and dtype on all ranks. owner: rank within the group.
        """
        if self.world == 1:
            return _Done()
        self.sent_bytes += gather_bytes(_nbytes(tensor), self.world)
        work = dist.reduce(
            tensor, dist.get_global_rank(self.group, owner), group=self.group, async_op=self.overlap
        )
        return self._finish(work, not self.overlap)

    def all_to_all(self, parts: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        """Send ``parts[q]`` to rank q.

        Args:
            parts: one flat tensor for each rank, of one dtype. sizes: elements that come from each rank.

        Returns:
            By sending rank p a flat tensor of ``sizes[p]`` elements.
        """
        if self.world == 1:
            return list(parts)
        sent = torch.cat(list(parts))
        received = sent.new_empty(sum(sizes))
        own = parts[self.rank].numel()
        self.sent_bytes += (sent.numel() - own) * sent.element_size()
        dist.all_to_all_single(
            received, sent, list(sizes), [p.numel() for p in parts], group=self.group
        )
        return list(received.split(list(sizes)))

    def broadcast_object(self, value: Any) -> Any:
        """A picklable value of the group's first rank."""
        if self.world == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, dist.get_global_rank(self.group, 0), group=self.group)
        return box[0]

    def broadcast(self, tensor: Tensor, owner: int) -> None:
        """Overwrite ``tensor`` on all ranks by the owner's.

        Args:
            tensor: of one shape and dtype on all ranks. owner: rank within the group.
        """
        if self.world > 1:
            self.sent_bytes += gather_bytes(_nbytes(tensor), self.world)
            dist.broadcast(tensor, dist.get_global_rank(self.group, owner), group=self.group)

    @staticmethod
    def _finish(work: Any, done: bool) -> Work:
        return _Done() if done or work is None else work


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
