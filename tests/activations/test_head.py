"""What the language-model head reads is held as the policy says, and its gradients are right."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from hmt_deepspeed.activations.codecs import Codec, Fp8, Int8, Keep, SwapHost
from hmt_deepspeed.activations.head import hold_head_input
from hmt_deepspeed.memory.host import HostStore
from hmt_deepspeed.memory.transfer import TransferEngine

TOKENS, WIDTH, VOCAB = (4, 64), 16, 24


def swap_host() -> SwapHost:
    return SwapHost(HostStore(TransferEngine("cpu", 1 << 20), 1 << 20))


CODECS: dict[str, Any] = {"keep": Keep, "int8": Int8, "fp8": Fp8, "swap_host": swap_host}


def counted(*_: Any) -> None:
    """Where nobody asks how much is held."""


def head() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(WIDTH, VOCAB, bias=False)


def run(module: nn.Linear) -> tuple[list[Tensor], list[Tensor]]:
    """Gradients of input and weight, and the float tensors that autograd saved."""
    x = torch.randn(*TOKENS, WIDTH, generator=torch.Generator().manual_seed(1)).requires_grad_()
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = module(x * 1.0).square().mean()
    loss.backward()
    assert x.grad is not None
    assert module.weight.grad is not None
    return [x.grad, module.weight.grad], saved


def holds(saved: list[Tensor]) -> set[torch.dtype]:
    """Types of what was saved with as many elements as the head's input."""
    return {t.dtype for t in saved if t.numel() == TOKENS[0] * TOKENS[1] * WIDTH}


@pytest.mark.parametrize("name", CODECS)
def test_the_input_is_held_as_the_choice_says(name: str) -> None:
    exact, _ = run(head())
    module, codec = head(), CODECS[name]()
    undo = hold_head_input(module, "lm_head", codec, lambda: 7, counted)
    found, saved = run(module)
    assert torch.equal(found[0], exact[0])  # the input's gradient does not depend on the input
    # 8 bits of 256 tokens that share a scale; FP8 has 3 bits of mantissa, error of a sum over 256 tokens
    limit = {"int8": 0.01, "fp8": 0.05}.get(name, 0.0)
    assert (found[1] - exact[1]).norm() <= limit * exact[1].norm()
    assert (limit == 0) == torch.equal(found[1], exact[1])
    kept = {"keep": {torch.float32}, "int8": {torch.int8}, "fp8": {torch.float8_e4m3fn}}
    assert holds(saved) == kept.get(name, set())
    undo()
    again, saved = run(head())
    assert torch.equal(again[1], exact[1])
    assert "forward" not in vars(module)
    assert not module._forward_hooks
    assert not module._forward_pre_hooks


def test_swapped_input_leaves_the_device_and_its_entry_goes_with_the_graph() -> None:
    module, codec = head(), swap_host()
    hold_head_input(module, "lm_head", codec, lambda: 0, counted)
    loss = module(torch.randn(*TOKENS, WIDTH, requires_grad=True) * 1.0).sum()
    nbytes = TOKENS[0] * TOKENS[1] * WIDTH * 4
    assert codec.store.pool.used_bytes == nbytes
    loss.backward(retain_graph=True)
    loss.backward()
    del loss
    codec.sweep()
    assert codec.store.pool.used_bytes == 0


@pytest.mark.parametrize("name", ["int8", "swap_host"])
def test_without_grad_mode_nothing_is_encoded(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    codec: Codec = CODECS[name]()
    encode, encoded = codec.encode, []

    def watched(tensor: torch.Tensor, *given: Any, **named: Any) -> Any:
        encoded.append(tensor.numel())
        return encode(tensor, *given, **named)

    monkeypatch.setattr(codec, "encode", watched)
    module, x = head(), torch.randn(*TOKENS, WIDTH)
    hold_head_input(module, "lm_head", codec, lambda: 0, counted)
    with torch.no_grad():
        module(x)
    assert encoded == []
    module(x)
    assert encoded == [x.numel()]  # with it


def test_hooks_end_with_a_forward_that_fails() -> None:
    module = head()
    hold_head_input(module, "lm_head", swap_host(), lambda: 0, counted)
    with pytest.raises(RuntimeError):
        module(torch.randn(2, WIDTH + 1, requires_grad=True))
    x = torch.randn(2, 2, requires_grad=True)
    saved = (x * x).grad_fn._saved_self
    assert saved is x or torch.equal(saved, x)
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None


def test_a_copy_of_the_head_computes_what_the_head_did() -> None:
    module, seen = head(), []
    hold_head_input(module, "lm_head", Keep(), lambda: 0, lambda *given: seen.append(given))
    exact, _ = run(head())
    found, _ = run(copy.deepcopy(module))
    assert torch.equal(found[1], exact[1])
    assert seen == []
    module(torch.randn(*TOKENS, WIDTH)).sum().backward()
    assert len(seen) == 1


@pytest.mark.parametrize("name", CODECS)
def test_a_weight_changed_before_backward_is_noticed(name: str) -> None:
    module = head()
    hold_head_input(module, "lm_head", CODECS[name](), lambda: 0, counted)
    y = module(torch.randn(*TOKENS, WIDTH, requires_grad=True) * 1.0)
    with torch.no_grad():
        module.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_what_hooks_of_others_hold_is_not_counted_as_kept() -> None:
    module, seen = head(), []
    hold_head_input(module, "lm_head", Keep(), lambda: 0, lambda *given: seen.append(given))
    _, saved = run(module)
    assert holds(saved) == {torch.float32}
    assert seen == []


def test_a_head_that_is_no_linear_cannot_be_encoded() -> None:
    with pytest.raises(ValueError, match=r"lm_head as 'int8', but it is a Bilinear"):
        hold_head_input(nn.Bilinear(2, 2, 2), "lm_head", Int8(), lambda: 0, counted)
