"""Searches launched together: the result is that of deciding on the way, and the host reads once for all."""

import pytest
import torch
from draws import basis_of
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from hmt_deepspeed.optim.bases import search as module
from hmt_deepspeed.optim.bases.basis import keyed_generator
from hmt_deepspeed.optim.bases.range_finder import find_subspace
from hmt_deepspeed.optim.bases.search import SubspaceSearch, finish_searches
from hmt_deepspeed.optim.decisions import policy
from hmt_deepspeed.optim.hmt import HMT

CPU = torch.device("cpu")
RANKS = (8, 16, 32)


def generator(*labels):
    return keyed_generator(CPU, 0, *labels)


def gradient_of(seed, m=96, n=80, rank=None):
    """Singular values that fall slowly; of ``rank`` only the first are not zero."""
    sigma = torch.arange(1, min(m, n) + 1).float().pow(-0.6)
    sigma[len(sigma) if rank is None else rank :] = 0.0
    left, right = (basis_of(k, len(sigma), seed, k) for k in (m, n))
    return left * sigma @ right.t()


def search(gradient, kind="randomized", start=None, threshold=0.5, first=8):
    draw = generator("draw")
    return SubspaceSearch(kind, lambda: gradient, RANKS, threshold, draw, start, first=first)


class Waits(TorchDispatchMode):
    """Counts values of tensors that Python asks for."""

    number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.number += str(func) == "aten._local_scalar_dense.default"
        return func(*args, **(kwargs or {}))


@pytest.fixture
def blind(monkeypatch):
    """The host may not look at what is launched, as on a device that it would have to wait for."""
    monkeypatch.setattr(module.Conditions, "may_look", lambda self, _: not self.put_off)


@pytest.mark.parametrize("kind", ["randomized", "subspace"])
@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("rank", [None, 3])
def test_deciding_later_changes_no_bit(kind, warm, rank):
    gradient = gradient_of("g", rank=rank)
    start = basis_of(80, 8, "start") if warm else None
    expected = find_subspace(kind, gradient, 8, generator("draw"), start)
    (found,) = finish_searches([search(gradient, kind, start, threshold=0.01)])
    assert torch.equal(found.basis, expected.basis)
    assert torch.equal(found.captured(), expected.captured())
    assert found.products == expected.products


@pytest.mark.parametrize("kind", ["randomized", "subspace"])
@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("rank", [None, 40, 3])
def test_a_search_that_may_not_wait_finds_the_same(blind, kind, warm, rank):
    """Up to rounding: fp32 of energies, and what a direction of 1e-4 of the first's length keeps of it."""
    gradient = gradient_of("g", rank=rank)
    gradient *= torch.logspace(0, -4, 80)
    start = basis_of(80, 8, "start") if warm else None
    expected = find_subspace(kind, gradient, 8, generator("draw"), start)
    with Waits() as waits:
        begun = search(gradient, kind, start, threshold=0.01)
    assert waits.number == 0
    (found,) = finish_searches([begun])
    torch.testing.assert_close(found.basis.t() @ found.basis, torch.eye(8), atol=1e-5, rtol=0)
    torch.testing.assert_close(found.captured(), expected.captured(), atol=1e-5, rtol=0)
    assert found.products == expected.products


@pytest.mark.parametrize(("rank", "householder"), [(None, 0), (40, 0), (3, 1)])
def test_only_columns_that_are_missing_take_householder(blind, monkeypatch, rank, householder):
    """Columns from 1 to 1e-5 are too skew for one Cholesky-QR; beyond rank 3 there are only rounding errors."""
    qrs, qr = [], torch.linalg.qr
    monkeypatch.setattr(torch.linalg, "qr", lambda matrix: qrs.append(matrix) or qr(matrix))
    gradient = gradient_of("g", rank=rank)
    gradient *= torch.logspace(0, -4, 80)
    qrs.clear()
    finish_searches([search(gradient, first=16, threshold=0.01)])
    assert bool(qrs) == bool(householder)


@pytest.mark.parametrize("kind", ["randomized", "subspace"])
@pytest.mark.parametrize("rank", [None, 12, 30])
def test_deciding_a_wider_one_later_changes_no_bit(monkeypatch, kind, rank):
    """At rank 12 the second width finds no more directions, at 30 the third: then all is computed again."""
    gradient = gradient_of("g", rank=rank)
    start = basis_of(80, 24, "start")

    def found():
        """Of the last width of all, and the values that Python asked for on the way."""
        begun = search(gradient, kind, start, threshold=1.0)
        with Waits() as waits:
            (result,) = finish_searches([begun])
        return result, waits.number

    later, few = found()
    never = property(lambda self: False, lambda self, value: None)
    monkeypatch.setattr(module.Conditions, "put_off", never, raising=False)
    monkeypatch.setattr(module.Conditions, "met", property(lambda self: torch.tensor(False)))
    at_once, many = found()
    assert torch.equal(later.basis, at_once.basis)
    assert torch.equal(later.captured(), at_once.captured())
    assert later.products == at_once.products
    assert rank is not None or few < many


@pytest.mark.parametrize("kind", ["randomized", "subspace", "svd"])
@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
def test_nothing_is_found_in_what_is_not_finite_or_zero(kind, value):
    gradient = gradient_of("g") if value else torch.zeros(96, 80)
    gradient[3, 5] = value
    assert finish_searches([search(gradient, kind)]) == [None]


def test_one_read_for_all_that_need_no_wider_basis(monkeypatch):
    reads, read = [], module.read_together
    monkeypatch.setattr(module, "read_together", lambda t: reads.append(len(t)) or read(t))
    begun = [search(gradient_of(i), threshold=0.3) for i in range(4)]
    begun.append(search(gradient_of(4), threshold=0.99))
    found = finish_searches(begun)
    assert reads == [5]
    assert [f.basis.shape[1] for f in found] == [8, 8, 8, 8, 32]


@pytest.mark.parametrize(
    "ranks", [{"rank": 8}, {"rank_candidates": (8, 16), "energy_threshold": 0.2}]
)
def test_a_refresh_reads_no_more_for_more_matrices(monkeypatch, ranks):
    """Once of what was found; where ranks are chosen, once of averages too."""
    reads, read = [], module.read_together
    for place in (module, policy):
        monkeypatch.setattr(place, "read_together", lambda t: reads.append(len(t)) or read(t))
    for number in (1, 6):
        weights = [nn.Parameter(gradient_of(i)) for i in range(number)]
        options = {"update_interval": 1, "max_full_gradient_bytes": 10**7, **ranks}
        optimizer = HMT(weights, lr=1e-3, **options)
        for step in range(3):
            reads.clear()
            for place, weight in enumerate(weights):
                weight.grad = gradient_of((step, place))
            optimizer.step()
        assert [count for count in reads if count] == [number] * (1 if "rank" in ranks else 2)
