"""Models, backends and gradients that the tests of the backend share."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from families import tokens
from torch import nn

from hmt_deepspeed.activations.backend import ActivationBackend
from hmt_deepspeed.activations.codecs import build_codec
from hmt_deepspeed.attribution import Attribution, Layer, attribute
from hmt_deepspeed.config.codecs import block_bytes, held_bytes
from hmt_deepspeed.memory.host import HostStore
from hmt_deepspeed.memory.transfer import TransferEngine

INSIDE = ("attention_qkv", "attention_output", "mlp_intermediate", "residual")
KEEP = dict.fromkeys(INSIDE, "keep")
RECOMPUTE = dict.fromkeys(INSIDE, "recompute")
PAPER_KEPT = {"attention_output": "keep", "mlp_intermediate": "keep"}  # the paper's table, exact
SWAP = dict.fromkeys((*INSIDE, "layer_input"), "swap_host")
CHOICES = ["keep", "recompute", "swap_host"]  # the exact ones
SEED = 3


@pytest.fixture
def poison():
    """What holds nothing is NaN: who reads a blank shows it."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)


def codecs(store=None, block_size=16):
    moved = () if store is None else ("swap_host", "swap_ssd")
    return {
        "keep": build_codec("keep"),
        **{choice: build_codec(choice, block_size=block_size) for choice in ("int8", "fp8")},
        **{choice: build_codec(choice, store) for choice in moved},
    }


def bytes_of(choice, tokens, channels, itemsize, block_size=16):
    """What a choice holds on the device with blocks of this size."""
    if choice in ("int8", "fp8"):
        return block_bytes(tokens, channels, itemsize, block_size)
    return held_bytes(choice, tokens, channels, itemsize)


def host_store(nbytes=2**22):
    return HostStore(TransferEngine("cpu", 2**20), nbytes)


def make_backend(model, policy=None, attribution=None, store=None, **options):
    return ActivationBackend(
        model, attribution or attribute(model), policy or {}, codecs(store), **options
    )


@contextmanager
def installed(model, policy=None, **options):
    backend = make_backend(model, policy, **options)
    backend.install()
    try:
        yield backend
    finally:
        backend.uninstall()


def gradients(model, batch=None, **inputs):
    """By name, of a seeded forward and a backward."""
    model.zero_grad()
    torch.manual_seed(SEED)
    batch = tokens() if batch is None else batch
    model(input_ids=batch, labels=batch, **inputs).loss.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    different = [name for name in expected if not torch.equal(found[name], expected[name])]
    assert not different


def cosines(model, found, expected):
    """Cosine of the gradients of each layer."""
    result = []
    for index in range(len(model.model.layers)):
        names = [n for n in expected if f"layers.{index}." in n]
        one, other = (
            torch.cat([g[n].double().flatten() for n in names]) for g in (found, expected)
        )
        result.append(float(torch.cosine_similarity(one, other, dim=0)))
    return result


class Mlp(nn.Module):
    """A layer of two linears and what a test puts between and after them."""

    def __init__(self, width=16, between=nn.GELU, after=None):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.between = between()
        self.after = after() if after else nn.Identity()

    def forward(self, x):
        return x + self.after(self.fc2(self.between(self.fc1(x))))


class Stack(nn.Module):
    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def stack(count=2, **options):
    torch.manual_seed(0)
    return Stack(*(Mlp(**options) for _ in range(count)))


def attribution_of(model, components=None, exits=("fc2",)):
    components = {"fc1": "mlp_intermediate"} if components is None else components
    layers = tuple(
        Layer(f"layers.{i}", layer, components, frozenset(exits))
        for i, layer in enumerate(model.layers)
    )
    return Attribution(layers, head=None, final_norm=None, unattributed=())


def backend_on(model, choice="keep", components=None, exits=("fc2",), **options):
    """On a stack: the MLP's intermediate in this form, inputs and residuals kept or, with it, swapped."""
    policy = {"mlp_intermediate": choice, "layer_input": "keep", "residual": "keep"}
    if choice == "swap_host":
        policy = dict.fromkeys(("mlp_intermediate", "layer_input", "residual"), choice)
        options.setdefault("store", host_store())
    attribution = attribution_of(model, components, exits)
    return installed(model, policy, attribution=attribution, **options)


def batch(*shape):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(*(shape or (4, 6, 16)), generator=generator)


def stack_gradients(model, x=None, run=None, **options):
    """Of the parameters and the input."""
    model.zero_grad()
    x = (batch() if x is None else x).clone().requires_grad_()
    torch.manual_seed(SEED)
    (model if run is None else run)(x).square().sum().backward(**options)
    named = {"x": x, **dict(model.named_parameters())}
    return {name: p.grad.clone() for name, p in named.items() if p.grad is not None}
