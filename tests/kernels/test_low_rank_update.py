"""Low-rank updates: the formula, the noise, the kernel against float64 and against its twin."""

import pytest
import torch
from interpreted import assert_as_accurate, run_interpreted, strided

from hmt_deepspeed.kernels import chunks, low_rank_update
from hmt_deepspeed.kernels.low_rank_update import low_rank_update_, low_rank_update_reference_
from hmt_deepspeed.kernels.stochastic_rounding import stochastic_round

SHAPES = [(1, 1, 1), (3, 257, 1), (65, 130, 33), (64, 64, 32), (5, 70, 100), (130, 3, 7)]
OFFSETS = (0, 12_345, (1 << 31) - 40, (1 << 33) + 3, (1 << 40) - 7)


def inputs(rows, n, width, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((rows, n), (rows, width), (n, width))
    return [torch.randn(shape, generator=generator) for shape in shapes]


def exact_inputs(rows, n, width):
    """Integers and powers of two: fp32 holds every sum, whatever the order of its terms."""
    weight, update, projection = ((4 * t).round() for t in inputs(rows, n, width))
    return weight.bfloat16(), update, projection


def formula(weight, update, projection, lr, decay):
    weight, update, projection = (t.double() for t in (weight, update, projection))
    return (1 - lr * decay) * weight - lr * (update @ projection.t())


def magnitude(update, projection, lr):
    """What the terms of each element of the update add up to, signs apart."""
    return lr * (update.double().abs() @ projection.double().abs().t())


@pytest.mark.parametrize(("rows", "n", "width"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_formula(rows, n, width, dtype):
    weight, update, projection = inputs(rows, n, width)
    projection = projection.to(dtype)
    expected = formula(weight, update, projection, 0.3, 0.1)
    low_rank_update_(weight, strided(update), strided(projection), 0.3, 0.1)
    # Each of the width + 1 terms is below 16 and rounded a few times.
    assert (weight - expected).abs().max() < 16 * (width + 3) * 2.0**-23


@pytest.mark.parametrize(("rows", "n", "width"), SHAPES)
@pytest.mark.parametrize("swapped", [False, True])
def test_beside_a_bf16_factor_the_other_is_rounded(rows, n, width, swapped):
    weight, update, projection = inputs(rows, n, width)
    if swapped:
        update = update.bfloat16()
    else:
        projection = projection.bfloat16()
    exact = formula(weight, update, projection, 0.3, 0.1)
    terms = magnitude(update, projection, 0.3)
    rounded = formula(weight, update.bfloat16(), projection.bfloat16(), 0.3, 0.1)
    low_rank_update_(weight, update, projection, 0.3, 0.1)
    summed = 16 * (width + 3) * 2.0**-23
    # bf16 rounds by at most 2^-8 of a value: the factor, then the twin's product.
    assert ((weight - exact).abs() < 2.01 * 2.0**-8 * terms + summed).all()
    assert ((weight - rounded).abs() < 1.01 * 2.0**-8 * terms + summed).all()
    product = low_rank_update.low_rank_product(update, projection)
    assert product.dtype == torch.bfloat16


def test_a_bf16_product_leaves_small_weights_their_digits():
    # 300 elements of very different sizes: the weight is summed in fp32, whatever the product is in.
    weight = torch.logspace(-6, 6, 300).view(3, 100)
    before = weight.double()
    update, projection = torch.ones(3, 1), torch.ones(100, 1).bfloat16()
    low_rank_update_(weight, update, projection, 1e-3, 0.0)
    assert torch.allclose(weight.double(), before - 1e-3, rtol=2.0**-23, atol=2.0**-33)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("chunk", [300, 1 << 20])
def test_copy_is_the_rounded_weight(dtype, chunk, monkeypatch):
    monkeypatch.setattr(chunks, "CHUNK_ELEMENTS", chunk)
    weight, update, projection = inputs(65, 130, 33)
    twin, copy = weight.clone(), torch.empty_like(weight, dtype=dtype)
    low_rank_update_(weight, update, projection, 0.3, 0.1, copy=copy)
    low_rank_update_(twin, update, projection, 0.3, 0.1)
    assert torch.equal(weight, twin)
    assert torch.equal(copy, weight.to(dtype))


@pytest.mark.parametrize("chunk", [1, 300, 1 << 20])
@pytest.mark.parametrize("offset", OFFSETS)
def test_noise_is_that_of_the_element(chunk, offset, monkeypatch):
    monkeypatch.setattr(chunks, "CHUNK_ELEMENTS", chunk)
    weight, update, projection = exact_inputs(65, 130, 33)
    value = formula(weight, update, projection, 0.125, 0.5).float()
    expected = torch.empty_like(weight)
    stochastic_round(value, expected, 77, offset)
    halves = weight.clone()
    low_rank_update_(weight, update, projection, 0.125, 0.5, 77, offset)
    assert torch.equal(weight, expected)
    for rows in (slice(0, 20), slice(20, 65)):
        start = offset + rows.start * 130
        low_rank_update_(halves[rows], update[rows], projection, 0.125, 0.5, 77, start)
    assert torch.equal(halves, expected)


@pytest.mark.parametrize(
    "change",
    [
        {"weight": torch.ones(4, 6).half()},
        {"weight": torch.ones(4, 6).bfloat16()},  # no key
        {"weight": torch.ones(6, 4).t()},
        {"weight": torch.ones(24)},
        {"update": torch.ones(3, 2)},
        {"update": torch.ones(4, 2).double()},
        {"projection": torch.ones(6, 3)},
        {"projection": torch.ones(5, 2)},
        {"projection": torch.ones(6, 2).int()},
        {"projection": torch.ones(12)},
        {"copy": torch.ones(4, 6)},
        {"copy": torch.ones(6, 4).half()},
        {"copy": torch.ones(6, 4).half().t()},
        {"weight": torch.ones(4, 6).bfloat16(), "key": 1, "copy": torch.ones(4, 6).half()},
    ],
)
def test_refuses(change):
    arguments = {
        "weight": torch.ones(4, 6),
        "update": torch.ones(4, 2),
        "projection": torch.ones(6, 2),
    }
    low_rank_update_(**arguments, lr=0.1, weight_decay=0)
    with pytest.raises(ValueError):
        low_rank_update_(**(arguments | change), lr=0.1, weight_decay=0)


def check_kernel(device="cpu"):
    kernel = low_rank_update.low_rank_update_triton_
    for rows, n, width in SHAPES:
        weight, update, projection = inputs(rows, n, width, seed=rows)
        on_device = projection.to(device)
        for columns in (on_device, strided(on_device)):
            expected = formula(weight, update, columns.cpu(), 0.3, 0.1)
            first, second = weight.clone(), weight.to(device, copy=True)
            low_rank_update_reference_(first, update, columns.cpu(), 0.3, 0.1)
            kernel(second, strided(update.to(device)), columns, 0.3, 0.1)
            terms = formula(-weight.abs(), update.abs(), columns.cpu().abs(), 0.3, 0.1).abs()
            assert_as_accurate(second.cpu(), first, expected, terms)

        left, right = update.bfloat16(), projection.bfloat16()
        expected = formula(weight, left, right, 0.3, 0.1)
        terms = formula(-weight.abs(), left.abs(), right.abs(), 0.3, 0.1).abs()
        for dtype in (torch.bfloat16, torch.float16):
            first, second = weight.clone(), weight.to(device, copy=True)
            copy = torch.empty_like(second, dtype=dtype)
            low_rank_update_reference_(first, left.float(), right.float(), 0.3, 0.1)
            kernel(second, update.to(device), right.to(device), 0.3, 0.1, copy=copy)
            # Products of bf16 are exact in fp32: as accurate as fp32 factors of these values.
            assert_as_accurate(second.cpu(), first, expected, terms)
            assert torch.equal(copy, second.to(dtype))

        weight, update, projection = exact_inputs(rows, n, width)
        for offset, key in zip(OFFSETS, (0, 1, (1 << 63) - 5, 0xFFFFFFFF, 1 << 62), strict=True):
            first, second = weight.clone(), weight.to(device, copy=True)
            low_rank_update_reference_(first, update, projection, 0.125, 0.5, key, offset)
            kernel(second, update.to(device), projection.to(device), 0.125, 0.5, key, offset)
            assert torch.equal(first, second.cpu()), (rows, n, width, key, offset)
    weight = torch.full((2, 3), float("nan"), device=device).bfloat16()
    kernel(weight, weight.float()[:, :0], weight.float().t()[:, :0], 0.1, 0.0, 1)
    assert weight.isnan().all()
    weight, copy = torch.full((2, 3), float("nan"), device=device), torch.zeros(2, 3, device=device)
    copy = copy.bfloat16()
    assert copy._version == weight._version == 0
    kernel(weight, weight[:, :0], weight.t()[:, :0], 0.1, 0.0, copy=copy)
    assert copy.isnan().all()
    # A graph that saved what is overwritten fails in its backward, as it does with torch's operations.
    assert copy._version == weight._version == 1
    weight = weight.bfloat16()
    kernel(weight[:0], weight.float()[:0], torch.ones(3, 3, device=device), 0.1, 0.0, 1)


def test_kernel():
    pytest.importorskip("triton")
    run_interpreted(__file__, "check_kernel")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_kernel_on_gpu():
    check_kernel("cuda")
