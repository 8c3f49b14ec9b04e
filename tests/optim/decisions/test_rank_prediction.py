"""Where the search for a rank starts: predictions save columns, and need an energy that is measured."""

import pytest
import torch
from hmt_runs import (
    PAPERS_RULE,
    policy_like,
    refreshes,
)
from low_rank_adamw import low_rank_adamw
from rank_sources import CANDIDATES, SHAPE, Source, construct, train
from torch import nn

from hmt_deepspeed.optim.bases.search import SubspaceSearch
from hmt_deepspeed.optim.decisions.policy import RankPolicy

# -- prediction -----------------------------------------------------------------------------------


def counted(monkeypatch):
    """Columns multiplied by each refresh."""
    products, finish = [], SubspaceSearch.finish

    def count(search, numbers):
        found = finish(search, numbers)
        products.append(found.products)
        return found

    monkeypatch.setattr(SubspaceSearch, "finish", count)
    return products


def test_starting_at_the_last_rank_saves_sketched_columns(monkeypatch):
    """Against the largest candidate, which needs no history, on stationary gradients."""
    products, totals = counted(monkeypatch), {}
    for remember in (True, False):
        products.clear()
        sources = [Source(14, 0.01, seed=i) for i in range(3)]
        # All find their first basis at once, or some would remember the random one's energy.
        weights, optimizer = construct(sources, update_interval=4, max_full_gradient_bytes=10**6)
        optimizer.describe()
        if not remember:
            assert policy_like(optimizer).first_width(0) == CANDIDATES[0]
            monkeypatch.setattr(RankPolicy, "first_width", lambda *a: CANDIDATES[-1])
        for _ in train(weights, optimizer, sources, 16):
            pass
        assert [m.rank for m in optimizer.matrices.values()] == [16] * 3
        totals[remember] = sum(products[3:])
        assert len(products) >= 12
    assert totals[True] < 0.65 * totals[False]


@pytest.mark.parametrize(("finder", "rounds"), [("randomized", 3), ("subspace", 2)])
def test_a_second_refresh_starts_from_the_basis_in_force(monkeypatch, finder, rounds):
    products, sources = counted(monkeypatch), [Source(6, 0.01)]
    options = {"rank_candidates": (8,), "range_finder": finder, "update_interval": 1}
    for _ in train(*construct(sources, **options), sources, 2):
        pass
    cold, warm = products
    assert cold == 5 * (8 + 8)
    assert warm == rounds * (8 + 8)


class Arriving(Source):
    """More directions beside the old ones, each as strong as those."""

    def __init__(self, directions, noise, present):
        super().__init__(directions, noise)
        self.most, self.all_right = directions, self.right
        self.show(present)

    def show(self, present):
        self.directions, self.right = present, self.all_right[:, :present]

    def __call__(self):
        return super().__call__() * (self.directions / self.most) ** 0.5


def test_prediction_saves_columns_where_directions_arrive(monkeypatch):
    """Norm and lost energy tell of arrivals: the wider sketch is made at once, not after the last rank's."""
    products, columns, predicted = counted(monkeypatch), {}, RankPolicy.first_width
    for predict in (True, False):
        products.clear()
        sources = [Arriving(14, 0.01, present=7)]
        weights, optimizer = construct(sources, update_interval=60)
        optimizer.describe()
        (matrix,) = optimizer.matrices.values()

        def width(policy, index, matrix=matrix, predict=predict):
            return predicted(policy, index) if predict or not matrix.measured else matrix.rank

        monkeypatch.setattr(RankPolicy, "first_width", width)
        for step, _ in enumerate(train(weights, optimizer, sources, 121)):
            if step == 85:
                assert (matrix.rank, len(products)) == (8, 2)
                sources[0].show(14)
        assert matrix.rank == 16
        columns[predict] = products[2]
    # the old basis once more for its image, and the oversampling of 8 five times
    assert columns[False] - columns[True] == 8 + 5 * 8, columns


def test_first_refresh_of_a_type_starts_at_the_prior(monkeypatch):
    products, sources = counted(monkeypatch), [Source(14, 0.01, seed=i) for i in range(3)]
    weights = [nn.Parameter(torch.zeros(SHAPE)) for _ in sources]
    named = [(f"layers.{i}.up.weight", w) for i, w in enumerate(weights)]
    optimizer = low_rank_adamw(named, lr=1e-3, rank_candidates=CANDIDATES, **PAPERS_RULE)
    for _ in train(weights, optimizer, sources, 3):
        pass
    assert len(products) == 3
    # Cold columns and oversampling times five; the first had to widen from the smallest rank.
    assert products[1] == products[2] == 5 * (16 + 8)
    assert products[0] > products[1]


def test_a_first_refresh_without_a_norm_is_no_growth():
    """Before any step there is no norm to compare with: the next prediction has no trend."""
    sources = [Source(3, 0.02)]
    weights, optimizer = construct(sources, update_interval=5, energy_threshold=0.9)
    for _ in train(weights, optimizer, sources, 4):
        pass
    policy, matrix = policy_like(optimizer), optimizer.matrices["param_0"]
    assert "param_0" not in policy.log_norms
    matrix.captured_energy.mul_(0.9)  # what the basis holds fell
    assert policy.first_width(0) == matrix.rank == 4
    for _ in train(weights, optimizer, sources, 4):
        pass
    norms = policy_like(optimizer).log_norms
    assert norms["param_0"] == pytest.approx(0.0, abs=0.3)  # ||G|| is about 1


# -- without probes -------------------------------------------------------------------------------


def test_without_probes_nothing_is_predicted_from_an_energy_that_nobody_measured():
    """What is inside the basis is all that is seen: its share of that, which is 1, says nothing."""
    sources = [Source(6, 0.05)]
    options = {"residual": "none", "probes": 0, "energy_threshold": 0.9, "update_interval": 30}
    weights, optimizer = construct(sources, **options)
    for _ in train(weights, optimizer, sources, 20):
        pass
    policy, matrix = policy_like(optimizer), optimizer.matrices["param_0"]
    assert not matrix.measures_energy
    matrix.captured_energy.zero_()
    assert policy.first_width(0) == matrix.rank == 8
    for _ in train(weights, optimizer, sources, 20):
        pass
    assert refreshes(optimizer) == {"param_0": 2}


@pytest.mark.parametrize(
    ("options", "measures"),
    [
        ({"residual": "none"}, True),
        ({"residual": "none", "probes": 0}, False),
        ({"residual": "none", "probes": 0, "projection": "two_sided"}, False),
        ({"residual": "full"}, True),
        (
            {"residual": "none", "probes": 0, "projection": "left", "rank": 48},
            True,
        ),  # nothing is outside
    ],
)
def test_who_measures_the_captured_energy(options, measures):
    optimizer = low_rank_adamw([nn.Parameter(torch.zeros(SHAPE))], **{"rank": 8, **options})
    optimizer.describe()
    assert optimizer.matrices["param_0"].measures_energy == measures
