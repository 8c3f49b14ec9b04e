"""Projected backward: exactness, and what users do to modules."""

import copy
import gc

import pytest
import torch
from patched_linears import (
    Attention,
    D,
    assert_projected,
    columns,
    data,
    full_gradients,
    left_patched,
    patched,
)
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from hmt_deepspeed.optim.backward import projected_linear
from hmt_deepspeed.optim.backward.linear import can_project, unpatch_linear
from hmt_deepspeed.optim.backward.projected_linear import ProjectedLinear, SharedInputs


@pytest.mark.parametrize("shape", [(5, D), (2, 3, D), (D,)])
def test_exact_against_projecting_the_full_gradient(shape):
    model, x = Attention(), data(*shape).requires_grad_()
    twin, gradients = full_gradients(model, x)
    expected_dx, x.grad = x.grad, None
    sites, _ = patched(model.linears())
    model(x).square().sum().backward()
    assert_projected(sites, gradients)
    torch.testing.assert_close(x.grad, expected_dx, rtol=1e-12, atol=1e-12)
    for ours, theirs in zip(model.linears(), twin.linears(), strict=True):
        assert ours.weight.grad is None
        torch.testing.assert_close(ours.bias.grad, theirs.bias.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", [(5, D), (2, 3, D), (D,)])
def test_left_is_exact_against_projecting_the_full_gradient(shape):
    model, x = Attention(), data(*shape).requires_grad_()
    twin, gradients = full_gradients(model, x)
    expected_dx, x.grad = x.grad, None
    sites, shared = left_patched(model.linears())
    for _ in range(2):  # two micro-batches add up
        model(x).square().sum().backward()
    for i, (site, gradient) in enumerate(zip(sites, gradients, strict=True)):
        expected = 2 * gradient.t() @ columns(6, i)  # (B^T G)^T
        assert (site.take() - expected).abs().max() <= 1e-12 * expected.abs().max()
    torch.testing.assert_close(x.grad, 2 * expected_dx, rtol=1e-12, atol=1e-12)
    for ours, theirs in zip(model.linears(), twin.linears(), strict=True):
        assert ours.weight.grad is None
        torch.testing.assert_close(ours.bias.grad, 2 * theirs.bias.grad, rtol=1e-12, atol=1e-12)
    assert shared.groups() == []  # nothing of the input is multiplied that could be shared


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_left_under_activation_checkpointing(use_reentrant):
    model, x = Attention(), data(2, 3, D).requires_grad_()
    _, gradients = full_gradients(model, x)
    sites, _ = left_patched(model.linears())
    checkpoint(model, x, use_reentrant=use_reentrant).square().sum().backward()
    for i, (site, gradient) in enumerate(zip(sites, gradients, strict=True)):
        torch.testing.assert_close(site.take(), gradient.t() @ columns(6, i))


@pytest.mark.parametrize("patch", [patched, left_patched])
@pytest.mark.parametrize("use_reentrant", [None, False])
def test_what_was_not_asked_for_is_not_added(patch, use_reentrant):
    """FGSM, VAT: gradients of the inputs alone must leave nothing for the step that follows."""
    model, x = Attention(), data(4, D).requires_grad_()
    _, gradients = full_gradients(model, x)
    expected_dx, x.grad = x.grad, None
    sites, shared = patch(model.linears())
    model(x)
    shared.lay_out()

    def loss():
        if use_reentrant is None:
            return model(x).square().sum()
        return checkpoint(model, x, use_reentrant=use_reentrant).square().sum()

    (dx,) = torch.autograd.grad(loss(), x)
    loss().backward(inputs=[x])
    assert [site.take() for site in sites] == [None] * 4
    torch.testing.assert_close(dx, expected_dx)
    torch.testing.assert_close(x.grad, expected_dx)
    loss().backward(inputs=[model.k.weight])
    products = [site.take() for site in sites]
    assert [product is None for product in products] == [True, False, True, True]
    loss().backward()
    found = [site.take() for site in sites]
    torch.testing.assert_close(products[1], found[1])
    for i, gradient in enumerate(gradients):
        gradient = gradient.t() if sites[i].transposed else gradient
        torch.testing.assert_close(found[i], gradient @ columns(6, i))


@pytest.mark.parametrize("patch", [patched, left_patched])
def test_what_was_not_asked_for_is_not_computed(patch):
    n, tokens = 256, 64
    model, x = nn.Linear(n, n, bias=False), data(64, n, dtype=torch.float32).requires_grad_()
    patch([model], width=16, dtype=torch.float32)
    loss = model(x).sum()
    with FlopCounterMode(display=False) as counter:
        torch.autograd.grad(loss, x)
    assert counter.get_total_flops() == 2 * tokens * n * n  # D W


def test_hook_fires_without_a_gradient():
    """DeepSpeed counts parameters by this hook."""
    module, seen = nn.Linear(D, D, dtype=torch.float64), []
    module.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad))
    (site,), _ = patched([module])
    module(data(4, D)).sum().backward()
    assert seen == [None]
    assert site.take() is not None
    assert site.take() is None


