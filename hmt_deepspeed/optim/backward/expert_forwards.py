"""Modules of experts as they are computed where a weight's backward is projected."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from hmt_deepspeed.optim.backward.expert_functions import Half, Rows, down, up
from hmt_deepspeed.optim.backward.int8_linear import Int8Weight
from hmt_deepspeed.optim.backward.projected_linear import ProjectedLinear

__all__ = ["Links", "Role", "batched_experts", "routed_experts"]

Role = Literal["up", "down"]
Links = Mapping[Role, ProjectedLinear]
Encoded = Mapping[Role, Int8Weight | None]


def routed_experts(
    module: Any,
    links: Links,
    encoded: Encoded,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
) -> Tensor:
    """What a module of the experts interface computes, as transformers' ``grouped_mm`` does.

    Args:
        links: of the weights that are projected. encoded: those that are in INT8. hidden_states: T x H.
        top_k_index, top_k_weights: T x k.
    """
    name, is_transposed = "gate_up_proj" if module.has_gate else "up_proj", module.is_transposed
    first = Half(getattr(module, name), is_transposed, links.get("up"), encoded.get("up"))
    second = Half(module.down_proj, is_transposed, links.get("down"), encoded.get("down"))
    gate = module._apply_gate if module.has_gate else module.act_fn
    ids, order = torch.sort(top_k_index.reshape(-1), stable=True)
    next_experts = torch.arange(1, len(first.weight) + 1, dtype=ids.dtype, device=ids.device)
    offsets = torch.searchsorted(ids, next_experts, out_int32=True)
    split = getattr(module, "_is_expert_parallel", False)
    rows = Rows(offsets, order, top_k_index.shape[-1], split)
    scales = top_k_weights.reshape(-1)[order]
    z = up(hidden_states, first, rows)
    if module.has_bias:
        z.add_(getattr(module, f"{name}_bias")[rows.experts()])
    z = rows.cleared(z)
    bias = module.down_proj_bias if module.has_bias else None
    h = gate(z)
    if getattr(module, "has_post_expert_norm", False):
        y = down(h, second, rows, z, gate)
        if bias is not None:
            y.add_(bias[rows.experts()])
        y = rows.add_up(module.post_expert_norm(rows.cleared(y)) * scales[:, None])
    else:
        y = down(h, second, rows, z, gate, scales, bias)
    return y.to(hidden_states.dtype)


def batched_experts(module: Any, links: Links, encoded: Encoded, hidden_states: Tensor) -> Tensor:
    """What Llama-4's experts compute.

    Args:
        links: of the weights that are projected. encoded: those that are in INT8.
        hidden_states: (E n) x H, the rows of every expert side by side.
    """
    first = Half(module.gate_up_proj, True, links.get("up"), encoded.get("up"))
    second = Half(module.down_proj, True, links.get("down"), encoded.get("down"))
    x = hidden_states.view(len(first.weight), -1, module.hidden_size)
    steps = torch.arange(1, len(x) + 1, dtype=torch.int32, device=x.device)
    rows = Rows(steps * x.shape[1])

    def gate(z: Tensor) -> Tensor:
        gated, linear = z.chunk(2, dim=-1)
        return linear * module.act_fn(gated)

    z = up(x.flatten(0, 1), first, rows)
    return down(gate(z), second, rows, z, gate)
