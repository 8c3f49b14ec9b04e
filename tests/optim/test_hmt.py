"""The optimizer as a whole, on its contract."""

import gc
import io
from math import inf

import pytest
import torch
from galore_torch import GaLoreAdamW
from torch import nn

from hmt_deepspeed.optim.hmt import HMT, low_rank_settings
from hmt_deepspeed.optim.matrix import LowRankMatrix

WIDTHS = (24, 40, 40, 16)


def network(seed=0, dtype=torch.float32):
    torch.manual_seed(seed)
    layers = []
    for m, n in zip(WIDTHS[1:], WIDTHS, strict=False):
        layers += [nn.Linear(n, m), nn.Tanh()]
    return nn.Sequential(*layers[:-1]).to(dtype)


def batches(count, size=32, dtype=torch.float32):
    generator = torch.Generator().manual_seed(5)
    teacher = torch.randn(WIDTHS[0], WIDTHS[-1], generator=generator) / WIDTHS[0] ** 0.5
    for _ in range(count):
        x = torch.randn(size, WIDTHS[0], generator=generator)
        yield x.to(dtype), torch.tanh(x @ teacher).to(dtype)


OPTIONS = {"lr": 1e-2, "weight_decay": 0.1, "rank": 8, "update_interval": 6}


def train(model, optimizer, data, micro_batches=1, max_norm=None):
    """Losses of a run; weights change in place."""
    losses = []
    for x, y in data:
        optimizer.zero_grad()
        for part_x, part_y in zip(x.chunk(micro_batches), y.chunk(micro_batches), strict=True):
            loss = (model(part_x) - part_y).float().square().mean() / micro_batches
            loss.backward()
        losses.append(loss.item())
        if max_norm is not None:
            optimizer.clip_grad_norm_(max_norm)
        optimizer.step()
    return losses


def assert_same_weights(first, second, tolerance=0.0):
    for (name, a), b in zip(first.named_parameters(), second.parameters(), strict=True):
        error = (a.float() - b.float()).abs().max().item()
        assert error <= tolerance, f"{name} differs by {error}"


def movement(model, seed=0):
    start = network(seed)
    pairs = zip(model.parameters(), start.parameters(), strict=True)
    return max((a - b).abs().max().item() for a, b in pairs)


# -- equivalences ---------------------------------------------------------------------------------


@pytest.mark.parametrize("max_norm", [None, 0.05])
def test_projected_backward_on_is_off(max_norm):
    on, off = network(), network()
    train(on, HMT(on, **OPTIONS), batches(20), max_norm=max_norm)
    off_optimizer = HMT(off, projected_backward=False, **OPTIONS)
    train(off, off_optimizer, batches(20), max_norm=max_norm)
    # The order of summation is all that differs; Adam's sign-like first steps amplify it a little.
    assert_same_weights(on, off, 1e-4)
    assert movement(on) > 0.05


def test_module_is_named_parameters():
    """The patched way and the p.grad way of two users who pass different things."""
    first, second = network(), network()
    train(first, HMT(first, **OPTIONS), batches(10))
    train(second, HMT(second.named_parameters(), **OPTIONS), batches(10))
    assert_same_weights(first, second, 1e-4)


@pytest.mark.parametrize("projected_backward", ["auto", False])
@pytest.mark.parametrize("max_norm", [None, 0.05])
def test_accumulation(projected_backward, max_norm):
    whole, parts = network(), network()
    for model, micro_batches in ((whole, 1), (parts, 4)):
        optimizer = HMT(model, projected_backward=projected_backward, **OPTIONS)
        train(model, optimizer, batches(15), micro_batches, max_norm)
    assert_same_weights(whole, parts, 1e-4)


def test_projection_is_constant_over_a_window():
    model = network()
    optimizer = HMT(model, **OPTIONS)
    data = list(batches(4))
    train(model, optimizer, data[:3])
    site = next(s for s in optimizer._sites.values() if s.projection is not None)
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
    train(ours, HMT(ours.parameters(), method="adamw", **hyper), batches(20))
    train(theirs, torch.optim.AdamW(theirs.parameters(), **hyper), batches(20))
    assert_same_weights(ours, theirs, 1e-5)  # fused and unfused kernels round differently


