"""Experts of the interface in every kind that it has, links for their weights, and gradients without them."""

import copy
from types import SimpleNamespace

import torch
from torch import nn
from torch.nn import functional as F
from transformers.integrations.moe import use_experts_implementation

from hmt_deepspeed.optim.backward.experts import expert_sites, patch_experts
from hmt_deepspeed.optim.backward.projected_linear import ProjectedLinear

E, H, INNER = 5, 16, 24


class ScaledNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(H) + 0.5)

    def forward(self, x):
        return F.rms_norm(x, (H,), self.weight)


def experts(dtype=torch.float64, implementation="batched_mm", **how):
    """A module of the interface, by default gated, without biases and stored E x out x in."""

    @use_experts_implementation(**how)
    class Experts(nn.Module):
        def __init__(self, config):
            super().__init__()
            self.num_experts = E
            wide = 2 * INNER if how.get("has_gate", True) else INNER
            self._add("gate_up_proj" if how.get("has_gate", True) else "up_proj", wide, H)
            self._add("down_proj", H, INNER)
            self.act_fn = nn.SiLU()
            if how.get("has_post_expert_norm"):
                self.post_expert_norm = ScaledNorm()

        def _add(self, name, m, n):
            shape = (n, m) if how.get("is_transposed") else (m, n)
            self.register_parameter(name, nn.Parameter(torch.randn(E, *shape) / n**0.5))
            if how.get("has_bias"):
                self.register_parameter(f"{name}_bias", nn.Parameter(torch.randn(E, m)))

        def forward(self, *_):
            raise NotImplementedError

    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        return Experts(SimpleNamespace(_experts_implementation=implementation))
    finally:
        torch.set_default_dtype(before)


def routes(tokens, top_k, seed=0, dtype=torch.float64, of=E):
    """Experts of each token, no one twice, and their weights."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(tokens, of, generator=generator)
    weights, index = scores.topk(top_k)
    return index, weights.to(dtype).requires_grad_()


def inputs(tokens, seed=9, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, H, dtype=dtype, generator=generator).requires_grad_()


def links_of(module, side, own, width=6):
    """A link for each expert weight of a module, with a projection, by parameter name.

    side: of each matrix: "input", "output", or the model's "width", which is the input of what reads the stream and the
    output of what writes to it.
    """
    links, weights = {}, dict(module.named_parameters())
    sites = [(name, site) for name, site in expert_sites(module).items() if not site.reason]
    for number, (name, site) in enumerate(sites):
        weight = weights[name]
        of_input = side == "input" or (side == "width" and site.role == "up")
        link = links[name] = ProjectedLinear(name, of_input == site.is_transposed)
        link.own = own
        size = weight.shape[1 if link.transposed else 2]
        shape = (len(weight), size, width) if own else (size, width)
        generator = torch.Generator().manual_seed(number)
        link.projection = torch.randn(shape, generator=generator).bfloat16().to(weight.dtype)
    return links


def patch(module, links):
    sites = expert_sites(module)
    patch_experts([(sites[name], link) for name, link in links.items()])
    return links


def projected(link, gradient, columns=None):
    """The gradient of an expert weight, E x a x b, as its link is to have it."""
    columns = link.projection if columns is None else columns
    return (gradient.transpose(1, 2) if link.transposed else gradient) @ columns


def gradients(module, x, index, weights):
    """Output of an unpatched copy, and gradients of its square's sum: of x, of the routing weights and by parameter."""
    twin = copy.deepcopy(module)
    x, weights = (t.detach().clone().requires_grad_() for t in (x, weights))
    y = twin(x, index, weights)
    y.square().sum().backward()
    return y.detach(), x.grad, weights.grad, {name: p.grad for name, p in twin.named_parameters()}
