"""Moments, direction and residual of a stack: the rule they fuse, members that take no step, the kernel
against float64."""

from math import inf, nan

import pytest
import torch
from interpreted import assert_as_accurate, run_interpreted

from hmt_deepspeed.kernels import moment_update
from hmt_deepspeed.kernels.moment_update import moment_update_, moment_update_reference_

# members, rows, r, k
SHAPES = [
    (16, 1, 1, 1),
    (2, 3, 257, 5),
    (3, 65, 130, 2),
    (2, 257, 1, 33),
    (1, 33, 96, 160),
    (2, 17, 77, 7),  # r + k = 84
    (2, 40, 128, 0),
    (2, 1, 81 * 81, 0),  # a two-sided core
]
BETAS = [(0.9, 0.999), (0.3, 0.5), (0.0, 0.95)]


def inputs(shape, beta2, seed=0):
    """Gradients over eight decades with a zero column, moments of a few steps, their evidence; then what each
    member is scaled by."""
    (members, rows, rank, probes), generator = shape, torch.Generator().manual_seed(seed)
    gradient = torch.randn(members, rows, rank + probes, generator=generator)
    mean, square = torch.randn(2, members, rows, rank, generator=generator)
    size = 10.0 ** torch.linspace(-4, 4, rank)
    size[-1] = size[-1] * (rank == 1)
    gradient[..., :rank] *= size
    steps = 1 + torch.arange(rank, dtype=torch.float32) % 50
    evidence = (1 - beta2**steps).repeat(members, 1)
    number = torch.arange(members, dtype=torch.float32)
    states = [mean * size, (square * size).square(), evidence, 0.7 + 0.1 * number]
    return [gradient, *states], {"factor": 1.5 - 0.4 * (number % 4), "residual_scale": 3.0 + number}


def formula(gradient, mean, square, evidence, first, beta1, beta2, eps, *, factor, residual_scale):
    """Moments, update and squares in fp64, and of each the size of what is added up for it."""
    widths = (mean.shape[2], gradient.shape[2] - mean.shape[2])
    inside, outside = (gradient.double() * factor.double()[:, None, None]).split(widths, dim=2)
    square = beta2 * square.double() + (1 - beta2) * inside.square()
    denominator = (square / evidence.double()[:, None]).sqrt() + eps
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
        results.append((moved, square, torch.cat((direction, residual), dim=2), squares))
    return results


def applied(update, tensors, *constants, **scales):
    """Moments, update and squares by one of the implementations."""
    gradient, mean, square, *evidence = [tensor.clone() for tensor in tensors]
    squares = update(gradient, mean, square, *evidence, *constants, **scales)
    return mean, square, gradient, squares


def test_with_full_evidence_it_is_torch_adam():
    weight = torch.nn.Parameter(torch.zeros(6, 4))
    betas, eps, one = (0.9, 0.95), 1e-8, torch.ones(1)
    optimizer = torch.optim.Adam([weight], lr=1.0, betas=betas, eps=eps)
    mean, second = torch.zeros(1, 6, 4), torch.zeros(1, 6, 4)
    generator = torch.Generator().manual_seed(0)
    for i in range(8):
        before = weight.detach().clone()
        weight.grad = torch.randn(6, 4, generator=generator)
        optimizer.step()
        evidence = torch.full((1, 4), 1 - betas[1] ** (i + 1))
        first = one - betas[0] ** (i + 1)
        update = weight.grad.clone()[None]
        scales = {"factor": one, "residual_scale": one}
        assert not moment_update_(
            update, mean, second, evidence, first, *betas, eps, **scales
        ).any()
        torch.testing.assert_close(update[0], before - weight.detach(), rtol=1e-4, atol=1e-5)


def test_less_evidence_of_a_direction_counts_the_new_gradient_more():
    gradient, mean, second = torch.ones(1, 1, 2), torch.zeros(1, 1, 2), torch.zeros(1, 1, 2)
    evidence = torch.tensor([[0.05, 0.5]])  # beta2 = .95: the first has seen this gradient only
    scales = {"factor": torch.ones(1), "residual_scale": torch.ones(1)}
    moment_update_(gradient, mean, second, evidence, torch.tensor([0.1]), 0.9, 0.95, 0.0, **scales)
    torch.testing.assert_close(gradient, torch.tensor([[[1.0, 10**0.5]]]))


