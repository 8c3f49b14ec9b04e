"""APOLLO and APOLLO-Mini: against the authors' optimizer, against the float64 twin, and what they keep."""

from math import inf

import pytest
import torch
import twins
from hmt_runs import batches, network, train
from torch import nn
from twins import assert_same_steps

from hmt_deepspeed.kernels import growth_limit
from hmt_deepspeed.optim.hmt import HMT
from hmt_deepspeed.optim.rules.apollo import ApolloStack

TALL, WIDE = (20, 12), (12, 20)
BETAS = (0.9, 0.95)
PARTS = [
    ("apollo", "channel", 4, 1.0),
    ("apollo", "channel", 3, 2.0),
    ("apollo_mini", "tensor", 1, 128.0),
]


def gradients(shape, steps, growing=0.0):
    """A mean that the moments settle on, noise, and a size that may grow."""
    generator = torch.Generator().manual_seed(1)
    mean = torch.randn(shape, generator=generator)
    return [
        (mean + 0.5 * torch.randn(shape, generator=generator)) * (1 + growing * i)
        for i in range(steps)
    ]


def run(shape, series, **options):
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(shape))
    optimizer = HMT([weight], lr=1e-2, betas=BETAS, eps=1e-12, **options)
    path = []
    for gradient in series:
        weight.grad = gradient.clone()
        optimizer.step()
        path.append(weight.detach().clone())
    return path, optimizer


