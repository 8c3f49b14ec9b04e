"""What a row says of a model family: names of modules, traits, and how a config becomes sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["Family"]


@dataclass(frozen=True)
class Family:
    """One family of decoder-only transformers; defaults are Llama's.

    A row without ``layer`` is not computed in chunks, one without ``sizes`` is read by the planner from the model
    itself. Every row names modules for attribution.

    Attributes:
        base: attribute of the causal model that its body is. layers, embedding, positions, final_norm: paths within
            that, "" for what a family does not have. head: path of the language-model head.
        attention: path within a layer. qkv: names within the attention, one linear each or one for all; output: its
            output projection; head_norms: norms of each head of Q and K.
        up, down: paths of the MLP's linears within a layer, the gate among ``up``.
        mlp: paths within a layer that compute the MLP one after the other.
        norms: paths within a layer, in order.
        gated: gate and up instead of fc1. fused_up: both in one linear (Phi-3).
        shared_norm: one norm serves attention and MLP, which run side by side (Phi).
        sandwich: norms after attention and MLP too (Gemma 2 and 3).
        rms_norm: else LayerNorm with bias. offset_norm: RMSNorm whose weight is ``1 + w`` (Gemma).
        rotary: positions rotate Q and K; rotary_cat: rotated channels are joined to the others by ``cat``.
        conv1d: linears are GPT-2's ``Conv1D``.
        fp32_softmax: eager attention's softmax is in fp32.
        fp32_routing: a mixture scales in fp32 what its experts put out, else in the model's dtype.
        layer: name of the decoder layer's class, whose forward FPDT replaces; package: that the class is of.
        fused: how the output of one linear for Q, K and V is split: in thirds, or head by head.
        scaled_query: queries are scaled before attention, which then does not scale.
        mask_positions: positions are counted from the padding mask, and the attention mask is made without them:
            documents see each other.
        dropouts: names in the config of probabilities that must be 0 in chunks.
        forbidden: further names in the config that must be false or null in chunks.
        activation: name in the config of the MLP's activation function.
        sizes: fields of :class:`~hmt_deepspeed.planner.model.shapes.ModelShape` of a config, but for the row's own
            traits; ``"final_norm": False`` where a config leaves that norm out.
    """

    base: str = "model"
    layers: str = "layers"
    embedding: str = "embed_tokens"
    positions: str = ""
    final_norm: str = "norm"
    head: str = "lm_head"

    attention: str = "self_attn"
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    output: str = "o_proj"
    head_norms: tuple[str, ...] = ()
    up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    mlp: tuple[str, ...] = ("mlp",)
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")

    gated: bool = True
    fused_up: bool = False
    shared_norm: bool = False
    sandwich: bool = False
    rms_norm: bool = True
    offset_norm: bool = False
    rotary: bool = True
    rotary_cat: bool = False
    conv1d: bool = False
    fp32_softmax: bool = True
    fp32_routing: bool = True

    layer: str = ""
    package: str = "transformers"
    fused: Literal["thirds", "per_head"] | None = None
    scaled_query: bool = False
    mask_positions: bool = False
    dropouts: tuple[str, ...] = ("attention_dropout",)
    forbidden: tuple[str, ...] = ()

    activation: str = "hidden_act"
    sizes: Callable[[Any], Mapping[str, Any]] | None = None
