"""First moment and direction beside a factored second moment: the rule they fuse, the kernel against float64."""

import pytest
import torch
from interpreted import assert_as_accurate, run_interpreted, strided

from hmt_deepspeed.kernels import factored_moment_update
from hmt_deepspeed.kernels.factored_moment_update import (
    factored_moment_update_,
    factored_moment_update_reference_,
)

SHAPES = [(1, 1), (3, 257), (65, 130), (257, 1), (33, 96), (40, 128), (9, 520)]
BETAS = [(0.9, 0.999), (0.3, 0.5), (0.0, 0.95)]


def inputs(rows, rank, seed=0):
    """Gradients over eight decades with a zero row, a first moment, means of rows, roots of columns."""
    generator = torch.Generator().manual_seed(seed)
    projected, mean = (torch.randn(rows, rank, generator=generator) for _ in range(2))
    size = 10.0 ** torch.linspace(-4, 4, rows).unsqueeze(1)
    size[-1] = size[-1] * (rows == 1)
    row_means = torch.rand(rows, generator=generator) * size.squeeze(1).square()
    return projected * size, mean * size, row_means, torch.logspace(-2, 1, rank)


def formula(projected, mean, rows, columns, first, beta1, beta2, eps):
    projected, mean, rows, columns = (t.double() for t in (projected, mean, rows, columns))
    mean = mean + (1 - beta1) * (projected - mean)
    rows = beta2 * rows + (1 - beta2) * projected.square().mean(1)
    return mean, rows, mean / first / (torch.outer(rows.sqrt(), columns) + eps)


def test_of_one_row_it_is_the_sign_times_the_columns_share():
    """A first step: |A_j| / sqrt(mean A^2), over the column's own root."""
    gradient = torch.tensor([[3.0, -4.0]])
    mean, rows = torch.zeros(1, 2), torch.zeros(1)
    mean_square = gradient.square().mean()
    roots = gradient.abs().view(-1) / mean_square / 0.001**0.5
    direction = factored_moment_update_(gradient, mean, rows, roots, 0.1, 0.9, 0.999, 0.0)
    expected = gradient.sign() * mean_square.sqrt()
    torch.testing.assert_close(direction, expected)
    torch.testing.assert_close(rows, 0.001 * mean_square.view(1))


@pytest.mark.parametrize(
    "change",
    [
        {"projected": torch.ones(4, 3).bfloat16()},
        {"projected": torch.ones(3, 4)},
        {"projected": torch.ones(12)},
        {"exp_avg": torch.ones(4, 2)},
        {"exp_avg": torch.ones(3, 4).t()},
        {"row_means": torch.ones(3)},
        {"row_means": torch.ones(4, 1)},
        {"row_means": torch.ones(4).double()},
        {"column_roots": torch.ones(4)},
        {"column_roots": torch.ones(6)[::2]},
    ],
)
def test_refuses(change):
    arguments = {name: torch.ones(4, 3) for name in ("projected", "exp_avg")}
    arguments |= {"row_means": torch.ones(4), "column_roots": torch.ones(3)}
    constants = {"first_evidence": 1.0, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8}
    factored_moment_update_(**arguments, **constants)
    with pytest.raises(ValueError):
        factored_moment_update_(**(arguments | change), **constants)


def check_kernel(device="cpu"):
    for rows, rank in SHAPES:
        for betas in BETAS:
            projected, mean, row_means, columns = inputs(rows, rank, seed=rows)
            constants = (0.7, *betas, 1e-8)
            exact = formula(projected, mean, row_means, columns, *constants)
            terms = formula(-projected.abs(), -mean.abs(), row_means, columns, *constants)
            twin = [mean.clone(), row_means.clone()]
            twin.append(factored_moment_update_reference_(projected, *twin, columns, *constants))
            wide = torch.full((rows, rank + 5), float("nan"))
            wide[:, 2:-3] = projected
            for source in (wide.to(device)[:, 2:-3], strided(projected.to(device))):
                out = [mean.to(device, copy=True), row_means.to(device, copy=True)]
                out.append(
                    factored_moment_update.factored_moment_update_triton_(
                        source, *out, columns.to(device), *constants
                    )
                )
                # A difference m - A rounds by the larger of the two, and so does what is made of it.
                for found, other, expected, size in zip(out, twin, exact, terms, strict=True):
                    assert_as_accurate(found.cpu(), other, expected, size.abs())


def test_kernel():
    pytest.importorskip("triton")
    run_interpreted(__file__, "check_kernel")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_kernel_on_gpu():
    check_kernel("cuda")
