"""The comparison's own Fira."""

from __future__ import annotations

from itertools import pairwise

import torch

from comparison.fira import Fira


def test_fira_at_full_rank_has_no_residual_and_is_adam_in_its_basis() -> None:
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.zeros(6, 4, dtype=torch.float64))
    group = {"params": [weight], "rank": 4, "update_proj_gap": 9, "scale": 1.0}
    fira = Fira([{**group, "norm_growth_limit": 1.01}], 0.1, (0.9, 0.95), 0.0, 0.0)
    weight.grad = torch.randn(6, 4, dtype=torch.float64)
    fira.step()
    basis = fira.state[weight]["basis"]
    expected = -0.1 * (weight.grad @ basis).sign() @ basis.t()  # Adam's first step is the sign
    torch.testing.assert_close(weight.detach(), expected, atol=1e-6, rtol=0)


def test_fira_transposes_and_limits_the_growth() -> None:
    torch.manual_seed(0)
    tall = torch.nn.Parameter(torch.zeros(6, 4))
    wide = torch.nn.Parameter(torch.zeros(4, 6))
    group = {"rank": 2, "update_proj_gap": 1, "scale": 1.0, "norm_growth_limit": 1.01}
    fira = Fira([{"params": [tall, wide], **group}], 0.1, (0.9, 0.95), 1e-8, 0.1)
    norms = []
    for growth in (1.0, 50.0, 50.0):
        tall.grad = growth * torch.randn(6, 4)
        wide.grad = tall.grad.t().clone()
        fira.step()
        norms.append(float(fira.state[tall]["residual_norm"]))
    torch.testing.assert_close(tall.detach(), wide.detach().t())
    assert all(b <= 1.0101 * a for a, b in pairwise(norms))
