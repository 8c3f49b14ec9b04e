"""Subspaces of several gradients found at once: as good as each one's own SVD, and zeros where there is nothing to find."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hmt_deepspeed.optim.bases import expert_search
from hmt_deepspeed.optim.bases.expert_search import ExpertSearch
from hmt_deepspeed.optim.bases.range_finder import Subspace

E, M, N = 5, 60, 40


def gradients(dtype: torch.dtype = torch.float32) -> Tensor:
    """Spectra i^-0.6, but of the expert 1, of three directions, and of the expert 3, without tokens."""
    generator = torch.Generator().manual_seed(0)
    left, right = (
        torch.linalg.qr(torch.randn(E, size, N, generator=generator)).Q for size in (M, N)
    )
    sigma = torch.arange(1, N + 1).float().pow(-0.6).expand(E, N).clone()
    sigma[1, 3:], sigma[3] = 0.0, 0.0
    return ((left * sigma[:, None]) @ right.mT).to(dtype)


def search(
    gradient: Tensor,
    ranks: tuple[int, ...],
    threshold: float = 0.0,
    kind: str = "randomized",
    kept: Tensor | None = None,
) -> Subspace | None:
    generator = torch.Generator().manual_seed(1)
    warm = kept is not None
    if kept is None:
        kept = torch.linalg.qr(torch.randn(E, N, 6, generator=generator)).Q
    found = ExpertSearch(
        kind, lambda: gradient, ranks, threshold, generator, kept, warm, first=ranks[0]
    )
    return found.finish(found.numbers)


def captured(gradient: Tensor, basis: Tensor) -> Tensor:
    """Share of each gradient's energy."""
    inside = (gradient.double() @ basis.double()).square().sum((1, 2))
    return inside / gradient.double().square().sum((1, 2))


@pytest.mark.parametrize("parts", [1 << 24, 2 * M * N])
@pytest.mark.parametrize("kind", ["randomized", "subspace", "svd"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_has_its_dominant_subspace(
    dtype: torch.dtype, kind: str, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expert_search, "_ELEMENTS", parts)
    gradient = gradients(dtype)
    found = search(gradient, (10,), kind=kind)
    assert found is not None
    basis, there = found.basis, [0, 2, 4]
    identity = torch.eye(10).expand(3, 10, 10)
    torch.testing.assert_close(basis[there].mT @ basis[there], identity, atol=1e-5, rtol=0)
    best = torch.linalg.svdvals(gradient.double()).square()
    best = best[:, :10].sum(1) / best.sum(1)
    # what two power iterations leave of a slowly falling spectrum, see COLD_ROUNDS
    assert (captured(gradient, basis)[there] > best[there] - 0.005).all()
    energies = (gradient.double() @ basis.double()).square().sum(1)
    torch.testing.assert_close(
        found.energies.double(), energies.nan_to_num().sum(0), rtol=1e-3, atol=0
    )
    total = gradient.double().square().sum()
    torch.testing.assert_close(found.total.double(), total, rtol=1e-5, atol=0)


def test_columns_beyond_a_gradients_rank_are_zero() -> None:
    gradient = gradients()
    found = search(gradient, (10,))
    assert found is not None
    assert not found.basis[1, :, 3:].any()
    assert captured(gradient, found.basis)[1] > 1 - 1e-5
    again = search(
        gradient.roll(1, 0), (10,), kept=found.basis
    )  # they are no reason to find nothing later
    assert again is not None
    # one power iteration in place of two costs up to 0.03
    assert captured(gradient.roll(1, 0), again.basis)[1] > captured(gradient, found.basis)[0] - 0.03


@pytest.mark.parametrize("rank", [4, 6, 10])
def test_an_expert_without_tokens_keeps_its_basis(rank: int) -> None:
    kept = torch.linalg.qr(torch.randn(E, N, 6, generator=torch.Generator().manual_seed(4))).Q
    found = search(gradients(), (rank,), kept=kept)
    assert found is not None
    same = min(rank, 6)
    assert torch.equal(found.basis[3, :, :same], kept[3, :, :same])
    assert not found.basis[3, :, same:].any()


def test_goes_on_until_the_energy_of_all_is_reached() -> None:
    gradient = gradients()
    found = search(gradient, (4, 8, 16, 24), threshold=0.8)
    assert found is not None
    assert found.basis.shape == (E, N, 16)
    inside = (gradient @ found.basis).square().sum() / gradient.square().sum()
    assert float(inside) == pytest.approx(float(found.captured()[-1]), rel=1e-4)
    assert float(found.captured()[7]) < 0.8 <= float(found.captured()[-1])


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
@pytest.mark.parametrize("kind", ["randomized", "svd"])
def test_finds_nothing_where_there_is_nothing(kind: str, value: float) -> None:
    gradient = gradients() * 0.0
    gradient[2] = value
    assert search(gradient, (4, 8), threshold=0.9, kind=kind) is None
