"""The part of the gradient outside the basis: bounds, expectations, and when there is none."""

import copy

import alone
import pytest
import torch
from hmt_runs import batches, network, train
from low_rank_adamw import low_rank_adamw
from torch import nn

from hmt_deepspeed.kernels import growth_limit

M, N, RANK = 20, 32, 5
BETAS, EPS, LR, SCALE = (0.9, 0.99), 1e-12, 1e-2, 0.5


def gradients(steps, growing=0.0):
    generator = torch.Generator().manual_seed(2)
    strong = torch.randn(M, RANK, generator=generator) @ torch.randn(RANK, N, generator=generator)
    for i in range(steps):
        noise = torch.randn(M, N, generator=generator)
        yield strong + (0.5 + growing * i) * noise


@pytest.fixture
def unlimited(monkeypatch):
    """No limit on the growth of the residual's norm."""
    monkeypatch.setattr(growth_limit, "GROWTH_LIMIT", float("inf"))


def run(series, **options):
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(M, N))
    fields = {"rank": RANK, "scale": SCALE, "update_interval": 10**6, **options}
    optimizer = low_rank_adamw([weight], lr=LR, betas=BETAS, eps=EPS, **fields)
    path = [weight.detach().clone()]
    for gradient in series:
        weight.grad = gradient.clone()
        optimizer.step()
        path.append(weight.detach().clone())
    return path, optimizer


def test_a_row_the_basis_misses_moves_no_further_than_the_floor_allows(unlimited):
    path, optimizer = run(gradients(1), residual="full")
    basis = optimizer.matrices["param_0"].basis
    weight = optimizer.param_groups[0]["params"][0]
    gradient = next(gradients(1))
    gradient[0] -= gradient[0] @ basis @ basis.t()  # this row has nothing inside
    weight.grad = gradient
    before = path[-1][0]
    optimizer.step()
    moved = (weight.detach()[0] - before).norm() / (LR * SCALE)
    # ||U_j|| is a few, the floor a tenth of the residual: not the 1e6 of a ratio of rounding errors
    assert 0 < moved < 10 * 3 * RANK**0.5


def test_projected_backward_is_off_for_the_full_residual():
    model = network()
    optimizer = low_rank_adamw(model, rank=8, residual="full", update_interval=10)
    losses = train(model, optimizer, batches(3))
    assert not optimizer.owned()
    assert all(p.grad is not None for p in model.parameters())
    assert len(losses) == 3
    assert all(matrix.num_probes == 0 for matrix in optimizer.matrices.values())


@pytest.mark.parametrize(("probes", "draws"), [(6, 1000), (2, 2000)])
def test_expected_probe_residual_is_the_exact_one_scaled(unlimited, probes, draws):
    """Over draws of the probes, whose mean is then off by .06 to .08; with few of them c is below the unbiased (n-r)/k, and shrinks it."""
    series = list(gradients(3))
    _, optimizer = run(series, residual="probe", probes=probes)
    matrix = optimizer.matrices["param_0"]
    unbiased = (N - RANK) / probes
    assert matrix.residual_scale == (unbiased if probes == 6 else 8.0)
    gradient, total = series[-1], torch.zeros(M, N)
    basis = matrix.basis.clone()
    for first in range(0, draws, 100):
        columns, twins = torch.empty(100, N, RANK + probes), []
        for place in range(100):
            alone.draw_probes(matrix, first + place)
            columns[place] = matrix.projection
            twins.append(copy.copy(matrix))
            twins[-1].moments = copy.deepcopy(matrix.moments)
            twins[-1].limited_norm = matrix.limited_norm.clone()
        updates = alone.Together(twins).step(gradient @ columns, betas=BETAS, eps=EPS) / SCALE
        total += (updates[..., RANK:] @ columns[..., RANK:].mT).sum(0)
    direction = updates[-1, :, :RANK]
    low = gradient @ basis
    phi = (direction.norm(dim=1) / low.norm(dim=1))[:, None]
    exact = matrix.residual_scale / unbiased * phi * (gradient - low @ basis.t())
    # Rows whose probes outweigh the basis are damped; here the basis holds most of every row.
    error = (total / draws - exact).norm(dim=1) / exact.norm(dim=1)
    assert error.median() < 0.1


@pytest.mark.parametrize("projection", ["right", "two_sided"])
def test_a_basis_that_nobody_measured_has_no_residual(projection):
    """A matrix that waits for its first refresh moves inside its seeded basis only, and the limiter
    starts with the first residual there is."""
    torch.manual_seed(0)
    first, waiting = (nn.Parameter(torch.randn(M, N)) for _ in range(2))
    fields = {"rank": RANK, "update_interval": 100, "max_full_gradient_bytes": 4 * M * N}
    optimizer = low_rank_adamw(
        [first, waiting], lr=LR, weight_decay=0.0, projection=projection, **fields
    )
    optimizer.describe()  # builds the matrices
    matrix = optimizer.matrices["param_1"]
    moved = []
    for gradient in gradients(2):
        first.grad, waiting.grad = gradient.clone(), gradient.clone()
        seeded, before = matrix.basis.clone(), waiting.detach().clone()
        optimizer.step()
        basis = matrix.basis if matrix.measured else seeded
        change = waiting.detach() - before
        moved.append((change - change @ basis @ basis.t()).norm() / change.norm())
        assert (matrix.limited_norm.item() > 0) == (len(moved) == 2)
    assert moved[0] < 1e-3  # a difference of fp32 weights of size one: 1e-7 of 1e-3
    assert moved[1] > 1e-2


def test_full_residual_learns():
    model = network()
    optimizer = low_rank_adamw(
        model, lr=2e-2, rank=4, update_interval=20, scale=1.0, residual="full"
    )
    losses = train(model, optimizer, batches(150, size=64))
    assert sum(losses[-10:]) < 0.25 * sum(losses[:10])


@pytest.mark.parametrize(
    ("residual", "rank", "probes"),
    [("probe", 48, 12), ("probe", 8, 8), ("probe", 60, 4), ("none", 32, 8), ("full", 32, 0)],
)
def test_probes_are_a_quarter_of_the_rank_where_they_carry_the_residual(residual, rank, probes):
    weight = nn.Parameter(torch.zeros(64, 64))
    weight.grad = torch.randn(64, 64)
    optimizer = low_rank_adamw([weight], rank=rank, residual=residual, range_finder="random")
    optimizer.step()
    assert optimizer.matrices["param_0"].num_probes == probes
