"""Attention's output held between forward and backward, which then does not attend again."""

import gc
import weakref

import pytest
import torch
from tiny import batch, error, fpdt, step, tiny

from hmt_deepspeed.fpdt.ops import CpuAttention


class Pair:
    """One chunk's output and log-sum-exp; ``lossy`` moves the output by 1 %."""

    def __init__(self, out, log_sum_exp, lossy):
        self.out = out * 1.01 if lossy else out
        self.log_sum_exp = log_sum_exp

    def prefetch(self):
        pass

    def decode(self):
        return self.out, self.log_sum_exp


class Holding:
    def __init__(self, lossy=False):
        self.lossy, self.alive = lossy, weakref.WeakSet()

    def __call__(self):
        return self._hold

    def _hold(self, out, log_sum_exp):
        assert out.dim() == log_sum_exp.dim() == 3
        pair = Pair(out, log_sum_exp, self.lossy)
        self.alive.add(pair)
        return pair

    def num_alive(self):
        gc.collect()
        return len(self.alive)


def of_layers(model, holder):
    return dict.fromkeys(model.model.layers, holder)


@pytest.fixture
def attended(monkeypatch):
    """Tiles that were attended to in forward, one entry each."""
    calls, forward = [], CpuAttention.forward

    def counting(self, *args):
        calls.append(args[3])
        return forward(self, *args)

    monkeypatch.setattr(CpuAttention, "forward", counting)
    return calls


@pytest.mark.parametrize("name", ["llama, 4 heads on 2", "gemma"])
def test_the_same_bits_for_half_of_the_attention(name, attended):
    model, inputs = tiny(name), batch()
    with fpdt(model, chunk_size=9, piece_size=4):
        loss, expected = step(model, inputs)
    twice = len(attended)
    attended.clear()
    with fpdt(model, 9, piece_size=4, attention_holders=of_layers(model, Holding())):
        found_loss, found = step(model, inputs)
    assert 2 * len(attended) == twice > 0
    assert torch.equal(found_loss, loss)
    assert all(torch.equal(found[n], expected[n]) for n in expected)


def test_backward_reads_what_is_held():
    """A holder that changes the output changes the gradients, and not the loss."""
    model, inputs = tiny(), batch()
    with fpdt(model):
        loss, expected = step(model, inputs)
    with fpdt(model, attention_holders=of_layers(model, Holding(lossy=True))):
        found_loss, found = step(model, inputs)
    assert torch.equal(found_loss, loss)
    assert 1e-4 < error(found, expected) < 0.1


def test_one_layer_holds_and_the_other_does_not(attended):
    model, inputs = tiny(), batch()
    with fpdt(model):
        _, expected = step(model, inputs)
    twice = len(attended)
    attended.clear()
    with fpdt(model, attention_holders={model.model.layers[1]: Holding()}):
        _, found = step(model, inputs)
    assert 4 * len(attended) == 3 * twice
    assert all(torch.equal(found[n], expected[n]) for n in expected)


def test_what_is_held_lives_as_long_as_the_graph():
    model, inputs, holder = tiny(), batch(), Holding()
    with fpdt(model, attention_holders=of_layers(model, holder)):
        with torch.no_grad():
            model(**inputs)
        assert holder.num_alive() == 0  # no backward follows
        loss = model(**inputs).loss
        held = holder.num_alive()
        assert held > 0
        loss.backward(retain_graph=True)
        first = [p.grad.clone() for p in model.parameters()]
        assert holder.num_alive() == held
        model.zero_grad()
        loss.backward()
        assert holder.num_alive() == 0  # although somebody still has the loss
        assert all(torch.equal(a, p.grad) for a, p in zip(first, model.parameters(), strict=True))
        loss = model(**inputs).loss
        del loss
        assert holder.num_alive() == 0
