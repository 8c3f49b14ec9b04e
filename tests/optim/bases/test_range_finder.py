"""The kinds of range finder against an SVD, and widening to an energy."""

import pytest
import torch
from draws import basis_of

from hmt_deepspeed.optim.bases import range_finder as module
from hmt_deepspeed.optim.bases.basis import keyed_generator
from hmt_deepspeed.optim.bases.range_finder import (
    OVERSAMPLING,
    RANGE_FINDERS,
    find_subspace,
)
from hmt_deepspeed.optim.bases.search import find_subspace_to_energy

CPU = torch.device("cpu")
SHAPES = [(96, 160), (160, 96)]


def generator(*labels):
    return keyed_generator(CPU, 0, *labels)


def power_law(m, n, decay=0.7):
    """A gradient with singular values i^-decay, its right singular vectors, and those values."""
    side = min(m, n)
    left, right = (basis_of(s, side, w) for s, w in ((m, "left"), (n, "right")))
    sigma = torch.arange(1, side + 1).float() ** -decay
    return (left * sigma) @ right.t(), right, sigma


def turned(basis, drift):
    noise = torch.randn(basis.shape, generator=generator("drift")) / basis.shape[0] ** 0.5
    return torch.linalg.qr(basis + drift * noise).Q


def held(gradient, basis):
    return ((gradient @ basis).square().sum() / gradient.square().sum()).item()


def check_orthonormal(basis):
    eye = torch.eye(basis.shape[1])
    torch.testing.assert_close(basis.t() @ basis, eye, atol=1e-5, rtol=0)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("kind", list(RANGE_FINDERS))
def test_every_kind_captures_what_an_svd_does(kind, warm, shape):
    gradient, right, sigma = power_law(*shape)
    start = turned(right[:, :24], 0.5) if warm else None
    found = find_subspace(kind, gradient, 24, generator("s"), start)
    check_orthonormal(found.basis)
    exact = (sigma[:24].square().sum() / sigma.square().sum()).item()
    share = held(gradient, found.basis)
    assert exact - 0.01 < share <= exact + 1e-5
    # The energies are what the columns capture, or at most a hundredth of everything less.
    assert share - 0.01 < found.captured()[-1] <= share + 1e-4
    assert (found.energies.diff() <= 0).all()
    torch.testing.assert_close(found.total, gradient.square().sum())
    if warm:
        assert share > held(gradient, start) + 0.05  # the old basis itself had lost that much


def test_a_power_step_multiplies_two_thirds_of_a_warm_range_finder():
    gradient, right, _ = power_law(*SHAPES[0])
    columns = 24 + OVERSAMPLING
    for kind, start, products in (
        ("randomized", None, 5 * columns),
        ("randomized", right[:, :24], 3 * columns),
        ("subspace", right[:, :24], 2 * columns),
        ("subspace", None, 5 * columns),
        ("svd", None, 0),
    ):
        assert find_subspace(kind, gradient, 24, generator("s"), start).products == products


def test_products_are_counted_as_they_are_made(monkeypatch):
    """The count is what the two functions that multiply by the gradient saw."""
    seen = []
    for name in ("_times", "_transposed_times"):
        plain = getattr(module, name)

        def counted(gradient, columns, plain=plain):
            seen.append(columns.shape[1])
            return plain(gradient, columns)

        monkeypatch.setattr(module, name, counted)
    gradient, right, _ = power_law(*SHAPES[0])
    for kind in ("randomized", "subspace"):
        for start in (None, right[:, :8], right[:, :32]):
            seen.clear()
            found = find_subspace_to_energy(
                kind, gradient, (8, 16, 32), 0.999, generator("s"), start, first=8
            )
            assert found.products == sum(seen)


def test_subspace_without_an_old_basis_is_randomized():
    gradient = power_law(*SHAPES[0])[0]
    pair = [find_subspace(k, gradient, 24, generator("s")) for k in ("subspace", "randomized")]
    assert torch.equal(pair[0].basis, pair[1].basis)


