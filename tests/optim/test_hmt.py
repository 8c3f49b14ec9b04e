"""The optimizer as a whole: equivalences, what it is for, gradients that are missing or bad."""

import copy
from math import inf, log

import pytest
import torch
from galore_torch import GaLoreAdamW
from hmt_runs import OPTIONS, assert_same_weights, batches, movement, network, refreshes, train
from low_rank_adamw import low_rank_adamw
from torch import nn

# -- equivalences ---------------------------------------------------------------------------------


@pytest.mark.parametrize("max_norm", [None, 0.05])
def test_projected_backward_on_is_off(max_norm):
    on, off = network(), network()
    train(on, low_rank_adamw(on, **OPTIONS), batches(20), max_norm=max_norm)
    off_optimizer = low_rank_adamw(off, projected_backward=False, **OPTIONS)
    train(off, off_optimizer, batches(20), max_norm=max_norm)
    # The order of summation is all that differs; Adam's sign-like first steps amplify it a little.
    assert_same_weights(on, off, 1e-4)
    assert movement(on) > 0.05


def test_module_is_named_parameters():
    """The patched way and the p.grad way of two users who pass different things."""
    first, second = network(), network()
    train(first, low_rank_adamw(first, **OPTIONS), batches(10))
    train(second, low_rank_adamw(second.named_parameters(), **OPTIONS), batches(10))
    assert_same_weights(first, second, 1e-4)


@pytest.mark.parametrize("projected_backward", ["auto", False])
@pytest.mark.parametrize("max_norm", [None, 0.05])
def test_accumulation(projected_backward, max_norm):
    whole, parts = network(), network()
    for model, micro_batches in ((whole, 1), (parts, 4)):
        optimizer = low_rank_adamw(model, projected_backward=projected_backward, **OPTIONS)
        train(model, optimizer, batches(15), micro_batches, max_norm)
    assert_same_weights(whole, parts, 1e-4)


def test_projection_is_constant_over_a_window():
    model = network()
    optimizer = low_rank_adamw(model, **OPTIONS)
    data = list(batches(4))
    train(model, optimizer, data[:3])
    site = next(s for s in optimizer._patches.projected.values() if s.projection is not None)
    during = []
    for x, y in data:
        (model(x) - y).square().mean().backward()
        during.append(site.projection.clone())
    optimizer.clip_grad_norm_(1.0)
    during.append(site.projection.clone())
    assert all(torch.equal(during[0], p) for p in during)
    optimizer.step()
    assert site.projection is None or not torch.equal(during[0], site.projection)


def test_method_adamw_is_torchs():
    ours, theirs = network(), network()
    hyper = {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-7, "weight_decay": 0.1}
    train(ours, low_rank_adamw(ours.parameters(), method="adamw", **hyper), batches(20))
    train(theirs, torch.optim.AdamW(theirs.parameters(), **hyper), batches(20))
    assert_same_weights(ours, theirs, 1e-5)  # fused and unfused kernels round differently


def test_a_weight_that_is_stored_transposed_takes_the_same_step():
    """Kernels that go through memory meet its gradient in another order than its states."""
    start, hyper = torch.randn(6, 4), {"lr": 1e-2, "weight_decay": 0.1}
    for method in ("adamw", "lowrank_adamw"):
        plain, transposed = nn.Parameter(start.clone()), nn.Parameter(start.t().contiguous().t())
        assert not transposed.is_contiguous()
        options = {} if method == "adamw" else {"rank": 2}
        for weight in (plain, transposed):
            optimizer = low_rank_adamw([weight], method=method, **hyper, **options)
            draw = torch.Generator().manual_seed(0)
            for _ in range(5):
                weight.grad = torch.empty_like(weight).copy_(torch.randn(6, 4, generator=draw))
                optimizer.step()
        torch.testing.assert_close(plain, transposed)
        assert not torch.allclose(plain, start, atol=1e-3)


