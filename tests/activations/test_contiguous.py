"""Checkpoints in the slots of one allocation: constant addresses, reuse, and what does not fit."""

import gc
from contextlib import suppress

import pytest
import torch
from held_inputs import checkpointed, make_layers

from hmt_deepspeed.activations.contiguous import Contiguous

LAYERS, TOKENS, WIDTH = 4, 6, 16


def step(layers, codec, x, held=None):
    """One forward and backward; the gradients."""
    for layer in layers:
        layer.zero_grad()
    y = x
    for layer in layers:
        y = checkpointed(layer, y, codec, held)
    y.square().sum().backward()
    return [p.grad.clone() for layer in layers for p in layer.parameters()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_addresses_are_constant_and_memory_is_one_allocation(dtype):
    layers = make_layers(LAYERS, WIDTH, dtype)
    codec = Contiguous(LAYERS)
    x = torch.randn(2, TOKENS, WIDTH, dtype=dtype, requires_grad=True)
    expected = step(layers, None, x)
    addresses = []
    for _ in range(3):
        held = []
        found = step(layers, codec, x, held)
        assert all(torch.equal(f, e) for f, e in zip(found, expected, strict=True))
        assert [h.nbytes for h in held] == [x.nbytes] * LAYERS
        slots = [h.memory for h in held]
        assert len({s.untyped_storage().data_ptr() for s in slots}) == 1
        addresses.append([s.data_ptr() for s in slots])
        del held, slots
    assert addresses[0] == addresses[1] == addresses[2]
    stride = codec.slots.shape[1]
    assert addresses[0] == [addresses[0][0] + i * stride for i in range(LAYERS)]
    assert codec.slots.nbytes == LAYERS * stride < LAYERS * (x.nbytes + 512)


def test_what_is_held_does_not_see_later_writes_and_outlives_its_slot():
    codec = Contiguous(1)
    tensor = torch.randn(8, 3)
    original = tensor.clone()
    held = codec.encode(tensor)
    tensor.zero_()
    first, second = held.decode(), held.decode()
    del held
    gc.collect()
    codec.encode(torch.ones(8, 3))
    assert torch.equal(first, original)
    assert torch.equal(second, original)


@pytest.mark.parametrize("larger", [False, True])
def test_a_second_backward_and_one_that_breaks_off(larger):
    layers = make_layers(LAYERS, WIDTH)
    codec = Contiguous(LAYERS)
    x = torch.randn(2, WIDTH, requires_grad=True)
    expected = step(layers, None, x)

    def forward():
        y = x
        for layer in layers:
            y = checkpointed(layer, y, codec)
        return y.square().sum()

    def broken(grad):
        raise RuntimeError("broken off")

    loss = forward()
    handle = layers[1][0].weight.register_hook(broken)
    with suppress(RuntimeError):
        loss.backward()
    handle.remove()
    del loss
    for layer in layers:
        layer.zero_grad()
    x = torch.cat([x, x]) if larger else x
    loss = forward()
    loss.backward(retain_graph=True)
    loss.backward()
    found = [p.grad for layer in layers for p in layer.parameters()]
    if larger:
        expected = step(layers, None, x)
    assert all(torch.equal(f, 2 * e) for f, e in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(4, 6).t(),
        torch.randn(4, 12)[:, ::2],
        torch.randn(4, 1).expand(4, 6),
        torch.randn(4, 6, dtype=torch.float16),
        torch.randn(()),
    ],
    ids=["transposed", "gaps", "expanded", "fp16", "scalar"],
)
def test_every_layout_comes_back(tensor):
    back = Contiguous(1).encode(tensor).decode()
    assert torch.equal(back, tensor)
    assert back.dtype == tensor.dtype
    if tensor.is_contiguous() or tensor.t().is_contiguous():
        assert back.stride() == tensor.stride()


def test_one_checkpoint_more_than_announced_is_an_error():
    codec = Contiguous(2)
    held = [codec.encode(torch.ones(4)) for _ in range(2)]
    with pytest.raises(ValueError, match=r"number_checkpoints is 2, and 'third' is one more"):
        codec.encode(torch.ones(4), name="third")
    del held[0]
    codec.encode(torch.ones(4))


def test_smaller_ones_fit_and_larger_ones_make_new_memory_between_passes():
    codec = Contiguous(2)
    held = codec.encode(torch.ones(300))
    memory = codec.slots
    small = codec.encode(torch.full((10,), 2.0))
    assert codec.slots is memory
    assert torch.equal(small.decode(), torch.full((10,), 2.0))
    del small
    with pytest.raises(ValueError, match=r"'x' \(4000 bytes.*slots of 1536 bytes.*1 are taken"):
        codec.encode(torch.ones(1000), name="x")
    assert torch.equal(held.decode(), torch.ones(300))
    del held
    assert torch.equal(codec.encode(torch.ones(1000)).decode(), torch.ones(1000))
    assert codec.slots.shape == (2, 4096)


def test_no_slots_are_refused():
    with pytest.raises(ValueError, match=r"number_checkpoints is 0, legal is an integer >= 1"):
        Contiguous(0)
