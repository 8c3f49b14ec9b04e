"""Mixtures of experts: what belongs to the component, what each choice holds of it, and that no token changes experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from backends import (
    PAPER_KEPT,
    SEED,
    assert_equal,
    bytes_of,
    cosines,
    gradients,
    host_store,
    installed,
    poison,  # noqa: F401
)
from expert_modules import links_of, patch
from families import LENGTH, tiny, tokens
from torch import nn

from hmt_deepspeed.attribution import attribute
from hmt_deepspeed.optim.backward.int8_linear import quantize
from hmt_deepspeed.sites import expert_weights

pytestmark = pytest.mark.usefixtures("poison")

TOKENS, EXPERTS = 2 * LENGTH, 5
# family -> experts, router, tokens that an expert layer computes for each token of the stream, I
MIXTURES = {
    "mixtral": ("mlp.experts", "mlp.gate", 2, 48),
    "qwen3_moe": ("mlp.experts", "mlp.gate", 2, 24),
    "gpt_oss": ("mlp.experts", "mlp.router", 2, 48),
    "deepseek_v3": ("mlp.experts", "mlp.gate", 2, 24),
    "olmoe": ("mlp.experts", "mlp.gate", 2, 48),
    "llama4": ("feed_forward.experts", "feed_forward.router", EXPERTS, 48),  # all of them
}


@pytest.mark.parametrize("family", MIXTURES)
def test_experts_and_routers_are_known(family: str) -> None:
    experts, router, _, _ = MIXTURES[family]
    attribution = attribute(tiny(family))
    for layer in attribution.layers:
        assert layer.components[experts] == "experts"
        assert layer.routers == {router}
    assert attribution.unattributed == ()


@pytest.mark.parametrize("family", MIXTURES)
def test_a_weight_s_sides_are_those_of_its_products(family: str) -> None:
    """By what one expert computes of the channels that it reads."""
    model = tiny(family)
    name, _, times, intermediate = MIXTURES[family]
    module: Any = model.model.layers[0].get_submodule(name)
    found = expert_weights(module)
    up, down = found["gate_up_proj"], found["down_proj"]
    assert (up.role, up.inputs, up.outputs) == ("up", 32, 2 * intermediate)
    assert (down.role, down.inputs, down.outputs) == ("down", intermediate, 32)
    assert up.count == down.count == module.gate_up_proj.shape[0]
    assert up.is_routed == (times != EXPERTS)
    weight = module.gate_up_proj[0] if up.is_transposed else module.gate_up_proj[0].T
    assert weight.shape == (32, 2 * intermediate)


def test_an_ordinary_module_has_no_experts() -> None:
    assert not expert_weights(nn.Linear(3, 3))
    module = nn.Module()
    module.gate_up_proj = nn.Parameter(torch.zeros(2, 8, 3))
    module.down_proj = nn.Parameter(torch.zeros(2, 5, 7))  # of other sizes
    assert not expert_weights(module)


def _logits(model: Any, family: str) -> int:
    """Experts that a router chooses from."""
    router = model.model.layers[0].get_submodule(MIXTURES[family][1])
    return next(int(p.shape[0]) for p in router.parameters() if p.dim() == 2)


@pytest.mark.parametrize("choice", ["keep", "recompute", "swap_host"])
@pytest.mark.parametrize("family", MIXTURES)
def test_exact_choices_change_no_bit_and_hold_what_they_say(family: str, choice: str) -> None:
    model = tiny(family)
    expected = gradients(model)
    _, _, times, intermediate = MIXTURES[family]
    is_routed = (
        family != "llama4"
    )  # which weighs the tokens before the experts: none needs their last output
    widths = 2 * intermediate + 32 * is_routed
    logits = _logits(model, family)
    with installed(model, PAPER_KEPT | {"experts": choice}, store=host_store()) as backend:
        for _ in range(2):
            backend.begin_step()
            assert_equal(gradients(model), expected)
        report = backend.report()
    held = 2 * bytes_of(choice, times * TOKENS, widths, 4)
    assert report.bytes_by_label["experts"] == held + 2 * bytes_of("keep", TOKENS, logits, 4)
    again = 2 * 2 * times * TOKENS * 32 * (2 + is_routed) * intermediate
    assert report.rerun_flops.get("experts", 0) == (again if choice == "recompute" else 0)
    assert report.missed == ()


# What experts choose and what is done with the inputs of their products; each of both, with either kind of basis.
POLICIES = {
    False: [("keep", "project"), ("recompute", "recompute"), ("swap_host", "project")],
    True: [("keep", "recompute"), ("recompute", "project"), ("swap_host", "recompute")],
}


@pytest.mark.parametrize(
    ("family", "own"),
    # The others' experts run what Mixtral's run.
    [(family, own) for own in (False, True) for family in ("mixtral", "gpt_oss", "llama4")]
    + [("qwen3_moe", True), ("deepseek_v3", False), ("olmoe", True)],
    ids=str,
)
def test_projected_gradients_are_those_without_a_backend(family: str, own: bool) -> None:
    model = tiny(family)
    links = patch(model, links_of(model, "input" if own else "width", own))
    expected = gradients(model)
    projected = {name: link.take() for name, link in links.items()}
    assert len(links) == 4
    assert not links.keys() & expected.keys()
    for choice, products in POLICIES[own]:
        policy = PAPER_KEPT | {"experts": choice, "projected_inputs": products}
        with installed(model, policy, store=host_store()) as backend:
            for _ in range(3):  # watched, recorded, and by the record
                backend.begin_step()
                assert_equal(gradients(model), expected)
                assert_equal({name: link.take() for name, link in links.items()}, projected)
            report = backend.report()
        held = report.bytes_by_label.get("projected_inputs", 0)
        assert bool(held) == (products == "project")
        assert report.missed == ()


@pytest.mark.parametrize(
    ("family", "whole"),
    [("mixtral", False), ("gpt_oss", False), ("gpt_oss", True), ("llama4", True)],
    ids=str,
)
def test_gradients_of_int8_weights_are_those_without_a_backend(family: str, whole: bool) -> None:
    model = tiny(family)
    links = patch(model, links_of(model, "width", own=False))
    for name, link in links.items():
        path, _, key = name.rpartition(".")
        quantize(model.get_submodule(path), key)
        link.projection = None if whole else link.projection
    expected = gradients(model)
    projected = {name: link.take() for name, link in links.items()}
    assert (links.keys() <= expected.keys()) == whole
    for choice in ("keep", "recompute", "swap_host"):
        with installed(model, PAPER_KEPT | {"experts": choice}, store=host_store()) as backend:
            for _ in range(3):
                backend.begin_step()
                assert_equal(gradients(model), expected)
                found = {name: link.take() for name, link in links.items()}
                if not whole:
                    assert_equal(found, projected)
            assert backend.report().missed == ()


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
@pytest.mark.parametrize("choice", ["int8", "fp8"])
def test_8_bits_hold_a_quarter_and_keep_the_direction(family: str, choice: str) -> None:
    model = tiny(family)
    expected = gradients(model)
    _, _, times, intermediate = MIXTURES[family]
    with installed(model, {"attention_output": "keep", "experts": choice}) as backend:
        found = gradients(model)
        held = backend.report().bytes_by_label["experts"]
    encoded = bytes_of(choice, times * TOKENS, 2 * intermediate, 4)
    encoded += bytes_of(choice, times * TOKENS, 32, 4)
    logits = _logits(model, family)
    assert held == 2 * encoded + 2 * bytes_of("keep", TOKENS, logits, 4)
    assert min(cosines(model, found, expected)) > 0.995


@pytest.mark.parametrize("family", MIXTURES)
def test_no_token_changes_experts_when_a_layer_is_computed_again(family: str) -> None:
    """Not even from an input that comes back with an error, where the router by itself would choose otherwise."""
    model = tiny(family)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.3)
    _, router, _, _ = MIXTURES[family]
    calls: list[tuple[torch.Tensor, ...]] = []
    hooks = [
        layer.get_submodule(router).register_forward_hook(
            lambda _, __, out: calls.append(tuple(t.detach().clone() for t in out))
        )
        for layer in model.model.layers
    ]
    policy = {"layer_input": "fp8", "experts": "recompute"}
    with installed(model, policy):
        gradients(model)
    for hook in hooks:
        hook.remove()
    first, second = calls[:2], calls[2:][::-1]
    assert len(second) == 2
    for before, after in zip(first, second, strict=True):
        for one, other in zip(before, after, strict=True):
            assert torch.equal(one, other)


# -- losses of router logits ------------------------------------------------------------------------------

# The other families have no such loss.
ROUTERS = [("mixtral", False), ("qwen3_moe", True), ("gpt_oss", True), ("olmoe", False)]
# Error of a router's gradient that 8 bits may make: thrice that of what they hold, since differences of experts count.
LOSSY = {"int8": 3 * 0.015, "fp8": 3 * 0.06}
SHARE = 1.0  # of either loss in the whole, so that routers would have other gradients without it


def router_gradients(model: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss and gradients with transformers' load-balancing loss and the router z-loss (2202.08906, equation 5)."""
    model.zero_grad()
    batch = tokens()
    outputs = model(input_ids=batch, labels=batch, output_router_logits=True)
    logits = outputs.router_logits
    loss = outputs.loss + SHARE * sum(one.logsumexp(-1).square().mean() for one in logits)
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("family", "own"), ROUTERS, ids=str)
def test_losses_of_router_logits_have_the_gradients_of_dense_experts(
    family: str, own: bool
) -> None:
    model = tiny(family, router_aux_loss_coef=SHARE)
    router = f".{MIXTURES[family][1]}."
    without, (loss, dense) = gradients(model), router_gradients(model)
    routers = [name for name in dense if router in name and not name.endswith("bias")]
    assert len(routers) == 2
    assert all(torch.dist(without[n], dense[n]) > 0.1 * dense[n].norm() for n in routers)
    links = patch(model, links_of(model, "input" if own else "width", own))
    projected_loss, expected = router_gradients(model)
    projected = {name: link.take() for name, link in links.items()}
    torch.testing.assert_close(projected_loss, loss, rtol=1e-6, atol=0)
    for name in routers:
        # Experts' part of the gradient within 1e-5, and what fp32 rounds of the sum (2^-24 of it, in a few sums). This is up
        # to 1,200 times as long: olmoe's auxiliary loss pulls that much harder than its tiny language model.
        rounding = 1e-7 * dense[name].norm()
        assert torch.dist(expected[name], dense[name]) < 1e-5 * without[name].norm() + rounding
    for choice in ("keep", "recompute", "swap_host", "int8", "fp8"):
        policy = PAPER_KEPT | {"experts": choice}
        with installed(model, policy, store=host_store()) as backend:
            for _ in range(3):  # watched, recorded, and by the record
                backend.begin_step()
                found_loss, found = router_gradients(model)
                products = {name: link.take() for name, link in links.items()}
                assert torch.equal(found_loss, projected_loss)
                if choice in LOSSY:  # only the language model's part of a gradient comes through
                    errors = {n: torch.dist(found[n], dense[n]) for n in routers}
                    assert all(errors[n] < LOSSY[choice] * without[n].norm() for n in routers)
                else:
                    assert_equal(found, expected)
                    assert_equal(products, projected)
            assert backend.report().missed == ()


def test_noise_on_what_routers_read_is_drawn_once() -> None:
    """Mixtral's, by which tokens would go to other experts when a layer is computed again."""
    model = tiny("mixtral", router_jitter_noise=0.5)
    expected = gradients(model)
    torch.manual_seed(SEED + 1)
    other = model(input_ids=tokens(), labels=tokens()).loss
    torch.manual_seed(SEED)
    assert model(input_ids=tokens(), labels=tokens()).loss != other
    for choice in ("keep", "recompute", "swap_host"):
        with installed(model, PAPER_KEPT | {"experts": choice}, store=host_store()) as backend:
            for _ in range(3):
                backend.begin_step()
                assert_equal(gradients(model), expected)
