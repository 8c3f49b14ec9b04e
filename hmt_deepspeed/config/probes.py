"""What `"probes": "auto"` is, for the optimizer and the planner."""

from __future__ import annotations

__all__ = ["auto_probes"]

_LEAST = 8
_ALIGNED = 16  # columns of 16 bits that tensor cores take at once, and whose rows begin at multiples of 32 bytes


def auto_probes(rank: int, residual: str, on_gpu: bool) -> int:
    """Probe columns k of a matrix at a rank r, before it is known how many its complement has.

    A quarter of the rank, where they carry the residual. Without one the gradient's norm is all that they estimate. On a
    GPU so many more that r + k is a multiple of 16.
    """
    probes = max(_LEAST, rank // 4) if residual == "probe" else _LEAST
    return probes + (-(rank + probes) % _ALIGNED if on_gpu else 0)
