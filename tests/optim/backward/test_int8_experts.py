"""INT8 weights of experts: bytes, products, updates, training by the bare optimizer, what leaves it."""

import copy

import pytest
import torch
from expert_modules import INNER, E, H, experts, inputs, links_of, patch, routes
from torch import nn
from torch.func import functional_call, jvp
from transformers import Llama4TextConfig
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.models.llama4.modeling_llama4 import Llama4TextExperts

from hmt_deepspeed.kernels.noise import base_key, step_keys
from hmt_deepspeed.optim.backward.experts import unpatch_experts
from hmt_deepspeed.optim.backward.int8_linear import (
    Int8Weight,
    encoded_weights,
    quantize,
    update_together_,
)

KINDS = {
    "plain": {},
    "transposed with biases": {"is_transposed": True, "has_bias": True},
    "no gate": {"has_gate": False},
    "norm": {"has_post_expert_norm": True},
}
DTYPES = [torch.float32, torch.bfloat16]


def encode(module, links):
    return {name: quantize(module, name) for name in links}


def twins(dtype, kind="plain", side="input", own=False, implementation="grouped_mm"):
    """A module with INT8 weights and one with their values, both patched, with their links."""
    pair = []
    for _ in range(2):
        module = experts(dtype, implementation, **KINDS[kind])
        pair.append((module, patch(module, links_of(module, side, own))))
    for name, weight in encode(*pair[0]).items():
        pair[1][0].get_parameter(name).data = weight.decode()
    return pair


def results(module, links, dtype, forward=None):
    x, (index, weights) = inputs(11, dtype=dtype), routes(11, 2, dtype=dtype)
    y = (forward or module)(x, index, weights)
    y.backward(torch.linspace(-1, 1, y.numel()).view_as(y).to(y.dtype))
    found = {"y": y.detach(), "x": x.grad, "weights": weights.grad}
    found |= {name: p.grad for name, p in module.named_parameters()}
    return found | {f"projected {name}": link.take() for name, link in links.items()}


def check_alike(found, expected):
    for key, value in expected.items():
        assert (found[key] is None) == (value is None), key
        if value is not None:
            assert torch.equal(found[key], value), key


