"""Moments and direction: the rule they fuse, the kernel against float64."""

import pytest
import torch
from interpreted import assert_as_accurate, run_interpreted, strided

from hmt_deepspeed.kernels import moment_update
from hmt_deepspeed.kernels.moment_update import moment_update_, moment_update_reference_

SHAPES = [(1, 1), (3, 257), (65, 130), (257, 1), (33, 96), (40, 128), (1, 81 * 81)]
BETAS = [(0.9, 0.999), (0.3, 0.5), (0.0, 0.95)]


def inputs(rows, rank, beta2, seed=0):
    """Gradients over eight decades with a zero column, moments of a few steps, their evidence."""
    generator = torch.Generator().manual_seed(seed)
    projected, mean, square = (torch.randn(rows, rank, generator=generator) for _ in range(3))
    size = 10.0 ** torch.linspace(-4, 4, rank)
    size[-1] = size[-1] * (rank == 1)
    steps = 1 + torch.arange(rank, dtype=torch.float32) % 50
    return projected * size, mean * size, (square * size).square(), 1 - beta2**steps


def formula(projected, mean, square, evidence, first, beta1, beta2, eps):
    projected, mean, square, evidence = (t.double() for t in (projected, mean, square, evidence))
    mean = mean + (1 - beta1) * (projected - mean)
    square = beta2 * square + (1 - beta2) * projected**2
    return mean, square, mean / first / ((square / evidence).sqrt() + eps)


def test_with_full_evidence_it_is_torch_adam():
    weight = torch.nn.Parameter(torch.zeros(6, 4))
    betas, eps = (0.9, 0.95), 1e-8
    optimizer = torch.optim.Adam([weight], lr=1.0, betas=betas, eps=eps)
    mean, second = torch.zeros(6, 4), torch.zeros(6, 4)
    generator = torch.Generator().manual_seed(0)
    for i in range(8):
        before = weight.detach().clone()
        weight.grad = torch.randn(6, 4, generator=generator)
        optimizer.step()
        evidence = torch.full((4,), 1 - betas[1] ** (i + 1))
        first = 1 - betas[0] ** (i + 1)
        direction = moment_update_(weight.grad, mean, second, evidence, first, *betas, eps)
        torch.testing.assert_close(direction, before - weight.detach(), rtol=1e-4, atol=1e-5)


def test_less_evidence_of_a_direction_counts_the_new_gradient_more():
    gradient, mean, second = torch.ones(1, 2), torch.zeros(1, 2), torch.zeros(1, 2)
    evidence = torch.tensor([0.05, 0.5])  # beta2 = .95: the first has seen this gradient only
    direction = moment_update_(gradient, mean, second, evidence, 0.1, 0.9, 0.95, 0.0)
    torch.testing.assert_close(direction, torch.tensor([[1.0, 10**0.5]]))


@pytest.mark.parametrize(
    "change",
    [
        {"projected": torch.ones(4, 3).bfloat16()},
        {"projected": torch.ones(3, 4)},
        {"projected": torch.ones(12)},
        {"exp_avg": torch.ones(4, 2)},
        {"exp_avg": torch.ones(3, 4).t()},
        {"exp_avg_sq": torch.ones(3, 4).t()},
        {"exp_avg_sq": torch.ones(4, 3).double()},
        {"evidence": torch.ones(4)},
        {"evidence": torch.ones(6)[::2]},
    ],
)
def test_refuses(change):
    arguments = {name: torch.ones(4, 3) for name in ("projected", "exp_avg", "exp_avg_sq")}
    arguments["evidence"] = torch.ones(3)
    constants = {"first_evidence": 1.0, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8}
    moment_update_(**arguments, **constants)
    with pytest.raises(ValueError):
        moment_update_(**(arguments | change), **constants)


def check_kernel(device="cpu"):
    for rows, rank in SHAPES:
        for betas in BETAS:
            projected, mean, square, evidence = inputs(rows, rank, betas[1], seed=rows)
            constants = (0.7, *betas, 1e-8)
            exact = formula(projected, mean, square, evidence, *constants)
            twin = [mean.clone(), square.clone()]
            twin.append(moment_update_reference_(projected, *twin, evidence, *constants))
            wide = torch.full((rows, rank + 5), float("nan"))
            wide[:, 2:-3] = projected
            for source in (wide.to(device)[:, 2:-3], strided(projected.to(device))):
                out = [mean.to(device, copy=True), square.to(device, copy=True)]
                out.append(
                    moment_update.moment_update_triton_(
                        source, *out, evidence.to(device), *constants
                    )
                )
                assert_accurate(out, twin, exact, (projected, mean, square, evidence, *constants))


def assert_accurate(out, twin, exact, inputs):
    projected, mean, *others = inputs
    # A difference m - A rounds by the larger of the two, and so does what is made of it.
    terms = formula(-projected.abs(), -mean.abs(), *others)
    for kernel, twin_result, expected, size in zip(out, twin, exact, terms, strict=True):
        assert_as_accurate(kernel.cpu(), twin_result, expected, size.abs())


def test_kernel():
    pytest.importorskip("triton")
    run_interpreted(__file__, "check_kernel")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_kernel_on_gpu():
    check_kernel("cuda")
