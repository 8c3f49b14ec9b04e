"""What `"max_full_gradient_bytes": "auto"` is, for the optimizer and the planner."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

__all__ = ["auto_full_gradient_bytes"]

_MUCH = 2**30


def auto_full_gradient_bytes(group_bytes: Sequence[int]) -> int:
    """Bytes of full gradients alive at once, which say in how many steps all matrices find their first basis.

    Before it they move inside random ones, which a run of a few hundred steps pays for: an eighth of all. Where that
    is more than 1 GiB memory counts more, and runs are long: 1 GiB, and never less than a thirty-second of all or
    the largest group.

    Args:
        group_bytes: of the full gradients of each group of matrices that refresh together; alone, a group of one.
    """
    every = sum(group_bytes)
    return max(min(ceil(every / 8), _MUCH), ceil(every / 32), *group_bytes, 0)
