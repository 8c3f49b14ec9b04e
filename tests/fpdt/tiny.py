"""Tiny models of every family, and one training step with and without FPDT."""

from __future__ import annotations

from contextlib import contextmanager

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hmt_deepspeed.fpdt.install import install

VOCABULARY = 61
FP32 = 1e-5  # error of a loss, and of gradients as :func:`error` has it
LENGTH = 37  # of no chunk size a multiple
LLAMA_LIKE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}

# name -> model type and what is special about it
MODELS = {
    "llama, 4 heads on 2": ("llama", {}),
    "llama, 4 heads on 4, biases": (
        "llama",
        {"num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True},
    ),
    "llama, tied head": ("llama", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "mistral, window": ("mistral", {"num_key_value_heads": 1, "sliding_window": 9}),
    "mistral, window of 1": ("mistral", {"sliding_window": 1}),
    "mistral, window over many chunks": ("mistral", {"sliding_window": 23}),
    "qwen2, one layer with a window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {"head_dim": 8}),
    "gemma": ("gemma", {"num_key_value_heads": 1, "head_dim": 16}),
    "gpt2": (
        "gpt2",
        {"scale_attn_by_inverse_layer_idx": True, "attn_pdrop": 0, "resid_pdrop": 0},
    ),
    "gpt_neox, parallel residual": ("gpt_neox", {}),
    "gpt_neox, serial residual": ("gpt_neox", {"use_parallel_residual": False}),
    "opt": ("opt", {}),
    "opt, norms after": ("opt", {"do_layer_norm_before": False}),
    "mixtral": ("mixtral", {"num_local_experts": 5}),
    "qwen3_moe, a layer without experts": (
        "qwen3_moe",
        {
            "head_dim": 8,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "num_hidden_layers": 3,
            "mlp_only_layers": [1],
        },
    ),
}
SIZES = {
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "embd_pdrop": 0},
    "gpt_neox": {k: v for k, v in LLAMA_LIKE.items() if k != "num_key_value_heads"},
    "opt": {
        "hidden_size": 32,
        "word_embed_proj_dim": 32,
        "ffn_dim": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "dropout": 0.0,
    },
}


def tiny(name="llama, 4 heads on 2", dtype=torch.float32, **special):
    """A tiny model with weights so large that attention is not uniform, and not larger: HF's own gradients
    in fp32 are then some 1e-6 from those in fp64."""
    kind, more = MODELS[name]
    common = {"vocab_size": VOCABULARY, "max_position_embeddings": 64, "initializer_range": 0.2}
    common["use_cache"] = False  # with a cache HF makes no mask for packed documents
    common |= {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    config = AutoConfig.for_model(
        kind, **{**common, **SIZES.get(kind, LLAMA_LIKE), **more, **special}
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").to(dtype)


def batch(length=LENGTH, rows=2, seed=1):
    """Inputs whose first labels do not count."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, VOCABULARY, (rows, length), generator=generator)
    labels = ids.clone()
    labels[:, :3] = -100
    return {"input_ids": ids, "labels": labels}


@contextmanager
def fpdt(model, chunk_size=8, **options):
    installation = install(model, chunk_size, **options)
    try:
        yield installation
    finally:
        installation.remove()


def step(model, inputs, factor=1.0):
    """Loss, and gradients by name, of one backward."""
    model.zero_grad()
    loss = model(**inputs).loss
    (loss * factor).backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return loss.detach(), found


def error(found, expected):
    """The largest relative error of a parameter's gradient.

    One that is 0 in exact arithmetic (a key's bias) is rounding noise of the size of an fp32 epsilon of
    the others; with this allowance a bound of 1e-5 means ``1e-5 |g| + 1.2e-7 |largest g|``.
    """
    largest = max(float(grad.double().norm()) for grad in expected.values())
    assert found.keys() == expected.keys()
    return max(
        float((found[n].double() - e.double()).norm()) / float(e.double().norm() + 0.012 * largest)
        for n, e in expected.items()
    )


def compare(model, inputs, factor=1.0, **options):
    """One step with and without FPDT."""
    loss, expected = step(model, inputs, factor)
    with fpdt(model, **options):
        found_loss, found = step(model, inputs, factor)
    torch.testing.assert_close(found_loss, loss, rtol=FP32, atol=0)
    assert error(found, expected) <= FP32