def test_a_row_that_the_basis_misses_moves_as_far_as_its_direction():
    """A is a thousandth of S: ``phi ||S||`` is ``||U||``, not a thousand times as much."""
    tensors, _ = inputs((1, 4, 8, 4), 0.999)
    tensors[0][..., :8] = 1e-3
    scales = {"factor": torch.ones(1), "residual_scale": torch.tensor([2.0])}
    _, _, update, squares = applied(moment_update_, tensors, 0.9, 0.999, 1e-8, **scales)
    direction, residual = update.split((8, 4), dim=2)
    torch.testing.assert_close(residual.norm(dim=2), 2 * direction.norm(dim=2))
    torch.testing.assert_close(residual.square().sum(dim=2), squares)


def check_members_that_take_no_step(update, device="cpu"):
    for shape in ((4, 5, 33, 8), (4, 5, 33, 0)):
        tensors, scales = inputs(shape, 0.999)
        tensors[0][1, 2], tensors[0][1, 3] = nan, inf
        tensors[0][2, :, 33:] = inf
        tensors[2][1, 0, 0] = -0.0
        tensors[3][1] = 0.0  # no evidence yet
        scales["factor"] = torch.tensor([1.0, 0.0, 0.5, 1.0])
        scales["residual_scale"] = torch.tensor([1.0, 2.0, 0.0, 1.0])
        tensors = [tensor.to(device) for tensor in tensors]
        scales = {name: value.to(device) for name, value in scales.items()}
        mean, square, gradient, squares = applied(update, tensors, 0.9, 0.999, 0.0, **scales)
        for kept, before in ((mean[1], tensors[1][1]), (square[1], tensors[2][1])):
            assert torch.equal(kept.view(torch.int32), before.view(torch.int32))
        assert not gradient[1].any()
        assert not gradient[2, :, 33:].any()
        assert not squares[1:3].any()
        assert gradient[2, :, :32].all()
        alone = applied(update, [tensor[3:] for tensor in tensors], 0.9, 0.999, 0.0, **{
            name: value[3:] for name, value in scales.items()
        })  # fmt: skip
        for whole, part in zip((mean, square, gradient, squares), alone, strict=True):
            assert torch.equal(whole[3:].nan_to_num(7.0), part.nan_to_num(7.0))


def test_members_that_take_no_step():
    check_members_that_take_no_step(moment_update_)


@pytest.mark.parametrize("shape", SHAPES)
def test_pieces_of_a_stack_do_not_matter(shape, monkeypatch):
    tensors, scales = inputs(shape, 0.999)
    whole = applied(moment_update_, tensors, 0.9, 0.999, 1e-8, **scales)
    monkeypatch.setattr(moment_update, "CACHED", 200)
    parts = applied(moment_update_, tensors, 0.9, 0.999, 1e-8, **scales)
    assert all(torch.equal(first, second) for first, second in zip(whole, parts, strict=True))


@pytest.mark.parametrize(
    "change",
    [
        {"gradient": torch.ones(2, 4, 5).bfloat16()},
        {"gradient": torch.ones(4, 5)},
        {"gradient": torch.ones(2, 4, 2)},
        {"gradient": torch.ones(2, 5, 4).mT},
        {"exp_avg": torch.ones(2, 3, 3)},
        {"exp_avg": torch.ones(2, 3, 4).mT},
        {"exp_avg_sq": torch.ones(2, 3, 4).mT},
        {"exp_avg_sq": torch.ones(2, 4, 3).double()},
        {"evidence": torch.ones(3)},
        {"evidence": torch.ones(2, 4)},
        {"first_evidence": torch.ones(1)},
        {"factor": torch.ones(4)[::2]},
        {"residual_scale": torch.ones(2).double()},
    ],
)
def test_refuses(change):
    arguments = {name: torch.ones(2, 4, 3) for name in ("exp_avg", "exp_avg_sq")}
    arguments |= {"gradient": torch.ones(2, 4, 5), "evidence": torch.ones(2, 3)}
    vectors = ("first_evidence", "factor", "residual_scale")
    arguments |= {name: torch.ones(2) for name in vectors}
    constants = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8}
    moment_update_(**arguments, **constants)
    (name,) = change
    with pytest.raises(ValueError, match=f"{name}|exp_avg|B x r"):
        moment_update_(**(arguments | change), **constants)


def check_kernel(device="cpu"):
    kernel = moment_update.moment_update_triton_
    for shape in SHAPES:
        for betas in BETAS:
            tensors, scales = inputs(shape, betas[1], seed=shape[1])
            constants = (*betas, 1e-8)
            exact, terms = formula(*tensors, *constants, **scales)
            twin = applied(moment_update_reference_, tensors, *constants, **scales)
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
