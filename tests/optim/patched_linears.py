"""Linears with a projected backward, and their gradients without one."""

import copy

import torch
from torch import nn

from hmt_deepspeed.optim.backward.linear import patch_linear
from hmt_deepspeed.optim.backward.projected_linear import ProjectedLinear, SharedInputs

D = 32


def columns(width=6, seed=0, n=D, dtype=torch.float64):
    return torch.randn(n, width, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def patched(modules, width=6, dtype=torch.float64, project=True):
    """Sites of the modules, their shared inputs laid out."""
    sites = [ProjectedLinear(f"site{i}") for i in range(len(modules))]
    shared = SharedInputs(sites)
    for i, (module, site) in enumerate(zip(modules, sites, strict=True)):
        if project:
            site.projection = columns(width, i, module.in_features, dtype)
        patch_linear(module, site, shared)
    shared.lay_out()
    return sites, shared


class Attention(nn.Module):
    """q, k, v read one input, o another: enough of a block to see who shares."""

    def __init__(self, dtype=torch.float64):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(D, D, dtype=dtype) for _ in range(4))

    def forward(self, x):
        return x + self.o(torch.sigmoid(self.q(x)) * torch.tanh(self.k(x)) + self.v(x))

    def linears(self):
        return [self.q, self.k, self.v, self.o]


def data(*shape, dtype=torch.float64, seed=9):
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def full_gradients(model, *inputs):
    """Weight gradients of an unpatched copy."""
    twin = copy.deepcopy(model)
    sum(twin(x).square().sum() for x in inputs).backward()
    return twin, [module.weight.grad for module in twin.linears()]


def assert_projected(sites, gradients):
    for i, (site, gradient) in enumerate(zip(sites, gradients, strict=True)):
        expected = gradient @ columns(6, i)
        # fp64: the order of summation is all that differs
        assert (site.take() - expected).abs().max() <= 1e-12 * expected.abs().max()


def left_patched(modules, width=6, dtype=torch.float64):
    """Sites of modules projected from the left, as :func:`patched`."""
    sites = [ProjectedLinear(f"site{i}", transposed=True) for i in range(len(modules))]
    shared = SharedInputs(sites)
    for i, (module, site) in enumerate(zip(modules, sites, strict=True)):
        site.projection = columns(width, i, module.out_features, dtype)
        patch_linear(module, site, shared)
    shared.lay_out()
    return sites, shared
