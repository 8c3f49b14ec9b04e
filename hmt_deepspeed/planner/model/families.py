"""The :class:`~hmt_deepspeed.planner.model.shapes.ModelShape` of a Hugging Face config.

Nothing is built: a config's numbers and the family's traits are enough. Tests build small models of each
family and compare parameters, FLOPs and saved tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hmt_deepspeed.planner.model.shapes import LLAMA_NAMES, Activation, ModelShape, Names

__all__ = ["FAMILIES", "shape_of_config"]

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "gelu_new": "new_gelu",
}


def _activation(config: Any, field: str) -> Activation:
    name = getattr(config, field)
    if name not in _ACTIVATIONS:
        raise ValueError(
            f"{config.model_type}: {field} is {name!r}; legal: {', '.join(_ACTIVATIONS)}. What autograd saves "
            "of another activation is not known: choose one of them."
        )
    return _ACTIVATIONS[name]


def _rotary_dim(config: Any, head_dim: int) -> int:
    """Channels of a head that rotate: all but for ``partial_rotary_factor``."""
    parameters = getattr(config, "rope_parameters", None) or {}
    return int(head_dim * parameters.get("partial_rotary_factor", 1.0))


def _windows(config: Any, layers: int) -> tuple[int, ...]:
    window = getattr(config, "sliding_window", None)
    if not window:
        return ()
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * layers
    windows = tuple(window if kind == "sliding_attention" else 0 for kind in kinds)
    return windows if any(windows) else ()


def _llama_like(config: Any) -> ModelShape:
    """Llama and those that keep its names: gated MLP, RMSNorm, rotary positions."""
    heads, layers = config.num_attention_heads, config.num_hidden_layers
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    bias = bool(getattr(config, "attention_bias", False))
    activation = "hidden_act" if hasattr(config, "hidden_act") else "hidden_activation"
    return ModelShape(
        config.model_type,
        hidden=config.hidden_size,
        layers=layers,
        heads=heads,
        kv_heads=config.num_key_value_heads or heads,
        head_dim=head_dim,
        intermediate=config.intermediate_size,
        vocab=config.vocab_size,
        activation=_activation(config, activation),
        rotary_dim=_rotary_dim(config, head_dim),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bool(getattr(config, "mlp_bias", False)),
        tied=bool(config.tie_word_embeddings),
        windows=_windows(config, layers),
        attention_dropout=float(config.attention_dropout or 0.0),
    )


def _qwen2(config: Any) -> ModelShape:
    return replace(_llama_like(config), qkv_bias=True, out_bias=False)


def _qwen3(config: Any) -> ModelShape:
    names = replace(LLAMA_NAMES, head_norms=("self_attn.q_norm", "self_attn.k_norm"))
    return replace(_llama_like(config), names=names, head_norm=True)


def _gemma(config: Any) -> ModelShape:
    return replace(_llama_like(config), offset_norm=True)


_SANDWICH = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)


def _gemma2(config: Any) -> ModelShape:
    return replace(
        _gemma(config),
        names=replace(LLAMA_NAMES, norms=_SANDWICH),
        sandwich=True,
        soft_cap=config.attn_logit_softcapping is not None,
        final_soft_cap=config.final_logit_softcapping is not None,
    )


def _gemma3(config: Any) -> ModelShape:
    head_norms = ("self_attn.q_norm", "self_attn.k_norm")
    return replace(
        _gemma(config),
        names=replace(LLAMA_NAMES, norms=_SANDWICH, head_norms=head_norms),
        sandwich=True,
        head_norm=True,
        rotary_tables=len(set(config.layer_types)),
        final_soft_cap=config.final_logit_softcapping is not None,
    )


def _phi3(config: Any) -> ModelShape:
    names = replace(LLAMA_NAMES, qkv=("self_attn.qkv_proj",), up=("mlp.gate_up_proj",))
    return replace(
        _llama_like(config),
        names=names,
        fused_up=True,
        rotary_cat=True,
        dropout=float(config.resid_pdrop),
    )


def _phi(config: Any) -> ModelShape:
    head_norms = ("self_attn.q_layernorm", "self_attn.k_layernorm")
    names = replace(
        LLAMA_NAMES,
        final_norm="model.final_layernorm",
        out="self_attn.dense",
        up=("mlp.fc1",),
        down="mlp.fc2",
        norms=("input_layernorm",),
        head_norms=head_norms if config.qk_layernorm else (),
    )
    return replace(
        _llama_like(config),
        names=names,
        gated=False,
        rms_norm=False,
        parallel=True,
        shared_norm=True,
        rotary_cat=True,
        head_norm=bool(config.qk_layernorm),
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        head_bias=True,
        dropout=float(config.resid_pdrop),
        embedding_dropout=float(config.embd_pdrop),
    )


_GPT2_NAMES = Names(
    layer="transformer.h.*",
    embedding="transformer.wte",
    positions="transformer.wpe",
    final_norm="transformer.ln_f",
    qkv=("attn.c_attn",),
    out="attn.c_proj",
    up=("mlp.c_fc",),
    down="mlp.c_proj",
    norms=("ln_1", "ln_2"),
)


def _gpt2(config: Any) -> ModelShape:
    return ModelShape(
        config.model_type,
        hidden=config.n_embd,
        layers=config.n_layer,
        heads=config.n_head,
        kv_heads=config.n_head,
        head_dim=config.n_embd // config.n_head,
        intermediate=config.n_inner or 4 * config.n_embd,
        vocab=config.vocab_size,
        names=_GPT2_NAMES,
        activation=_activation(config, "activation_function"),
        positions=config.n_positions,
        gated=False,
        rms_norm=False,
        conv1d=True,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        tied=bool(config.tie_word_embeddings),
        fp32_softmax=False,
        dropout=float(config.resid_pdrop),
        attention_dropout=float(config.attn_pdrop),
        embedding_dropout=float(config.embd_pdrop),
    )


_NEOX_NAMES = Names(
    layer="gpt_neox.layers.*",
    embedding="gpt_neox.embed_in",
    final_norm="gpt_neox.final_layer_norm",
    qkv=("attention.query_key_value",),
    out="attention.dense",
    up=("mlp.dense_h_to_4h",),
    down="mlp.dense_4h_to_h",
    norms=("input_layernorm", "post_attention_layernorm"),
)


def _gpt_neox(config: Any) -> ModelShape:
    heads = config.num_attention_heads
    head_dim = config.hidden_size // heads
    return ModelShape(
        config.model_type,
        hidden=config.hidden_size,
        layers=config.num_hidden_layers,
        heads=heads,
        kv_heads=heads,
        head_dim=head_dim,
        intermediate=config.intermediate_size,
        vocab=config.vocab_size,
        names=_NEOX_NAMES,
        activation=_activation(config, "hidden_act"),
        rotary_dim=_rotary_dim(config, head_dim),
        rotary_cat=True,
        gated=False,
        parallel=bool(config.use_parallel_residual),
        rms_norm=False,
        qkv_bias=bool(config.attention_bias),
        out_bias=bool(config.attention_bias),
        mlp_bias=True,
        tied=bool(config.tie_word_embeddings),
        dropout=float(config.hidden_dropout),
        attention_dropout=float(config.attention_dropout),
        embedding_dropout=float(config.hidden_dropout),
    )


_OPT_NAMES = Names(
    layer="model.decoder.layers.*",
    embedding="model.decoder.embed_tokens",
    positions="model.decoder.embed_positions",
    final_norm="model.decoder.final_layer_norm",
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    out="self_attn.out_proj",
    up=("fc1",),
    down="fc2",
    norms=("self_attn_layer_norm", "final_layer_norm"),
)
_OPT_OFFSET = 2  # rows of the position table before that of the first token


def _opt(config: Any) -> ModelShape:
    heads, before = config.num_attention_heads, bool(config.do_layer_norm_before)
    final_norm = before and not config._remove_final_layer_norm
    width = config.word_embed_proj_dim
    return ModelShape(
        config.model_type,
        hidden=config.hidden_size,
        layers=config.num_hidden_layers,
        heads=heads,
        kv_heads=heads,
        head_dim=config.hidden_size // heads,
        intermediate=config.ffn_dim,
        vocab=config.vocab_size,
        names=_OPT_NAMES if final_norm else replace(_OPT_NAMES, final_norm=""),
        activation=_activation(config, "activation_function"),
        positions=config.max_position_embeddings + _OPT_OFFSET,
        position_offset=_OPT_OFFSET,
        post_norm=not before,
        embedding_size=width if width != config.hidden_size else 0,
        gated=False,
        rms_norm=False,
        qkv_bias=bool(config.enable_bias),
        out_bias=bool(config.enable_bias),
        mlp_bias=bool(config.enable_bias),
        norm_affine=bool(config.layer_norm_elementwise_affine),
        tied=bool(config.tie_word_embeddings),
        dropout=float(config.dropout),
        attention_dropout=float(config.attention_dropout),
    )


# Hugging Face's model_type -> its shape.
FAMILIES: dict[str, Callable[[Any], ModelShape]] = {
    "llama": _llama_like,
    "mistral": _llama_like,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "phi": _phi,
    "phi3": _phi3,
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    "opt": _opt,
}


def shape_of_config(config: Any) -> ModelShape:
    """The shape of a ``transformers`` config of a causal model; nothing of it is built.

    Raises:
        ValueError: a family or an activation that is not known.
    """
    family = getattr(config, "model_type", type(config).__name__)
    if family not in FAMILIES:
        raise ValueError(
            f"the model's family is {family!r}; legal: {', '.join(FAMILIES)}. Use one of them, or give the "
            "plain sizes (plain_shape)."
        )
    return FAMILIES[family](config)
