"""Small configs of many architectures: what a table of tests walks."""

from __future__ import annotations

from typing import Any

import transformers

_TEXT = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 128,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_GROUPED = {**_TEXT, "num_key_value_heads": 2, "head_dim": 8}
_VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
}
_MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
_SPEECH = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "vocab_size": 128,
}
_GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 128, "n_positions": 64}

# name -> (config, its fields, the class of its model)
ARCHITECTURES: dict[str, tuple[str, dict[str, Any], str]] = {
    "llama": ("LlamaConfig", _GROUPED, "LlamaForCausalLM"),
    "reward": ("LlamaConfig", {**_GROUPED, "num_labels": 1}, "LlamaForSequenceClassification"),
    "gpt2": ("GPT2Config", _GPT2, "GPT2LMHeadModel"),
    "gemma3_text": ("Gemma3TextConfig", _GROUPED, "Gemma3ForCausalLM"),
    "gemma3": (
        "Gemma3Config",
        {"text_config": _GROUPED, "vision_config": _VISION, "mm_tokens_per_image": 4},
        "Gemma3ForConditionalGeneration",
    ),
    "qwen2_vl": (
        "Qwen2VLConfig",
        {
            "text_config": {
                **_GROUPED,
                "rope_parameters": {"mrope_section": [1, 1, 2], "rope_type": "default"},
            },
            "vision_config": {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 4},
        },
        "Qwen2VLForConditionalGeneration",
    ),
    "llava": (
        "LlavaConfig",
        {
            "text_config": {"model_type": "llama", **_GROUPED},
            "vision_config": {"model_type": "clip_vision_model", **_VISION},
        },
        "LlavaForConditionalGeneration",
    ),
    "t5": (
        "T5Config",
        {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 128},
        "T5ForConditionalGeneration",
    ),
    "bart": (
        "BartConfig",
        {**_SPEECH, "max_position_embeddings": 64},
        "BartForConditionalGeneration",
    ),
    "whisper": (
        "WhisperConfig",
        {
            **_SPEECH,
            "num_mel_bins": 16,
            "max_source_positions": 32,
            "max_target_positions": 64,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "decoder_start_token_id": 1,
        },
        "WhisperForConditionalGeneration",
    ),
    "wav2vec2": (
        "Wav2Vec2Config",
        {
            **_TEXT,
            "conv_dim": [32] * 3,
            "conv_stride": [5, 2, 2],
            "conv_kernel": [10, 3, 3],
            "num_conv_pos_embeddings": 16,
            "num_conv_pos_embedding_groups": 2,
            "layerdrop": 0.0,  # of its layers one in ten would not run, whichever
        },
        "Wav2Vec2ForCTC",
    ),
    "bert": ("BertConfig", _TEXT, "BertForMaskedLM"),
    "vit": ("ViTConfig", {**_VISION, "num_labels": 3}, "ViTForImageClassification"),
    "swin": (
        "SwinConfig",
        {
            "image_size": 32,
            "patch_size": 4,
            "embed_dim": 16,
            "depths": [2, 2],
            "num_heads": [2, 4],
            "window_size": 4,
        },
        "SwinForImageClassification",
    ),
    "mixtral": ("MixtralConfig", {**_GROUPED, "num_local_experts": 4}, "MixtralForCausalLM"),
    "qwen3_moe": ("Qwen3MoeConfig", {**_GROUPED, **_MOE, "num_experts": 8}, "Qwen3MoeForCausalLM"),
    "gpt_oss": (
        "GptOssConfig",
        {**_GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2},
        "GptOssForCausalLM",
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        {
            **_TEXT,
            **_MOE,
            "n_routed_experts": 8,
            "n_group": 2,
            "topk_group": 1,
            "q_lora_rank": 16,
            "kv_lora_rank": 8,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "first_k_dense_replace": 1,
            "num_key_value_heads": 4,
        },
        "DeepseekV3ForCausalLM",
    ),
    "olmoe": (
        "OlmoeConfig",
        {**_TEXT, "num_experts": 4, "num_experts_per_tok": 2},
        "OlmoeForCausalLM",
    ),
    "llama4": (
        "Llama4TextConfig",
        {
            **_GROUPED,
            "intermediate_size_mlp": 64,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
        },
        "Llama4ForCausalLM",
    ),
    "mamba": (
        "MambaConfig",
        {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "vocab_size": 128,
            "state_size": 4,
            "time_step_rank": 4,
        },
        "MambaForCausalLM",
    ),
    "falcon": ("FalconConfig", _TEXT, "FalconForCausalLM"),
    "bloom": (
        "BloomConfig",
        {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 128},
        "BloomForCausalLM",
    ),
    "albert": (
        "AlbertConfig",
        {**_TEXT, "embedding_size": 16},
        "AlbertForMaskedLM",
    ),
}


def tiny_config(name: str, **changes: Any) -> Any:
    """A new config, without ``architectures``."""
    kind, fields, _ = ARCHITECTURES[name]
    return getattr(transformers, kind)(**{**fields, **changes})


def model_type(name: str) -> Any:
    """The class of the model that the config is for."""
    return getattr(transformers, ARCHITECTURES[name][2])