@pytest.mark.parametrize(("width", "rank"), [(8, 64), (10, 24), (16, 48)])
def test_subspace_completes_a_narrower_old_basis_in_one_step(width, rank):
    gradient, right, _ = power_law(*SHAPES[0])
    start = turned(right[:, :width], 0.5)
    step, cold = (
        find_subspace(kind, gradient, rank, generator("s"), start)
        for kind in ("subspace", "randomized")
    )
    assert step.products == 2 * (rank + OVERSAMPLING) + rank < 0.75 * cold.products
    check_orthonormal(step.basis)
    assert held(gradient, step.basis) > held(gradient, cold.basis) - 0.02  # as COLD_ROUNDS says
    assert step.captured()[-1] == pytest.approx(held(gradient, step.basis), abs=1e-5)


def test_a_wider_old_basis_is_cut_and_a_narrower_one_completed():
    gradient, right, sigma = power_law(*SHAPES[0])
    exact = (sigma.square().cumsum(0) / sigma.square().sum()).tolist()
    for width, rank in ((48, 16), (16, 48)):
        found = find_subspace("randomized", gradient, rank, generator("s"), right[:, :width])
        assert found.basis.shape == (160, rank)
        assert held(gradient, found.basis) > exact[rank - 1] - 0.01


@pytest.mark.parametrize("kind", ["randomized", "subspace"])
def test_a_turn_that_the_old_basis_misses_is_found_by_the_next_refresh(kind):
    """Eight new strong directions, orthogonal to the old basis: the oversampling lets them in."""
    gradient, right, sigma = power_law(*SHAPES[0], decay=1.0)
    old = right[:, OVERSAMPLING : OVERSAMPLING + 24].contiguous()
    found = find_subspace(kind, gradient, 24, generator("s"), old)
    exact = (sigma[:24].square().sum() / sigma.square().sum()).item()
    assert held(gradient, old) < 0.15
    assert held(gradient, found.basis) > exact - 0.02


@pytest.mark.parametrize("kind", ["randomized", "subspace"])
@pytest.mark.parametrize("count", [1, 3])
def test_rank_deficient_gradient(kind, count):
    """Cholesky fails on the sketch of such a gradient; the result must be orthonormal all the same."""
    gradient = torch.randn(40, count, generator=generator("a")) @ torch.randn(
        count, 30, generator=generator("b")
    )
    for start in (None, basis_of(30, 10, "q")):
        found = find_subspace(kind, gradient, 10, generator("s"), start)
        check_orthonormal(found.basis)
        assert found.captured()[count - 1] > 0.999
        wide = find_subspace_to_energy(
            kind, gradient, (2, 10, 30), 1.1, generator("s"), start, first=2
        )
        check_orthonormal(wide.basis)
        assert wide.basis.shape == (30, 30)


@pytest.mark.parametrize("scale", [1e-12, 1e8])
def test_scale_does_not_matter(scale):
    gradient, right, _ = power_law(*SHAPES[0])
    for start in (None, right[:, :24]):
        found = find_subspace("randomized", gradient, 24, generator("s"), start)
        scaled = find_subspace("randomized", gradient * scale, 24, generator("s"), start)
        torch.testing.assert_close(found.captured(), scaled.captured(), atol=1e-3, rtol=0)


@pytest.mark.parametrize("decay", [0.0, 3.0])
def test_cholesky_qr_is_as_orthonormal_as_householder(decay):
    """Well and badly conditioned columns: 3 spans 6 decades at 100 columns, too skew for Cholesky."""
    columns = power_law(400, 100, decay)[0] @ basis_of(100, 100, "mix")
    basis = module._cholesky_qr(columns, module._WELL_CONDITIONED, module.Conditions())
    check_orthonormal(basis)
    torch.testing.assert_close(basis @ (basis.t() @ columns), columns, atol=1e-5, rtol=1e-4)