def test_no_projection_means_an_ordinary_backward():
    module = nn.Linear(D, D, dtype=torch.float64)
    (site,), _ = patched([module], project=False)
    module(data(4, D)).sum().backward()
    assert module.weight.grad is not None
    assert site.take() is None


def test_q_k_v_share_one_product_and_o_does_not():
    model, x = Attention(), data(4, D)
    sites, shared = patched(model.linears())
    assert shared.groups() == []
    model(x)
    shared.lay_out()
    assert shared.groups() == [["site0", "site1", "site2"]]
    assert sites[3].group.linears == [sites[3]]
    calls = []

    class Count(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten.mm.default:  # the linears with bias are addmm
                calls.append(tuple(args[1].shape))
            return func(*args, **(kwargs or {}))

    _, gradients = full_gradients(model, x)
    with Count():
        y = model(x)
    assert calls == [(D, 18), (D, 6)]  # X [B_q B_k B_v], then o's own
    y.square().sum().backward()
    assert_projected(sites, gradients)
    # The groups survive a checkpoint.
    fresh, again = patched(model.linears())
    again.restore(shared.groups())
    again.lay_out()
    assert again.groups() == shared.groups()
    assert fresh[1].span == (6, 12)


@pytest.mark.parametrize("most", [0, 1200, 1 << 27])
def test_columns_of_groups_lie_side_by_side_in_pieces(monkeypatch, most):
    """Three groups: of 32 x 18 columns each."""
    monkeypatch.setattr(projected_linear, "_JOINED", most)
    models = [Attention() for _ in range(3)]
    sites, shared = patched([linear for model in models for linear in model.linears()])
    for model in models:
        model(data(4, D))
    shared.lay_out()
    groups = [sites[first].group for first in (0, 4, 8)]
    pieces = {group.columns.untyped_storage().data_ptr() for group in groups}
    assert len(pieces) == {0: 3, 1200: 2, 1 << 27: 1}[most]
    for place, group in enumerate(groups):
        own = [columns(6, 4 * place + member) for member in range(3)]
        torch.testing.assert_close(group.columns, torch.cat(own, dim=1), rtol=0, atol=0)


def test_groups_are_learned_once():
    model = Attention()
    _, shared = patched(model.linears())
    model(data(4, D))
    shared.lay_out()
    groups = shared.groups()
    for _ in range(3):
        x = data(4, D)
        model.v(x), model.o(x)  # neighbours of another kind, later
        shared.lay_out()
        assert shared.groups() == groups


def test_a_member_without_projection_leaves_the_product():
    """One of the sharers refreshes its basis: the others go on."""
    model, x = Attention(), data(4, D)
    sites, shared = patched(model.linears())
    model(x)
    sites[1].projection = None
    shared.lay_out()
    _, gradients = full_gradients(model, x)
    model(x).square().sum().backward()
    torch.testing.assert_close(model.k.weight.grad, gradients[1])
    for i in (0, 2, 3):
        torch.testing.assert_close(sites[i].take(), gradients[i] @ columns(6, i))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing(use_reentrant):
    model, x = Attention(), data(2, 3, D).requires_grad_()
    _, gradients = full_gradients(model, x)
    expected_dx, x.grad = x.grad, None
    sites, shared = patched(model.linears())
    for _ in range(2):  # the first round learns the groups, the second uses them
        x.grad = None
        checkpoint(model, x, use_reentrant=use_reentrant).square().sum().backward()
        assert_projected(sites, gradients)
        torch.testing.assert_close(x.grad, expected_dx)
        shared.lay_out()
    assert shared.groups() == [["site0", "site1", "site2"]]


def test_called_twice_in_one_graph_and_several_backwards():
    model, first, second = Attention(), data(4, D), data(3, D, seed=2)
    sites, shared = patched(model.linears())
    model(first)
    shared.lay_out()
    _, gradients = full_gradients(model, first, second)
    (model(first).square().sum() + model(second).square().sum()).backward()
    assert_projected(sites, gradients)
    for x in (first, second):
        model(x).square().sum().backward()
    assert_projected(sites, gradients)


def test_input_changed_in_place_is_not_the_same_input():
    model, x = Attention(), data(4, D)
    sites, shared = patched(model.linears())
    model(x)
    shared.lay_out()
    first = model.q(x)
    before = x.clone()
    x.mul_(3)
    (first.sum() + model.k(x).sum()).backward()
    ones = torch.ones(4, D, dtype=torch.float64)
    torch.testing.assert_close(sites[0].take(), ones.t() @ before @ columns(6, 0))
    torch.testing.assert_close(sites[1].take(), ones.t() @ x @ columns(6, 1))


def test_freed_input_is_not_mistaken_for_a_new_one():
    """The address of a dead tensor may be given to the next one."""
    model = Attention()
    sites, shared = patched(model.linears())
    model(data(4, D))
    shared.lay_out()
    for seed in range(5):
        model.q(data(4, D, seed=seed))  # k and v do not read it
        gc.collect()
        x = data(4, D, seed=100 + seed)
        model.k(x).sum().backward()
        expected = torch.ones(D, 4, dtype=torch.float64) @ x @ columns(6, 1)
        torch.testing.assert_close(sites[1].take(), expected)


def test_no_grad_computes_and_keeps_nothing():
    model, x = Attention(), data(4, D)
    expected = copy.deepcopy(model)(x)
    sites, shared = patched(model.linears())
    with torch.no_grad():
        assert torch.equal(model(x), expected)
    assert shared._last is None
    assert all(site.group._product is None for site in sites)


def test_frozen_weight_is_left_alone():
    module = nn.Linear(D, D, dtype=torch.float64)
    (site,), _ = patched([module])
    module.weight.requires_grad_(False)
    module(data(4, D).requires_grad_()).sum().backward()
    assert site.take() is None


def test_deep_copy_and_unpatched_are_ordinary_linears():
    module, x = nn.Linear(D, D, dtype=torch.float64), data(4, D)
    (site,), _ = patched([module])
    twin = copy.deepcopy(module)
    twin(x).sum().backward()
    assert twin.weight.grad is not None
    assert site.take() is None
    assert can_project(twin)  # so that a copy can be trained by another optimizer
    unpatch_linear(module, ProjectedLinear("another's"))
    module(x).sum().backward()
    assert module.weight.grad is None  # still the first site's
    unpatch_linear(module, site)
    module(x).sum().backward()
    torch.testing.assert_close(module.weight.grad, twin.weight.grad)
    assert "forward" not in vars(module)


def test_can_project_only_plain_linears():
    class Scaled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    assert can_project(nn.Linear(2, 2))
    assert not can_project(Scaled(2, 2))
    assert not can_project(nn.Conv1d(2, 2, 1))
    assert not can_project(nn.MultiheadAttention(2, 1).out_proj)  # read by the attention itself
    wrapped = nn.Linear(2, 2)
    wrapped.forward = lambda x: F.linear(x, wrapped.weight)
    assert not can_project(wrapped)


def test_without_sites_there_is_nothing_to_wait_for():
    assert SharedInputs(()).observed
    shared = SharedInputs([ProjectedLinear("a")])
    assert not shared.observed
    shared.restore([], observed=True)
    assert shared.observed


def test_bf16_micro_batches_add_up_in_fp32():
    module = nn.Linear(D, D, bias=False, dtype=torch.bfloat16)
    (site,), _ = patched([module], dtype=torch.bfloat16)
    x = torch.ones(1, D, dtype=torch.bfloat16)
    for _ in range(600):
        module(x).sum().backward()
    one = columns(6, 0, D, torch.bfloat16).sum(0).bfloat16().float()
    # In bf16 a sum stops growing after 256 equal terms; in fp32 600 terms are exact to rounding.
    torch.testing.assert_close(site.take()[0], 600 * one, rtol=1e-2, atol=1e-2 * 600)
