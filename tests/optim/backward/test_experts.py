"""Experts with projected backwards: exactness in every kind of the interface, and what users do to modules."""

import pytest
import torch
from expert_modules import (
    E,
    experts,
    gradients,
    inputs,
    links_of,
    patch,
    projected,
    routes,
)
from torch.testing import assert_close

KINDS = {
    "plain": {},
    "transposed with biases": {"is_transposed": True, "has_bias": True},
    "no gate, biases": {"has_gate": False, "has_bias": True},
    "norm": {"has_post_expert_norm": True},
}


def compare(module, links, index, weights, tokens=11):
    x = inputs(tokens)
    y, dx, dweights, whole = gradients(module, x, index, weights)
    patch(module, links)
    found = module(x, index, weights)
    found.square().sum().backward()
    # fp64; each sum is of some hundred terms
    close = {"rtol": 1e-10, "atol": 1e-10}
    assert_close(found.detach(), y, **close)
    assert_close(x.grad, dx, **close)
    assert_close(weights.grad, dweights, **close)
    for name, parameter in module.named_parameters():
        if name not in links:
            assert_close(parameter.grad, whole[name], **close)
            continue
        assert parameter.grad is None
        assert_close(links[name].take(), projected(links[name], whole[name]), **close)


@pytest.mark.parametrize("own", [False, True], ids=["shared", "own"])
@pytest.mark.parametrize("side", ["input", "output"])
@pytest.mark.parametrize("kind", KINDS)
def test_exact_against_projecting_the_full_gradient(kind, side, own):
    module = experts(**KINDS[kind])
    compare(module, links_of(module, side, own), *routes(11, 2))


@pytest.mark.parametrize("top_k", range(1, E + 1))
def test_any_number_of_experts_of_a_token(top_k):
    module = experts()
    compare(module, links_of(module, "input", False), *routes(11, top_k))


@pytest.mark.parametrize("only", ["gate_up_proj", "down_proj"])
def test_one_weight_is_projected_and_the_other_gets_its_gradient(only):
    module = experts(is_transposed=True, has_bias=True)
    links = links_of(module, "input", False)
    compare(module, {only: links[only]}, *routes(11, 2))


def test_an_expert_without_tokens_gets_zeros():
    module = experts()
    links = patch(module, links_of(module, "input", True))
    index = torch.tensor([[0, 3], [3, 1], [0, 1]])
    module(inputs(3), index, torch.ones(3, 2, dtype=torch.float64)).sum().backward()
    for link in links.values():
        norms = link.take().flatten(1).norm(dim=1)
        assert [bool(norm) for norm in norms] == [True, True, False, True, False]


def test_of_no_tokens():
    module = experts()
    links = patch(module, links_of(module, "input", False))
    index, weights = routes(0, 2)
    module(inputs(0), index, weights).sum().backward()
    assert all(not link.take().any() for link in links.values())