def test_16_bit_gradient_is_widened_by_blocks():
    gradient = power_law(600, 160)[0].bfloat16()
    for kind in ("randomized", "subspace"):
        start = basis_of(160, 24, "q")
        narrow = find_subspace(kind, gradient, 24, generator("s"), start)
        wide = find_subspace(kind, gradient.float(), 24, generator("s"), start)
        assert narrow.basis.dtype == torch.float32
        torch.testing.assert_close(narrow.captured(), wide.captured(), atol=1e-4, rtol=0)


def test_no_copy_of_the_gradient(monkeypatch):
    """No product, norm or conversion makes a tensor of the gradient's size, in bf16 either."""
    from torch.utils._python_dispatch import TorchDispatchMode

    m, n = 700, 640

    class Largest(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            views = {"aten.t.default", "aten.transpose.int", "aten.detach.default"}
            if isinstance(out, torch.Tensor) and str(func) not in views:
                self.elements = max(self.elements, out.numel())
            return out

    for dtype in (torch.float32, torch.bfloat16):
        gradient = torch.randn(m, n, generator=generator("g")).to(dtype)
        for start in (None, basis_of(n, 64, "q")):
            with Largest() as largest:
                find_subspace("subspace", gradient, 64, generator("s"), start)
            assert 0 < largest.elements < m * n / 2


# -- widening -----------------------------------------------------------------------------------------

RANKS = (8, 16, 32, 64)


@pytest.mark.parametrize("kind", list(RANGE_FINDERS))
@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize(("first", "expected"), [(8, 32), (16, 32), (32, 32), (64, 64)])
def test_stops_at_the_first_rank_that_reaches_the_energy(kind, warm, first, expected):
    gradient, right, sigma = power_law(*SHAPES[0])
    exact = (sigma.square().cumsum(0) / sigma.square().sum()).tolist()
    threshold = (exact[15] + exact[31]) / 2
    start = turned(right[:, :32], 0.3) if warm else None
    found = find_subspace_to_energy(
        kind, gradient, RANKS, threshold, generator("s"), start, first=first
    )
    assert found.basis.shape[1] == len(found.energies) == expected
    check_orthonormal(found.basis)
    assert exact[expected - 1] - 0.012 < held(gradient, found.basis) <= exact[expected - 1] + 1e-5


def test_never_reached_ends_at_the_largest():
    gradient, _, _ = power_law(*SHAPES[0], decay=0.1)
    found = find_subspace_to_energy("randomized", gradient, RANKS, 0.99, generator("s"), first=8)
    assert found.basis.shape[1] == 64


def test_right_prediction_saves_columns_and_a_wrong_one_costs_little():
    """Threshold reached at 16 of 64. Columns: right, too low by one, and always the largest."""
    gradient, right, sigma = power_law(*SHAPES[0], decay=1.2)
    exact = (sigma.square().cumsum(0) / sigma.square().sum()).tolist()
    threshold = (exact[7] + exact[15]) / 2
    for kind, start in (("randomized", None), ("subspace", right[:, :16])):
        products = {
            first: find_subspace_to_energy(
                kind, gradient, RANKS, threshold, generator("s"), start, first=first
            ).products
            for first in RANKS
        }
        assert products[16] < 0.4 * products[64]
        assert products[8] < 0.7 * products[64]


def test_what_cannot_be():
    gradient = power_law(*SHAPES[0])[0]
    with pytest.raises(ValueError, match="randomized, subspace, svd"):
        find_subspace("qr", gradient, 8, generator("s"))
    with pytest.raises(ValueError, match="first is 9"):
        find_subspace_to_energy("svd", gradient, RANKS, 0.9, generator("s"), first=9)
    with pytest.raises(ValueError, match=r"rank is 97; legal is 1\.\.96"):
        find_subspace_to_energy("subspace", gradient, (8, 97), 0.9, generator("s"), first=8)
    for kind in RANGE_FINDERS:
        with pytest.raises(ValueError, match=r"rank is 0; legal is 1\.\.96"):
            find_subspace(kind, gradient, 0, generator("s"))