def test_fixed_basis_is_galores():
    """GaLore with proj_type right and a gap that never comes again.

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
    optimizer = HMT([ours], lr=1e-2, eps=1e-12, rank=rank, residual="none", update_interval=10**6)
    for i, gradient in enumerate(gradients):
        theirs.grad, ours.grad = gradient.clone(), gradient.clone()
        reference.step()
        if i == 0:  # both refresh at the first step; ours then gets theirs: Adam is not
            optimizer.describe()  # invariant to a rotation of the basis, nor to its signs
            matrix = optimizer._slots[ours].matrix
            matrix.adopt(reference.state[theirs]["projector"].ortho_matrix.t())
            matrix.draw_probes(0)
            optimizer._slots[ours].due = False
            optimizer._schedule.refreshed(0, 0)
            optimizer._schedule.next_refresh[0] = 10**6
        optimizer.step()
    assert (ours - start).abs().max() > 1e-2
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


# -- what it is for -------------------------------------------------------------------------------


@pytest.mark.parametrize("residual", ["probe", "none"])
def test_learns(residual):
    model = network()
    optimizer = HMT(model, lr=2e-2, rank=8, update_interval=20, scale=1.0, residual=residual)
    losses = train(model, optimizer, batches(300, size=64))
    assert sum(losses[-10:]) < 0.1 * sum(losses[:10])


def test_residual_moves_the_weight_outside_the_basis():
    outside = {}
    for residual in ("probe", "none"):
        weight = nn.Parameter(torch.zeros(16, 32))
        optimizer = HMT([weight], rank=4, residual=residual)
        weight.grad = torch.randn(16, 32, generator=torch.Generator().manual_seed(0))
        optimizer.step()
        basis = optimizer.state_dict()["state"][0]["basis"]
        outside[residual] = (weight - weight @ basis @ basis.t()).norm() / weight.norm()
    assert outside["none"] < 1e-4
    assert outside["probe"] > 0.1


def test_weight_gradients_are_formed_only_for_a_refresh():
    model = network()
    optimizer = HMT(model, **OPTIONS)
    formed = []
    for x, y in batches(20):
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        formed.append([i for i in (0, 2, 4) if model[i].weight.grad is not None])
        assert all(model[i].bias.grad is not None for i in (0, 2, 4))
        optimizer.step()
    assert all(len(step) <= 1 for step in formed)  # the default budget: one of the largest
    later = [i for step in formed[3:15] for i in step]  # two intervals after the first round
    assert sorted(later) == [0, 0, 2, 2, 4, 4]


def test_first_refresh_under_a_larger_budget_takes_all():
    model = network()
    HMT(model, max_full_gradient_bytes=10**6, **OPTIONS)
    x, y = next(iter(batches(1)))
    (model(x) - y).square().mean().backward()
    assert all(model[i].weight.grad is not None for i in (0, 2, 4))


def test_rank_follows_the_energy():
    """Gradients of rank 3 need rank 4 of the candidates; of full rank, the largest."""
    generator = torch.Generator().manual_seed(0)
    thin, full = nn.Parameter(torch.zeros(32, 48)), nn.Parameter(torch.zeros(32, 48))
    optimizer = HMT([thin, full], rank_candidates=(2, 4, 16), max_full_gradient_bytes=10**6)
    thin.grad = torch.randn(32, 3, generator=generator) @ torch.randn(3, 48, generator=generator)
    full.grad = torch.randn(32, 48, generator=generator)
    optimizer.step()
    assert [row.rank for row in optimizer.describe()] == [4, 16]


def test_clipping_by_the_estimated_norm():
    model = network()
    optimizer = HMT(model, projected_backward=False, **OPTIONS)
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
    optimizer = HMT([weight])
    assert optimizer.clip_grad_norm_(1.0) == 0
    weight.grad = torch.tensor([3.0, 0.0, 4.0])
    torch.testing.assert_close(optimizer.clip_grad_norm_(6.0), torch.tensor(5.0))
    torch.testing.assert_close(weight.grad, torch.tensor([3.0, 0.0, 4.0]))
    with pytest.raises(ValueError, match="max_norm is 0"):
        optimizer.clip_grad_norm_(0)


# -- gradients that are missing or bad ------------------------------------------------------------


def test_parameter_without_gradient_is_skipped():
    used, unused = nn.Parameter(torch.ones(8, 8)), nn.Parameter(torch.ones(8, 8))
    optimizer = HMT([used, unused], rank=2, weight_decay=0.5, max_full_gradient_bytes=10**6)
    used.grad = torch.randn(8, 8)
    optimizer.step()
    assert torch.equal(unused, torch.ones(8, 8))
    assert not torch.equal(used, torch.ones(8, 8))
    assert optimizer._schedule.num_refreshes == [1, 0]  # still waits for its first gradient


@pytest.mark.parametrize("bad", [inf, float("nan"), 0.0])
def test_bad_gradient_keeps_the_old_basis(bad):
    weight = nn.Parameter(torch.ones(8, 12))
    optimizer = HMT([weight], rank=2, update_interval=1)
    weight.grad = torch.randn(8, 12)
    optimizer.step()
    matrix = optimizer._slots[weight].matrix
    before = matrix.basis.clone()
    weight.grad = torch.full((8, 12), bad)
    optimizer.clip_grad_norm_(inf)  # refreshes; the user sees the norm and skips the step
    assert torch.equal(matrix.basis, before)
    weight.grad = torch.randn(8, 12)
    optimizer.step()
    optimizer.step()
    assert not torch.equal(matrix.basis, before)


def test_zero_grad_drops_projected_gradients():
    first, second = network(), network()
    optimizers = [HMT(model, **OPTIONS) for model in (first, second)]
    for x, y in batches(6):
        (first(3 * x) - y).square().mean().backward()  # thought better of it
        for model, optimizer in zip((first, second), optimizers, strict=True):
            optimizer.zero_grad()
            (model(x) - y).square().mean().backward()
            optimizer.step()
    assert_same_weights(first, second)


def test_closure():
    first, second = network(), network()
    optimizers = [HMT(model, **OPTIONS) for model in (first, second)]
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
    optimizer = HMT(
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
    optimizer = HMT([weight], rank=2)
    weight.grad = torch.randn(8, 8)
    optimizer.step()
    optimizer.add_param_group({"params": [late], "lr": 1e-1})
    late.grad = torch.randn(8, 8)
    optimizer.step()
    assert not torch.equal(late, torch.ones(8, 8))
    assert optimizer._schedule.num_refreshes[1] == 1


def test_scheduler_and_grad_accumulated_in_a_tied_use():
    """A linear's weight that is also used elsewhere: both parts of its gradient arrive."""
    on, off = network(), network()
    for model, projected_backward in ((on, "auto"), (off, False)):
        optimizer = HMT(model, projected_backward=projected_backward, **OPTIONS)
        decay = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        for x, y in batches(8):
            optimizer.zero_grad()
            loss = (model(x) - y).square().mean() + (model[2].weight ** 3).mean()
            loss.backward()
            optimizer.step()
            decay.step()
    assert_same_weights(on, off, 1e-4)


