"""HMT with low-rank AdamW, for tests of what that has and the default's rule has not."""

from __future__ import annotations

from typing import Any

from hmt_deepspeed.optim.hmt import HMT

LOW_RANK_ADAMW: dict[str, Any] = {"method": "lowrank_adamw"}


def low_rank_adamw(parameters: Any, **fields: Any) -> HMT:
    """HMT(parameters, ...), with that method where ``fields`` name no other."""
    return HMT(parameters, **{**LOW_RANK_ADAMW, **fields})
