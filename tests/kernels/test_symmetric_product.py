"""Symmetric products of which half is computed, against whole ones in fp64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from hmt_deepspeed.kernels import symmetric_product as module
from hmt_deepspeed.kernels.symmetric_product import symmetric_product, symmetric_share


@pytest.fixture(autouse=True, params=[8, 100], ids=["blocks", "whole"])
def rows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setitem(module._ROWS_OF_BLOCK, "cpu", request.param)
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


def test_parted_it_takes_its_share(rows: int) -> None:
    tall = drawn(2, 50, 37)
    with FlopCounterMode(display=False) as counter:
        gram = symmetric_product(tall.mT, tall)
    assert symmetric_share(37, "cpu") == (1.0 if rows > 37 else 5 / 8)
    share = counter.get_total_flops() / (2 * 2 * 37 * 37 * 50)
    assert share == pytest.approx(
        symmetric_share(37, "cpu"), rel=0.02
    )  # 37 is not four times a block
    above = gram - gram.mT
    if rows < 37:
        assert not above[:, :9, 9:].any()  # copied


def test_a_gpu_parts_only_what_is_far_larger_than_a_launch() -> None:
    assert symmetric_share(512, "cuda") == 1
    assert symmetric_share(1024, "cuda") == 0.75
    assert symmetric_share(1 << 15, "cuda") == 9 / 16
