"""Tiny models with random weights, one of each family that is attributed by name."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

VOCAB, HIDDEN, LENGTH = 61, 32, 8

_SHAPE: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
_GROUPED = _SHAPE | {"num_key_value_heads": 2}
_HEAD = _GROUPED | {"head_dim": 8}
_MIXTURE = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
_GPT = {"n_embd": HIDDEN, "n_layer": 2, "n_head": 4, "n_positions": 64}
_NO_DROPOUT = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}

# family -> (config class, its arguments)
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", _GROUPED),
    "mistral": ("MistralConfig", _GROUPED),
    "qwen2": ("Qwen2Config", _GROUPED),
    "qwen3": ("Qwen3Config", _HEAD),
    "gemma": ("GemmaConfig", _HEAD),
    "gemma2": ("Gemma2Config", _HEAD),
    "gemma3": ("Gemma3TextConfig", _HEAD),
    "phi": ("PhiConfig", _SHAPE),
    "phi3": ("Phi3Config", _GROUPED),
    "gpt2": ("GPT2Config", _GPT | _NO_DROPOUT),
    "gpt_neox": ("GPTNeoXConfig", _SHAPE),
    "opt": (
        "OPTConfig",
        {
            "hidden_size": HIDDEN,
            "word_embed_proj_dim": HIDDEN,
            "ffn_dim": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": 64,
            "dropout": 0.0,
        },
    ),
    "mixtral": ("MixtralConfig", _GROUPED | {"num_local_experts": 3}),
    "qwen3_moe": ("Qwen3MoeConfig", _HEAD | _MIXTURE | {"num_experts": 5}),
    "gpt_oss": ("GptOssConfig", _HEAD | {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "deepseek_v3": (
        "DeepseekV3Config",
        _SHAPE
        | _MIXTURE
        | {
            "n_routed_experts": 6,
            "n_group": 2,
            "topk_group": 1,
            "q_lora_rank": 16,
            "kv_lora_rank": 8,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "first_k_dense_replace": 0,
            "num_key_value_heads": 4,
        },
    ),
    "olmoe": ("OlmoeConfig", _SHAPE | {"num_experts": 5, "num_experts_per_tok": 2}),
    "llama4": (
        "Llama4TextConfig",
        _HEAD | {"num_local_experts": 5, "num_experts_per_tok": 1, "intermediate_size_mlp": 48},
    ),
    "mamba": ("MambaConfig", {"hidden_size": HIDDEN, "num_hidden_layers": 2}),
}


def tiny(family: str, **changes: Any) -> nn.Module:
    """The family's causal model, 2 layers, in training mode."""
    import transformers

    name, fields = CONFIGS[family]
    ends = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    config = getattr(transformers, name)(vocab_size=VOCAB, **ends, **(fields | changes))
    torch.manual_seed(0)
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    return model.train()


def tokens(batch: int = 2, length: int = LENGTH) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(3, VOCAB, (batch, length), generator=generator)