# -- construction ---------------------------------------------------------------------------------


def test_construction_with_tensors_allocates_nothing(monkeypatch):
    monkeypatch.setattr(LowRankMatrix, "__init__", lambda *a: pytest.fail("allocated"))
    model = network()
    optimizer = HMT(model.named_parameters(), projected_backward=True)
    assert not optimizer.state
    assert optimizer.options["rank"] == "auto"
    assert "forward" not in vars(model[0])


def test_options_and_settings():
    settings = low_rank_settings(HMT([nn.Parameter(torch.ones(2))]).options)
    assert (settings.rank, settings.probes, settings.residual_scale) == (None, None, None)
    assert (settings.scale, settings.norm_growth_limit) == (0.25, 1.01)
    options = HMT([nn.Parameter(torch.ones(2))], norm_growth_limit=None, residual="none").options
    assert low_rank_settings(options).norm_growth_limit is None
    assert not low_rank_settings(options).residual


@pytest.mark.parametrize(
    ("field", "value", "legal"),
    [
        ("lr", -1.0, ">= 0"),
        ("betas", (0.9, 1.0), "< 1"),
        ("eps", float("nan"), ">= 0"),
        ("weight_decay", -0.1, ">= 0"),
        ("method", "galore", "lowrank_adamw"),
        ("rank", 0, ">= 1"),
        ("rank", 2.5, ">= 1"),
        ("rank", "full", ">= 1"),
        ("rank_candidates", (64, 32), "increasing"),
        ("rank_candidates", (), "increasing"),
        ("rank_candidates", 32, "increasing"),
        ("energy_threshold", 1.5, "at most 1"),
        ("energy_threshold", "high", "at most 1"),
        ("update_interval", 0, ">= 1"),
        ("residual", "full", "probe"),
        ("probes", 0, ">= 1"),
        ("probes", -1, ">= 0"),
        ("residual_scale", 0.0, "> 0"),
        ("projected_backward", "yes", "auto"),
        ("scale", 0, "> 0"),
        ("norm_growth_limit", 0.9, ">= 1"),
        ("max_full_gradient_bytes", 0, ">= 1"),
        ("master_weights", "bf16", "fp32"),
        ("target_modules", "mlp", "list"),
        ("exclude_modules", None, "list"),
        ("seed", -1, "from 0"),
    ],
)
def test_values_out_of_range(field, value, legal):
    with pytest.raises(ValueError) as caught:
        HMT([nn.Parameter(torch.ones(4, 4))], **{field: value})
    message = str(caught.value)
    assert field in message
    assert repr(value) in message
    assert legal in message


