"""Norms that grow too fast from step to step."""

import itertools

import pytest
import torch
from interpreted import run_interpreted

from hmt_deepspeed.kernels.growth_limit import limit_growth_, limit_growth_reference_

# norm, the one before, scale, limit
CASES = [
    (1.0, 1.0, 1.0, 1.0),
    (2.0, 1.0, 1.0, 0.505),
    (2.0, 1.0, 0.0, 0.505),
    (0.5, 1.0, 0.3, 1.0),
    (5.0, 0.0, 1.0, 1.0),
    (0.0, 1.0, 1.0, 1.0),
    (float("inf"), 1.0, 0.0, 0.0),
]


def check(limit_growth, device="cpu"):
    for times, of in itertools.product((1, 80), itertools.product((False, True), repeat=2)):
        norm, previous, scale, limit = torch.tensor(CASES).t().repeat(1, times).to(device)
        after = torch.where(scale != 0, norm * limit, previous)
        expected = torch.stack([scale * limit if own else scale for own in of], dim=1)
        previous, scale = previous.contiguous(), scale.contiguous()
        found, scales = limit_growth(norm.square(), previous, scale, of)
        torch.testing.assert_close(found, limit)
        torch.testing.assert_close(scales, expected)
        torch.testing.assert_close(previous, after)


def check_kernel(device="cpu"):
    from hmt_deepspeed.kernels.growth_limit import limit_growth_triton_

    check(limit_growth_triton_, device)


def test_twin():
    check(limit_growth_reference_)


def test_kernel():
    pytest.importorskip("triton")
    run_interpreted(__file__, "check_kernel")


def test_growth_is_limited_step_by_step():
    previous = torch.ones(1)
    for _ in range(10):
        limit_growth_(torch.tensor([100.0]), previous, torch.ones(1))
    torch.testing.assert_close(previous, torch.tensor([1.01**10]))


@pytest.mark.parametrize(
    "squares", [torch.ones(3), torch.ones(2).double(), torch.ones(4)[::2]], ids=str
)
def test_refuses(squares):
    with pytest.raises(ValueError, match="squares must be contiguous fp32"):
        limit_growth_(squares, torch.ones(2), torch.ones(2))
