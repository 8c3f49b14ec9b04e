"""The loss at a model's head: the model's own, without its logits."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from hmt_deepspeed.fpdt import head_loss
from hmt_deepspeed.fpdt.head_loss import HeadLoss, why_not


def llama() -> Any:
    config = LlamaConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config)


def gpt2() -> Any:
    """Head and embedding are one weight."""
    torch.manual_seed(0)
    dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = GPT2Config(vocab_size=61, n_embd=32, n_layer=1, n_head=4, use_cache=False, **dropouts)
    return GPT2LMHeadModel(config)


TOKENS = torch.randint(0, 61, (3, 14), generator=torch.Generator().manual_seed(1))
HALF = TOKENS.clone()
HALF[:, 5:9] = -100
CALLS: list[dict[str, Any]] = [
    {"labels": TOKENS},
    {"labels": HALF},
    {"labels": HALF, "num_items_in_batch": 50},
    {"labels": HALF, "num_items_in_batch": torch.tensor(50)},
    {"labels": TOKENS, "shift_labels": HALF},
]


def gradients(model: Any, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: param.grad.clone() for name, param in model.named_parameters()}


@pytest.mark.parametrize("build", [llama, gpt2])
@pytest.mark.parametrize("given", CALLS)
def test_the_models_own_loss(
    build: Any, given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head_loss, "PIECE", 5)  # tokens of 42
    model = build()
    whole = model(input_ids=TOKENS, **given)
    expected = gradients(model, whole.loss)
    loss = HeadLoss(model, nullcontext)
    with loss.installed():
        found = loss.call(model, input_ids=TOKENS, **given)
        assert found.logits is None
        assert found.loss.item() == pytest.approx(whole.loss.item(), rel=1e-6)
        for name, grad in gradients(model, found.loss).items():
            torch.testing.assert_close(grad, expected[name], rtol=1e-5, atol=1e-7)
        with torch.no_grad():
            assert loss.call(model, input_ids=TOKENS).logits.shape == (3, 14, 61)
    torch.testing.assert_close(model(input_ids=TOKENS, **given).logits, whole.logits)


def test_what_is_no_loss_over_all_logits_is_refused() -> None:
    model = llama()
    loss = HeadLoss(model, nullcontext)
    with loss.installed():
        with pytest.raises(ValueError, match="logits_to_keep"):
            loss.call(model, input_ids=TOKENS, labels=TOKENS, logits_to_keep=4)
        handle = model.lm_head.register_forward_hook(lambda _, __, logits: logits * 2)
        with pytest.raises(ValueError, match="changes its logits"):
            loss.call(model, input_ids=TOKENS, labels=TOKENS)
        handle.remove()
    assert why_not(model) == ""
    model.loss_function = lambda *args, **named: None
    assert "ForCausalLMLoss" in why_not(model)
    assert "head" in why_not(model.model)
