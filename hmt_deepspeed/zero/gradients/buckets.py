"""Buckets of gradients; one collective reduces a bucket."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn

from hmt_deepspeed.zero.gradients.gradient import Gradient
from hmt_deepspeed.zero.sharding.collectives import Work

__all__ = ["Bucket", "InFlight", "build_buckets"]


@dataclass(eq=False)
class Bucket:
    """Gradients that one collective reduces.

    Attributes:
        offsets: where each member begins, in elements of one rank's chunk.
        waiting: members that have not arrived in this round; a leaf stands for its members.
        launched: its collective has begun in this round.
    """

    index: int
    members: list[Gradient]
    offsets: list[int] = field(default_factory=list)
    chunk: int = 0
    waiting: set[Gradient | nn.Module] = field(default_factory=set)
    launched: bool = False


@dataclass(eq=False)
class InFlight:
    """A collective on its way; ``result`` is fresh memory, ``buffer`` goes back to the pool."""

    bucket: Bucket
    work: Work
    result: Tensor
    buffer: Tensor | None = None


def build_buckets(
    gradients: Sequence[Gradient], parts: int, bucket_elements: int, each_alone: bool
) -> list[Bucket]:
    """Buckets of an accumulation window, the last parameters first, as backward will meet them.

    A whole gradient, of a matrix that refreshes its basis, has a bucket of its own.

    Args:
        gradients: in order of registration. parts: that rows are sharded into, 1 where every rank keeps all.
        bucket_elements: most elements of a bucket over all parts, unless one gradient has more.
        each_alone: of one rank, which sends nothing: every gradient goes on to its shard by itself.
    """
    buckets: list[Bucket] = []
    open_bucket: Bucket | None = None
    for gradient in reversed(gradients):
        if gradient.refreshing:
            buckets.append(Bucket(len(buckets), [gradient]))
            continue
        size = gradient.shards.max_rows * gradient.width
        is_full = each_alone or (
            open_bucket is not None and (open_bucket.chunk + size) * parts > bucket_elements
        )
        if open_bucket is None or is_full:
            open_bucket = Bucket(len(buckets), [])
            buckets.append(open_bucket)
        open_bucket.offsets.append(open_bucket.chunk)
        open_bucket.chunk += size
        open_bucket.members.append(gradient)
    return buckets
