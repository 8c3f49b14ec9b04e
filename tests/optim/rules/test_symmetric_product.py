"""Symmetric products of which half is computed, against whole ones in fp64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from hmt_deepspeed import rules
from hmt_deepspeed.optim.rules.symmetric_product import symmetric_product


@pytest.fixture(autouse=True, params=[8, 100], ids=["blocks", "whole"])
def rows_of_block(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setitem(rules._ROWS_OF_BLOCK, "cpu", request.param)
    return request.param


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("size", [5, 16, 20, 37, 90])
def test_it_is_the_product(size: int) -> None:
    tall = drawn(3, 2 * size, size)
    gram = symmetric_product(tall.mT, tall)
    exact = tall.double().mT @ tall.double()
    torch.testing.assert_close(gram.double(), exact, rtol=1e-5, atol=1e-4)
    found = symmetric_product(gram, gram, gram, 0.5, -2.0)
    whole = 0.5 * gram.double() - 2 * gram.double() @ gram.double()
    torch.testing.assert_close(found.double(), whole, rtol=1e-5, atol=1e-5 * whole.abs().max())


def test_parted_it_takes_its_share(rows_of_block: int) -> None:
    tall = drawn(2, 50, 37)
    with FlopCounterMode(display=False) as counter:
        gram = symmetric_product(tall.mT, tall)
    share = counter.get_total_flops() / (2 * 2 * 37 * 37 * 50)
    # 37 rows are not quite four equal blocks
    assert share == pytest.approx(1.0 if rows_of_block > 37 else 5 / 8, rel=0.02)
    above = gram - gram.mT
    if rows_of_block < 37:
        assert not above[:, :9, 9:].any()  # copied


def test_a_gpu_parts_only_what_is_far_larger_than_a_launch() -> None:
    assert [rules.symmetric_blocks(size, "cuda") for size in (512, 1024, 1 << 15)] == [1, 2, 8]