@pytest.mark.parametrize(
    ("parameter", "options", "words"),
    [
        (torch.ones(4, 4), {"rank": 5}, "legal is 1..4"),
        (torch.ones(4, 4), {"max_full_gradient_bytes": 63}, "64 bytes"),
        (torch.ones(4, 4), {"projected_backward": True}, "pass the module"),
        (torch.ones(4, 4), {"target_modules": ["nothing"]}, "matches no trainable"),
        (torch.ones(4, 4), {"master_weights": "none"}, "no weight is bfloat16"),
        (torch.ones(4, 4).half(), {"master_weights": "none"}, "float16"),
        (torch.ones(4, 4).double(), {}, "float64"),
    ],
)
def test_what_cannot_work_is_refused_at_first_use(parameter, options, words):
    parameter = nn.Parameter(parameter)
    optimizer = HMT([parameter], **options)
    parameter.grad = torch.ones_like(parameter)
    with pytest.raises(ValueError, match=words):
        optimizer.step()


def test_modules_that_cannot_be_patched():
    class Doubled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    model = nn.Sequential(nn.Linear(8, 8), Doubled(8, 8))
    with pytest.raises(ValueError, match="Doubled"):
        HMT(model, rank=2, projected_backward=True)
    optimizer = HMT(model, rank=2)  # auto: what cannot be patched projects p.grad
    before = model[1].weight.clone()
    model(torch.randn(3, 8)).sum().backward()
    optimizer.step()
    assert not torch.equal(model[1].weight, before)
    parallel = type("DistributedDataParallel", (nn.Module,), {})()
    with pytest.raises(ValueError, match="DistributedDataParallel"):
        HMT(parallel)


def test_sparse_gradients_are_refused():
    model = nn.Embedding(10, 4, sparse=True)
    optimizer = HMT(model)
    model(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match="sparse=False"):
        optimizer.step()


def ordinary(model):
    model.zero_grad()
    x, y = next(iter(batches(1)))
    (model(x) - y).square().mean().backward()
    return all(p.grad is not None for p in model.parameters())


def test_close_and_garbage_collection_unpatch():
    model = network()
    optimizer = HMT(model, **OPTIONS)
    assert not ordinary(model)
    train(model, optimizer, batches(3))
    optimizer.close()
    assert ordinary(model)
    train(model, optimizer, batches(3))  # goes on with p.grad
    optimizer = HMT(model, **OPTIONS)
    assert not ordinary(model)
    del optimizer
    gc.collect()
    assert ordinary(model)


def test_a_second_optimizer_takes_over():
    model = network()
    first = HMT(model, **OPTIONS)
    second = HMT(model, **OPTIONS)
    first.close()
    before = model[2].weight.clone()
    train(model, second, batches(1))
    assert not ordinary(model)
    assert not torch.equal(model[2].weight, before)


