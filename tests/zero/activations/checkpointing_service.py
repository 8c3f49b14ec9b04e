"""A service of deepspeed.checkpointing callers, and a caller in the manner of Megatron, for its tests."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from deepspeed.runtime.activation_checkpointing import checkpointing
from torch import Tensor, nn

from hmt_deepspeed.activations.backend import ActivationBackend
from hmt_deepspeed.activations.codecs import Codec, Int8, Keep, SwapHost
from hmt_deepspeed.attribution import Attribution, attribute
from hmt_deepspeed.config.activation_checkpointing import ActivationCheckpointing
from hmt_deepspeed.memory.host import HostStore
from hmt_deepspeed.memory.transfer import TransferEngine
from hmt_deepspeed.zero.activations.boundary import Boundary
from hmt_deepspeed.zero.activations.checkpointing import LayerInputs, Service

STOCK = {
    name: getattr(checkpointing, name)
    for name in ("CheckpointFunction", "non_reentrant_checkpoint")
}
WIDTH, BATCH = 8, 4


class Backend(ActivationBackend):
    """Counts what callers ask of it. By default of a model without attributed layers."""

    def __init__(self, inputs: LayerInputs, model: nn.Module | None = None, **policy: Any) -> None:
        found = Attribution((), None, None, ()) if model is None else attribute(model)
        super().__init__(
            model or nn.Identity(),
            found,
            policy,
            {"keep": Keep(), "int8": Int8()},
            of_inputs=inputs.codec,
            around=Boundary(inputs.keys).run,
        )
        self.num_calls = 0

    def checkpoint(self, fn: Any, *args: Any, **options: Any) -> Any:
        self.num_calls += 1
        return super().checkpoint(fn, *args, **options)


class Spy(LayerInputs):
    """Remembers what holds the inputs."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.held: list[Any] = []

    def codec(self, inner: Codec, position: int = 0) -> Any:
        codec: Any = super().codec(inner, position)
        if not hasattr(codec, "spied"):
            codec.spied, codec.encode = codec.encode, functools.partial(self._encode, codec)
        return codec

    def _encode(self, codec: Any, *args: Any) -> Any:
        self.held.append(codec.spied(*args))
        return self.held[-1]


def layer_inputs(mpu: Any = None, **keys: Any) -> Spy:
    store = HostStore(TransferEngine("cpu", 1 << 20), 1 << 20)
    return Spy(ActivationCheckpointing.from_section(keys), mpu, lambda: SwapHost(store))


def serve(module: nn.Module, mpu: Any = None, **keys: Any) -> Any:
    """A service, with its backend's ``inputs``."""
    inputs = layer_inputs(mpu, **keys)
    service: Any = Service(module, Backend(inputs))
    service.inputs = inputs
    return service


# -- a caller in the manner of Megatron --------------------------------------------------------------


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.num_calls = 0

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        self.num_calls += 1
        y = nn.functional.dropout(self.up(x), 0.3)  # the data-parallel random state
        with checkpointing.get_cuda_rng_tracker().fork():
            y = nn.functional.dropout(nn.functional.gelu(y), 0.3)
        return x + self.down(y).masked_fill(mask, 0.0)


class Stack(nn.Module):
    """Four layers, checkpointed two by two; several outputs, arguments of several kinds."""

    def __init__(self, checkpoint: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.checkpoint = checkpoint

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        def custom(first: int, last: int) -> Any:
            def forward(x: Tensor, mask: Tensor, scale: float, flag: bool, none: None) -> Any:
                assert flag is True
                assert none is None
                for index in range(first, last):
                    x = self.layers[index](x, mask)
                return x * scale, x.detach().argmax(-1)

            return forward

        for first in (0, 2):
            x, index = self.checkpoint(custom(first, first + 2), x, mask, 0.5, True, None)
        return x, index


def plainly(function: Any, *args: Any) -> Any:
    return function(*args)


def run(checkpoint: Any, stack: Stack | None = None) -> list[Tensor]:
    """Output, and gradients of input and weights, of a step whose random states are always the same."""
    stack = stack or Stack(checkpoint)
    tracker = checkpointing.get_cuda_rng_tracker()
    tracker.reset()
    torch.manual_seed(1)
    tracker.add("model-parallel-rng", 2)
    x = torch.randn(BATCH, WIDTH, requires_grad=True)
    mask = torch.zeros(BATCH, WIDTH, dtype=torch.bool)
    mask[:, 0] = True
    y, index = stack(x, mask)
    y.square().sum().backward()
    after = torch.rand(1)  # random states go on as if nothing had been recomputed
    with tracker.fork():
        after_fork = torch.rand(1)
    return [y, index, after, after_fork, x.grad, *(p.grad for p in stack.parameters())]


def assert_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    assert all(torch.equal(f, e) for f, e in zip(found, expected, strict=True))


@pytest.fixture(autouse=True)
def stock_again(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Every test ends with DeepSpeed as it was."""
    monkeypatch.setattr(checkpointing, "timers", None)
    yield
    assert {name: getattr(checkpointing, name) for name in STOCK} == STOCK
