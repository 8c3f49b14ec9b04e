"""As of the moment update, beside a factored second moment: the rule, the kernel against float64."""

from math import inf, nan

import pytest
import torch
from interpreted import assert_as_accurate, run_interpreted

from hmt_deepspeed.kernels import factored_moment_update
from hmt_deepspeed.kernels.factored_moment_update import (
    factored_moment_update_,
    factored_moment_update_reference_,
)

# members, rows, r, k
SHAPES = [
    (16, 1, 1, 1),
    (2, 3, 257, 5),
    (3, 65, 130, 2),
    (2, 257, 1, 33),
    (1, 33, 96, 160),
    (2, 17, 77, 7),  # r + k = 84
    (2, 40, 128, 0),
    (1, 9, 520, 40),
]
BETAS = [(0.9, 0.999), (0.3, 0.5), (0.0, 0.95)]


def inputs(shape, seed=0):
    """Gradients over eight decades with a zero row, a first moment, means of rows, roots of columns; then what
    each member is scaled by."""
    (members, rows, rank, probes), generator = shape, torch.Generator().manual_seed(seed)
    gradient = torch.randn(members, rows, rank + probes, generator=generator)
    mean = torch.randn(members, rows, rank, generator=generator)
    size = 10.0 ** torch.linspace(-4, 4, rows).unsqueeze(1)
    size[-1] = size[-1] * (rows == 1)
    row_means = torch.rand(members, rows, generator=generator) * size.squeeze(1).square()
    roots = torch.logspace(-2, 1, rank).repeat(members, 1)
    number = torch.arange(members, dtype=torch.float32) % 4
    scales = {"factor": 1.5 - 0.4 * number, "residual_scale": 3.0 + number}
    return [gradient * size, mean * size, row_means, roots, 0.7 + 0.1 * number], scales


def formula(gradient, mean, rows, columns, first, beta1, beta2, eps, *, factor, residual_scale):
    """First moment, row means, update and squares in fp64, and of each the size of what is added up for it."""
    widths = (mean.shape[2], gradient.shape[2] - mean.shape[2])
    inside, outside = (gradient.double() * factor.double()[:, None, None]).split(widths, dim=2)
    rows = beta2 * rows.double() + (1 - beta2) * inside.square().mean(dim=2)
    denominator = rows.sqrt()[..., None] * columns.double()[:, None] + eps
    seen = torch.maximum(inside.norm(dim=2), outside.norm(dim=2)).clamp_min(1e-30)
    start, results = mean.double(), []
    # A difference A - m rounds by the larger of the two, and so does what is made of it.
    for moved in (
        start + (1 - beta1) * (inside - start),
        start.abs() + (1 - beta1) * (inside.abs() + start.abs()),
    ):
        direction = moved / denominator / first.double()[:, None, None]
        phi = residual_scale.double()[:, None] * direction.norm(dim=2) / seen
        residual = phi[..., None] * (outside.abs() if results else outside)
        # What a square rounds by is twice its root's.
        squares = (1 + len(results)) * residual.square().sum(dim=2)
        results.append((moved, rows, torch.cat((direction, residual), dim=2), squares))
    return results


def applied(update, tensors, *constants, **scales):
    """First moment, row means, update and squares by one of the implementations."""
    gradient, mean, rows, *others = [tensor.clone() for tensor in tensors]
    squares = update(gradient, mean, rows, *others, *constants, **scales)
    return mean, rows, gradient, squares


def test_of_one_row_it_is_the_sign_times_the_columns_share():
    """A first step: |A_j| / sqrt(mean A^2), over the column's own root."""
    gradient = torch.tensor([[[3.0, -4.0]]])
    mean, rows, one = torch.zeros(1, 1, 2), torch.zeros(1, 1), torch.ones(1)
    mean_square = gradient.square().mean()
    roots = gradient.abs().view(1, -1) / mean_square / 0.001**0.5
    expected = gradient.sign() * mean_square.sqrt()
    scales = {"factor": one, "residual_scale": one}
    factored_moment_update_(gradient, mean, rows, roots, 0.1 * one, 0.9, 0.999, 0.0, **scales)
    torch.testing.assert_close(gradient, expected)
    torch.testing.assert_close(rows, 0.001 * mean_square.view(1, 1))


