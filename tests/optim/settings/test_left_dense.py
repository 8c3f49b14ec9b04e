"""The warning of weights that cannot be projected: how much of a model they are, which, and why."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from hmt_deepspeed.optim.hmt import HMT
from hmt_deepspeed.optim.settings.assign import Assignment, left_dense

LINEAR = Assignment("up.weight", (30, 30), None, "method is adamw")


class Kernels(nn.Module):
    """A linear beside the kernels of a convolution, which nothing projects."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.up, self.conv = nn.Linear(32, 32, bias=False), nn.Conv2d(channels, channels, 3)


def test_each_reason_has_its_share_and_its_first_weight() -> None:
    others = [
        Assignment("a.conv", (10, 10, 2), None, "3-D weight, belongs to a Moe"),
        Assignment("b.conv", (10, 10, 2), None, "3-D weight, belongs to a Moe"),
        Assignment("c.conv", (10, 10, 2, 1), None, "4-D weight"),
    ]
    found = left_dense([LINEAR, *others])
    assert found.startswith("40% of the trained parameters are left to AdamW")
    assert "27% 3-D weight, belongs to a Moe (a.conv is the first), 13% 4-D weight (c.c" in found


@pytest.mark.parametrize("reason", ["not in target_modules", "module_rules 'conv'", ""])
def test_what_the_user_chose_is_not_warned_of(reason: str) -> None:
    assert not left_dense([LINEAR, Assignment("a.conv", (99, 10, 2), None, reason)])


@pytest.mark.parametrize(("channels", "warned"), [(3, False), (8, True)])
def test_the_optimizer_warns_above_a_tenth(channels: int, warned: bool) -> None:
    """9 x 9 of 1108 parameters, and 9 x 64 of 1608."""
    model = Kernels(channels)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        HMT(model, lr=1e-3, rank=4).describe()
    told = [str(w.message) for w in caught if "left to AdamW" in str(w.message)]
    assert len(told) == warned
    assert all("36% of" in text and "4-D weight (conv.weight" in text for text in told)
    model.up(torch.zeros(1, 32))
