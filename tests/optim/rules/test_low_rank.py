"""Low-rank AdamW is its float64 twin: bases, residual, limiter, moments in new bases, clipping, weight decay."""

from __future__ import annotations

from math import inf
from pathlib import Path
from typing import Any

import hmt_simple
import pytest
from twins import LOW_RANK, TALL, WIDE, assert_same_steps


@pytest.mark.parametrize("max_norm", [inf, 1.0])
@pytest.mark.parametrize("residual", ["none", "probe", "full"])
@pytest.mark.parametrize("projection", ["right", "left"])
@pytest.mark.parametrize("shape", [TALL, WIDE])
def test_steps_are_the_twins(
    shape: tuple[int, int], projection: str, residual: str, max_norm: float
) -> None:
    options: dict[str, Any] = {**LOW_RANK, "projection": projection, "residual": residual}
    if residual != "full":
        options["probes"] = 4
    twin = assert_same_steps(shape, max_norm, **options)
    limited = sum(growth > 1.01 for growth in twin.growths)
    assert limited >= 4 if residual != "none" else not twin.growths


def test_few_probes_are_not_scaled_up_without_bound() -> None:
    """(n - r)/k is 18 for one probe, and the factor on it 8."""
    assert_same_steps(TALL, residual="probe", probes=1, **LOW_RANK)


def test_the_twin_shares_no_code_with_the_rules() -> None:
    assert "hmt_deepspeed" not in Path(hmt_simple.__file__).read_text(encoding="utf-8")
