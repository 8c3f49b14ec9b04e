"""Norms that grow too fast from step to step."""

import pytest
import torch
from interpreted import run_interpreted

from hmt_deepspeed.kernels.growth_limit import limit_growth_, limit_growth_reference_

# norm, the one before, factor, limit
CASES = [
    (1.0, 1.0, 1.0, 1.0),
    (2.0, 1.0, 1.0, 0.505),
    (2.0, 1.0, 0.0, 0.505),
    (0.5, 1.0, 0.3, 1.0),
    (5.0, 0.0, 1.0, 1.0),
    (0.0, 1.0, 1.0, 1.0),
    (float("inf"), 1.0, 0.0, 0.0),
]


def given():
    norm, previous, factor, limit = torch.tensor(CASES).t().contiguous()
    after = torch.where(factor != 0, norm * limit, previous)
    return norm, previous, factor, limit, after


def check(limit_growth, device="cpu"):
    for times in (1, 80):  # of a program and more
        norm, previous, factor, limit, after = (one.repeat(times).to(device) for one in given())
        torch.testing.assert_close(limit_growth(norm, previous, factor), limit)
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
    "norm", [torch.ones(3), torch.ones(2).double(), torch.ones(4)[::2]], ids=str
)
def test_refuses(norm):
    with pytest.raises(ValueError, match="norm must be contiguous fp32"):
        limit_growth_(norm, torch.ones(2), torch.ones(2))
