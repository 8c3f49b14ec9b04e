"""A tiny model of every family of the installed transformers whose experts follow the experts interface."""

import copy
import importlib
import inspect
from pathlib import Path

import torch
import transformers
from transformers import PreTrainedModel

MODELS = Path(transformers.__file__).parent / "models"
FAMILIES = sorted(
    path.parent.name
    for path in MODELS.glob("*/modeling_*.py")
    if "\n@use_experts_implementation" in path.read_text(encoding="utf-8")
)

LAYERS, EXPERTS = 2, 4
# What of a config makes a model small; a family takes what its config knows.
_SIZES = {
    **dict.fromkeys(("hidden_size", "moe_hidden_size"), 32),
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size"), 16),
    **dict.fromkeys(("shared_expert_intermediate_size", "moe_latent_size"), 16),
    "moe_shared_expert_intermediate_size": 16,
    **dict.fromkeys(("vocab_size", "max_position_embeddings"), 64),
    **dict.fromkeys(("vocab_size_per_layer_input", "unpadded_vocab_size"), 64),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads"), 4),
    **dict.fromkeys(("swa_num_attention_heads", "swa_num_key_value_heads"), 4),
    **dict.fromkeys(("linear_num_heads", "linear_num_key_heads", "linear_num_value_heads"), 4),
    **dict.fromkeys(("mamba_num_heads", "mamba_n_heads"), 4),
    **dict.fromkeys(("head_dim", "swa_head_dim", "global_head_dim", "linear_head_dim"), 8),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "mamba_head_dim"), 8),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim"), 8),
    **dict.fromkeys(("v_head_dim", "hidden_size_per_layer_input", "ssm_state_size"), 8),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), EXPERTS),
    "moe_num_experts": EXPERTS,
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts"), 2),
    **dict.fromkeys(("n_shared_experts", "n_group", "topk_group"), 1),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers", "pad_token_id"), 0),
    "num_hidden_layers": LAYERS,
}
_AXES = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
# What a family needs beside or instead.
_OWN = {
    "beam": {"mlp_layer_types": ["sparse"] * LAYERS},
    "deepseek_ocr2": {"mlp_layer_types": ["sparse"] * LAYERS},
    "ernie4_5_vl_moe": {"moe_intermediate_size": [16, 16], "rope_parameters": _AXES},
    "flint": {"mlp_only_layers": []},
    "gemma4": {"enable_moe_block": True},
    "glm4v_moe": {"rope_parameters": _AXES | {"partial_rotary_factor": 1.0}},
    "glm5_next": {"qk_rope_head_dim": 0, "mlp_layer_types": ["sparse"] * LAYERS},
    "granitemoehybrid": {"layer_types": ["attention"] * LAYERS},
    "hy_v4_vl": {"rope_parameters": _AXES},
    "lfm2_moe": {"layer_types": ["full_attention"] * LAYERS},
    "mimo_v2_flash": {"num_key_value_heads": 2},
    "nemotron_h": {"n_groups": 1},
    "zaya": {"num_experts_per_tok": 1},
}


def tiny(family):
    """A model of some thousand parameters, fp32, and its experts by name.

    The class is the one that generates text, if there is one of a text config, else its decoder.
    """
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    own = [
        c for c in vars(module).values() if inspect.isclass(c) and c.__module__ == module.__name__
    ]
    kinds = tuple(c for c in own if hasattr(c, "_apply_gate"))
    models = [c for c in own if issubclass(c, PreTrainedModel) and "PreTrained" not in c.__name__]
    models = [c for c in models if inspect.isclass(c.config_class)]
    models.sort(key=lambda c: not c.__name__.endswith("ForCausalLM"))
    refusals = []
    for kind in models:
        if any("text" in name or "thinker" in name for name in kind.config_class.sub_configs):
            continue
        config = kind.config_class
        known = {*inspect.signature(config.__init__).parameters, *config.attribute_map}
        sizes = {key: size for key, size in _SIZES.items() if key in known}
        try:
            config = config(**sizes | copy.deepcopy(_OWN.get(family, {})))
            with torch.device("meta"):
                skeleton = kind(config)
        except Exception as error:  # a model of images or sound, whose config has other fields
            refusals.append(f"{kind.__name__}: {error}")
            continue
        if any(isinstance(module, kinds) for module in skeleton.modules()):
            size = sum(p.numel() for p in skeleton.parameters())
            assert size < 2_500_000, f"{kind.__name__} has {size} parameters"
            torch.manual_seed(0)
            model = kind(config).eval()
            for name, table in model.named_buffers():
                if name.endswith("tid2eid"):  # experts by token, all the first one
                    table.copy_(torch.arange(table.numel()).view(table.shape) % EXPERTS)
            return model, {n: m for n, m in model.named_modules() if isinstance(m, kinds)}
        refusals.append(f"{kind.__name__} has no experts")
    raise AssertionError("\n".join(refusals))