def test_fixed_basis_is_galores():
    """GaLore with proj_type right, whose basis is an SVD's, and a gap that never comes again.

    GaLore adds eps before the bias correction, we (like torch) after it, so eps is 1e-12 here; it
    takes weight decay after the step, so there is none.
    """
    m, n, rank, steps = 12, 20, 4, 20
    generator = torch.Generator().manual_seed(3)
    gradients = [torch.randn(m, n, generator=generator) for _ in range(steps)]
    start = torch.randn(m, n, generator=generator)
    theirs, ours = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    galore = {"rank": rank, "update_proj_gap": 10**6, "scale": 0.25, "proj_type": "right"}
    reference = GaLoreAdamW(
        [{"params": [theirs], **galore}], lr=1e-2, eps=1e-12, no_deprecation_warning=True
    )
    options = {"rank": rank, "scale": 0.25, "residual": "none", "update_interval": 10**6}
    optimizer = low_rank_adamw([ours], lr=1e-2, eps=1e-12, range_finder="svd", **options)
    for gradient in gradients:
        theirs.grad, ours.grad = gradient.clone(), gradient.clone()
        reference.step()
        optimizer.step()
    assert (ours - start).abs().max() > 1e-2
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


# -- what it is for -------------------------------------------------------------------------------


@pytest.mark.parametrize("residual", ["probe", "none"])
def test_learns(residual):
    model = network()
    optimizer = low_rank_adamw(
        model, lr=2e-2, rank=8, update_interval=20, scale=1.0, residual=residual
    )
    losses = train(model, optimizer, batches(300, size=64))
    assert sum(losses[-10:]) < 0.1 * sum(losses[:10])


def test_residual_moves_the_weight_outside_the_basis():
    outside = {}
    for residual in ("probe", "none"):
        weight = nn.Parameter(torch.zeros(16, 32))
        optimizer = low_rank_adamw([weight], rank=4, residual=residual)
        weight.grad = torch.randn(16, 32, generator=torch.Generator().manual_seed(0))
        optimizer.step()
        basis = optimizer.state_dict()["state"][0]["basis"]
        outside[residual] = (weight - weight @ basis @ basis.t()).norm() / weight.norm()
    assert outside["none"] < 1e-4
    assert outside["probe"] > 0.1


def test_weight_gradients_are_formed_only_for_a_refresh():
    model = network()
    optimizer = low_rank_adamw(model, **OPTIONS)
    formed = []
    for x, y in batches(20):
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        formed.append([i for i in (0, 2, 4) if model[i].weight.grad is not None])
        assert all(model[i].bias.grad is not None for i in (0, 2, 4))
        optimizer.step()
    # The default budget is the largest gradient: at most the two smaller ones fit together.
    assert all(step in ([], [0], [2], [4], [0, 4]) for step in formed)
    later = [i for step in formed[3:15] for i in step]  # two intervals after the first round
    assert sorted(later) == [0, 0, 2, 2, 4, 4]


def test_first_refresh_under_a_larger_budget_takes_all():
    model = network()
    low_rank_adamw(model, max_full_gradient_bytes=10**6, **OPTIONS)
    x, y = next(iter(batches(1)))
    (model(x) - y).square().mean().backward()
    assert all(model[i].weight.grad is not None for i in (0, 2, 4))


def test_rank_follows_the_energy():
    """Gradients of rank 3 need rank 4 of the candidates; of full rank, the largest."""
    generator = torch.Generator().manual_seed(0)
    thin, full = nn.Parameter(torch.zeros(32, 48)), nn.Parameter(torch.zeros(32, 48))
    optimizer = low_rank_adamw(
        [thin, full], rank_candidates=(2, 4, 16), max_full_gradient_bytes=10**6
    )
    thin.grad = torch.randn(32, 3, generator=generator) @ torch.randn(3, 48, generator=generator)
    full.grad = torch.randn(32, 48, generator=generator)
    optimizer.step()
    assert [row.rank for row in optimizer.describe()] == [4, 16]


