"""Updates written to weights: the formula, and that chunks and shards do not show."""

import pytest
import torch

from hmt_deepspeed.optim import apply
from hmt_deepspeed.optim.apply import (
    apply_adamw_rounded_,
    apply_low_rank_,
    apply_low_rank_rounded_,
)

M, N, WIDTH, LR, DECAY = 37, 20, 6, 1e-2, 0.1


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_rank_is_the_formula(dtype):
    weight, update, projection = randn(M, N), randn(M, WIDTH, seed=1), randn(N, WIDTH, seed=2)
    projection = projection.to(dtype)
    expected = (1 - LR * DECAY) * weight - LR * update @ projection.float().t()
    apply_low_rank_(weight, update, projection, LR, DECAY)
    torch.testing.assert_close(weight, expected)


def test_rounded_low_rank_is_the_formula_to_one_spacing():
    weight, update, projection = randn(M, N).bfloat16(), randn(M, WIDTH), randn(N, WIDTH)
    expected = weight.float()
    apply_low_rank_(expected, update, projection, LR, DECAY)
    apply_low_rank_rounded_(weight, update, projection, LR, DECAY, 3, 0)
    # bf16 has 8 bits: neighbours are at most 2^-7 of the value apart.
    torch.testing.assert_close(weight.float(), expected, rtol=2**-7, atol=0)
    assert not torch.equal(weight, expected.bfloat16())  # to nearest would be another result


def test_rounding_does_not_depend_on_chunks_or_shards(monkeypatch):
    update, projection = randn(M, WIDTH, seed=1), randn(N, WIDTH, seed=2)
    whole, chunked, shards = (randn(M, N).bfloat16() for _ in range(3))
    apply_low_rank_rounded_(whole, update, projection, LR, DECAY, 3, 0)
    for begin, end in ((0, 11), (11, M)):
        part, key = shards[begin:end], 3
        apply_low_rank_rounded_(part, update[begin:end], projection, LR, DECAY, key, begin * N)
    monkeypatch.setattr(apply, "CHUNK_ELEMENTS", 5 * N + 1)
    apply_low_rank_rounded_(chunked, update, projection, LR, DECAY, 3, 0)
    # A product of other rows may differ in its last fp32 bit, which moves one rounding in 2^16.
    assert (whole != chunked).sum() <= 1
    assert (whole != shards).sum() <= 1


def test_rounded_adamw_does_not_depend_on_chunks(monkeypatch):
    results = []
    for chunk in (1 << 22, 96):  # whole vectors, as the real one: a ragged tail rounds otherwise
        monkeypatch.setattr(apply, "CHUNK_ELEMENTS", chunk)
        weight, step = randn(M, N).bfloat16(), torch.zeros(())
        mean, second = torch.zeros(M, N), torch.zeros(M, N)
        for i in range(3):
            apply_adamw_rounded_(
                weight,
                randn(M, N, seed=i).bfloat16(),
                mean,
                second,
                step,
                i,
                lr=LR,
                betas=(0.9, 0.95),
                eps=1e-8,
                weight_decay=DECAY,
            )
        assert step.item() == 3
        results.append((weight, mean, second))
    for whole, chunked in zip(*results, strict=True):
        assert torch.equal(whole, chunked)
