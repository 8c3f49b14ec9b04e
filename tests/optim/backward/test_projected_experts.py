"""Experts with projected backwards: exactness in every kind of the interface."""

import copy
from types import SimpleNamespace

import pytest
import torch
from expert_modules import (
    INNER,
    E,
    experts,
    gradients,
    inputs,
    links_of,
    patch,
    projected,
    routes,
)
from torch import nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint
from transformers import Llama4TextConfig
from transformers.models.llama4.modeling_llama4 import Llama4TextExperts

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


def test_micro_batches_add_up_in_room():
    module = experts()
    links = patch(module, links_of(module, "input", False))
    rooms = {}

    def room(name, link):
        m = getattr(module, name).shape[1]  # not transposed
        rooms[name] = torch.full((E, m, 6), torch.nan, dtype=torch.float64)
        return rooms[name]

    for name, link in links.items():
        link.room = lambda name=name, link=link: room(name, link)
    expected = dict.fromkeys(links, 0)
    for seed in range(2):
        x, (index, weights) = inputs(11, seed), routes(11, 2, seed)
        whole = gradients(module, x, index, weights)[3]
        expected = {k: expected[k] + projected(links[k], whole[k]) for k in links}
        module(x, index, weights).square().sum().backward()
    for name, link in links.items():
        assert link.pending is rooms[name]
        assert_close(link.take(), expected[name])
        assert link.take() is None


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_under_activation_checkpointing(use_reentrant):
    module, x = experts(has_bias=True), inputs(11)
    index, weights = routes(11, 2)
    _, dx, dweights, whole = gradients(module, x, index, weights)
    links = patch(module, links_of(module, "input", True))
    y = checkpoint(module, x, index, weights, use_reentrant=use_reentrant)
    y.square().sum().backward()
    assert_close(x.grad, dx)
    assert_close(weights.grad, dweights)
    for name, link in links.items():
        assert_close(link.take(), projected(link, whole[name]))


def test_what_was_not_asked_for_is_not_added():
    module, x = experts(), inputs(11)
    index, weights = routes(11, 2)
    _, dx, dweights, _ = gradients(module, x, index, weights)
    links = patch(module, links_of(module, "input", False))
    found = torch.autograd.grad(module(x, index, weights).square().sum(), (x, weights))
    assert_close(found, (dx, dweights))
    module(x, index, weights).square().sum().backward(inputs=[x])
    assert all(link.take() is None for link in links.values())
    module(x, index, weights).square().sum().backward(inputs=[module.down_proj])
    assert [name for name, link in links.items() if link.take() is not None] == ["down_proj"]


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("side", ["input", "output"])
@pytest.mark.parametrize("name", ["gate_up_proj", "down_proj"])
def test_refuses_to_give_the_whole_gradient(name, side):
    module, x = experts(), inputs(11)
    links = patch(module, links_of(module, side, False))
    loss = module(x, *routes(11, 2)).square().sum()
    weight = getattr(module, name)
    with pytest.raises(ValueError, match=rf"autograd\.grad was asked for the gradient of {name}"):
        torch.autograd.grad(loss, weight, retain_graph=True)
    with pytest.raises(ValueError, match=r"backward\(create_graph=True\) was asked for"):
        loss.backward(create_graph=True, inputs=[weight], retain_graph=True)
    assert all(link.take() is None for link in links.values())
    loss.backward()
    assert all(link.take() is not None for link in links.values())


