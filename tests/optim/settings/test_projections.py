"""Which side is projected: left is right on the transposed problem, auto is GaLore's rule."""

import pytest
import torch
from hmt_runs import OPTIONS, PAPERS_RULE, assert_same_weights, batches, movement, network, train
from low_rank_adamw import low_rank_adamw
from torch import nn

TALL, WIDE, SQUARE = (40, 24), (24, 40), (32, 32)


def gradients(shape, steps):
    """A drifting mean and noise, so that bases, moments and probes all matter."""
    generator = torch.Generator().manual_seed(3)
    mean = torch.randn(shape, generator=generator)
    for _ in range(steps):
        mean += 0.3 * torch.randn(shape, generator=generator)
        yield mean + 0.5 * torch.randn(shape, generator=generator)


def run(shape, flip=False, steps=12, start=None, **options):
    """Weight after some steps, always as ``shape``; ``flip`` trains the transpose."""
    torch.manual_seed(0)
    begin = torch.randn(shape)
    weight = nn.Parameter(begin.t().clone() if flip else begin.clone())
    optimizer = low_rank_adamw([weight], lr=1e-1, weight_decay=0.1, update_interval=5, **options)
    for gradient in gradients(shape, steps):
        weight.grad = gradient.t().clone() if flip else gradient.clone()
        optimizer.clip_grad_norm_(5.0)
        optimizer.step()
    moved = weight.detach().t() if flip else weight.detach()
    assert (moved - begin).norm() > 0.5
    return moved, optimizer


@pytest.mark.parametrize("shape", [TALL, WIDE, SQUARE])
@pytest.mark.parametrize("residual", ["none", "probe", "full"])
@pytest.mark.parametrize("rank", [{"rank": 6}, {"rank_candidates": (2, 6, 12)}])
def test_left_is_right_on_the_transposed_problem(shape, residual, rank):
    left, _ = run(shape, projection="left", residual=residual, **rank)
    right, optimizer = run(shape, flip=True, projection="right", residual=residual, **rank)
    # Layouts differ, so sums are taken in another order: fp32 rounding of a few steps.
    torch.testing.assert_close(left, right, rtol=0, atol=2e-4)
    other, _ = run(shape, projection="right", residual=residual, **rank)
    assert (other - right).abs().max() > 1e-2  # the sides do differ
    assert not optimizer.matrices["param_0"].transposed


@pytest.mark.parametrize(("shape", "side"), [(TALL, "right"), (WIDE, "left"), (SQUARE, "right")])
def test_auto_projects_the_smaller_side_of_each_matrix(shape, side):
    auto, optimizer = run(shape, projection="auto", rank=6)
    named, _ = run(shape, projection=side, rank=6)
    assert torch.equal(auto, named)
    matrix = optimizer.matrices["param_0"]
    assert matrix.transposed == (side == "left")
    assert matrix.basis.shape == (min(shape), 6)
    assert matrix.moments.exp_avg.shape == (max(shape), 6)


def test_auto_decides_per_matrix():
    model = network()  # 40 x 24, 40 x 40, 16 x 40
    matrices = low_rank_adamw(model, projection="auto", rank=8).matrices
    assert [m.transposed for m in matrices.values()] == [False, False, True]
    # 2 max(m, n) r and the basis of the smaller side, evidence beside them.
    sizes = [m.state_bytes() for m in matrices.values()]
    assert sizes == [4 * (2 * 40 * 8 + 24 * 8 + 9), 4 * (3 * 40 * 8 + 9), 4 * (2 * 320 + 128 + 9)]


@pytest.mark.parametrize("projection", ["left", "auto", "two_sided"])
@pytest.mark.parametrize("residual", ["probe", "none"])
@pytest.mark.parametrize("micro_batches", [1, 4])
def test_projected_backward_on_is_off(projection, residual, micro_batches):
    options = {**OPTIONS, "projection": projection, "residual": residual}
    on, off = network(), network()
    train(
        on, low_rank_adamw(on, projected_backward=True, **options), batches(15), micro_batches, 0.1
    )
    train(
        off,
        low_rank_adamw(off, projected_backward=False, **options),
        batches(15),
        micro_batches,
        0.1,
    )
    assert_same_weights(on, off, 2e-4)
    assert movement(on) > 0.03


