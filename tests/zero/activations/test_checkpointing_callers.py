"""Callers of deepspeed.checkpointing: what they get with an engine of ours, without one, and of which."""

from __future__ import annotations

import functools
from typing import Any

import deepspeed
import pytest
import torch
from checkpointing_service import (
    BATCH,
    STOCK,
    WIDTH,
    Backend,
    Stack,
    assert_equal,
    layer_inputs,
    plainly,
    run,
    serve,
    stock_again,
)
from deepspeed.runtime.activation_checkpointing import checkpointing
from torch import Tensor, nn
from training import HIDDEN, tiny_llama

import hmt_deepspeed
from hmt_deepspeed.zero.activations.checkpointing import Service

ends_with_stock = stock_again  # of every test here
captured_checkpoint = checkpointing.checkpoint  # as Megatron does, long before any engine


@pytest.mark.parametrize(
    "checkpoint", ["checkpoint", "captured", "non_reentrant_checkpoint", "CheckpointFunction"]
)
@pytest.mark.parametrize("served", [True, False])
def test_megatron_style_callers(checkpoint, served):
    def apply(function: Any, *args: Any) -> Any:
        outputs: list[Any] = []
        checkpointing.CheckpointFunction.apply(function, outputs, *args)
        return tuple(outputs)

    caller = {
        "checkpoint": lambda *args: deepspeed.checkpointing.checkpoint(*args),
        "captured": captured_checkpoint,
        "non_reentrant_checkpoint": lambda *args: deepspeed.checkpointing.non_reentrant_checkpoint(
            *args
        ),
        "CheckpointFunction": apply,
    }[checkpoint]
    stack = Stack(caller)
    service = serve(stack) if served else None
    found = run(caller, stack)
    assert [layer.num_calls for layer in stack.layers] == [2] * 4  # forward and recomputation
    if service is not None:
        assert service.backend.num_calls == 2
        # one activation each: mask and numbers are held as they are
        assert [held.nbytes for held in service.inputs.held] == [BATCH * WIDTH * 4] * 2
    assert_equal(found, run(plainly))


def test_recomputation_under_other_random_states_is_seen():
    """The test above would fail without the tracker's part."""
    stack = Stack(checkpointing.checkpoint)
    service = serve(stack)
    tracker = checkpointing.get_cuda_rng_tracker()
    set_states, tracker.set_states = tracker.set_states, lambda states: None
    try:
        found = run(None, stack)
    finally:
        tracker.set_states = set_states
    expected = run(plainly)
    assert torch.equal(found[0], expected[0])
    assert not torch.equal(found[-1], expected[-1]) or not torch.equal(found[4], expected[4])
    service.close()


def test_outputs_alone_in_lists_and_keywords():
    service = serve(nn.Identity())
    x, w = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    for caller in (
        deepspeed.checkpointing.checkpoint,
        deepspeed.checkpointing.non_reentrant_checkpoint,
    ):
        assert isinstance(caller(lambda a: a * 2, x), Tensor)
        assert isinstance(caller(lambda a: [a * 2], x), Tensor)
        _first, second, third = caller(lambda a: [a * 2, None, a.sum()], x)
        assert second is None
        assert third.dim() == 0
    y = deepspeed.checkpointing.checkpoint(lambda a, b: (a * b).sin(), x, b=w)
    (grad,) = torch.autograd.grad(y.sum(), w)  # DeepSpeed's own refuses autograd.grad
    assert torch.equal(grad, torch.autograd.grad((x * w).sin().sum(), w)[0])
    assert not deepspeed.checkpointing.checkpoint(lambda a: a.detach() * 2, x).requires_grad
    service.close()


def test_without_gradients_nothing_is_held():
    stack = Stack(checkpointing.checkpoint)
    service = serve(stack)
    checkpointing.get_cuda_rng_tracker().reset()
    checkpointing.get_cuda_rng_tracker().add("model-parallel-rng", 2)
    with torch.no_grad():
        stack(torch.randn(BATCH, WIDTH), torch.zeros(BATCH, WIDTH, dtype=torch.bool))
    assert service.backend.num_calls == 0
    assert [layer.num_calls for layer in stack.layers] == [1] * 4


def test_which_inputs_are_held():
    service = serve(nn.Identity())
    x, kept = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    kept.no_checkpointing = True
    weight, mask = nn.Parameter(torch.randn(3)), torch.ones(3)
    frozen = torch.randn(3)
    for args in ((frozen, weight, x, kept, mask), (x, weight, kept, mask)):
        service.inputs.held.clear()
        x.grad = kept.grad = weight.grad = None
        y = checkpointing.checkpoint(lambda *args: functools.reduce(torch.mul, args), *args)
        y.sum().backward()
        assert len(service.inputs.held) == (2 if args[0] is frozen else 1)  # (frozen and) x
        others = frozen if args[0] is frozen else torch.ones(3)
        torch.testing.assert_close(kept.grad, x * weight * others)
        torch.testing.assert_close(x.grad, kept * weight * others)
        torch.testing.assert_close(weight.grad, kept * x * others)
    service.close()


