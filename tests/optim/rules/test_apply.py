"""Updates written to weights."""

import torch

from hmt_deepspeed.optim.rules.apply import apply_whole_

M, N, LR, DECAY = 37, 20, 1e-2, 0.1


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_whole_is_the_formula():
    weight, update = randn(M, N), randn(M, N, seed=1)
    expected = (1 - LR * DECAY) * weight - LR * update
    apply_whole_(weight, update, LR, DECAY)
    torch.testing.assert_close(weight, expected)
