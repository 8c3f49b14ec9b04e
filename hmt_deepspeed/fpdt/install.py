"""FPDT on a Hugging Face model, reversibly; and its attention alone, under a name of its own."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, nullcontext
from typing import Any

from torch import Tensor, nn

from hmt_deepspeed import ownership
from hmt_deepspeed.families.family import Family
from hmt_deepspeed.fpdt.attention import ATTENTION, chunked_attention
from hmt_deepspeed.fpdt.block import ChunkedLayer
from hmt_deepspeed.fpdt.chunks import ChunkMemory
from hmt_deepspeed.fpdt.forwards import (
    checkpointing_off,
    generate_paused,
    head_forward,
    layer_forward,
    model_forward,
    tokenwise_forward,
)
from hmt_deepspeed.fpdt.gradients import Around
from hmt_deepspeed.fpdt.inputs import AttentionHolder, Holder
from hmt_deepspeed.fpdt.installation import Installation
from hmt_deepspeed.fpdt.layer import check_layer, heads_of, resolve
from hmt_deepspeed.fpdt.loss import loss_chunk_size
from hmt_deepspeed.fpdt.masks import visibility_of_mask
from hmt_deepspeed.fpdt.part import SequencePart
from hmt_deepspeed.fpdt.refusals import as_visibility, chunked_family, refuse, refuse_dropout
from hmt_deepspeed.fpdt.sequence import Group, SequenceParallel

__all__ = ["clear_for_fpdt", "decoder_layers", "install", "register_attention"]

CHUNK_SIZE = 65536  # tokens; the paper's


def install(
    model: Any,
    chunk_size: int = CHUNK_SIZE,
    piece_size: int | None = None,
    offload_kv: bool = True,
    group: Group | None = None,
    around_backward: Around = nullcontext,
    holders: Mapping[nn.Module, Holder] | None = None,
    attention_holders: Mapping[nn.Module, AttentionHolder] | None = None,
    engine: str = "",
) -> Installation:
    """Replaces the forward of a causal language model's decoder layers, last norm and loss.

    Everything computes what it did; with labels the model returns the loss without logits, and layers keep
    their input only. ``use_cache`` is off until :meth:`Installation.remove`.

    Args:
        model: of transformers, of a family whose row names its layer.
        chunk_size: tokens of a chunk in attention.
        piece_size: tokens that projections, MLP and loss take at once; default a quarter of a chunk, since
            MLP and vocabulary are several times as wide as the rest.
        offload_kv: keep chunks in pinned host memory between their uses.
        group: ranks that share each sequence. They call the model with the same whole rows, with labels;
            each computes its part, returns the loss of all, and has gradients whose mean over the ranks is
            the loss's.
        around_backward: entered for the time of each layer's backward, and of the head's.
        holders: of the inputs of layers, and of the head, between forward and backward, piece by piece;
            autograd saves those of other modules as they are.
        attention_holders: of layers' attention, whose backward then does not attend again.
        engine: see :class:`Installation`.

    Raises:
        ValueError: another family, or a setting that would change the result.
    """
    _check_sizes(chunk_size, piece_size)
    clear_for_fpdt(model)
    layers, family = decoder_layers(model), chunked_family(model)
    sequence = _shared_sequence(group, layers[0], family, chunk_size)
    from transformers import AttentionInterface

    if ATTENTION not in AttentionInterface():
        register_attention()
    holders, attention_holders = holders or {}, attention_holders or {}
    memory = ChunkMemory(offload_kv)
    installation = Installation(model, memory, sequence, engine)
    piece_size = piece_size or max(1, chunk_size // 4)

    def in_chunks(layer: nn.Module) -> ChunkedLayer:
        held = holders.get(layer), attention_holders.get(layer)
        return ChunkedLayer(
            layer, family, chunk_size, piece_size, memory, sequence, around_backward, *held
        )

    with ExitStack() as undo:
        undo.callback(installation.remove)
        _replace_layers(installation, layers, in_chunks)
        _replace_norm_and_head(installation, family, piece_size, around_backward, holders)
        _replace_model(installation, layers, SequencePart(family, sequence, chunk_size))
        undo.pop_all()
    ownership.claim(installation)
    return installation


def _check_sizes(chunk_size: int, piece_size: int | None) -> None:
    if chunk_size < 1 or (piece_size is not None and piece_size < 1):
        raise ValueError(
            f"fpdt.chunk_size and piece_size are tokens, at least 1; got {chunk_size}, {piece_size}"
        )


def _shared_sequence(
    group: Group | None, layer: nn.Module, family: Family, chunk_size: int
) -> SequenceParallel:
    """The ranks that share a sequence; ValueError where a layer's heads or a chunk cannot be shared among them."""
    sequence = SequenceParallel(group)
    sequence.check_heads(*heads_of(layer, family)[:2])
    if chunk_size < sequence.size:
        raise ValueError(
            f"fpdt.chunk_size is {chunk_size}, fewer tokens than the {sequence.size} ranks that share it"
        )
    return sequence


