"""DeepSpeed's activation_checkpointing keys on our backend."""

from __future__ import annotations

from typing import Any

import deepspeed
import pytest
import torch
from checkpointing_service import (
    BATCH,
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
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.activation_checkpointing import checkpointing
from torch import Tensor, nn
from training import tiny_llama

from hmt_deepspeed.activations.codecs import Int8, Keep
from hmt_deepspeed.config.activation_checkpointing import ActivationCheckpointing

ends_with_stock = stock_again  # of every test here

# -- keys ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (
            {"partitioned_activations": True},
            'did you mean "activation_checkpointing.partition_activations"',
        ),
        (
            {"offload": True},
            "Legal: partition_activations, cpu_checkpointing, contiguous_memory_optimization",
        ),
        (
            {"profile": 1},
            "activation_checkpointing.profile: got 1. Legal: true, false|true or false",
        ),
        ({"number_checkpoints": 0}, "activation_checkpointing.number_checkpoints: got 0"),
        ([], "activation_checkpointing is .*legal is an object"),
        (
            {"contiguous_memory_optimization": True},
            "number_checkpoints is None, legal .* integer >= 1",
        ),
    ],
)
def test_sections_that_cannot_be_honoured(section, message):
    with pytest.raises(ValueError, match=message):
        ActivationCheckpointing.from_section(section)


def test_deepspeeds_own_defaults():
    from deepspeed.runtime.activation_checkpointing.config import ACT_CHKPT_DEFAULT

    assert ActivationCheckpointing.from_section(None).model_dump() == ACT_CHKPT_DEFAULT
    assert (
        ActivationCheckpointing.from_section(dict(ACT_CHKPT_DEFAULT)).model_dump()
        == ACT_CHKPT_DEFAULT
    )


@pytest.mark.parametrize("key", ["cpu_checkpointing", "contiguous_memory_optimization"])
def test_a_lossy_policy_beside_a_key_that_would_replace_it(key):
    inputs = layer_inputs(**{key: True, "number_checkpoints": 2})
    with pytest.raises(ValueError, match=f"{key} is true.*'int8'.*legal.*\"keep\""):
        inputs.codec(Int8())


def test_partition_without_a_group_says_what_to_do():
    with pytest.raises(
        ValueError, match=r"no model-parallel group.*checkpointing.configure\(mpu\)"
    ):
        layer_inputs(partition_activations=True).codec(Keep())


def test_cpu_checkpointing_holds_nothing_on_the_device():
    stack = Stack(checkpointing.checkpoint)
    service = serve(stack, cpu_checkpointing=True)
    found = run(None, stack)
    assert [held.nbytes for held in service.inputs.held] == [0, 0]
    counters = service.inputs.codec(Keep()).current().store.engine.counters
    assert counters.bytes_out == counters.bytes_in == 2 * BATCH * WIDTH * 4
    assert_equal(found, run(plainly))


def test_contiguous_memory_is_one_for_all_components():
    inputs = layer_inputs(contiguous_memory_optimization=True, number_checkpoints=3)
    residual, embedding = inputs.codec(Keep()), inputs.codec(Keep())
    held = [embedding.encode(torch.ones(200)), residual.encode(torch.ones(200))]
    first, second = (h.memory for h in held)
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    assert second.data_ptr() - first.data_ptr() == 1024
    other = inputs.codec(Keep(), position=1).encode(torch.ones(999))  # another size, other slots
    assert other.memory.untyped_storage().data_ptr() != first.untyped_storage().data_ptr()


def test_what_configure_sets_counts_from_the_next_checkpoint_on(monkeypatch):
    service = serve(nn.Identity(), number_checkpoints=9)
    x = torch.randn(4, 8, requires_grad=True)
    ys = [checkpointing.checkpoint(torch.sin, x * 1)]
    monkeypatch.setattr(checkpointing, "CONTIGUOUS_CHECKPOINTING", True)
    deepspeed.checkpointing.set_num_layers(2)
    try:
        ys += [checkpointing.checkpoint(torch.sin, x * 1) for _ in range(2)]
        with pytest.raises(ValueError, match=r"number_checkpoints is 2, and .* is one more"):
            checkpointing.checkpoint(torch.sin, x * 1)
    finally:
        deepspeed.checkpointing.set_num_layers(None)
    assert [type(held).__name__ for held in service.inputs.held] == [
        "_Raw",
        "SavedSlot",
        "SavedSlot",
    ]
    sum(y.sum() for y in ys).backward()
    assert torch.equal(x.grad, 3 * x.cos())
    service.close()


