"""Muon in a low-rank space is its float64 twin; the iteration that orthogonalises errs by as much as it may."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import inf, sqrt
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from twins import LOW_RANK, TALL, WIDE, assert_same_steps, gradients

from hmt_deepspeed import rules
from hmt_deepspeed.optim.hmt import HMT
from hmt_deepspeed.optim.rules import muon
from hmt_deepspeed.optim.rules.inverse_root import ERROR, FLOOR, inverse_root, quintics

MUON: dict[str, Any] = {**LOW_RANK, "method": "muon"}
# what six quintics reach, of which fp32 knows nothing
EXACT = partial(inverse_root, error=1e-6)


@pytest.fixture
def exact_roots(monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin's are of an eigendecomposition."""
    monkeypatch.setattr(muon, "inverse_root", EXACT)


@pytest.mark.usefixtures("exact_roots")
@pytest.mark.parametrize("residual", ["none", "probe", "full"])
@pytest.mark.parametrize("projection", ["right", "left"])
@pytest.mark.parametrize(("shape", "max_norm"), [(TALL, inf), (WIDE, 1.0)])
def test_steps_are_the_twins(
    shape: tuple[int, int], projection: str, residual: str, max_norm: float
) -> None:
    options: dict[str, Any] = {**MUON, "projection": projection, "residual": residual}
    if residual != "full":
        options["probes"] = 4
    assert_same_steps(shape, max_norm, **options)


@pytest.mark.usefixtures("exact_roots")
def test_at_full_rank_a_matrix_has_no_basis_and_the_same_steps() -> None:
    """The twin keeps one of all columns: what is orthogonalised turns with it."""
    assert_same_steps(TALL, **MUON | {"rank": TALL[1], "residual": "none", "probes": 0})


@pytest.mark.usefixtures("exact_roots")
@pytest.mark.parametrize(("shape", "max_norm"), [(TALL, inf), (WIDE, 1.0)])
def test_rank_full_is_the_twins_without_a_basis(shape: tuple[int, int], max_norm: float) -> None:
    assert_same_steps(shape, max_norm, method="muon", rank="full", scale=0.5)


def steps_of(make: Callable[[Tensor], Any], shape: tuple[int, int]) -> Tensor:
    """What each step moves a weight without decay, STEPS x m x n."""
    weight, found = nn.Parameter(torch.zeros(shape)), []
    optimizer = make(weight)
    for gradient in gradients(shape):
        weight.grad, before = gradient.clone(), weight.detach().clone()
        optimizer.step()
        found.append(weight.detach() - before)
    return torch.stack(found)


