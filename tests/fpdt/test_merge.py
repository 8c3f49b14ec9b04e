"""The online softmax against a whole one in fp64."""

import pytest
import torch

from hmt_deepspeed.fpdt.merge import merge_


def pieces(offsets, queries=5, keys=6, size=4):
    generator = torch.Generator().manual_seed(0)
    scores = [torch.randn(1, 2, queries, keys, generator=generator) + offset for offset in offsets]
    values = [torch.randn(1, 2, keys, size, generator=generator) for _ in offsets]
    return scores, values


def attend(scores, values):
    return scores.softmax(-1) @ values, scores.logsumexp(-1)


@pytest.mark.parametrize("offsets", [(0, 0, 0), (0, 120, -300), (-3e4, 3e4, 0), (90, -90, 200)])
def test_merged_pieces_are_the_whole_softmax(offsets):
    scores, values = pieces(offsets)
    out, lse = torch.zeros(1, 2, 5, 4), torch.full((1, 2, 5), float("-inf"))
    for s, v in zip(scores, values, strict=True):
        merge_(out, lse, *attend(s, v))
    whole, whole_lse = attend(torch.cat(scores, -1).double(), torch.cat(values, -2).double())
    # fp32 rounds a log-sum-exp of 3e4 to 2e-3, and a weight is e to its error
    tolerance = 1e-6 + 4e-7 * max(abs(o) for o in offsets)
    torch.testing.assert_close(out, whole.float(), rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse, whole_lse.float(), rtol=1e-6, atol=1e-5)


def test_queries_that_have_seen_nothing_stay_empty_and_then_take_what_comes():
    nothing = torch.zeros(1, 1, 2, 3), torch.full((1, 1, 2), float("-inf"))
    out, lse = nothing[0].clone(), nothing[1].clone()
    merge_(out, lse, *nothing)
    assert torch.equal(out, nothing[0])
    assert torch.equal(lse, nothing[1])
    something = torch.randn(1, 1, 2, 3), torch.randn(1, 1, 2)
    merge_(out, lse, *something)
    merge_(out, lse, *nothing)
    assert torch.equal(out, something[0])
    assert torch.equal(lse, something[1])


def test_a_16_bit_piece_is_merged_in_fp32():
    out, lse = torch.ones(1, 1, 1, 2), torch.zeros(1, 1, 1)
    merge_(out, lse, torch.full((1, 1, 1, 2), 3.0, dtype=torch.bfloat16), torch.zeros(1, 1, 1))
    assert out.tolist() == [[[[2.0, 2.0]]]]
