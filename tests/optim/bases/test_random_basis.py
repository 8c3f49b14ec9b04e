"""The random range finder: no full gradient, nothing of the basis stored, the same one drawn again."""

import pytest
import torch
from hmt_runs import assert_same_weights, batches, network, refreshes, through_a_file, train
from low_rank_adamw import low_rank_adamw
from torch import nn

OPTIONS = {"lr": 1e-2, "rank": 8, "update_interval": 4, "range_finder": "random"}
PROJECTIONS = ["right", "left", "two_sided"]


@pytest.mark.parametrize("projection", PROJECTIONS)
def test_no_full_gradient_is_ever_formed(projection):
    model = network()
    optimizer = low_rank_adamw(model, projection=projection, projected_backward=True, **OPTIONS)
    bases = set()
    for x, y in batches(14):
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        assert all(model[i].weight.grad is None for i in (0, 2, 4))
        optimizer.step()
        bases.add(optimizer.matrices["2.weight"].basis.sum().item())
    assert len(bases) == 4  # a new one every four steps all the same
    assert min(refreshes(optimizer).values()) >= 3


@pytest.mark.parametrize("projection", PROJECTIONS)
def test_basis_is_orthonormal_keyed_by_name_and_number(projection):
    def matrix(name, seed=0):
        weight = nn.Parameter(torch.zeros(24, 32))
        optimizer = low_rank_adamw([(name, weight)], projection=projection, seed=seed, **OPTIONS)
        optimizer.describe()
        return optimizer.matrices[name]

    first = matrix("a")
    sides = first.shape[1]
    drawn = first.seeded_basis(8, 3)
    eye = torch.eye(8)
    torch.testing.assert_close(drawn[:sides].t() @ drawn[:sides], eye, atol=1e-5, rtol=0)
    assert torch.equal(drawn, matrix("a").seeded_basis(8, 3))
    for other in (first.seeded_basis(8, 4), matrix("b").seeded_basis(8, 3)):
        assert not torch.allclose(drawn, other, atol=1e-2)
    assert not torch.allclose(drawn, matrix("a", seed=1).seeded_basis(8, 3), atol=1e-2)


@pytest.mark.parametrize("projection", PROJECTIONS)
@pytest.mark.parametrize("after", [3, 6])
def test_state_holds_no_basis_and_load_draws_it_again(projection, after):
    data = list(batches(14))
    straight, resumed = network(), network(seed=1)
    optimizer = low_rank_adamw(straight, projection=projection, **OPTIONS)
    train(straight, optimizer, data[:after])
    saved = through_a_file(optimizer.state_dict())
    state = saved["state"][0]
    assert not {"basis", "left_basis"} & state.keys()
    assert all(m.state_bytes() == m.moments.nbytes for m in optimizer.matrices.values())
    moments = optimizer.matrices["0.weight"].moments.exp_avg.shape.numel()
    numbers = sum(v.numel() for v in state.values() if isinstance(v, torch.Tensor))
    assert (
        numbers <= 3 * moments + 5
    )  # the first's evidence, the limited norm, two averages and their weight
    resumed.load_state_dict(straight.state_dict())
    fresh = low_rank_adamw(resumed, projection=projection, **OPTIONS)
    fresh.load_state_dict(saved)
    for name, matrix in optimizer.matrices.items():
        assert torch.equal(matrix.projection, fresh.matrices[name].projection)
    train(straight, optimizer, data[after:])
    train(resumed, fresh, data[after:])
    assert_same_weights(straight, resumed)


@pytest.mark.parametrize(
    ("saved", "wanted"),
    [
        ({}, {"range_finder": "randomized"}),
        ({"range_finder": "randomized"}, {}),
        ({}, {"rank": 4}),
    ],
)
def test_moments_of_other_bases_are_refused(saved, wanted):
    model = network()
    optimizer = low_rank_adamw(model, **{**OPTIONS, **saved})
    train(model, optimizer, batches(3))
    other = low_rank_adamw(network(), **{**OPTIONS, **wanted})
    with pytest.raises(
        ValueError, match="construct it with the options and the model of the saved"
    ):
        other.load_state_dict(optimizer.state_dict())


def test_moments_are_carried_over_at_a_redraw():
    weight = nn.Parameter(torch.zeros(24, 32))
    optimizer = low_rank_adamw([weight], residual="none", **OPTIONS)
    for _ in range(3):
        weight.grad = torch.ones(24, 32)
        optimizer.step()
    matrix = optimizer.matrices["param_0"]
    old, mean = matrix.basis.clone(), matrix.moments.exp_avg.read().clone()
    weight.grad = torch.zeros(24, 32)
    optimizer.step()  # decays the mean, then draws the next basis
    assert matrix.draw == 1
    expected = 0.9 * mean @ (old.t() @ matrix.basis)
    torch.testing.assert_close(matrix.moments.exp_avg.read(), expected, rtol=1e-4, atol=1e-6)


def test_learns():
    model = network()
    options = {**OPTIONS, "update_interval": 20, "scale": 1.0}
    losses = train(model, low_rank_adamw(model, **options), batches(150, size=64))
    assert sum(losses[-10:]) < 0.3 * sum(losses[:10])