def limiter_acts(shape, series, options):
    limited, _ = run(shape, series, **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(growth_limit, "GROWTH_LIMIT", float("inf"))
        free, _ = run(shape, series, **options)
    return (limited[-1] - free[-1]).abs().max() > 1e-3


@pytest.mark.parametrize(("method", "scale_type", "rank", "scale"), PARTS)
@pytest.mark.parametrize("shape", [TALL, WIDE, (16, 16)])
def test_steps_are_the_authors(monkeypatch, shape, method, scale_type, rank, scale):
    """apollo_torch takes eps before the bias correction, hence 1e-12."""
    reference_module = pytest.importorskip("apollo_torch")
    from apollo_torch.random_projector import GradientProjector

    gap, steps = 6, 15
    series = gradients(shape, steps, growing=0.2)
    side = "left" if shape[0] < shape[1] else "right"
    projector, drawn = GradientProjector(rank, proj_type="std", seed=1), []
    for _ in range(steps // gap + 1):
        projector.update_ortho_matrix(series[0], side)
        drawn.append(projector.ortho_matrix if side == "left" else projector.ortho_matrix.t())
    monkeypatch.setattr(
        ApolloStack, "projections", lambda self: [drawn[matrix.draw] for matrix in self.members]
    )

    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(shape))
    group = {
        "params": [weight],
        "rank": rank,
        "proj": "random",
        "scale_type": scale_type,
        "scale": scale,
        "update_proj_gap": gap,
        "proj_type": "std",
    }
    authors = reference_module.APOLLOAdamW([group], lr=1e-2, betas=BETAS, eps=1e-12)
    options = {"method": method, "rank": rank, "scale": scale, "update_interval": gap}
    path, _ = run(shape, series, **options)
    assert limiter_acts(shape, series, options)
    for gradient, ours in zip(series, path, strict=True):
        weight.grad = gradient.clone()
        authors.step()
        torch.testing.assert_close(ours, weight.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("max_norm", [inf, 1.0])
@pytest.mark.parametrize("options", [{"rank": 4, "scale": 2.0}, {"rank": 3}])
@pytest.mark.parametrize("shape", [twins.TALL, twins.WIDE])
def test_steps_of_channels_are_the_twins(shape, options, max_norm):
    twin = assert_same_steps(shape, max_norm, method="apollo", update_interval=5, **options)
    assert sum(growth > 1.01 for growth in twin.growths) >= 4


@pytest.mark.parametrize("max_norm", [inf, 1.0])
@pytest.mark.parametrize("shape", [twins.TALL, twins.WIDE])
def test_steps_of_tensors_are_the_twins(shape, max_norm):
    options = {"method": "apollo_mini", "scale": 128.0, "update_interval": 5}
    twin = assert_same_steps(shape, max_norm, **options)
    assert sum(growth > 1.01 for growth in twin.growths) >= 4


def test_projection_is_gaussian_of_variance_one_over_r():
    weights = [nn.Parameter(torch.zeros(512, 400)) for _ in range(2)]
    optimizer = HMT(weights, method="apollo", rank=16)
    optimizer.describe()
    members = list(optimizer.matrices.values())

    def drawn(*numbers):
        for matrix, number in zip(members, numbers, strict=True):
            matrix.draw = number
        stack = ApolloStack(members)
        stack.start(torch.ones(2), betas=BETAS, eps=1e-8, step=torch.tensor(0))
        return stack.projections()

    one, other = drawn(3, 3)
    assert one.shape == (400, 16)
    assert abs(one.std().item() * 4 - 1) < 0.03
    assert abs(one.mean().item()) < 0.01
    assert not torch.equal(one, other)
    again, next_one = drawn(3, 4)
    assert torch.equal(again, one)
    assert not torch.equal(next_one, other)


def test_default_ranks():
    weights = [nn.Parameter(torch.zeros(shape)) for shape in ((64, 32), (8, 200))]
    rows = HMT(weights, method="apollo").describe()
    assert [row.rank for row in rows] == [8, 2]  # a quarter of the smaller side
    assert [row.rank for row in HMT(weights, method="apollo_mini").describe()] == [1, 1]


def test_default_scales():
    weight = nn.Parameter(torch.zeros(64, 32))
    for options, scale in (
        ({"method": "apollo"}, 1.0),
        ({"method": "apollo_mini"}, 128.0),
    ):
        optimizer = HMT([weight], **options)
        optimizer.describe()
        assert optimizer.matrices["param_0"].scale == scale


def test_a_new_projection_every_interval():
    _, optimizer = run(TALL, gradients(TALL, 1), method="apollo", rank=4, update_interval=5)
    weight, draws = optimizer.param_groups[0]["params"][0], []
    for gradient in gradients(TALL, 15):
        draws.append(optimizer.matrices["param_0"].draw)
        weight.grad = gradient
        optimizer.step()
    assert draws == [0] * 4 + [1] * 5 + [2] * 5 + [3]  # one step was taken before


@pytest.mark.parametrize(("method", "rank"), [("apollo", 4), ("apollo_mini", 1)])
@pytest.mark.parametrize("shape", [TALL, WIDE])
def test_nothing_of_the_projection_is_stored(method, rank, shape):
    _, optimizer = run(shape, gradients(shape, 3), method=method, rank=rank)
    rows = 20
    # Two moments of the larger side's rows, and the evidence.
    assert optimizer.describe()[0].state_bytes == 4 * (2 * rows * rank + rank + 1)
    state = optimizer.state_dict()["state"][0]
    tensors = {k: tuple(v.shape) for k, v in state.items() if isinstance(v, torch.Tensor)}
    assert tensors["exp_avg"] == tensors["exp_avg_sq"] == (rows, rank)
    assert all(shape in ((rows, rank), (rank,), ()) for shape in tensors.values())
    held = vars(optimizer.matrices["param_0"]).values()
    assert all(v.numel() <= 3 for v in held if isinstance(v, torch.Tensor))  # smoothed energies


@pytest.mark.parametrize("method", ["apollo", "apollo_mini"])
def test_learns_with_whole_gradients(method):
    model = network()
    optimizer = HMT(model, lr=2e-2, method=method, update_interval=20)
    losses = train(model, optimizer, batches(200, size=64))
    assert sum(losses[-10:]) < 0.3 * sum(losses[:10])
    assert all(model[i].weight.grad is not None for i in (0, 2, 4))  # backward is ordinary
    assert not optimizer.owned()


def test_small_int8_states_stay_fp32():
    _, optimizer = run(TALL, gradients(TALL, 2), method="apollo_mini", state_dtype="int8")
    assert optimizer.matrices["param_0"].moments.exp_avg.dtype == "fp32"
    large = HMT([nn.Parameter(torch.zeros(1024, 64))], method="apollo", rank=4, state_dtype="int8")
    large.describe()
    assert large.matrices["param_0"].moments.exp_avg.dtype == "int8"


def test_clipping_is_of_the_true_norm():
    weight = nn.Parameter(torch.zeros(TALL))
    optimizer = HMT([weight], method="apollo", rank=4)
    weight.grad = gradients(TALL, 1)[0]
    true = weight.grad.norm()
    torch.testing.assert_close(optimizer.clip_grad_norm_(1.0), true)
    torch.testing.assert_close(weight.grad.norm(), torch.tensor(1.0), rtol=1e-4, atol=0)