def check_members_that_take_no_step(update, device="cpu"):
    tensors, scales = inputs((4, 5, 33, 8))
    tensors[0][1, 2], tensors[0][1, 3] = nan, inf
    tensors[0][2, :, 33:] = inf
    scales["factor"] = torch.tensor([1.0, 0.0, 0.5, 1.0])
    scales["residual_scale"] = torch.tensor([1.0, 2.0, 0.0, 1.0])
    tensors = [tensor.to(device) for tensor in tensors]
    scales = {name: value.to(device) for name, value in scales.items()}
    mean, rows, gradient, squares = applied(update, tensors, 0.9, 0.999, 1e-8, **scales)
    for kept, before in ((mean[1], tensors[1][1]), (rows[1], tensors[2][1])):
        assert torch.equal(kept.view(torch.int32), before.view(torch.int32))
    assert not gradient[1].any()
    assert not gradient[2, :, 33:].any()
    assert not squares[1:3].any()
    assert gradient[2, :4, :33].all()


def test_members_that_take_no_step():
    check_members_that_take_no_step(factored_moment_update_)


@pytest.mark.parametrize("shape", SHAPES)
def test_pieces_of_a_stack_do_not_matter(shape, monkeypatch):
    tensors, scales = inputs(shape)
    whole = applied(factored_moment_update_, tensors, 0.9, 0.999, 1e-8, **scales)
    monkeypatch.setattr(factored_moment_update, "CACHED", 200)
    parts = applied(factored_moment_update_, tensors, 0.9, 0.999, 1e-8, **scales)
    assert all(torch.equal(first, second) for first, second in zip(whole, parts, strict=True))


@pytest.mark.parametrize(
    "change",
    [
        {"gradient": torch.ones(2, 4, 2)},
        {"exp_avg": torch.ones(2, 3, 4).mT},
        {"row_means": torch.ones(2, 3)},
        {"row_means": torch.ones(2, 4, 1)},
        {"row_means": torch.ones(2, 4).double()},
        {"column_roots": torch.ones(2, 4)},
        {"column_roots": torch.ones(2, 6)[:, ::2]},
        {"factor": torch.ones(1)},
    ],
)
def test_refuses(change):
    arguments = {"gradient": torch.ones(2, 4, 5), "exp_avg": torch.ones(2, 4, 3)}
    arguments |= {"row_means": torch.ones(2, 4), "column_roots": torch.ones(2, 3)}
    vectors = ("first_evidence", "factor", "residual_scale")
    arguments |= {name: torch.ones(2) for name in vectors}
    constants = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8}
    factored_moment_update_(**arguments, **constants)
    (name,) = change
    with pytest.raises(ValueError, match=f"{name}|exp_avg|B x r"):
        factored_moment_update_(**(arguments | change), **constants)


def check_kernel(device="cpu"):
    kernel = factored_moment_update.factored_moment_update_triton_
    for shape in SHAPES:
        for betas in BETAS:
            tensors, scales = inputs(shape, seed=shape[1])
            constants = (*betas, 1e-8)
            exact, terms = formula(*tensors, *constants, **scales)
            twin = applied(factored_moment_update_reference_, tensors, *constants, **scales)
            on_device = [tensor.to(device) for tensor in tensors]
            scales = {name: value.to(device) for name, value in scales.items()}
            out = applied(kernel, on_device, *constants, **scales)
            for found, other, expected, size in zip(out, twin, exact, terms, strict=True):
                assert_as_accurate(found.cpu(), other, expected, size)
    check_members_that_take_no_step(kernel, device)


def test_kernel():
    pytest.importorskip("triton")
    run_interpreted(__file__, "check_kernel")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_kernel_on_gpu():
    check_kernel("cuda")