# -- a model whose layers the backend knows ----------------------------------------------------------


def llama_gradients(inputs: Any, **policy: Any) -> list[Tensor]:
    """Gradients of a step of a tiny Llama."""
    model = tiny_llama(layers=3).train()
    Backend(inputs, model, **policy).install()
    tokens = torch.arange(2 * 10).view(2, 10)
    model(input_ids=tokens, labels=tokens).loss.backward()
    return [p.grad for p in model.parameters()]


def test_keys_apply_to_the_layers_of_a_model():
    expected = llama_gradients(layer_inputs())
    contiguous = layer_inputs(
        contiguous_memory_optimization=True, number_checkpoints=3, profile=True
    )
    assert_equal(llama_gradients(contiguous), expected)
    memory = {held.memory.untyped_storage().data_ptr() for held in contiguous.held}
    assert (len(contiguous.held), len(memory)) == (3, 1)
    # the final norm is checkpointed too
    assert len(checkpointing.timers("backward").event_timers) == 4
    on_host = layer_inputs(cpu_checkpointing=True)
    assert_equal(llama_gradients(on_host), expected)
    assert [held.nbytes for held in on_host.held] == [0] * 3


# -- profile, synchronize_checkpoint_boundary --------------------------------------------------------


def test_profile_times_checkpoints_and_waits_for_nothing(monkeypatch):
    logged, waits = [], []
    monkeypatch.setattr("deepspeed.utils.timer.print_dist", lambda text, ranks: logged.append(text))
    monkeypatch.setattr(get_accelerator(), "synchronize", lambda *_: waits.append(1))
    stack = Stack(checkpointing.checkpoint)
    service = serve(stack, profile=True)
    expected = run(plainly)
    assert_equal(run(None, stack), expected)
    timers = checkpointing.timers.get_timers()
    assert {name: len(timer.event_timers) for name, timer in timers.items()} == {
        "fwd": 2,
        "backward": 2,
    }
    assert all(seconds > 0 for timer in timers.values() for seconds in timer.event_timers)
    assert logged == waits == []
    stack.zero_grad()
    run(None, stack)  # one line per pass, when the next begins
    (line,) = logged
    assert "fwd:" in line
    assert "backward:" in line
    assert {name: len(timer.event_timers) for name, timer in timers.items()} == {
        "fwd": 2,
        "backward": 2,
    }
    service.close()


def test_profile_goes_on_after_a_broken_backward():
    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            raise RuntimeError("broken")

    service = serve(nn.Identity(), profile=True)
    x = torch.randn(3, requires_grad=True)
    with pytest.raises(RuntimeError, match="broken"):
        checkpointing.checkpoint(Broken.apply, x).sum().backward()
    for _ in range(2):
        checkpointing.checkpoint(torch.sin, x).sum().backward()
    assert len(checkpointing.timers("backward").event_timers) == 1
    inner = []

    def function(x: Tensor) -> Tensor:
        inner.append(x.exp())
        return inner[0].sin()

    checkpointing.checkpoint(function, x)
    inner[0].sum().backward()  # past the output, whose gradient nobody asks for
    checkpointing.checkpoint(torch.sin, x).sum().backward()
    assert len(checkpointing.timers("backward").event_timers) == 1
    service.close()


def test_synchronize_waits_at_every_boundary(monkeypatch):
    events: list[str] = []
    monkeypatch.setattr(get_accelerator(), "synchronize", lambda *_: events.append("wait"))

    def function(x: Tensor) -> Tensor:
        events.append("run")
        return x.sin()

    service = serve(nn.Identity(), synchronize_checkpoint_boundary=True)
    x = torch.randn(3, requires_grad=True)
    other = x * 1  # whose backward comes after the checkpoint's and is no part of it
    other.register_hook(lambda _: events.append("other"))
    (other.sum() + checkpointing.checkpoint(function, x).sum()).backward()
    assert events == ["wait", "run", "wait", "wait", "run", "wait", "other"]
    service.close()