def test_describe():
    model = nn.ModuleDict({"embed": nn.Embedding(50, 16), "up": nn.Linear(16, 40)})
    rows = {row.name: row for row in HMT(model.to(torch.bfloat16), rank=4).describe()}
    assert rows["embed.weight"][1:4] == ("adamw", "excluded by 'embed'", None)
    assert rows["embed.weight"].state_bytes == 50 * 16 * 12
    assert rows["up.weight"][1:4] == ("lowrank_adamw", "", 4)
    # Two fp32 moments, evidence, bf16 basis, fp32 master.
    assert rows["up.weight"].state_bytes == 2 * 40 * 4 * 4 + 4 * 4 + 16 * 4 * 2 + 40 * 16 * 4
    rows = {row.name: row for row in HMT(model, rank=4, master_weights="none").describe()}
    assert rows["embed.weight"].state_bytes == 50 * 16 * 8


# -- 16-bit weights -------------------------------------------------------------------------------


def test_master_keeps_updates_below_the_spacing():
    weight = nn.Parameter(torch.ones(8, 8, dtype=torch.bfloat16))
    optimizer = HMT([weight], lr=1e-4, method="adamw")
    for _ in range(100):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    torch.testing.assert_close(weight.float(), torch.full((8, 8), 0.99), atol=2e-3, rtol=0)
    assert optimizer.state[weight]["master"].dtype == torch.float32


@pytest.mark.parametrize("method", ["lowrank_adamw", "adamw"])
def test_none_mode_drifts_as_fp32_does(method):
    """Steps far below bf16's spacing of 1/128: rounding to nearest would never move."""
    m, n, steps = 64, 48, 100
    gradient = torch.randn(m, 1, generator=torch.Generator().manual_seed(0)) @ torch.ones(1, n)
    moved = {}
    for dtype, masters in ((torch.float32, "fp32"), (torch.bfloat16, "none")):
        weight = nn.Parameter(torch.full((m, n), 1.5, dtype=dtype))
        rule = {} if method == "adamw" else {"rank": 2, "residual": "none", "scale": 1.0}
        optimizer = HMT([weight], lr=2e-4, method=method, master_weights=masters, **rule)
        for _ in range(steps):
            weight.grad = gradient.to(dtype)
            optimizer.step()
        assert set(optimizer.state[weight]) <= {"exp_avg", "exp_avg_sq", "step"}
        moved[dtype] = weight.detach().float() - 1.5
    exact, rounded = moved[torch.float32], moved[torch.bfloat16]
    assert exact.abs().max() > 1e-4
    # A step rounds to a neighbour 1/128 away with the right probability: a row's mean of 48 elements
    # after 100 steps has a deviation of sqrt(|move| / 128 / 48), at most 2e-3.
    torch.testing.assert_close(rounded.mean(1), exact.mean(1), atol=8e-3, rtol=0)
    slope = (rounded * exact).sum() / exact.square().sum()
    assert 0.9 < slope < 1.1


@pytest.mark.parametrize("masters", ["fp32", "none"])
@pytest.mark.parametrize("contiguous", [True, False])
def test_bf16_learns(masters, contiguous):
    model = network(dtype=torch.bfloat16)
    if not contiguous:
        model[2].weight = nn.Parameter(model[2].weight.detach().t().contiguous().t())
    optimizer = HMT(model, lr=1e-2, rank=8, update_interval=10, scale=1.0, master_weights=masters)
    losses = train(model, optimizer, batches(150, size=64, dtype=torch.bfloat16))
    assert sum(losses[-10:]) < 0.3 * sum(losses[:10])


