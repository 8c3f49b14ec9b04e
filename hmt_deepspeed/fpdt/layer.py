"""The decoder layers that can run in chunks, as data: what their parts are called and how they join.

What works token by token is done by the layer's own submodules, called as modules, and by the rotary
function of its own file: LoRA, projected backward and hooks see what they always see.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import reduce
from typing import Any, Literal

import torch
from torch import Tensor, nn

__all__ = [
    "FAMILIES",
    "Family",
    "Rotary",
    "check_layer",
    "finish",
    "heads_of",
    "owned",
    "project",
    "resolve",
    "scale_of",
]

Rotary = tuple[Tensor, Tensor]  # cos and sin, [1 or B, T, D]


@dataclass(frozen=True)
class Family:
    """Names within a decoder layer, and where the model keeps its layers.

    Attributes:
        layer: class of the decoder layer in transformers.
        layers, final_norm: paths within the base model.
        norms: before (or after) attention, and the MLP's.
        qkv: one linear each, or one for all.
        fused: how one linear's output is split: all queries, then keys, then values; or head by head.
        head_norms: norms of each head of Q and K.
        mlp: modules that follow one another.
        scaled_query: queries are scaled before attention, which then does not scale.
        mask_positions: positions are counted from the padding mask, and the attention mask is made without
            them: documents see each other.
        dropouts: names in the config of probabilities that must be 0.
        forbidden: further names in the config that must be false or null.
    """

    layer: str
    layers: str = "layers"
    final_norm: str = "norm"
    attention: str = "self_attn"
    norms: tuple[str, str] = ("input_layernorm", "post_attention_layernorm")
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    fused: Literal["thirds", "per_head"] | None = None
    head_norms: tuple[str, str] | None = None
    output: str = "o_proj"
    mlp: tuple[str, ...] = ("mlp",)
    rotary: bool = True
    scaled_query: bool = False
    mask_positions: bool = False
    dropouts: tuple[str, ...] = ("attention_dropout",)
    forbidden: tuple[str, ...] = ()


# By ``config.model_type``.
FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaDecoderLayer"),
    "mistral": Family("MistralDecoderLayer"),
    "qwen2": Family("Qwen2DecoderLayer"),
    "qwen3": Family("Qwen3DecoderLayer", head_norms=("q_norm", "k_norm")),
    "gemma": Family("GemmaDecoderLayer", forbidden=("use_bidirectional_attention",)),
    "gpt2": Family(
        "GPT2Block",
        layers="h",
        final_norm="ln_f",
        attention="attn",
        norms=("ln_1", "ln_2"),
        qkv=("c_attn",),
        fused="thirds",
        output="c_proj",
        rotary=False,
        dropouts=("attn_pdrop", "resid_pdrop"),
        forbidden=("add_cross_attention",),
    ),
    "gpt_neox": Family(
        "GPTNeoXLayer",
        final_norm="final_layer_norm",
        attention="attention",
        qkv=("query_key_value",),
        fused="per_head",
        output="dense",
        dropouts=("attention_dropout", "hidden_dropout"),
    ),
    "opt": Family(
        "OPTDecoderLayer",
        layers="decoder.layers",
        final_norm="decoder.final_layer_norm",
        norms=("self_attn_layer_norm", "final_layer_norm"),
        output="out_proj",
        mlp=("fc1", "activation_fn", "fc2"),
        rotary=False,
        scaled_query=True,
        mask_positions=True,
        dropouts=("attention_dropout", "dropout"),
    ),
}


def resolve(root: nn.Module, path: str) -> Any:
    """The attribute at a dotted path."""
    return reduce(getattr, path.split("."), root)


def check_layer(layer: nn.Module, family: Family) -> None:
    """Raises ValueError when a layer is not exactly what the family describes."""
    found = type(layer).__name__
    if found != family.layer or not type(layer).__module__.startswith("transformers."):
        raise ValueError(
            f"FPDT replaces the forward of transformers' {family.layer}, this model's layers are {found} "
            f"of {type(layer).__module__}: leave hmt.fpdt out, or use attn_implementation='hmt_fpdt'"
        )
    if "forward" in vars(layer):
        raise ValueError(
            f"the forward of {found} was replaced already: undo that before FPDT is installed"
        )


def project(
    layer: nn.Module, family: Family, x: Tensor, rotary: Rotary | None
) -> tuple[Tensor, ...]:
    """Norm, QKV projection, rotary.

    Args:
        x: [B, T, n]: what enters the layer.

    Returns:
        Q [B, Hq, T, D], K and V [B, Hkv, T, D].
    """
    attention = resolve(layer, family.attention)
    h = resolve(layer, family.norms[0])(x) if _norm_first(layer) else x
    size = _head_size(attention)
    parts = [getattr(attention, name)(h) for name in family.qkv]
    if family.fused == "per_head":
        parts = list(_heads(parts[0], 3 * size).chunk(3, dim=-1))
    else:
        if family.fused == "thirds":
            parts = list(parts[0].chunk(3, dim=-1))
        if family.scaled_query:
            parts[0] = parts[0] * attention.scaling
        parts = [_heads(part, size) for part in parts]
    if family.head_norms is not None:
        for index, name in enumerate(family.head_norms):
            parts[index] = getattr(attention, name)(parts[index])
    q, k, v = (part.transpose(1, 2) for part in parts)
    if family.rotary:
        assert rotary is not None
        q, k = sys.modules[type(attention).__module__].apply_rotary_pos_emb(q, k, *rotary)
    if torch.is_autocast_enabled(x.device.type):  # as it does to scaled_dot_product_attention
        dtype = torch.get_autocast_dtype(x.device.type)
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    return q, k, v


def finish(layer: nn.Module, family: Family, x: Tensor, attended: Tensor) -> Tensor:
    """Output projection, residual, MLP, residual.

    Args:
        x: [B, T, n]: what enters the layer.
        attended: [B, T, Hq D].

    Returns:
        [B, T, n]: what leaves the layer.
    """
    norm, mlp_norm = (resolve(layer, name) for name in family.norms)
    attention_out = getattr(resolve(layer, family.attention), family.output)(attended)
    if getattr(layer, "use_parallel_residual", False):  # GPT-NeoX
        return _mlp(layer, family, mlp_norm(x)) + attention_out + x
    h = x + attention_out
    if _norm_first(layer):
        return h + _mlp(layer, family, mlp_norm(h))
    h = norm(h)  # OPT-350m
    return mlp_norm(h + _mlp(layer, family, h))


def scale_of(layer: nn.Module, family: Family) -> float:
    """Factor on the attention scores."""
    return 1.0 if family.scaled_query else float(resolve(layer, family.attention).scaling)


def heads_of(layer: nn.Module, family: Family) -> tuple[int, int, int]:
    """Heads of queries, heads of keys and values, and the size of one."""
    attention = resolve(layer, family.attention)
    heads = int(attention.config.num_attention_heads)
    key_heads = getattr(attention.config, "num_key_value_heads", None) or heads
    return heads, int(key_heads), _head_size(attention)


def owned(tensor: Tensor) -> Tensor:
    """The tensor, copied if it would keep more memory alive than its own."""
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def _mlp(layer: nn.Module, family: Family, h: Tensor) -> Tensor:
    for name in family.mlp:
        h = getattr(layer, name)(h)
    return h


def _norm_first(layer: nn.Module) -> bool:
    return bool(getattr(layer, "do_layer_norm_before", True))


def _heads(x: Tensor, size: int) -> Tensor:
    """[B, T, H size] as [B, T, H, size], also without tokens."""
    return x.unflatten(-1, (x.shape[-1] // size, size))


def _head_size(attention: Any) -> int:
    return int(attention.head_size if hasattr(attention, "head_size") else attention.head_dim)
