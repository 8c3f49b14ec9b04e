"""What goes beyond one backward: torch.func, autograd.functional, forward-mode AD, double backward, autograd.grad of
weights. Values are those of an ordinary nn.Linear, or the error names the weight."""

import copy

import pytest
import torch
from low_rank_adamw import low_rank_adamw
from torch import nn
from torch.autograd import forward_ad
from torch.autograd import functional as AF
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vmap

from hmt_deepspeed.activations.codecs import Int8
from hmt_deepspeed.activations.linear import EncodedInputs
from hmt_deepspeed.activations.linear import patch_linear as patch_head
from hmt_deepspeed.optim.backward.int8_linear import dequantize, encoded_weight, quantize
from hmt_deepspeed.optim.backward.linear import patch_linear
from hmt_deepspeed.optim.backward.projected_linear import ProjectedLinear, SharedInputs

N, WIDTH = 6, 3


def drawn(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


class Block(nn.Module):
    """q and k read one input; every linear has a nonlinear function behind it, so that nothing vanishes."""

    def __init__(self, dtype=torch.float64):
        super().__init__()
        self.q, self.k, self.o = (nn.Linear(N, N, dtype=dtype) for _ in range(3))

    def forward(self, x):
        return torch.tanh(self.o(torch.sigmoid(self.q(x)) * torch.tanh(self.k(x)) + x))

    def linears(self):
        return {"q": self.q, "k": self.k, "o": self.o}


def dtype_of(kind):
    return torch.float64 if kind in ("left", "right") else torch.float32  # codes stand for fp32


def agree(found, expected):
    """All that differs is the order of summation, in a few products after each other."""
    bound = 1e-12 if expected.dtype == torch.float64 else 2e-5
    return (found - expected).abs().max() <= bound * expected.abs().max()


def patched(kind):
    """A block of one kind of linears in a window that has begun, an ordinary twin of it, and the sites."""
    torch.manual_seed(3)
    dtype = dtype_of(kind)
    model, sites = Block(dtype), []
    if kind.startswith("int8"):
        for linear in model.linears().values():
            quantize(linear)
            dequantize(linear)  # the values that INT8 has
    twin = copy.deepcopy(model)
    if kind == "encoded_input":
        inputs = EncodedInputs(Int8(block_size=4), lambda: 0)
        for name, linear in model.linears().items():
            patch_head(linear, inputs, name)
        return model, twin, sites
    if kind.startswith("int8"):
        for linear in model.linears().values():
            quantize(linear)
    sites = [ProjectedLinear(f"{name}.weight", kind == "left") for name in model.linears()]
    shared = SharedInputs(sites)
    for linear, site in zip(model.linears().values(), sites, strict=True):
        patch_linear(linear, site, shared)
    model(drawn(2, N).to(dtype))  # who shares an input is learned
    for seed, site in enumerate(sites):
        site.projection = None if kind == "int8_whole" else drawn(N, WIDTH, seed=seed).to(dtype)
    shared.lay_out()
    return model, twin, sites


def scalar(y):
    return (y * y.detach().cos()).sum() + y.pow(3).sum()


def of_params(model, x):
    given = {name: p.detach() for name, p in model.named_parameters()}
    return tuple(grad(lambda p: scalar(functional_call(model, p, x)))(given).values())


def per_sample(model, x):
    given = {name: p.detach() for name, p in model.named_parameters()}
    one = grad(lambda p, row: scalar(functional_call(model, p, row)))
    return tuple(vmap(one, in_dims=(None, 0))(given, x).values())


def dual(model, x):
    with forward_ad.dual_level():
        return tuple(forward_ad.unpack_dual(model(forward_ad.make_dual(x, x.cos()))))


def third_order(model, x):
    x = x.clone().requires_grad_()
    found = [scalar(model(x))]
    for _ in range(3):
        found.append(torch.autograd.grad(found[-1].sum(), x, create_graph=True)[0])
    return found


def batched(model, x):
    x = x.clone().requires_grad_()
    seeds = torch.eye(x.numel(), dtype=x.dtype).view(-1, *x.shape)
    return torch.autograd.grad(model(x), x, seeds, is_grads_batched=True)


TRANSFORMS = {
    "func.grad": lambda m, x: grad(lambda x: scalar(m(x)))(x),
    "func.grad of parameters": of_params,
    "per-sample gradients": per_sample,
    "func.vmap": lambda m, x: vmap(m)(x),
    "func.jvp": lambda m, x: jvp(m, (x,), (x.cos(),)),
    "func.jacrev": lambda m, x: jacrev(m)(x),
    "func.jacfwd": lambda m, x: jacfwd(m)(x),
    "func.hessian": lambda m, x: hessian(lambda x: scalar(m(x)))(x),
    "forward-mode AD": dual,
    "jacobian": lambda m, x: AF.jacobian(m, x),
    "jacobian, vectorized": lambda m, x: AF.jacobian(m, x, vectorize=True),
    "jacobian, forward": lambda m, x: AF.jacobian(m, x, strategy="forward-mode", vectorize=True),
    "hessian": lambda m, x: AF.hessian(lambda x: scalar(m(x)), x),
    "hessian, vectorized": lambda m, x: AF.hessian(lambda x: scalar(m(x)), x, vectorize=True),
    "hvp": lambda m, x: AF.hvp(lambda x: scalar(m(x)), x, x.cos()),
    "vhp": lambda m, x: AF.vhp(lambda x: scalar(m(x)), x, x.cos()),
    "functional.jvp": lambda m, x: AF.jvp(m, x, x.cos()),
    "third order": third_order,
    "batched gradients": batched,
}
KINDS = ["right", "left", "int8", "int8_whole", "encoded_input"]


def leaves(value):
    return [value] if isinstance(value, torch.Tensor) else [t for v in value for t in leaves(v)]


@pytest.mark.parametrize("kind", KINDS)
def test_values_are_an_ordinary_linears(kind):
    """Every transform, and after all of them nothing is left for the step."""
    model, twin, sites = patched(kind)
    x = drawn(4, N, seed=9).to(dtype_of(kind))
    for name, transform in TRANSFORMS.items():
        for found, expected in zip(
            leaves(transform(model, x)), leaves(transform(twin, x)), strict=True
        ):
            assert agree(found, expected), name
    assert [site.take() for site in sites] == [None] * len(sites)
    assert all(p.grad is None for p in model.parameters())


def penalty(model, x):
    x = x.clone().requires_grad_()
    loss = scalar(model(x))
    (dx,) = torch.autograd.grad(loss, x, create_graph=True)
    (loss + dx.square().sum()).backward()


def vmapped(model, x):
    (scalar(vmap(model)(x)) + scalar(model(x))).backward()


def own_parameters_given(model, x):
    scalar(functional_call(model, dict(model.named_parameters()), x)).backward()


def decayed_given(model, x):
    """functional_call with functions of the Parameters: the gradient reaches them whole."""
    given = {name: p * 0.5 for name, p in model.named_parameters()}
    scalar(functional_call(model, given, x)).backward()


def dual_then_backward(model, x):
    with forward_ad.dual_level():
        y, tangent = forward_ad.unpack_dual(model(forward_ad.make_dual(x, x.cos())))
    (scalar(y) + scalar(tangent)).backward()


def total(linear, site):
    """What the step takes: the projected gradient of all that backward has left."""
    parts = [site.take()]
    if linear.weight.grad is not None:
        gradient = linear.weight.grad.t() if site.transposed else linear.weight.grad
        parts.append(gradient @ site.projection)
    return sum(part for part in parts if part is not None)


TRAINS = [penalty, vmapped, own_parameters_given, dual_then_backward]
CASES = [(train, kind) for train in TRAINS for kind in ("right", "left", "int8")]
# the stand-in of an INT8 weight has no values to compute others from
CASES += [(decayed_given, kind) for kind in ("right", "left")]


@pytest.mark.parametrize(("train", "kind"), CASES)
def test_gradients_for_the_step_are_those_of_an_ordinary_linear(train, kind):
    model, twin, sites = patched(kind)
    x = drawn(4, N, seed=9).to(dtype_of(kind))
    train(model, x)
    train(twin, x)
    for site, (name, linear) in zip(sites, model.linears().items(), strict=True):
        ordinary = twin.linears()[name]
        expected = ordinary.weight.grad.t() if site.transposed else ordinary.weight.grad
        expected = expected @ site.projection
        assert agree(total(linear, site), expected)
        assert agree(linear.bias.grad, ordinary.bias.grad)


def test_a_window_that_forms_whole_gradients_of_int8_weights():
    model, twin, _ = patched("int8_whole")
    x = drawn(4, N, seed=9).float()
    penalty(model, x)
    penalty(twin, x)
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert agree(ours.grad, theirs.grad)


def test_other_weights_in_the_place_of_int8_ones():
    """functional_call with real weights computes with these, not with the codes."""
    model, _, sites = patched("int8")
    others = {
        name: drawn(*p.shape, seed=5).float().requires_grad_()
        for name, p in model.named_parameters()
    }
    plain, x = Block(torch.float32), drawn(4, N, seed=9).float()
    scalar(functional_call(model, others, x)).backward()
    found = [other.grad.clone() for other in others.values()]
    for other in others.values():
        other.grad = None
    scalar(functional_call(plain, others, x)).backward()
    for name, gradient in zip(others, found, strict=True):
        torch.testing.assert_close(gradient, others[name].grad, msg=name)
    assert [site.take() for site in sites] == [None] * 3
    assert encoded_weight(model.q) is not None


@pytest.mark.parametrize("kind", ["right", "int8"])
def test_a_whole_gradient_that_cannot_be_formed_is_an_error(kind):
    model, _, sites = patched(kind)
    x = drawn(4, N, seed=9).to(dtype_of(kind))
    named = (
        r"q\.weight, but .* hmt\.optimizer\.module_rules, or set hmt\.optimizer\.projected_backward"
    )
    with pytest.raises(ValueError, match=f"autograd.grad was asked for the gradient of {named}"):
        torch.autograd.grad(scalar(model(x)), model.q.weight, allow_unused=True)
    with pytest.raises(
        ValueError, match=r"create_graph=True\) was asked for a gradient of o\.weight"
    ):
        scalar(model(x)).backward(create_graph=True)
    assert [site.take() for site in sites] == [None] * 3
    # what is not projected is returned as ever
    torch.autograd.grad(scalar(model(x)), model.q.bias)


def test_a_projection_from_the_left_has_the_input_and_returns_the_gradient():
    model, twin, sites = patched("left")
    x = drawn(4, N, seed=9)
    found = torch.autograd.grad(scalar(model(x)), list(model.parameters()))
    expected = torch.autograd.grad(scalar(twin(x)), list(twin.parameters()))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert [site.take() for site in sites] == [None] * 3
    for module in (model, twin):  # the gradient's norm as a penalty
        scalar(module(x)).backward(create_graph=True)
        gradients = [p.grad for p in module.parameters()]
        for p in module.parameters():
            p.grad = None
        sum(gradient.square().sum() for gradient in gradients).backward()
    for site, (name, linear) in zip(sites, model.linears().items(), strict=True):
        expected = twin.linears()[name].weight.grad.t() @ site.projection
        torch.testing.assert_close(total(linear, site), expected, rtol=1e-10, atol=1e-10)


def test_inputs_held_in_8_bits_refuse_a_gradient_that_is_differentiated_again():
    model, _, _ = patched("encoded_input")
    with pytest.raises(ValueError, match='"keep" for lm_head'):
        scalar(model(drawn(4, N).float())).backward(create_graph=True)


def trained(own, options):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 8)
    )
    options = {"rank": 2, "update_interval": 4, **options}
    optimizer = low_rank_adamw(model if own else model.named_parameters(), lr=1e-2, **options)
    for step in range(6):  # windows that refresh and windows that project
        x = drawn(5, 8, seed=step).float()
        (penalty if step % 2 else vmapped)(model, x)
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model


@pytest.mark.parametrize("options", [{}, {"projection": "left"}, {"range_finder": "random"}])
def test_trains_as_with_whole_gradients(options):
    """HMT of a module beside HMT of its parameters, which is given whole gradients."""
    ours, whole = trained(True, options), trained(False, options)
    for found, expected in zip(ours.parameters(), whole.parameters(), strict=True):
        # six steps of Adam at 1e-2 whose gradients differ by fp32's rounding
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
