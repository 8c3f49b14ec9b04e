"""The sizes that a Hugging Face config gives, in the planner's words. Nothing is built: numbers and flags are read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = [
    "gemma2_sizes",
    "gemma3_sizes",
    "gpt2_sizes",
    "gpt_neox_sizes",
    "llama_sizes",
    "opt_sizes",
    "phi3_sizes",
    "phi_sizes",
    "qwen2_sizes",
    "qwen3_sizes",
]

Sizes = Mapping[str, Any]


def _rotary_dim(config: Any, head_dim: int) -> int:
    """Channels of a head that rotate: all but for ``partial_rotary_factor``."""
    parameters = getattr(config, "rope_parameters", None) or {}
    return int(head_dim * parameters.get("partial_rotary_factor", 1.0))


def _windows(config: Any, layers: int) -> tuple[int, ...]:
    """Tokens that each layer looks back, 0 for all of them; nothing where all layers see all."""
    window = getattr(config, "sliding_window", None)
    if not window:
        return ()
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * layers
    windows = tuple(window if kind == "sliding_attention" else 0 for kind in kinds)
    return windows if any(windows) else ()


def llama_sizes(config: Any) -> Sizes:
    """Of Llama and those that keep its names of fields."""
    heads, layers = config.num_attention_heads, config.num_hidden_layers
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    bias = bool(getattr(config, "attention_bias", False))
    return {
        "hidden": config.hidden_size,
        "layers": layers,
        "heads": heads,
        "kv_heads": config.num_key_value_heads or heads,
        "head_dim": head_dim,
        "intermediate": config.intermediate_size,
        "vocab": config.vocab_size,
        "rotary_dim": _rotary_dim(config, head_dim),
        "qkv_bias": bias,
        "out_bias": bias,
        "mlp_bias": bool(getattr(config, "mlp_bias", False)),
        "tied": bool(config.tie_word_embeddings),
        "windows": _windows(config, layers),
        "attention_dropout": float(config.attention_dropout or 0.0),
    }


def qwen2_sizes(config: Any) -> Sizes:
    """Biases of Q, K and V, whatever the config says."""
    return {**llama_sizes(config), "qkv_bias": True, "out_bias": False}


def qwen3_sizes(config: Any) -> Sizes:
    return {**llama_sizes(config), "head_norm": True}


def gemma2_sizes(config: Any) -> Sizes:
    """Scores and logits may be capped."""
    return {
        **llama_sizes(config),
        "soft_cap": config.attn_logit_softcapping is not None,
        "final_soft_cap": config.final_logit_softcapping is not None,
    }


def gemma3_sizes(config: Any) -> Sizes:
    """A rotary table for each kind of layer."""
    return {
        **llama_sizes(config),
        "head_norm": True,
        "rotary_tables": len(set(config.layer_types)),
        "final_soft_cap": config.final_logit_softcapping is not None,
    }


def phi3_sizes(config: Any) -> Sizes:
    return {**llama_sizes(config), "dropout": float(config.resid_pdrop)}


def phi_sizes(config: Any) -> Sizes:
    """Biases everywhere, the head's too; attention and MLP side by side."""
    return {
        **llama_sizes(config),
        "parallel": True,
        "head_norm": bool(config.qk_layernorm),
        "qkv_bias": True,
        "out_bias": True,
        "mlp_bias": True,
        "head_bias": True,
        "dropout": float(config.resid_pdrop),
        "embedding_dropout": float(config.embd_pdrop),
    }


def gpt2_sizes(config: Any) -> Sizes:
    return {
        "hidden": config.n_embd,
        "layers": config.n_layer,
        "heads": config.n_head,
        "kv_heads": config.n_head,
        "head_dim": config.n_embd // config.n_head,
        "intermediate": config.n_inner or 4 * config.n_embd,
        "vocab": config.vocab_size,
        "positions": config.n_positions,
        "qkv_bias": True,
        "out_bias": True,
        "mlp_bias": True,
        "tied": bool(config.tie_word_embeddings),
        "dropout": float(config.resid_pdrop),
        "attention_dropout": float(config.attn_pdrop),
        "embedding_dropout": float(config.embd_pdrop),
    }


def gpt_neox_sizes(config: Any) -> Sizes:
    heads = config.num_attention_heads
    head_dim = config.hidden_size // heads
    return {
        "hidden": config.hidden_size,
        "layers": config.num_hidden_layers,
        "heads": heads,
        "kv_heads": heads,
        "head_dim": head_dim,
        "intermediate": config.intermediate_size,
        "vocab": config.vocab_size,
        "rotary_dim": _rotary_dim(config, head_dim),
        "parallel": bool(config.use_parallel_residual),
        "qkv_bias": bool(config.attention_bias),
        "out_bias": bool(config.attention_bias),
        "mlp_bias": True,
        "tied": bool(config.tie_word_embeddings),
        "dropout": float(config.hidden_dropout),
        "attention_dropout": float(config.attention_dropout),
        "embedding_dropout": float(config.hidden_dropout),
    }


_OPT_OFFSET = 2  # rows of the position table before that of the first token


def opt_sizes(config: Any) -> Sizes:
    """OPT-350m has norms after the sums, no last norm, and an embedding narrower than its stream."""
    heads, before = config.num_attention_heads, bool(config.do_layer_norm_before)
    width = config.word_embed_proj_dim
    return {
        "hidden": config.hidden_size,
        "layers": config.num_hidden_layers,
        "heads": heads,
        "kv_heads": heads,
        "head_dim": config.hidden_size // heads,
        "intermediate": config.ffn_dim,
        "vocab": config.vocab_size,
        "final_norm": before and not config._remove_final_layer_norm,
        "positions": config.max_position_embeddings + _OPT_OFFSET,
        "position_offset": _OPT_OFFSET,
        "post_norm": not before,
        "embedding_size": width if width != config.hidden_size else 0,
        "qkv_bias": bool(config.enable_bias),
        "out_bias": bool(config.enable_bias),
        "mlp_bias": bool(config.enable_bias),
        "norm_affine": bool(config.layer_norm_elementwise_affine),
        "tied": bool(config.tie_word_embeddings),
        "dropout": float(config.dropout),
        "attention_dropout": float(config.attention_dropout),
    }
