"""The families that are known, by Hugging Face's ``model_type``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hmt_deepspeed.families.family import Family
from hmt_deepspeed.families.sizes import (
    gemma2_sizes,
    gemma3_sizes,
    gpt2_sizes,
    gpt_neox_sizes,
    llama_sizes,
    opt_sizes,
    phi3_sizes,
    phi_sizes,
    qwen2_sizes,
    qwen3_sizes,
)

__all__ = ["FAMILIES", "family_of", "in_chunks", "register_family"]

_HEAD_NORMS = ("q_norm", "k_norm")
_GEMMA2 = Family(
    norms=(
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
    sandwich=True,
    offset_norm=True,
    activation="hidden_activation",
    sizes=gemma2_sizes,
)
# GPT-2's line: LayerNorm, fc1, no gate.
_GPT = Family(
    base="transformer",
    layers="h",
    embedding="wte",
    final_norm="ln_f",
    gated=False,
    rms_norm=False,
    rotary=False,
)

FAMILIES: dict[str, Family] = {
    "llama": Family(layer="LlamaDecoderLayer", sizes=llama_sizes),
    "mistral": Family(layer="MistralDecoderLayer", sizes=llama_sizes),
    "qwen2": Family(layer="Qwen2DecoderLayer", sizes=qwen2_sizes),
    "qwen3": Family(layer="Qwen3DecoderLayer", head_norms=_HEAD_NORMS, sizes=qwen3_sizes),
    "gemma": Family(
        layer="GemmaDecoderLayer",
        forbidden=("use_bidirectional_attention",),
        offset_norm=True,
        sizes=llama_sizes,
    ),
    "gemma2": _GEMMA2,
    "gemma3_text": replace(_GEMMA2, head_norms=_HEAD_NORMS, sizes=gemma3_sizes),
    "phi": Family(
        final_norm="final_layernorm",
        output="dense",
        head_norms=("q_layernorm", "k_layernorm"),
        up=("mlp.fc1",),
        down="mlp.fc2",
        norms=("input_layernorm",),
        gated=False,
        rms_norm=False,
        shared_norm=True,
        rotary_cat=True,
        sizes=phi_sizes,
    ),
    "phi3": Family(
        qkv=("qkv_proj",),
        up=("mlp.gate_up_proj",),
        fused_up=True,
        rotary_cat=True,
        sizes=phi3_sizes,
    ),
    "gpt2": replace(
        _GPT,
        positions="wpe",
        attention="attn",
        qkv=("c_attn",),
        output="c_proj",
        up=("mlp.c_fc",),
        down="mlp.c_proj",
        norms=("ln_1", "ln_2"),
        conv1d=True,
        fp32_softmax=False,
        layer="GPT2Block",
        fused="thirds",
        dropouts=("attn_pdrop", "resid_pdrop"),
        forbidden=("add_cross_attention",),
        activation="activation_function",
        sizes=gpt2_sizes,
    ),
    "gpt_neox": Family(
        base="gpt_neox",
        embedding="embed_in",
        final_norm="final_layer_norm",
        attention="attention",
        qkv=("query_key_value",),
        output="dense",
        up=("mlp.dense_h_to_4h",),
        down="mlp.dense_4h_to_h",
        gated=False,
        rms_norm=False,
        rotary_cat=True,
        layer="GPTNeoXLayer",
        fused="per_head",
        dropouts=("attention_dropout", "hidden_dropout"),
        sizes=gpt_neox_sizes,
    ),
    "opt": Family(
        layers="decoder.layers",
        embedding="decoder.embed_tokens",
        positions="decoder.embed_positions",
        final_norm="decoder.final_layer_norm",
        output="out_proj",
        up=("fc1",),
        down="fc2",
        mlp=("fc1", "activation_fn", "fc2"),
        norms=("self_attn_layer_norm", "final_layer_norm"),
        gated=False,
        rms_norm=False,
        rotary=False,
        layer="OPTDecoderLayer",
        scaled_query=True,
        mask_positions=True,
        dropouts=("attention_dropout", "dropout"),
        activation="activation_function",
        sizes=opt_sizes,
    ),
    # Mixtures of experts, whose MLP sends each token to some of them.
    "mixtral": Family(layer="MixtralDecoderLayer", forbidden=("router_jitter_noise",)),
    "qwen3_moe": Family(layer="Qwen3MoeDecoderLayer", head_norms=_HEAD_NORMS, fp32_routing=False),
    # Known by their modules' names alone.
    "glm": Family(up=("mlp.gate_up_proj",), fused_up=True),
    "llama4_text": Family(
        up=("feed_forward.gate_proj", "feed_forward.up_proj"),
        down="feed_forward.down_proj",
        mlp=("feed_forward",),
    ),
    "deepseek_v3": Family(
        qkv=("q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")
    ),
    "gptj": replace(
        _GPT,
        attention="attn",
        output="out_proj",
        up=("mlp.fc_in",),
        down="mlp.fc_out",
        norms=("ln_1",),
        rotary=True,
    ),
    "codegen": replace(
        _GPT,
        attention="attn",
        qkv=("qkv_proj",),
        output="out_proj",
        up=("mlp.fc_in",),
        down="mlp.fc_out",
        norms=("ln_1",),
        rotary=True,
    ),
    "gpt_neo": replace(
        _GPT,
        attention="attn.attention",
        output="out_proj",
        up=("mlp.c_fc",),
        down="mlp.c_proj",
        norms=("ln_1", "ln_2"),
    ),
    "bloom": replace(
        _GPT,
        embedding="word_embeddings",
        attention="self_attention",
        qkv=("query_key_value",),
        output="dense",
        up=("mlp.dense_h_to_4h",),
        down="mlp.dense_4h_to_h",
    ),
    "falcon": replace(
        _GPT,
        embedding="word_embeddings",
        attention="self_attention",
        qkv=("query_key_value",),
        output="dense",
        up=("mlp.dense_h_to_4h",),
        down="mlp.dense_4h_to_h",
        rotary=True,
    ),
    "mpt": replace(
        _GPT,
        layers="blocks",
        final_norm="norm_f",
        attention="attn",
        qkv=("Wqkv",),
        output="out_proj",
        up=("ffn.up_proj",),
        down="ffn.down_proj",
        mlp=("ffn",),
        norms=("norm_1", "norm_2"),
    ),
}


def register_family(model_type: str, row: Family) -> None:
    """Add a family: attribution, FPDT and the planner know it from then on.

    Raises:
        ValueError: a type that has a row.
    """
    if model_type in FAMILIES:
        raise ValueError(
            f"the family {model_type!r} has a row; legal: another model_type than {', '.join(FAMILIES)}. Give the "
            "config of your model one of its own."
        )
    FAMILIES[model_type] = row


def family_of(config: Any) -> Family | None:
    """The row of a config's family, None where there is none."""
    return FAMILIES.get(getattr(config, "model_type", ""))


def in_chunks() -> tuple[str, ...]:
    """Families whose layers FPDT replaces."""
    return tuple(name for name, row in FAMILIES.items() if row.layer)
