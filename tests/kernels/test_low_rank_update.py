"""Low-rank updates: the formula and the noise."""

import pytest
import torch
from low_rank_updates import (
    FP32_MODES,
    MODES,
    OFFSETS,
    SHAPES,
    check_in_tensors,
    check_rows,
    check_stack,
    cloned,
    exact_inputs,
    formula,
    inputs,
    magnitude,
    members,
    narrowed,
    padded,
    update_,
    with_rows,
)

from hmt_deepspeed.kernels import chunks
from hmt_deepspeed.kernels.low_rank_factors import ScaledRows, low_rank_product
from hmt_deepspeed.kernels.low_rank_update import low_rank_updates_
from hmt_deepspeed.kernels.stochastic_rounding import stochastic_round


@pytest.mark.parametrize(("rows", "n", "width"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_formula(rows, n, width, dtype):
    weight, update, projection = inputs(rows, n, width)
    projection = projection.to(dtype)
    expected = formula(weight, update, projection, 0.3, 0.1)
    update_(weight, padded(update), padded(projection), 0.3, 0.1)
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
    update_(weight, update, projection, 0.3, 0.1)
    summed = 16 * (width + 3) * 2.0**-23
    # bf16 rounds by at most 2^-8 of a value: the factor, then the twin's product.
    assert ((weight - exact).abs() < 2.01 * 2.0**-8 * terms + summed).all()
    assert ((weight - rounded).abs() < 1.01 * 2.0**-8 * terms + summed).all()
    product = low_rank_product(update, projection)
    assert product.dtype == torch.bfloat16


def test_a_bf16_product_leaves_small_weights_their_digits():
    # 300 elements of very different sizes: the weight is summed in fp32, whatever the product is in.
    weight = torch.logspace(-6, 6, 300).view(3, 100)
    before = weight.double()
    update, projection = torch.ones(3, 1), torch.ones(100, 1).bfloat16()
    update_(weight, update, projection, 1e-3, 0.0)
    assert torch.allclose(weight.double(), before - 1e-3, rtol=2.0**-23, atol=2.0**-33)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("chunk", [300, 1 << 20])
def test_copy_is_the_rounded_weight(dtype, chunk, monkeypatch):
    monkeypatch.setattr(chunks, "CHUNK_ELEMENTS", chunk)
    weight, update, projection = inputs(65, 130, 33)
    twin, copy = weight.clone(), torch.empty_like(weight, dtype=dtype)
    update_(weight, update, projection, 0.3, 0.1, copy=copy)
    update_(twin, update, projection, 0.3, 0.1)
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
    update_(weight, update, projection, 0.125, 0.5, 77, offset)
    assert torch.equal(weight, expected)
    for rows in (slice(0, 20), slice(20, 65)):
        start = offset + rows.start * 130
        update_(halves[rows], update[rows], projection, 0.125, 0.5, 77, start)
    assert torch.equal(halves, expected)


@pytest.mark.parametrize("mode", MODES)
def test_stack(mode):
    given = members(*mode)
    after = cloned(given)
    low_rank_updates_(**after, lr=0.125, weight_decay=0.5, offset=11)
    check_stack(mode, given, after, 0.125, 0.5)
    assert torch.equal(after["update"].nan_to_num(), given["update"].nan_to_num())
    again = cloned(given)
    numbers = {"lr": torch.tensor(0.125), "weight_decay": torch.tensor(0.5)}
    low_rank_updates_(**again, **numbers, offset=11)
    assert all(map(torch.equal, again["weights"], after["weights"]))


def test_a_matrix_of_a_stack_moves_as_it_does_alone():
    given = members(torch.bfloat16, False, torch.bfloat16, None, False)
    after = cloned(given)
    low_rank_updates_(**after, lr=0.125, weight_decay=0.5)
    for b in (0, 2, 3):
        alone = cloned(given)
        arguments = {
            name: alone[name][b : b + 1]
            for name in alone
            if name in ("weights", "update", "projections", "column_scale", "keys")
        }
        low_rank_updates_(**arguments, rank=given["rank"], lr=0.125, weight_decay=0.5)
        assert torch.equal(alone["weights"][b], after["weights"][b])


@pytest.mark.parametrize("width", [37, 0])
@pytest.mark.parametrize("matrix_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mode", FP32_MODES)
def test_rows_beside(mode, matrix_dtype, width, monkeypatch):
    monkeypatch.setattr(chunks, "CHUNK_ELEMENTS", 1000)
    given = with_rows(narrowed(members(*mode), width), matrix_dtype, len(mode))
    after = cloned(given)
    low_rank_updates_(**after, lr=0.125, weight_decay=0.5, offset=11)
    check_rows(given, after, 0.125, 0.5)


def test_matrices_in_one_tensor():
    check_in_tensors(low_rank_updates_)


@pytest.mark.parametrize(
    ("matrices", "scale"),
    [
        ([torch.ones(4, 6)], torch.ones(2, 4)),
        ([torch.ones(4, 6)] * 2, torch.ones(2, 6)),
        ([torch.ones(4, 6)] * 2, torch.ones(2, 4).double()),
        ([torch.ones(4, 6)] * 2, torch.ones(4, 2).t()),
        ([torch.ones(6, 4)] * 2, torch.ones(2, 4)),
        ([torch.ones(4, 6).double()] * 2, torch.ones(2, 4)),
        ([torch.ones(4, 6), torch.ones(4, 6).half()], torch.ones(2, 4)),
        ([torch.ones(4, 6), torch.ones(6, 4).t()], torch.ones(2, 4)),
        ([], torch.ones(2, 4)),
    ],
)
def test_refuses_rows_beside(matrices, scale):
    arguments = {
        "weights": [torch.ones(4, 6), torch.ones(4, 6)],
        "update": torch.ones(2, 4, 2),
        "projections": [torch.ones(6, 2)] * 2,
        "rank": 1,
        "column_scale": torch.ones(2, 2),
        "keys": None,
        "lr": 0.1,
        "weight_decay": 0,
    }
    low_rank_updates_(**arguments, beside=ScaledRows([torch.ones(4, 6)] * 2, torch.ones(2, 4)))
    with pytest.raises(ValueError):
        low_rank_updates_(**arguments, beside=ScaledRows(matrices, scale))


@pytest.mark.parametrize(
    "change",
    [
        {"weights": []},
        {"weights": [torch.ones(4, 6).half()] * 2},
        {"weights": [torch.ones(4, 6).bfloat16()] * 2},  # no keys
        {"weights": [torch.ones(4, 6), torch.ones(4, 6).bfloat16()]},
        {"weights": [torch.ones(4, 6), torch.ones(6, 4).t()]},
        {"weights": [torch.ones(4, 6)] * 3},
        {"weights": [torch.ones(24)] * 2},
        {"update": torch.ones(2, 3, 2)},
        {"update": torch.ones(1, 4, 2)},
        {"update": torch.ones(4, 2)},
        {"update": torch.ones(2, 4, 2).double()},
        {"update": torch.ones(2, 2, 4).mT},
        {"projections": [torch.ones(6, 3)] * 2},
        {"projections": [torch.ones(6, 2)]},
        {"projections": [torch.ones(6, 2), torch.ones(6, 2).half()]},
        {"projections": [torch.ones(6, 2), torch.ones(6, 4)[:, :2]]},
        {"projections": torch.ones(2, 5, 2)},
        {"projections": torch.ones(2, 6, 2).int()},
        {"projections": torch.ones(2, 2, 6).mT},
        {"copies": [torch.ones(4, 6)] * 2},
        {"copies": [torch.ones(4, 6).half()]},
        {"copies": [torch.ones(6, 4).half()] * 2},
        {"copies": [torch.ones(6, 4).half().t()] * 2},
        {"rank": 3},
        {"column_scale": torch.ones(2)},
        {"column_scale": torch.ones(2, 2).double()},
        {"column_scale": torch.ones(2, 2).t()},
        {"transposed": True},
        {"weights": [torch.ones(4, 6).bfloat16()] * 2, "keys": torch.ones(2, 2)},
        {"weights": [torch.ones(4, 6).bfloat16()] * 2, "keys": torch.ones(1, 2).int()},
    ],
)
def test_refuses(change):
    arguments = {
        "weights": [torch.ones(4, 6), torch.ones(4, 6)],
        "update": torch.ones(2, 4, 2),
        "projections": [torch.ones(6, 2)] * 2,
        "rank": 1,
        "column_scale": torch.ones(2, 2),
        "keys": None,
    }
    low_rank_updates_(**arguments, lr=0.1, weight_decay=0)
    with pytest.raises(ValueError):
        low_rank_updates_(**(arguments | change), lr=0.1, weight_decay=0)
