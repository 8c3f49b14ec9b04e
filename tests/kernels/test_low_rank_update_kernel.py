"""Low-rank updates: the kernel against float64 and against its twin."""

import pytest
import torch
from interpreted import assert_as_accurate, run_interpreted
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
    members,
    narrowed,
    padded,
    stack,
    update_,
    with_rows,
)

from hmt_deepspeed.kernels import low_rank_update
from hmt_deepspeed.kernels.launching import count_of, device_table
from hmt_deepspeed.kernels.low_rank_factors import Factors


def check_kernel_in_tensors(device="cpu"):
    check_in_tensors(kernel, device)


def kernel(
    weights,
    update,
    projections,
    lr,
    weight_decay,
    *,
    rank,
    column_scale,
    keys,
    transposed=False,
    **rest,
):
    factors = Factors(update, projections, rank, column_scale, transposed)
    factors.check(weights[0].shape[-2:], count_of(weights))
    low_rank_update.low_rank_updates_triton_(weights, factors, lr, weight_decay, keys, **rest)


def check_kernel(device="cpu"):
    for rows, n, width in SHAPES:
        weight, update, projection = inputs(rows, n, width, seed=rows)
        for columns in (projection, padded(projection)):
            expected = formula(weight, update, columns, 0.3, 0.1)
            first, second = weight.clone(), weight.to(device, copy=True)
            update_(first, update, columns, 0.3, 0.1)
            given = stack(second, padded(update.to(device)), columns.to(device))
            kernel(**given, lr=0.3, weight_decay=0.1)
            terms = formula(-weight.abs(), update.abs(), columns.abs(), 0.3, 0.1).abs()
            assert_as_accurate(second.cpu(), first, expected, terms)

        for dtype in (torch.bfloat16, torch.float16):
            left, right = update.to(dtype), projection.to(dtype)
            expected = formula(weight, left, right, 0.3, 0.1)
            terms = formula(-weight.abs(), left.abs(), right.abs(), 0.3, 0.1).abs()
            first, second = weight.clone(), weight.to(device, copy=True)
            copy = torch.empty_like(second, dtype=dtype)
            update_(first, left.float(), right.float(), 0.3, 0.1)
            kernel(
                **stack(second, update.to(device), right.to(device), copy=copy),
                lr=0.3,
                weight_decay=0.1,
            )
            # Products of 16-bit numbers are exact in fp32: as accurate as fp32 factors of these values.
            assert_as_accurate(second.cpu(), first, expected, terms)
            assert torch.equal(copy, second.to(dtype))

        weight, update, projection = exact_inputs(rows, n, width)
        for offset, key in zip(OFFSETS, (0, 1, (1 << 63) - 5, 0xFFFFFFFF, 1 << 62), strict=True):
            first, second = weight.clone(), weight.to(device, copy=True)
            update_(first, update, projection, 0.125, 0.5, key, offset)
            given = stack(second, update.to(device), projection.to(device), key)
            kernel(**given, lr=0.125, weight_decay=0.5, offset=offset)
            assert torch.equal(first, second.cpu()), (rows, n, width, key, offset)


def check_kernel_modes(device="cpu"):
    for mode in MODES:
        given = members(*mode)
        after = cloned(given, device)
        lr, decay = torch.tensor(0.125, device=device), torch.tensor(0.5, device=device)
        kernel(**after, lr=lr, weight_decay=0.5, offset=11)
        check_stack(mode, given, cloned(after), 0.125, 0.5)
    again = cloned(given, device)
    kernel(**again, lr=0.125, weight_decay=decay, offset=11)
    assert all(map(torch.equal, again["weights"], after["weights"]))


def check_kernel_rows(device="cpu"):
    """Of the matrices' dtypes two with each mode, and each with every dtype of the weights and either side."""
    dtypes = torch.float32, torch.bfloat16, torch.float16
    for number, mode in enumerate(FP32_MODES):
        for place, width in enumerate((37, 0)):
            given = with_rows(narrowed(members(*mode), width), dtypes[(number + place) % 3], number)
            after = cloned(given, device)
            kernel(**after, lr=0.125, weight_decay=0.5, offset=11)
            check_rows(given, cloned(after), 0.125, 0.5)


def check_kernel_launches(device="cpu"):
    """One for all matrices, of a table that is made once."""
    launched, real = [], low_rank_update._low_rank_update_kernel

    class Counted:
        def __getitem__(self, grid):
            launched.append(grid)
            return real[grid]

    low_rank_update._low_rank_update_kernel = Counted()
    after = cloned(members(torch.float32, False, torch.bfloat16, torch.bfloat16, True), device)
    device_table.cache_clear()
    for _ in range(3):
        kernel(**after, lr=0.125, weight_decay=0.5)
    assert len(launched) == 3
    assert device_table.cache_info()[:2] == (2, 1)  # found again, made
    low_rank_update._low_rank_update_kernel = real


def check_kernel_edges(device="cpu"):
    def given(weight, copy=None):
        update, projection = weight.float()[:, :0], weight.float().t()[:, :0]
        return stack(weight, update, projection, key=1, copy=copy)

    weight = torch.full((2, 3), float("nan"), device=device)
    copy = torch.zeros(2, 3, device=device).bfloat16()
    assert copy._version == weight._version == 0
    kernel(**given(weight, copy), lr=0.1, weight_decay=0.0)
    assert copy.isnan().all()
    # A graph that saved what is overwritten fails in its backward, as it does with torch's operations.
    assert copy._version == weight._version == 1
    weight = weight.bfloat16()
    kernel(**given(weight), lr=0.1, weight_decay=0.0)
    assert weight.isnan().all()
    kernel(
        **stack(weight[:0], weight.float()[:0], torch.ones(3, 3, device=device), 1),
        lr=0.1,
        weight_decay=0.0,
    )


@pytest.mark.parametrize(
    "check",
    [
        "check_kernel",
        "check_kernel_modes",
        "check_kernel_rows",
        "check_kernel_launches",
        "check_kernel_edges",
        "check_kernel_in_tensors",
    ],
)
def test_kernel(check):
    pytest.importorskip("triton")
    run_interpreted(__file__, check)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    "check",
    [
        check_kernel,
        check_kernel_modes,
        check_kernel_rows,
        check_kernel_launches,
        check_kernel_edges,
        check_kernel_in_tensors,
    ],
)
def test_kernel_on_gpu(check):
    check("cuda")