def test_clipping_by_the_estimated_norm():
    model = network()
    optimizer = low_rank_adamw(model, projected_backward=False, **OPTIONS)
    true, estimated = [], []
    for x, y in batches(30):
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        true.append(nn.utils.get_total_norm([p.grad for p in model.parameters()]).item())
        estimated.append(optimizer.clip_grad_norm_(inf).item())
        unclipped = [p.grad.clone() for p in model.parameters()]
        optimizer.clip_grad_norm_(true[-1] / 10)
        for before, p in zip(unclipped, model.parameters(), strict=True):
            torch.testing.assert_close(p.grad, before * 0.1 * true[-1] / estimated[-1])
        optimizer.step()
    # Only the residual is estimated: a few percent on average, never far in one step.
    ratios = torch.tensor(estimated) / torch.tensor(true)
    assert (ratios.mean() - 1).abs() < 0.03
    assert (ratios - 1).abs().max() < 0.3


def test_clipping_leaves_small_gradients_and_refuses_nonsense():
    weight = nn.Parameter(torch.zeros(3))
    optimizer = low_rank_adamw([weight])
    assert optimizer.clip_grad_norm_(1.0) == 0
    weight.grad = torch.tensor([3.0, 0.0, 4.0])
    torch.testing.assert_close(optimizer.clip_grad_norm_(6.0), torch.tensor(5.0))
    torch.testing.assert_close(weight.grad, torch.tensor([3.0, 0.0, 4.0]))
    with pytest.raises(ValueError, match="max_norm is 0"):
        optimizer.clip_grad_norm_(0)


def test_the_norm_that_ranks_are_predicted_by_is_that_before_clipping():
    norms = []
    for max_norms in ((), (0.05,), (0.5, 0.05)):
        model = network()
        optimizer = low_rank_adamw(
            model, **{**OPTIONS, "lr": 0.0}
        )  # weights stay: all three see the same gradients
        for x, y in batches(6):
            optimizer.zero_grad()
            (model(x) - y).square().mean().backward()
            for max_norm in max_norms:
                optimizer.clip_grad_norm_(max_norm)
            optimizer.step()
        found = optimizer.matrices.values()
        norms.append([0.5 * log(m.mean_square_norm / m.energy_weight) for m in found])
    assert norms[1] == pytest.approx(norms[0], rel=1e-4)
    assert norms[2] == pytest.approx(norms[0], rel=1e-4)


# -- gradients that are missing or bad ------------------------------------------------------------


def test_parameter_without_gradient_is_skipped():
    used, unused = nn.Parameter(torch.ones(8, 8)), nn.Parameter(torch.ones(8, 8))
    optimizer = low_rank_adamw(
        [used, unused], rank=2, weight_decay=0.5, max_full_gradient_bytes=10**6
    )
    used.grad = torch.randn(8, 8)
    optimizer.step()
    assert torch.equal(unused, torch.ones(8, 8))
    assert not torch.equal(used, torch.ones(8, 8))
    assert refreshes(optimizer) == {
        "param_0": 1,
        "param_1": 0,
    }  # still waits for its first gradient


@pytest.mark.parametrize("bad", [inf, float("nan"), 0.0])
def test_bad_gradient_keeps_the_old_basis(bad):
    weight = nn.Parameter(torch.ones(8, 12))
    optimizer = low_rank_adamw([weight], rank=2, update_interval=1)
    weight.grad = torch.randn(8, 12)
    optimizer.step()
    matrix = optimizer.matrices["param_0"]
    before = matrix.basis.clone()
    weight.grad = torch.full((8, 12), bad)
    optimizer.clip_grad_norm_(inf)  # refreshes; the user sees the norm and skips the step
    assert torch.equal(matrix.basis, before)
    weight.grad = torch.randn(8, 12)
    optimizer.step()
    optimizer.step()
    assert not torch.equal(matrix.basis, before)


@pytest.mark.parametrize("who", ["optimizer", "model", "layers"])
def test_zero_grad_drops_projected_gradients(who):
    first, second = network(), network()
    optimizers = [low_rank_adamw(model, **OPTIONS) for model in (first, second)]
    dropping = {"optimizer": optimizers[:1], "model": [first], "layers": list(first)}
    for x, y in batches(6):
        (first(3 * x) - y).square().mean().backward()  # thought better of it
        for one in dropping[who]:
            one.zero_grad()
        for model, optimizer in zip((first, second), optimizers, strict=True):
            (model(x) - y).square().mean().backward()
            optimizer.step()
            model.zero_grad()
    assert_same_weights(first, second)


