"""Update rules against torch's and against their formulas."""

import pytest
import torch
from draws import basis_of, key_of

from hmt_deepspeed.kernels.moment_update import scale_residual_
from hmt_deepspeed.optim.bases.basis import probe_columns
from hmt_deepspeed.optim.rules.formulas import (
    adamw_,
    estimated_square_norm,
)

BETAS, EPS = (0.9, 0.95), 1e-8


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def probe_residual(direction, projected, probes, scale):
    """``c phi S`` of one matrix, and the squared norms of its rows."""
    residual, seen = probes.clone().unsqueeze(0), projected.norm(dim=1).unsqueeze(0)
    squares = scale_residual_(residual, direction.unsqueeze(0), seen, torch.tensor([[scale]]))
    return residual[0], squares[0]


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_adamw_is_torchs(weight_decay):
    ours, theirs = randn(7, 5), torch.nn.Parameter(randn(7, 5))
    optimizer = torch.optim.AdamW(
        [theirs], lr=1e-2, betas=BETAS, eps=EPS, weight_decay=weight_decay, foreach=False
    )
    mean, second, step = torch.zeros(7, 5), torch.zeros(7, 5), torch.zeros(())
    for i in range(10):
        gradient = randn(7, 5, seed=i)
        theirs.grad = gradient.clone()
        optimizer.step()
        states = [ours], [gradient], [mean], [second], [step]
        adamw_(*states, lr=1e-2, betas=BETAS, eps=EPS, weight_decay=weight_decay)
    assert step.item() == 10
    # Fused and unfused kernels round differently: a few ulp per step.
    torch.testing.assert_close(ours, theirs.detach(), rtol=1e-5, atol=1e-6)


def test_norm_estimate_is_unbiased_and_exact_with_a_whole_complement():
    m, n, rank, num_probes, draws = 10, 30, 6, 3, 1500
    gradient, basis = randn(m, n), basis_of(n, rank, "q")
    inside = (gradient @ basis).square().sum()
    estimates = []
    for i in range(draws):
        outside = (
            (gradient @ probe_columns(basis[None], num_probes, key_of("p", i))[0]).square().sum()
        )
        estimates.append(estimated_square_norm(inside, outside, n, rank, num_probes))
    estimates = torch.stack(estimates)
    error = (estimates.mean() - gradient.square().sum()).abs()
    assert error < 4 * estimates.std() / draws**0.5
    everything = (gradient @ probe_columns(basis[None], n - rank, key_of("all"))[0]).square().sum()
    exact = estimated_square_norm(inside, everything, n, rank, n - rank)
    torch.testing.assert_close(exact, gradient.square().sum(), rtol=1e-5, atol=0)
    assert estimated_square_norm(inside, everything, n, rank, 0) is inside


def test_expected_probe_residual_is_phi_times_the_exact_one():
    m, n, rank, num_probes, draws = 6, 20, 5, 4, 4000
    basis = basis_of(n, rank, "q")
    # A basis of a gradient sees more of every row than four random columns do.
    gradient = 3 * randn(m, rank, seed=1) @ basis.t() + 0.3 * randn(m, n, seed=2)
    projected, direction = gradient @ basis, randn(m, rank, seed=3)
    total = torch.zeros(m, n)
    for i in range(draws):
        probes = probe_columns(basis[None], num_probes, key_of("p", i))[0]
        scale = (n - rank) / num_probes
        found, squares = probe_residual(direction, projected, gradient @ probes, scale)
        torch.testing.assert_close(squares, found.square().sum(dim=1))
        total += found @ probes.t()
    phi = direction.norm(dim=1, keepdim=True) / projected.norm(dim=1, keepdim=True)
    exact = phi * (gradient - projected @ basis.t())
    # Per entry the draws' deviation is about |row| sqrt(c/n): 3 % of a row's norm after 4000 draws.
    error = (total / draws - exact).norm(dim=1) / exact.norm(dim=1)
    assert error.max() < 0.1


def test_probe_residual_of_a_row_the_basis_misses_is_bounded():
    direction, probes = torch.full((2, 4), 1.0), torch.full((2, 3), 5.0)
    projected = torch.tensor([[0.0] * 4, [1e-20] * 4])
    residual, _ = probe_residual(direction, projected, probes, 4.0)
    # c ||U_j|| = 4 * 2
    torch.testing.assert_close(residual.norm(dim=1), torch.full((2,), 8.0))
