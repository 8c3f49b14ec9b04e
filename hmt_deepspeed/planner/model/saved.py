"""Lists the tensors that autograd saves of a layer with no checkpointing.

The modules are those of ``transformers`` on CUDA: RMSNorm in Python, of which autograd keeps the fp32 copy
of the input and the normalised product; LayerNorm, GELU and dropout as single ops; rotary positions that
save nothing but their tables; fused attention with its log-sum-exp (joining rotated channels to others by
``cat`` leaves the queries in a layout for which its output is copied once more), or eager attention with its
probabilities. A tensor that two ops save is counted once, views keep the whole of a fused projection.
"""

from __future__ import annotations

from collections.abc import Collection

from hmt_deepspeed.planner.model.shapes import ModelShape, Role

__all__ = ["backward_extra", "head_saved", "layer_saved", "shared_saved"]

FP32 = 4
_MASK = 1  # dropout's mask is bool


def _norm(shape: ModelShape, tokens: int, channels: int, itemsize: int) -> int:
    """Internals and input of a norm; its output belongs to who reads it."""
    if not shape.rms_norm:
        return tokens * (channels * itemsize + 2 * FP32)  # input, mean, reciprocal deviation
    if shape.offset_norm:  # (x.float() * rsqrt) * (1 + w), in fp32 to the end
        return tokens * (2 * channels * FP32 + FP32) + channels * FP32
    return tokens * (channels * FP32 + FP32 + channels * itemsize)


def layer_saved(
    shape: ModelShape,
    micro_batch: int,
    seq_length: int,
    itemsize: int,
    *,
    fused: bool,
    freed: Collection[Role] = (),
) -> dict[str, int]:
    """Bytes by tensor that autograd saves of one layer, parameters not counted.

    Args:
        itemsize: bytes of a computed element. fused: whether attention is one op.
        freed: roles of linears that do not save their input (projected backward from the right); their
            ``X [Q | P]`` is not counted here.
    """
    tokens = micro_batch * seq_length
    stream = tokens * shape.hidden * itemsize
    saved = {
        **_attention_saved(shape, micro_batch, seq_length, itemsize, fused=fused),
        **_mlp_saved(shape, tokens, itemsize),
        "attention_norm": _norm(shape, tokens, shape.hidden, itemsize),
    }
    if shape.sandwich:
        saved["post_norms"] = 2 * _norm(shape, tokens, shape.hidden, itemsize)
    if shape.dropout > 0:
        saved["dropout"] = 2 * tokens * shape.hidden * _MASK
    if not shape.shared_norm:
        saved["mlp_norm"] = _norm(shape, tokens, shape.hidden, itemsize)
        if shape.parallel and not shape.rms_norm:
            saved["mlp_norm"] -= stream  # both norms read the layer's input
    output = tokens * shape.query_width * itemsize
    if fused:
        saved["attention_output"] = output
    return saved | {
        f"{role}_input": nbytes
        for role, nbytes in {
            "qkv": 0 if shape.shared_norm and "up" not in freed else stream,
            "out": output if not fused or shape.rotary_cat else 0,  # else the attention op keeps it
            "up": stream,
            "down": 0 if shape.activation == "relu" else tokens * shape.intermediate * itemsize,
        }.items()
        if role not in freed
    }