def test_a_batch_that_is_skipped_leaves_nothing_to_the_next():
    """Of an infinite norm clipping makes a factor of zero and gradients of nan."""
    once = {**OPTIONS, "update_interval": 100, "max_full_gradient_bytes": 10**6}
    first, second = network(), network()
    optimizers = [low_rank_adamw(model, **once) for model in (first, second)]
    (bad, _), *data = batches(4)
    for model, optimizer in zip((first, second), optimizers, strict=True):
        for step, (x, y) in enumerate(data):
            if model is first and step > 0:  # the first step's window makes the bases
                (model(bad).square().mean() * inf).backward()
                assert not optimizer.clip_grad_norm_(1.0).isfinite()
            model.zero_grad()
            (model(x) - y).square().mean().backward()
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
            model.zero_grad()
    assert_same_weights(first, second)
    for matrix, twin in zip(*(o.matrices.values() for o in optimizers), strict=True):
        assert torch.equal(matrix.mean_square_norm, twin.mean_square_norm)


def test_a_copy_of_a_patched_model_drops_its_own_gradients_only():
    model = network()
    optimizer = low_rank_adamw(
        model, **{**OPTIONS, "update_interval": 100, "max_full_gradient_bytes": 10**6}
    )
    data = list(batches(2))
    train(model, optimizer, data)
    copied, (x, y) = copy.deepcopy(model), data[0]
    for one in (model, copied):
        (one(x) - y).square().mean().backward()
    copied.zero_grad()
    assert all(p.grad is None for p in copied.parameters())
    assert all(site.pending is not None for site in optimizer._patches.projected.values())
    optimizer.close()
    assert "zero_grad" not in vars(model)
    low_rank_adamw(model, **OPTIONS)
    assert "zero_grad" not in vars(model)  # its optimizer is gone


def test_closure():
    first, second = network(), network()
    optimizers = [low_rank_adamw(model, **OPTIONS) for model in (first, second)]
    for x, y in batches(6):
        train(first, optimizers[0], [(x, y)])

        def closure(x=x, y=y):
            optimizers[1].zero_grad()
            loss = (second(x) - y).square().mean()
            loss.backward()
            return loss

        assert optimizers[1].step(closure).item() > 0
    assert_same_weights(first, second)


def test_groups_have_their_own_hyperparameters():
    slow, fast, frozen = (nn.Parameter(torch.ones(8, 8)) for _ in range(3))
    frozen.requires_grad_(False)
    optimizer = low_rank_adamw(
        [{"params": [slow], "lr": 1e-4}, {"params": [fast, frozen], "weight_decay": 0.5}],
        lr=1e-2,
        rank=2,
        max_full_gradient_bytes=10**6,
    )
    slow.grad = torch.ones(8, 8)
    fast.grad = torch.zeros(8, 8)
    optimizer.step()
    assert 0 < (slow - 1).abs().max() < 1e-3
    torch.testing.assert_close(fast.detach(), torch.full((8, 8), 1 - 1e-2 * 0.5))
    assert len(optimizer.describe()) == 2


def test_add_param_group_while_training():
    weight, late = nn.Parameter(torch.ones(8, 8)), nn.Parameter(torch.ones(8, 8))
    optimizer = low_rank_adamw([weight], rank=2)
    weight.grad = torch.randn(8, 8)
    optimizer.step()
    optimizer.add_param_group({"params": [late], "lr": 1e-1})
    late.grad = torch.randn(8, 8)
    optimizer.step()
    assert not torch.equal(late, torch.ones(8, 8))
    assert refreshes(optimizer)["param_1"] == 1


def test_scheduler_and_grad_accumulated_in_a_tied_use():
    """A linear's weight that is also used elsewhere: both parts of its gradient arrive."""
    on, off = network(), network()
    for model, projected_backward in ((on, "auto"), (off, False)):
        optimizer = low_rank_adamw(model, projected_backward=projected_backward, **OPTIONS)
        decay = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        for x, y in batches(8):
            optimizer.zero_grad()
            loss = (model(x) - y).square().mean() + (model[2].weight ** 3).mean()
            loss.backward()
            optimizer.step()
            decay.step()
    assert_same_weights(on, off, 1e-4)
