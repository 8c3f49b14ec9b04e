"""Updates written to weights: the formula, and that chunks and shards do not show."""

import torch

from hmt_deepspeed.optim.rules import apply
from hmt_deepspeed.optim.rules.apply import apply_whole_, apply_whole_rounded_

M, N, LR, DECAY = 37, 20, 1e-2, 0.1


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_whole_is_the_formula():
    weight, update = randn(M, N), randn(M, N, seed=1)
    expected = (1 - LR * DECAY) * weight - LR * update
    apply_whole_(weight, update, LR, DECAY)
    torch.testing.assert_close(weight, expected)


def test_rounding_of_a_whole_update_does_not_depend_on_chunks_or_shards(monkeypatch):
    update = randn(M, N, seed=1)
    whole, chunked, shards = (randn(M, N).bfloat16() for _ in range(3))
    apply_whole_rounded_(whole, update, LR, DECAY, 3)
    assert not torch.equal(whole, randn(M, N).sub(update, alpha=LR).bfloat16())
    for begin, end in ((0, 11), (11, M)):
        apply_whole_rounded_(shards[begin:end], update[begin:end], LR, DECAY, 3, begin * N)
    monkeypatch.setattr(apply, "CHUNK_ELEMENTS", 5 * N + 1)
    apply_whole_rounded_(chunked, update, LR, DECAY, 3)
    assert torch.equal(whole, chunked)
    assert torch.equal(whole, shards)
