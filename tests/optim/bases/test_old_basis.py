"""An old, wider basis: what the range finder makes of it when the rank rises again."""

from __future__ import annotations

import torch
from hmt_runs import settings_of

from hmt_deepspeed.optim.bases.basis import keyed_generator, widened
from hmt_deepspeed.optim.bases.search import find_subspace_to_energy, finish_searches
from hmt_deepspeed.optim.rules.low_rank import LowRankMatrix

CPU = torch.device("cpu")
N = 96


def orthonormal(columns: int, seed: int, n: int = N) -> torch.Tensor:
    drawn = torch.randn(n, columns, generator=torch.Generator().manual_seed(seed))
    return torch.linalg.qr(drawn).Q


def test_a_widened_basis_begins_with_the_basis_and_spans_the_older_one():
    older = orthonormal(16, 0)
    turned = older @ orthonormal(16, 1, n=16)
    basis = turned[:, :6]
    wide = widened(basis, older)
    assert wide.shape == (N, 16)
    torch.testing.assert_close(wide[:, :6], basis)
    torch.testing.assert_close(wide.t() @ wide, torch.eye(16), atol=1e-5, rtol=0)
    torch.testing.assert_close(wide @ (wide.t() @ older), older, atol=1e-5, rtol=0)


def test_a_basis_that_has_drifted_away_keeps_what_it_found_and_gets_the_rest():
    older, basis = orthonormal(16, 2), orthonormal(6, 3)
    wide = widened(basis.bfloat16(), older.bfloat16())
    torch.testing.assert_close(wide[:, :6], basis, atol=5e-3, rtol=0)
    # bf16 is orthonormal to about 2^-8 per entry
    torch.testing.assert_close(wide.t() @ wide, torch.eye(16), atol=2e-2, rtol=0)


def test_from_an_old_basis_a_rank_that_rises_again_takes_fewer_products():
    left, right = orthonormal(16, 4, n=200), orthonormal(16, 5)
    strengths = torch.linspace(2, 1, 16)
    noise = 0.02 * torch.randn(200, N, generator=torch.Generator().manual_seed(6))
    gradient = left * strengths @ right.t() + noise
    basis = right[:, :4]

    def found(start: torch.Tensor):
        generator = keyed_generator(CPU, 0, "sketch")
        return find_subspace_to_energy(
            "randomized", gradient, (4, 16), 0.85, generator, start, first=4
        )

    cold, warm = found(basis), found(widened(basis, right))
    assert cold.basis.shape == warm.basis.shape == (N, 16)
    assert warm.products < cold.products
    assert warm.captured()[-1] >= cold.captured()[-1] - 1e-6


def test_a_matrix_widens_its_own_basis_by_the_older_one() -> None:
    left, right = orthonormal(16, 4, n=200), orthonormal(16, 5)
    gradient = left * torch.linspace(2, 1, 16) @ right.t()
    settings = settings_of(rank_candidates=(4, 16))
    matrix = LowRankMatrix("w", (200, N), (0, 200), settings, torch.float32, CPU)
    matrix.adopt(right[:, :4])
    searches = [matrix.search_basis(lambda: gradient, 1, 4, 0.9, older) for older in (None, right)]
    found = finish_searches(searches)
    assert [f is not None and f.basis.shape[1] for f in found] == [16, 16]
    alone, widened_one = (f.products for f in found if f is not None)
    assert widened_one < alone