def _replace_layers(
    installation: Installation,
    layers: Iterable[Any],
    in_chunks: Callable[[nn.Module], ChunkedLayer],
) -> None:
    for layer in layers:
        forward = layer_forward(type(layer).forward, in_chunks(layer))
        installation.replace_method(layer, "forward", forward)
        if hasattr(layer, "gradient_checkpointing"):  # it would run the whole layer once more
            installation.set_config(layer, "gradient_checkpointing", False)


def _replace_norm_and_head(
    installation: Installation,
    family: Family,
    piece_size: int,
    around_backward: Around,
    holders: Mapping[nn.Module, Holder],
) -> None:
    """The last norm, where there is one, and the head with the loss, piece by piece."""
    model: Any = installation.model
    norm = resolve(getattr(model, model.base_model_prefix), family.final_norm)
    if norm is not None:
        installation.replace_method(norm, "forward", tokenwise_forward(norm.forward, piece_size))
    head = model.get_output_embeddings()
    size = loss_chunk_size(model.config.vocab_size, piece_size)
    forward = head_forward(head.forward, size, around_backward, holders.get(head))
    installation.replace_method(head, "forward", forward)


def _replace_model(installation: Installation, layers: Iterable[Any], part: SequencePart) -> None:
    """The model's own forward and what calls it otherwise; its attention is ours, without a cache."""
    model: Any = installation.model
    kind = type(model)
    installation.replace_method(model, "forward", model_forward(kind.forward, part))
    installation.replace_method(model, "generate", generate_paused(kind.generate, installation))
    checkpointing = checkpointing_off(model._set_gradient_checkpointing, layers)
    installation.replace_method(model, "_set_gradient_checkpointing", checkpointing)
    installation.set_config(model.config, "_attn_implementation", ATTENTION)
    installation.set_config(model.config, "use_cache", False)


def clear_for_fpdt(model: nn.Module) -> None:
    """Take the model's modules over from earlier activation backends and installations.

    Raises:
        ValueError: one of them is in use.
    """
    ownership.take_over(model.modules(), "FPDT", warnings.warn)


def decoder_layers(model: Any) -> nn.ModuleList:
    """The layers that :func:`install` would replace; ValueError when it would refuse."""
    family = chunked_family(model)
    base = getattr(model, model.base_model_prefix)
    layers: nn.ModuleList = resolve(base, family.layers)
    for layer in layers:
        check_layer(layer, family)
    for module in (layers, resolve(base, family.final_norm), model.get_output_embeddings()):
        if module is not None:  # OPT may have no last norm
            refuse_dropout(module)
    return layers


def register_attention(chunk_size: int = CHUNK_SIZE) -> None:
    """Registers ``attn_implementation="hmt_fpdt"`` with transformers: attention alone, in chunks.

    For models whose layers are not replaced: Q, K and V are there as a whole, attention's workspace is
    that of a chunk, documents and windows cost only what is seen. Repeat with another ``chunk_size`` to
    change it.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        dropout: float = 0.0,
        scaling: float | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        refuse(dropout=dropout, **kwargs)
        visibility = as_visibility(attention_mask)
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        out = chunked_attention(query, key, value, visibility, chunk_size, scale)
        return out.transpose(1, 2).contiguous(), None

    AttentionInterface.register(ATTENTION, attention)
    # Without one of its own, HF would drop a padding mask without a word.
    AttentionMaskInterface.register(ATTENTION, visibility_of_mask)
