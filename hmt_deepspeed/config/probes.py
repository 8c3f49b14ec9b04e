"""What `"probes": "auto"` is, for the optimizer and the planner."""

from __future__ import annotations

__all__ = ["auto_probes"]

_LEAST = 8


def auto_probes(rank: int, residual: str) -> int:
    """Probe columns k of a matrix at a rank, before it is known how many its complement has.

    Half of the rank, where they carry the residual. Without one the gradient's norm is all that they estimate.
    """
    return max(_LEAST, rank // 2) if residual == "probe" else _LEAST