def _attention_saved(
    shape: ModelShape, micro_batch: int, seq_length: int, itemsize: int, *, fused: bool
) -> dict[str, int]:
    """Queries, keys and values as attention reads them, and what the attention op keeps."""
    tokens = micro_batch * seq_length
    rotates, fused_qkv = shape.rotary_dim > 0, len(shape.names.qkv) == 1
    kv_read = shape.kv_width if fused else shape.query_width  # eager repeats the key heads
    query_key = shape.query_width + kv_read
    whole = shape.query_width + 2 * shape.kv_width
    if not fused_qkv:
        read = query_key + kv_read
    elif rotates:  # the values are a view of the fused projection
        read = query_key + (whole if fused else kv_read)
    else:
        read = whole
    saved = {"query_key_value": tokens * read * itemsize}
    if shape.head_norm:
        saved["head_norms"] = _norm(shape, tokens * shape.heads, shape.head_dim, itemsize) + _norm(
            shape, tokens * shape.kv_heads, shape.head_dim, itemsize
        )
    if fused:
        saved["log_sum_exp"] = tokens * shape.heads * FP32
        return saved
    scores = tokens * seq_length * shape.heads
    saved["softmax"] = scores * (FP32 if shape.fp32_softmax else itemsize)
    if shape.attention_dropout > 0:
        saved["attention_dropout"] = scores * _MASK
        saved["probabilities"] = scores * itemsize
    elif shape.fp32_softmax and itemsize != FP32:
        saved["probabilities"] = scores * itemsize
    if shape.soft_cap:
        saved["soft_cap"] = scores * itemsize
    return saved


def _mlp_saved(shape: ModelShape, tokens: int, itemsize: int) -> dict[str, int]:
    """Around the activation; the down projection's input is not among them, but for relu's output."""
    wide = tokens * shape.intermediate * itemsize
    if shape.gated:
        return {"gate_up": 2 * wide, "activation": wide}
    if shape.activation == "new_gelu":  # x, 0.5 x, tanh and 1 + tanh
        return {"gate_up": wide, "activation": 3 * wide}
    if shape.activation == "relu":  # keeps its output, which is the down projection's input
        return {"activation": wide}
    return {"gate_up": wide}


def backward_extra(
    shape: ModelShape, tokens: int, itemsize: int, freed: Collection[Role] = ()
) -> int:
    """Bytes that the worst moment of a layer's backward has beyond what autograd saved of the layer.

    That moment is the activation function's backward: the gradient of the stream and those around the
    function, less the down projection's input, which has gone by then if it was saved at all (``freed`` as in
    :func:`layer_saved`), and the layer's input, where it is saved as it is and held anyway. A norm after the MLP
    has four fp32 tensors of its own.
    """
    stream = tokens * shape.hidden * itemsize
    fused = shape.activation == "gelu" and not shape.gated
    saves_none = "down" in freed and shape.activation != "relu"
    gradients = ((1 if fused else 2) + saves_none) * tokens * shape.intermediate * itemsize
    if shape.sandwich:
        gradients = max(gradients, 4 * tokens * shape.hidden * FP32)
    saves_input = not shape.rms_norm or itemsize == FP32
    return gradients if saves_input else gradients + stream


def head_saved(shape: ModelShape, tokens: int, itemsize: int) -> dict[str, int]:
    """Bytes by tensor from the final norm to the loss (of mean cross-entropy in fp32)."""
    saved = {"log_softmax": tokens * shape.vocab * FP32 + FP32}  # and the sum of the loss's weights
    if shape.final_soft_cap:
        saved["final_soft_cap"] = tokens * shape.vocab * itemsize
    if shape.names.final_norm:
        saved["final_norm"] = _norm(shape, tokens, shape.hidden, itemsize)
    width = shape.embedding_size or shape.hidden
    saved["lm_head"] = tokens * width * itemsize
    if width != shape.hidden:
        saved["project_out"] = tokens * shape.hidden * itemsize
    return saved


def shared_saved(
    shape: ModelShape, micro_batch: int, seq_length: int, itemsize: int
) -> dict[str, int]:
    """Bytes by tensor that the layers share or that precede them, integers not counted."""
    tokens = micro_batch * seq_length
    saved = {}
    if shape.rotary_dim:
        tables = shape.rotary_tables * 2  # cosines and sines
        saved["rotary"] = tables * seq_length * shape.rotary_dim * itemsize
    if shape.embedding_dropout > 0:
        saved["embedding_dropout"] = tokens * shape.hidden * _MASK
    if shape.embedding_size and shape.embedding_size != shape.hidden:
        saved["project_in"] = tokens * shape.embedding_size * itemsize
    return saved