@pytest.mark.parametrize("kind", ["plain", "transposed with biases"])
def test_gradients_of_gradients(kind):
    """A penalty on the gradients of inputs and routing weights: what W contributes to them arrives whole."""
    module, x = experts(**KINDS[kind]), inputs(11)
    index, weights = routes(11, 2)
    twin = copy.deepcopy(module)
    links = patch(module, links_of(module, "input", False))

    def penalty(model):
        y = torch.tanh(model(x, index, weights))
        parts = torch.autograd.grad(y.square().sum(), (x, weights), create_graph=True)
        return sum(part.square().sum() for part in parts)

    expected = torch.autograd.grad(penalty(twin), (x, weights, *twin.parameters()))
    penalty(module).backward()
    assert_close((x.grad, weights.grad), expected[:2])
    for (name, parameter), wanted in zip(module.named_parameters(), expected[2:], strict=True):
        if name in links:
            found = links[name].take() + projected(links[name], parameter.grad)
            assert_close(found, projected(links[name], wanted))
        else:
            assert_close(parameter.grad, wanted)


@pytest.fixture
def _poison():
    """Memory that nobody wrote is NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("_poison")
@pytest.mark.parametrize("own", [False, True], ids=["shared", "own"])
@pytest.mark.parametrize("only", [None, 0, 1], ids=["both", "up", "down"])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_other_ranks_compute_leave_nothing(kind, only, own):
    """Sentinels of expert parallelism: this rank has the first E experts of E + 2. One weight or both are projected."""
    module = experts(torch.float32, **KINDS[kind])
    module._is_expert_parallel = True
    x = inputs(11, dtype=torch.float32)
    index, weights = routes(11, 3, dtype=torch.float32, of=E + 2)
    index = index.clamp(max=E)
    assert (index == E).any()
    y, dx, dweights, whole = gradients(module, x, index, weights)
    links = links_of(module, "input", own)
    links = links if only is None else dict([list(links.items())[only]])
    patch(module, links)
    found = module(x, index, weights)
    found.square().sum().backward()
    close = {"rtol": 1e-4, "atol": 1e-4}  # fp32
    assert_close(found.detach(), y, **close)
    assert_close(x.grad, dx, **close)
    assert_close(weights.grad, dweights, **close)
    for name, parameter in module.named_parameters():
        if name in links:
            assert_close(links[name].take(), projected(links[name], whole[name]), **close)
        else:
            assert_close(parameter.grad, whole[name], **close)


def test_routing_weights_in_fp32_beside_experts_in_bf16():
    module = experts(torch.bfloat16, "grouped_mm", has_bias=True)
    x, (index, weights) = inputs(11, dtype=torch.bfloat16), routes(11, 2, dtype=torch.float32)
    wide = copy.deepcopy(module).float()
    wide.config = SimpleNamespace(_experts_implementation="grouped_mm")
    exact = gradients(wide, x.float(), index, weights)
    theirs = gradients(module, x, index, weights)
    links = patch(module, links_of(module, "input", False))
    y = module(x, index, weights)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, theirs[0])  # computed as grouped_mm does
    y.square().sum().backward()
    assert weights.grad.dtype == torch.float32
    for found, other, wanted in zip((x.grad, weights.grad), theirs[1:3], exact[1:3], strict=True):
        assert (found - wanted).norm() <= 2 * (other - wanted).norm()
    assert all(link.pending.dtype == torch.float32 for link in links.values())


@pytest.mark.parametrize("basis", ["shared", "own"])
def test_saves_the_product_and_neither_inputs_nor_outputs(basis):
    """T x w for the input of gate and up; of the down projection nothing, and not what it puts out."""
    tokens, top_k, width = 64, 2, 6
    module = experts(torch.float32)
    x = inputs(tokens, dtype=torch.float32)
    index, weights = routes(tokens, top_k, dtype=torch.float32)
    links = links_of(module, "input", False)
    links["down_proj"] = links_of(module, "input", basis == "own")["down_proj"]
    patch(module, links)
    saved = {}
    weight_memory = {p.untyped_storage().data_ptr() for p in module.parameters()}

    def note(tensor):
        memory = tensor.untyped_storage()
        if memory.data_ptr() not in weight_memory:
            saved[memory.data_ptr()] = memory
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        y = module(x, index, weights)
    gated = 3 * INNER  # gate and up side by side, and silu's output
    of_row = 4 * gated + 4 + 8  # the routing weight, where the row came from
    bytes_saved = sum(memory.nbytes() for memory in saved.values())
    assert bytes_saved == tokens * (4 * width + top_k * of_row) + 4 * E
    y.sum().backward()


@pytest.mark.parametrize("projected_weights", [(0,), (1,), (0, 1)], ids=["up", "down", "both"])
@pytest.mark.parametrize("own", [False, True], ids=["shared", "own"])
@pytest.mark.parametrize("side", ["input", "output"])
def test_llama4_s_experts(side, own, projected_weights):
    """By `bmm`, and of a gradient whose memory is one number."""
    module = Llama4TextExperts(
        Llama4TextConfig(hidden_size=6, intermediate_size=5, num_local_experts=E)
    ).double()
    for weight in module.parameters():
        nn.init.normal_(weight)
    x = torch.randn(4 * E, 6, dtype=torch.float64, requires_grad=True)
    twin = copy.deepcopy(module)
    expected = torch.autograd.grad(twin(x).sum(), (x, *twin.parameters()))
    links = list(links_of(module, side, own, width=3).items())
    links = patch(module, dict(links[i] for i in projected_weights))
    module(x).sum().backward()
    assert_close(x.grad, expected[0])
    for (name, parameter), wanted in zip(module.named_parameters(), expected[1:], strict=True):
        if name in links:
            assert_close(links[name].take(), projected(links[name], wanted))
        else:
            assert_close(parameter.grad, wanted)


def test_sizes_that_grouped_mm_refuses():
    """Rows that are no multiple of 16 bytes: an odd width, and fp32 experts of three channels."""
    module = experts(torch.float32, "batched_mm", is_transposed=True)
    module.gate_up_proj = nn.Parameter(torch.randn(E, 3, 10))
    module.down_proj = nn.Parameter(torch.randn(E, 5, 3))
    x = torch.randn(11, 3, requires_grad=True)
    index, weights = routes(11, 2, dtype=torch.float32)
    _, dx, _, whole = gradients(module, x, index, weights)
    links = patch(module, links_of(module, "input", True, width=7))
    module(x, index, weights).square().sum().backward()
    assert_close(x.grad, dx, rtol=1e-4, atol=1e-4)
    for name, link in links.items():
        assert_close(link.take(), projected(link, whole[name]), rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("own", [False, True], ids=["shared", "own"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_on_gpu(dtype, own):
    """An odd width, biases, and an expert without tokens; against fp64 on the host."""
    module = experts(torch.float64, has_bias=True)
    x, (index, weights) = inputs(300), routes(300, 2, of=E - 1)
    *exact, whole = gradients(module, x, index, weights)
    module.config._experts_implementation = "grouped_mm"
    module.to("cuda", dtype)
    given = x.detach().to("cuda", dtype), index.cuda(), weights.detach().to("cuda", dtype)
    *theirs, others = gradients(module, *given)
    links = patch(module, links_of(module, "input", own, width=7))
    x, weights = (t.requires_grad_() for t in (given[0], given[2]))
    y = module(x, given[1], weights)
    y.square().sum().backward()
    rows = [*zip((y, x.grad, weights.grad), theirs, exact, strict=True)]
    for name, parameter in module.named_parameters():
        found, other, wanted = parameter.grad, others[name], whole[name]
        if name in links:
            columns = links[name].projection.double()
            other, wanted = (
                projected(links[name], g.double(), columns.to(g.device)) for g in (other, wanted)
            )
            found = links[name].take()
            assert not found[-1].any()
        rows.append((found, other, wanted))
    for found, other, wanted in rows:
        found, other = found.detach().cpu().double(), other.detach().cpu().double()
        assert (found - wanted).norm() <= 2 * (other - wanted).norm() + 1e-6 * wanted.norm()
