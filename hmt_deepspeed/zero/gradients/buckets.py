"""Buckets of gradients; one collective reduces a bucket."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn

from hmt_deepspeed.zero.gradients.gradient import Gradient
from hmt_deepspeed.zero.sharding.collectives import Collectives, Work

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

    @property
    def holders(self) -> Collectives:
        """Of the ranks that it is reduced over."""
        return self.members[0].holders


@dataclass(eq=False)
class InFlight:
    """A collective on its way; ``result`` is fresh memory, ``buffer`` goes back to the pool."""

    bucket: Bucket
    work: Work
    result: Tensor
    buffer: Tensor | None = None


def build_buckets(
    gradients: Sequence[Gradient], sharded: bool, bucket_elements: int
) -> list[Bucket]:
    """Buckets of an accumulation window, the last parameters first, as backward will meet them.

    A whole gradient, of a matrix that refreshes its basis, has a bucket of its own; so has each of one rank, which sends
    nothing.

    Args:
        gradients: in order of registration. sharded: whether rows are sharded over the holders, or each keeps all.
        bucket_elements: most elements of a bucket over all parts, unless one gradient has more.
    """
    buckets: list[Bucket] = []
    filling: dict[Collectives, Bucket] = {}
    for gradient in reversed(gradients):
        if gradient.refreshing:
            buckets.append(Bucket(len(buckets), [gradient]))
            continue
        size = gradient.shards.max_rows * gradient.width
        world, open_bucket = gradient.holders.world, filling.get(gradient.holders)
        parts = world if sharded else 1
        if (
            open_bucket is None
            or world == 1
            or (open_bucket.chunk + size) * parts > bucket_elements
        ):
            open_bucket = filling[gradient.holders] = Bucket(len(buckets), [])
            buckets.append(open_bucket)
        open_bucket.offsets.append(open_bucket.chunk)
        open_bucket.chunk += size
        open_bucket.members.append(gradient)
    return buckets
