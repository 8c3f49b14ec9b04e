"""One decoder layer token by token, by its family's row: what runs before attention and after it.

The layer's own submodules, called as modules, and the rotary function of its own file do this work, so LoRA,
projected backward and hooks see what they always see.
"""

from __future__ import annotations

import sys
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from hmt_deepspeed.families.family import Family

__all__ = [
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


def resolve(root: nn.Module, path: str) -> Any:
    """The attribute at a dotted path."""
    return reduce(getattr, path.split("."), root)


def check_layer(layer: nn.Module, family: Family) -> None:
    """Raises ValueError when a layer is not exactly what the family describes."""
    found, module = type(layer).__name__, type(layer).__module__
    if found != family.layer or module.partition(".")[0] != family.package:
        raise ValueError(
            f"FPDT replaces the forward of {family.layer} of {family.package}, this model's layers are {found} "
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
    if family.head_norms:
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
        h = resolve(layer, name)(h)
    return h


def _norm_first(layer: nn.Module) -> bool:
    return bool(getattr(layer, "do_layer_norm_before", True))


def _heads(x: Tensor, size: int) -> Tensor:
    """[B, T, H size] as [B, T, H, size], also without tokens."""
    return x.unflatten(-1, (x.shape[-1] // size, size))


def _head_size(attention: Any) -> int:
    return int(attention.head_size if hasattr(attention, "head_size") else attention.head_dim)
