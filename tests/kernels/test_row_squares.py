"""Squared norms of rows: fp32 sums, the kernel against float64."""

import itertools

import pytest
import torch
from interpreted import assert_as_accurate, run_interpreted, strided

from hmt_deepspeed.kernels.row_squares import row_squares, row_squares_reference

SHAPES = [(1, 1, 1), (3, 257, 0), (65, 130, 33), (9, 555, 555)]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LAYOUTS = ("rows", "strided", "transposed", "side by side")


def matrices(shape, dtype, layout):
    """Three."""
    found = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    if layout == "side by side":
        return [found[:2], found[2:]]
    if layout == "transposed":
        return [one.t().contiguous().t() for one in found]
    return [strided(one) if layout == "strided" else one.clone() for one in found]


def check_kernel(device="cpu"):
    from hmt_deepspeed.kernels.row_squares import row_squares_triton

    for (*shape, split), dtype, layout in itertools.product(SHAPES, DTYPES, LAYOUTS):
        given = matrices(shape, dtype, layout)
        twin = torch.stack(row_squares_reference(given, split))
        whole = torch.cat([one.reshape(-1, *shape) for one in given]).double().square()
        exact = torch.stack((whole[..., :split].sum(-1), whole[..., split:].sum(-1)))
        found = torch.stack(row_squares_triton([one.to(device) for one in given], split))
        assert_as_accurate(found.cpu(), twin, exact, exact)


def test_kernel_is_as_accurate_as_its_twin():
    pytest.importorskip("triton")
    run_interpreted(__file__, "check_kernel")


@pytest.mark.parametrize("shape", [(2, 0, 5), (0, 3, 5)])
def test_there_may_be_no_rows_or_no_matrices(shape):
    for found in row_squares([torch.ones(shape)], 2):
        assert found.shape == shape[:2]


@pytest.mark.parametrize(
    ("given", "split"),
    [
        ([torch.ones(3, 4).double()], 2),
        ([torch.ones(3, 4), torch.ones(4, 3).t()], 2),
        ([torch.ones(3, 4), torch.ones(3, 5)], 2),
        ([torch.ones(3, 4)], 5),
        ([torch.ones(4)], 2),
    ],
)
def test_refuses(given, split):
    with pytest.raises(ValueError):
        row_squares(given, split)