# -- checkpoint -----------------------------------------------------------------------------------


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("given", ["module", "named", "tensors"])
@pytest.mark.parametrize(
    ("dtype", "masters"),
    [(torch.float32, "fp32"), (torch.bfloat16, "fp32"), (torch.bfloat16, "none")],
)
def test_resume_is_bit_exact(given, dtype, masters):
    def construct(model):
        params = {"module": model, "named": model.named_parameters(), "tensors": model.parameters()}
        return HMT(
            params[given],
            lr=1e-2,
            weight_decay=0.1,
            rank_candidates=(2, 4, 8),
            update_interval=4,
            master_weights=masters,
        )

    data = list(batches(24, dtype=dtype))
    straight = network(dtype=dtype)
    optimizer = construct(straight)
    train(straight, optimizer, data[:11], max_norm=1.0)
    optimizer.param_groups[0]["lr"] = 5e-3
    saved = through_a_file({"model": straight.state_dict(), "optimizer": optimizer.state_dict()})
    train(straight, optimizer, data[11:], max_norm=1.0)

    resumed = network(seed=1, dtype=dtype)
    resumed.load_state_dict(saved["model"])
    fresh = construct(resumed)
    fresh.load_state_dict(saved["optimizer"])
    assert fresh.param_groups[0]["lr"] == 5e-3
    train(resumed, fresh, data[11:], max_norm=1.0)
    assert_same_weights(straight, resumed)
    ours, theirs = optimizer.state_dict(), fresh.state_dict()
    assert ours["hmt"] == theirs["hmt"]
    assert ours["state"].keys() == theirs["state"].keys()
    for index, state in ours["state"].items():
        assert state.keys() == theirs["state"][index].keys()
        for key, value in state.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(theirs["state"][index][key]))


class Sharing(nn.Module):
    """Three linears that read one input."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v = (nn.Linear(24, 16) for _ in range(3))

    def forward(self, x):
        return self.q(x) * torch.tanh(self.k(x)) + self.v(x)


def test_resume_keeps_who_shares_a_product():
    """One wide product and three narrow ones may differ in the last bit."""
    data = list(batches(12))
    straight, resumed = Sharing(), Sharing()
    optimizer = HMT(straight, **OPTIONS)
    train(straight, optimizer, data[:6])
    saved = through_a_file(optimizer.state_dict())
    assert saved["hmt"]["groups"] == [["q.weight", "k.weight", "v.weight"]]
    resumed.load_state_dict(straight.state_dict())
    train(straight, optimizer, data[6:])
    fresh = HMT(resumed, **OPTIONS)
    fresh.load_state_dict(saved)
    assert fresh._shared.groups() == saved["hmt"]["groups"]
    train(resumed, fresh, data[6:])
    assert_same_weights(straight, resumed)


def test_saving_does_not_disturb():
    first, second = network(), network()
    optimizers = [HMT(model, **OPTIONS) for model in (first, second)]
    for batch in batches(8):
        train(first, optimizers[0], [batch])
        train(second, optimizers[1], [batch])
        optimizers[1].state_dict()
    assert_same_weights(first, second)
    assert all("basis" not in state for state in optimizers[1].state.values())


def test_loading_before_the_first_and_after_some_steps():
    model = network()
    optimizer = HMT(model.named_parameters(), **OPTIONS)
    start = through_a_file(optimizer.state_dict())
    train(model, optimizer, batches(5))
    again = network()
    optimizer_again = HMT(again.named_parameters(), **OPTIONS)
    train(again, optimizer_again, batches(5))
    for m, o in ((model, optimizer), (again, optimizer_again)):
        m.load_state_dict(network().state_dict())
        o.load_state_dict(start)
        train(m, o, batches(5))
    fresh = network()
    train(fresh, HMT(fresh.named_parameters(), **OPTIONS), batches(5))
    assert_same_weights(model, fresh)
    assert_same_weights(again, fresh)


def test_foreign_states_are_refused():
    model = network()
    optimizer = HMT(model.named_parameters(), **OPTIONS)
    with pytest.raises(ValueError, match="no 'hmt' entry"):
        optimizer.load_state_dict(torch.optim.AdamW(model.parameters()).state_dict())
    train(model, optimizer, batches(1))
    with pytest.raises(ValueError, match="param_0"):
        HMT(network().parameters(), **OPTIONS).load_state_dict(optimizer.state_dict())
    dense = HMT(network().named_parameters(), method="adamw")
    with pytest.raises(ValueError, match=r"0\.weight: the state dict has lowrank_adamw"):
        dense.load_state_dict(optimizer.state_dict())