@pytest.mark.parametrize("shape", [TALL, WIDE])
def test_rank_full_steps_as_torchs_muon(
    shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the steps with a polar factor from a decomposition in float64: torch's five quintics leave the singular values
    between 0.7 and 1.2, thirty of Newton and Schulz's take them to 1 up to its bf16; our four leave them between 0.8 and
    1.2, six take them to 1."""
    how = {"lr": 1e-2, "weight_decay": 0.0}
    newton_schulz = {"ns_coefficients": (15 / 8, -10 / 8, 3 / 8), "ns_steps": 30}

    def torchs(**more: Any) -> Tensor:
        how_much = {"momentum": 0.95, "nesterov": True, "adjust_lr_fn": "match_rms_adamw"}
        return steps_of(lambda w: torch.optim.Muon([w], **how, **how_much, **more), shape)

    def hmts() -> Tensor:
        return steps_of(lambda w: HMT([w], **how, method="muon", rank="full", scale=0.2), shape)

    shipped = hmts()
    monkeypatch.setattr(muon, "inverse_root", EXACT)
    ours = hmts()
    momentum, exact = torch.zeros(shape, dtype=torch.float64), []
    for gradient in gradients(shape):
        momentum.lerp_(gradient.double(), 0.05)
        left, _, right = torch.linalg.svd(
            gradient.double().lerp(momentum, 0.95), full_matrices=False
        )
        exact.append(-1e-2 * 0.2 * max(shape) ** 0.5 * left @ right)

    def error(steps: Tensor, judge: Tensor) -> Tensor:
        off, size = (x.double().flatten(1).norm(dim=1) for x in (steps - judge, judge))
        return off / size

    whole, converged, usual = torch.stack(exact), torchs(**newton_schulz), torchs()
    assert (error(ours, whole) < 0.02).all(), (
        "the floor, of a singular value a hundredth of the largest"
    )
    assert error(ours, whole).median() < 0.01
    assert (error(ours, whole) < error(converged, whole)).all()
    assert (error(ours, converged) < 0.04).all()
    assert (error(usual, whole) > 0.15).all()
    assert (error(ours, usual) < 0.25).all()
    assert (error(shipped, whole) < 0.15).all()
    assert (error(shipped, usual) < 0.3).all()
    assert (error(shipped, ours) > 0.05).all(), "the two differ, else nothing above is of six"


# -- the inverse root ---------------------------------------------------------------------------------------

ROWS, RANK = 300, 64
SPECTRA = {
    "equal": torch.ones(RANK),
    "over two decades": torch.logspace(0, -2, RANK),
    "over five decades": torch.logspace(0, -5, RANK),
    "half of the rank": torch.cat((torch.logspace(0, -1, RANK // 2), torch.zeros(RANK // 2))),
    "one direction": torch.cat((torch.ones(1), torch.zeros(RANK - 1))),
}


def with_spectrum(singular: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    left, right = (
        torch.linalg.qr(torch.randn(n, RANK, generator=generator, dtype=torch.float64)).Q
        for n in (ROWS, RANK)
    )
    return (left * singular @ right.T).float()


def by_eigenvalues(gram: Tensor) -> Tensor:
    """In the dtype of ``gram``, whose least eigenvalues may have been rounded below zero."""
    values, vectors = torch.linalg.eigh(gram)
    least = FLOOR * torch.linalg.matrix_norm(gram, keepdim=True).squeeze(-1)
    return vectors * (values.clamp_min(0) + least).rsqrt().unsqueeze(-2) @ vectors.mT


def judged(name: str, root: Callable[[Tensor], Tensor]) -> Tensor:
    """In fp64 by what becomes of the matrix; sizes whose fourth powers fp32 does not have at once."""
    matrix = torch.stack([with_spectrum(SPECTRA[name]) * size for size in (1e-14, 1e3, 1e14)])
    exact = matrix.double() @ by_eigenvalues(matrix.double().mT @ matrix.double())
    off = torch.linalg.matrix_norm(matrix.double() @ root(matrix.mT @ matrix).double() - exact)
    return off / torch.linalg.matrix_norm(exact)


@pytest.mark.parametrize("name", SPECTRA)
def test_taken_further_the_iteration_errs_as_an_eigendecomposition_in_fp32(name: str) -> None:
    # the decomposition is of the matrix whose norm can be squared; what is left of zeros differs by processor
    assert (judged(name, EXACT) <= 2 * judged(name, by_eigenvalues)[1] + 1e-6).all()


@pytest.mark.parametrize("name", SPECTRA)
def test_the_iteration_errs_by_no_more_than_it_may(name: str) -> None:
    assert (judged(name, inverse_root) < ERROR).all()


@pytest.mark.parametrize("name", SPECTRA)
def test_so_it_does_when_half_of_each_product_is_computed(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setitem(rules._ROWS_OF_BLOCK, "cpu", 16)
    assert (judged(name, EXACT) <= 2 * judged(name, by_eigenvalues)[1] + 1e-6).all()
    assert (judged(name, inverse_root) < ERROR).all()


def test_columns_become_orthonormal() -> None:
    """But for the floor, which takes its share of a Gram matrix's norm, 8 for 64 equal eigenvalues."""
    matrix = with_spectrum(SPECTRA["equal"])
    polar = matrix @ EXACT((matrix.T @ matrix)[None])[0]
    torch.testing.assert_close(polar.T @ polar, torch.eye(RANK), atol=1.02 * 8 * FLOOR, rtol=0)


def test_a_matrix_of_zeros_has_no_direction() -> None:
    gram = torch.zeros(2, 3, 3)
    gram[1] = 4 * torch.eye(3)
    zero, other = inverse_root(gram)
    assert zero.isfinite().all()
    assert not (torch.zeros(5, 3) @ zero).any()
    torch.testing.assert_close(other, torch.eye(3) / 2, atol=ERROR / 2, rtol=0)


@pytest.mark.parametrize(("error", "number"), [(ERROR, 4), (1e-6, 6)])
def test_polynomials_take_all_singular_values_to_one(error: float, number: int) -> None:
    least = sqrt(FLOOR)
    values = torch.logspace(0, torch.log10(torch.tensor(least)).item(), 1001, dtype=torch.float64)
    steps = quintics(least, error)
    assert len(steps) == number  # Newton and Schulz's takes 10, and 12 to 1e-6
    for first, third, fifth in steps:
        values = first * values + third * values**3 + fifth * values**5
    assert float((values - 1).abs().max()) < error