# -- storage and updates ------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [256, 300])
@pytest.mark.parametrize("dtype", DTYPES)
def test_experts_are_encoded_as_matrices_alone(dtype, n):
    torch.manual_seed(0)
    value = torch.randn(E, 30, n).to(dtype)
    encoded = Int8Weight(value)
    assert encoded.nbytes == E * 30 * (n + 4 * -(-n // 256))
    for one, own in zip(value, encoded.matrices(), strict=True):
        alone = Int8Weight(one)
        assert torch.equal(own.codes, alone.codes)
        assert torch.equal(own.scales, alone.scales)
        assert own.codes._is_view()
    assert torch.equal(encoded.decode(), torch.stack([m.decode() for m in encoded.matrices()]))
    assert encoded.decode().dtype == dtype


@pytest.mark.parametrize("transposed", [False, True])
def test_experts_are_updated_as_matrices_alone_and_one_without_a_step_stays(transposed):
    torch.manual_seed(0)
    rows, n = 30, 300
    first, second = Int8Weight(torch.randn(E, rows, n)), Int8Weight(torch.randn(E, rows, n))
    m, other = (n, rows) if transposed else (rows, n)
    update, shared, own = torch.randn(2 * E, m, 4), torch.randn(other, 4), torch.randn(E, other, 4)
    keys = step_keys(torch.tensor([base_key(0, f"w[{e}]") for e in range(2 * E)]), 3, 0)
    scale = torch.ones(2 * E, 2)
    scale[1] = 0
    update[1] = torch.nan
    alone = [copy.deepcopy(one) for encoded in (first, second) for one in encoded.matrices()]
    before = first.codes[1].clone(), first.scales[1].clone()
    how = {"rank": 3, "transposed": transposed}
    columns = [shared.expand(E, -1, -1), own]
    update_together_(
        [first, second], update, columns, 1e-2, 0.1, column_scale=scale, keys=keys, **how
    )
    projections = [*columns[0], *own]
    for b, one in enumerate(alone):
        given = {"column_scale": scale[b : b + 1], "keys": keys[b : b + 1], **how}
        update_together_([one], update[b : b + 1], [projections[b]], 1e-2, 0.1, **given)
    for one, found in zip(alone, [*first.matrices(), *second.matrices()], strict=True):
        assert torch.equal(one.codes, found.codes)
        assert torch.equal(one.scales, found.scales)
    assert torch.equal(first.codes[1], before[0])
    assert torch.equal(first.scales[1], before[1])


# -- products -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("own", [False, True], ids=["shared", "own"])
@pytest.mark.parametrize("side", ["input", "output"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_products_are_those_of_the_decoded_weight(dtype, kind, side, own):
    (module, links), (twin, others) = twins(dtype, kind, side, own)
    check_alike(results(module, links, dtype), results(twin, others, dtype))
    given = inputs(11, dtype=dtype), *routes(11, 2, dtype=dtype)
    with torch.no_grad():
        torch.testing.assert_close(module(*given), twin(*given))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("projected", [[], ["down_proj"]], ids=["whole", "half projected"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_whole_gradients_are_those_of_the_decoded_weight(dtype, projected, kind):
    """In a window before a refresh. A module that is whole is transformers' own in the twin."""
    (module, links), (twin, others) = twins(dtype, kind)
    for of in (links, others):
        for name in of.keys() - set(projected):
            of[name].projection = None
    found, expected = results(module, links, dtype), results(twin, others, dtype)
    # transformers adds the biases' gradients of at most 11 rows in another order, each sum rounded
    rounded = 11 * 2**-9 if dtype == torch.bfloat16 else 11 * 2**-24
    close = {"rtol": rounded, "atol": rounded}
    for key, value in expected.items():
        assert (found[key] is None) == (value is None), key
        if value is not None:
            largest = value.abs().max()
            torch.testing.assert_close(found[key] / largest, value / largest, **close)


def test_llama4():
    sizes = {"hidden_size": H, "intermediate_size": INNER, "num_local_experts": E}
    pair = []
    for _ in range(2):
        torch.manual_seed(0)
        module = Llama4TextExperts(Llama4TextConfig(**sizes))
        for parameter in module.parameters():
            nn.init.normal_(parameter, std=0.2)
        pair.append((module, patch(module, links_of(module, "width", False))))
    (module, links), (twin, _) = pair
    for name, weight in encode(module, links).items():
        twin.get_parameter(name).data = weight.decode()
    for whole in (False, True):
        found = []
        for one, of in pair:
            for link in of.values():
                link.projection = None if whole else link.projection
            x = inputs(2 * E, dtype=torch.float32)
            y = one(x)
            y.square().sum().backward()
            own = [p.grad if whole else of[n].take() for n, p in one.named_parameters()]
            found.append([y.detach(), x.grad, *own])
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("whole", [False, True], ids=["projected", "whole"])
def test_no_decoded_weight_is_saved_for_backward(whole):
    (module, links), _ = twins(torch.float32)
    for link in links.values():
        link.projection = None if whole else link.projection
    saved = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t)
    with hooks:
        module(inputs(3, dtype=torch.float32), *routes(3, 2, dtype=torch.float32))
    assert saved
    assert all(t.untyped_storage().nbytes() < 4 * E * H * INNER for t in saved)


@pytest.mark.parametrize("whole", [False, True], ids=["projected", "whole"])
def test_an_update_between_forward_and_backward_is_an_error(whole):
    (module, links), _ = twins(torch.float32)
    for link in links.values():
        link.projection = None if whole else link.projection
    y = module(inputs(3, dtype=torch.float32), *routes(3, 2, dtype=torch.float32))
    encoded_weights(module)["down_proj"].codes.zero_()
    with pytest.raises(RuntimeError, match="updated between forward and backward"):
        y.sum().backward()


def test_other_ways_to_compute_find_the_values(monkeypatch):
    """Another implementation, a copy, forward-mode AD, a weight that is handed in."""
    (module, _), (twin, _) = twins(torch.float32, implementation="batched_mm")
    x, index, weights = inputs(7, dtype=torch.float32), *routes(7, 2, dtype=torch.float32)
    expected = twin(x, index, weights).detach()
    clone = copy.deepcopy(module)
    assert (
        encoded_weights(clone)["down_proj"].codes is not encoded_weights(module)["down_proj"].codes
    )
    found = clone(x, index, weights)
    torch.testing.assert_close(found.detach(), expected)
    found.sum().backward()
    assert clone.down_proj.grad.isfinite().all()
    tangents = torch.ones_like(x), torch.zeros_like(weights)
    first, second = (
        jvp(lambda x, w, one=one: one(x, index, w), (x, weights), tangents)
        for one in (module, twin)
    )
    torch.testing.assert_close(first, second)
    stand_ins = {name: p.detach() for name, p in module.named_parameters()}
    found = functional_call(module, stand_ins, (x, index, weights))
    torch.testing.assert_close(found.detach(), expected)
    other = {"down_proj": torch.zeros(E, H, INNER)}
    assert not functional_call(module, other, (x, index, weights)).any()
    monkeypatch.setitem(
        ALL_EXPERTS_FUNCTIONS._global_mapping, "another", lambda one, *_: one.down_proj
    )
    module.config._experts_implementation = "another"
    assert torch.equal(module(x, index, weights), twin.down_proj)
    assert "down_proj" not in vars(module)


@pytest.mark.parametrize("own", [False, True], ids=["shared", "own"])
def test_gradients_of_gradients_of_inputs(own):
    found = []
    for module, links in twins(torch.float32, side="output", own=own):
        for link in links.values():
            link.projection = None
        x, (index, weights) = inputs(7, dtype=torch.float32), routes(7, 2, dtype=torch.float32)
        (dx,) = torch.autograd.grad(module(x, index, weights).square().sum(), x, create_graph=True)
        dx.square().sum().backward()
        found.append([dx.detach(), x.grad, *(p.grad for p in module.parameters())])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


def test_unpatching_gives_real_weights():
    (module, _), (twin, _) = twins(torch.bfloat16)
    unpatch_experts(module)
    for own, other in zip(module.parameters(), twin.parameters(), strict=True):
        assert torch.equal(own, other)
        assert own.is_contiguous()
    assert not module._state_dict_hooks
    assert not encoded_weights(module)