def test_a_checkpoint_within_a_checkpoint():
    class Nested(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            inner = lambda a: nn.functional.dropout(a.exp(), 0.5)  # noqa: E731
            return checkpointing.checkpoint(lambda a: checkpointing.checkpoint(inner, a).sin(), x)

    found = []
    for served in (True, False):
        model = Nested()
        service = serve(model) if served else None
        torch.manual_seed(3)
        x = torch.randn(16, requires_grad=True)
        model(x).sum().backward()
        found.append(x.grad)
        if service is not None:
            assert service.backend.num_calls == 1  # the inner one is part of the outer one
            service.close()
    assert torch.equal(*found)


# -- who answers -----------------------------------------------------------------------------------


def test_deepspeed_answers_again_when_the_engine_is_gone():
    service = serve(nn.Identity())
    assert checkpointing.CheckpointFunction is not STOCK["CheckpointFunction"]
    del service
    assert {name: getattr(checkpointing, name) for name in STOCK} == STOCK


def test_unregister_restores_and_initialize_does_not(monkeypatch):
    monkeypatch.setattr(deepspeed, "initialize", lambda: serve(nn.Identity()))
    service = hmt_deepspeed.initialize()  # whose registration ends with the call
    assert checkpointing.CheckpointFunction is not STOCK["CheckpointFunction"]
    hmt_deepspeed.unregister()
    assert {name: getattr(checkpointing, name) for name in STOCK} == STOCK
    other = serve(nn.Identity())
    service.close()
    assert checkpointing.CheckpointFunction is not STOCK["CheckpointFunction"]
    other.close()
    other.close()


def test_of_several_engines_the_computing_one_answers():
    models = [Stack(checkpointing.checkpoint) for _ in range(2)]
    services = [serve(model) for model in models]
    run(None, models[0])
    assert [s.backend.num_calls for s in services] == [2, 0]
    with pytest.raises(RuntimeError, match="shape"):
        models[0](torch.randn(BATCH, WIDTH + 1), torch.zeros(1, dtype=torch.bool))
    checkpointing.checkpoint(torch.sin, torch.ones(2, requires_grad=True))
    assert [s.backend.num_calls for s in services] == [3, 1]
    for service in services:
        service.close()


def test_a_layer_given_to_deepspeed_is_held_as_the_policy_says():
    """And a function around it as it is."""
    model, inputs = tiny_llama(layers=2).train(), layer_inputs()
    service = Service(model, Backend(inputs, model, layer_input="int8"))
    layer = model.model.layers[0]
    x = torch.randn(1, 4, HIDDEN, requires_grad=True)
    rotary = model.model.rotary_emb(x, torch.arange(4)[None])
    forward = functools.partial(layer, position_embeddings=rotary)
    for function in (forward, lambda x: forward(x)):
        deepspeed.checkpointing.checkpoint(function, x).sum().backward()
    assert [type(held).__name__ for held in inputs.held] == ["SavedBlocks", "_Raw"]
    service.close()


def test_a_caller_over_several_layers_gets_the_policy_within():
    """Megatron's custom forward, over layers that the backend knows: only what is cheap runs again."""
    model, inputs = tiny_llama(layers=2).train(), layer_inputs()
    x = torch.randn(1, 4, HIDDEN, requires_grad=True)
    rotary = model.model.rotary_emb(x, torch.arange(4)[None])

    def custom(x: Tensor) -> Tensor:
        for layer in model.model.layers:
            x = layer(x, position_embeddings=rotary)
        return x

    custom(x).sum().backward()
    expected = [x.grad, *(p.grad for p in model.model.layers.parameters())]
    x.grad = None
    model.zero_grad()
    backend = Backend(
        inputs, model, attention_qkv="keep", attention_output="keep", mlp_intermediate="keep"
    )
    backend.install()
    service = Service(model, backend)
    deepspeed.checkpointing.checkpoint(custom, x).sum().backward()
    assert_equal([x.grad, *(p.grad for p in model.model.layers.parameters())], expected)
    report = backend.report()
    held = {"attention_qkv", "attention_output", "residual", "mlp_intermediate"}
    assert [hits.keys() & held for hits in report.hits.values()] == [held, held]
    assert not report.rerun.keys() - {"exit"}
    assert len(inputs.held) == 1
    service.close()
    backend.uninstall()