@pytest.mark.parametrize("projection", ["left", "two_sided"])
def test_weight_gradients_are_formed_only_for_a_refresh(projection):
    model = network()
    optimizer = low_rank_adamw(model, projection=projection, **OPTIONS)
    formed = []
    for x, y in batches(16):
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        formed.append([i for i in (0, 2, 4) if model[i].weight.grad is not None])
        optimizer.step()
    later = [i for step in formed[3:15] for i in step]  # two intervals after the first round
    assert sorted(later) == [0, 0, 2, 2, 4, 4]


@pytest.mark.parametrize("projection", ["right", "left", "two_sided"])
def test_rank_changes_at_a_refresh(projection):
    """Rank 3 of the gradient first, then full rank, then 3 again: ranks follow, moments fit."""
    weight = nn.Parameter(torch.zeros(24, 32))
    optimizer = low_rank_adamw(
        [weight],
        lr=1e-2,
        projection=projection,
        rank_candidates=(4, 8, 16),
        update_interval=3,
        **PAPERS_RULE,
    )
    generator = torch.Generator().manual_seed(0)
    thin = torch.randn(24, 3, generator=generator) @ torch.randn(3, 32, generator=generator)
    full = torch.randn(24, 32, generator=generator)
    ranks = []
    for step in range(12):
        weight.grad = (full if 3 <= step < 9 else thin).clone()
        before = weight.detach().clone()
        optimizer.step()
        matrix = optimizer.matrices["param_0"]
        ranks.append(matrix.rank)
        rows = {"right": 24, "left": 32, "two_sided": matrix.rank}[projection]
        assert matrix.moments.exp_avg.read().shape == (rows, matrix.rank)
        assert weight.isfinite().all()
        # No entry of Adam's step exceeds a few units, whatever the rotation did.
        assert (weight - before).norm() < 1e-2 * 10 * (24 * 32) ** 0.5 * 0.25
    assert ranks == [4] * 3 + [16] * 6 + [4] * 3


@pytest.mark.parametrize("shape", [TALL, WIDE])
@pytest.mark.parametrize("projection", ["right", "left", "auto", "two_sided"])
def test_the_default_is_a_quarter_at_ten_times_the_rate(shape, projection):
    """GaLore's alpha at GaLore's rate over AdamW's; what a step takes of a weight is not multiplied."""
    moved = []
    for lr, decay, scale in ((1e-3, 0.1, "auto"), (1e-2, 0.01, 0.25)):
        weight = nn.Parameter(torch.ones(shape))
        optimizer = low_rank_adamw(
            [weight], lr=lr, weight_decay=decay, scale=scale, rank=6, projection=projection
        )
        for gradient in gradients(shape, 3):
            weight.grad = gradient
            optimizer.step()
        moved.append(weight.detach())
    torch.testing.assert_close(*moved, rtol=1e-6, atol=1e-6)


def test_at_full_rank_the_default_is_adamws_own_step():
    weight = nn.Parameter(torch.zeros(24, 32))
    optimizer = low_rank_adamw(
        [weight],
        lr=1e-3,
        residual="none",
        rank_candidates=(4, 8),
        update_interval=2,
        full_rank_budget=1.0,
        **PAPERS_RULE,
    )
    generator = torch.Generator().manual_seed(0)
    thin = torch.randn(24, 3, generator=generator) @ torch.randn(3, 32, generator=generator)
    full = torch.randn(24, 32, generator=generator)
    scales = []
    for gradient in (thin, thin, full, full):
        weight.grad = gradient.clone()
        optimizer.step()
        matrix = optimizer.matrices["param_0"]
        scales.append((matrix.full_rank, matrix.rank, matrix.scale))
    assert scales == [(False, 4, 2.5)] * 2 + [(True, 32, 1.0)] * 2


@pytest.mark.parametrize("projection", ["left", "auto", "two_sided"])
def test_learns(projection):
    model = network()
    optimizer = low_rank_adamw(
        model, lr=2e-2, rank=8, update_interval=20, scale=1.0, projection=projection
    )
    losses = train(model, optimizer, batches(150, size=64))
    assert sum(losses[-10:]) < 0.25 * sum(losses[:10])
