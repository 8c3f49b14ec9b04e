"""Device and host bytes of FPDT by chunk size, and the choice of the size (2408.16978, section 4).

Any of four moments may be the fullest; K, V, Q, O are tensors of a chunk (Qw, Kw: channels of queries and of
keys; e: bytes of an element), and a layer's weight gradients are summed in fp32.

1. Attention's backward, chunk of keys j outside and of queries i inside, beside the sums of the whole layer::

    K, V and Q, O, dO of the pair                    e (2 Kw + 3 Qw)
    the same of the next pair, double-buffered       e (2 Kw + 3 Qw)
    dK, dV; dQ of i and the final one of j, fp32     4 (2 Kw + 2 Qw)
    what the pair's backward returns                 e (2 Kw + Qw)
    dQ on their way, two out and one in, fp32        4 (3 Qw)
    two log-sum-exps, fp32                           4 (2 heads)

2. The end of a piece of the projections' backward: the piece's weight gradients beside the sums of the whole
   layer, and on the device K, V and Q, O, dO, in fp32 dK, dV, and four of dQ.
3. A piece of the output projection's and the MLP's backward. In the first chunk, where the last sum turns wide: the
   sums and the piece's weight gradients, and on the device Q, K, V, attention's output in two layouts, its gradient,
   and in fp32 its sum. In each further chunk, where Q, O and dO of the chunk before are on their way out: the sums,
   and the fullest of five moments of the MLP's backward (n: channels of the stream; U: those that gate and up put
   out; R: those of a mixture's copies of a token, one for each expert that computes it; s: bytes of an element where
   routing weights scale what experts put out)::

    experts' outputs are scaled     e (2 U + 2 R) + 3 s R, and e R where they come in another dtype
    the gate                        e (3 U + R), and the gradients of the weights that lead back to the stream
    the gate, projected experts     e (3 U + R) + s U, or e U / 2 in place of s U where s = e; no sums of theirs
    gate and up                     e (U + 2 R), and the gradients of all weights
    the norm in front, in fp32      20 n, without two of the stream in e, and the gradients of all weights

4. The backward of a piece of the loss, a quarter of a chunk: logits, their logarithms of probabilities and their
   gradient in fp32, or the piece's gradient of the head beside the last of these; and the sum of the head's
   gradients in fp32.

Tensors as long as the sequence are every layer's input, attention's outputs as far as they are saved, the gradients
that enter and leave the last layer, cos and sin; with the loss also the last norm's output; of routers whose logits
are asked for, these and their gradients. Gradients of layers that backward has left are ZeRO's.

Of a mixture all weights' gradients count, although tokens reach some experts only; experts are computed by
transformers' ``grouped_mm``. Of layers of several kinds the largest counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from hmt_deepspeed.config.codecs import held_bytes, place_of
from hmt_deepspeed.config.components import Choice
from hmt_deepspeed.families.table import in_chunks
from hmt_deepspeed.planner.model.shapes import ModelShape
from hmt_deepspeed.planner.run.fpdt_layer import LayerInChunks, Mlp, layers_in_chunks

__all__ = [
    "FpdtBytes",
    "SavedInChunks",
    "fpdt_bytes",
    "fpdt_chunk_size",
    "longest_fpdt_sequence",
    "runs_in_chunks",
]

FP32 = 4
PIECES = 4  # of a chunk, for projections, MLP and loss
LOGITS = 2**27  # of one piece at most
_SMALLEST_CHUNK = 256  # tokens; below it kernels do not fill a GPU
_GRANULE = 256  # tokens, to which the longest sequence is found


def runs_in_chunks(shape: ModelShape) -> bool:
    """Whether FPDT replaces its layers; sizes given by numbers alone are like a family whose layers it does."""
    return shape.family.startswith("plain") or shape.family in in_chunks()


@dataclass(frozen=True)
class SavedInChunks:
    """Choices for the activations that ``hmt.activations`` beside ``hmt.fpdt`` saves on the device.

    Swapped ones take no device bytes, as if copies out kept up with the layers that make them.

    Attributes:
        inputs, attention: the choices of the layers, of any number of them; ``recompute`` of attention holds nothing.
        head: the choice of what enters the head.
    """

    inputs: tuple[Choice, ...]
    attention: tuple[Choice, ...]
    head: Choice

    def bytes(self, shape: ModelShape, tokens: int, query: int, heads: int, itemsize: int) -> int:
        """Bytes of the layers, for ``tokens`` of inputs and for attention of ``query`` channels and ``heads`` heads."""
        found = sum(held_bytes(choice, tokens, shape.hidden, itemsize) for choice in self.inputs)
        for choice in self.attention:
            found += held_bytes(choice, tokens, query, itemsize)
            if place_of(choice) == "device":  # log-sum-exps are never rounded
                found += FP32 * tokens * heads
        return found


@dataclass(frozen=True)
class FpdtBytes:
    """Bytes of one rank.

    Attributes:
        chunks: device bytes of the chunks at hand in attention's backward.
        gradients: device bytes of a layer's weight gradients, summed in fp32 over the chunks.
        pieces: device bytes where a piece's weight gradients are beside their sums (moments 2 and 3).
        loss: device bytes of a piece of the loss, and of the head's gradient, beyond ``stream``.
        stream: device bytes that are as long as this rank's part of the sequence.
        host: pinned bytes of a layer's chunks between their uses.
    """

    chunks: int
    gradients: int
    pieces: int
    loss: int
    stream: int
    host: int

    @property
    def device(self) -> int:
        """Most at once on the device, beside what is there between two steps."""
        return self.stream + max(self.chunks + self.gradients, self.pieces, self.loss)


def fpdt_bytes(
    shape: ModelShape,
    seq_length: int,
    chunk_size: int,
    *,
    micro_batch: int = 1,
    itemsize: int = 2,
    sequence_parallel: int = 1,
    held: SavedInChunks | None = None,
) -> FpdtBytes:
    """Bytes that FPDT needs for a sequence in chunks of ``chunk_size`` tokens, of which there are three or more.

    Args:
        seq_length, chunk_size: tokens of the whole sequence and of a whole chunk.
        sequence_parallel: ranks that share the sequence; each has a part of the heads in attention and a part
            of the tokens elsewhere.
        held: of activations; None: every layer's input and the head's.
    """
    tokens = micro_batch * min(chunk_size, seq_length)
    query = shape.query_width // sequence_parallel
    key = max(shape.head_dim, shape.kv_width // sequence_parallel)
    heads = shape.heads // sequence_parallel
    unit = 2 * key + 3 * query
    per_token = itemsize * (2 * unit + 2 * key + query)
    per_token += FP32 * (2 * key + 5 * query + 2 * heads)
    own = micro_batch * -(-seq_length // sequence_parallel)
    waiting = itemsize * unit + FP32 * (query + heads)
    if held is None:
        kept: tuple[Choice, ...] = ("keep",)
        held = SavedInChunks(kept * shape.layers, (), "keep")
    of_layers = held.bytes(
        shape, own, query * sequence_parallel, heads * sequence_parallel, itemsize
    )
    piece = min(tokens // PIECES, LOGITS // shape.vocab, own)
    softmax = 3 * FP32 * piece
    cast = 2 * itemsize if itemsize < FP32 else 0  # logits and their gradient in the head's dtype
    product = itemsize * shape.hidden + (FP32 + cast) * piece
    turning = (
        2 * shape.rotary_dim * shape.rotary_tables * itemsize
    )  # cos and sin are of a row for all
    layers = layers_in_chunks(shape)
    rows = -(-tokens // max(PIECES, sequence_parallel))
    logits = sum(layer.count * layer.mlp.routers for layer in layers) * shape.router_logits
    return FpdtBytes(
        chunks=tokens * per_token,
        gradients=FP32 * max(layer.parameters for layer in layers),
        pieces=max(_pieces(shape, layer, tokens, rows, query, key, itemsize) for layer in layers),
        loss=shape.vocab * (max(softmax, product) + FP32 * shape.hidden)
        + held_bytes(held.head, own, shape.hidden, itemsize),
        stream=of_layers
        + 2 * own * shape.hidden * itemsize
        + own // micro_batch * turning
        + 2 * micro_batch * seq_length * logits * itemsize,
        host=micro_batch * seq_length * waiting,
    )


def _pieces(
    shape: ModelShape,
    layer: LayerInChunks,
    tokens: int,
    piece: int,
    query: int,
    key: int,
    itemsize: int,
) -> int:
    """Moments 2 and 3, the larger.

    Args:
        tokens, piece: of a chunk, and of what its MLP takes at once.
        query, key: channels of a rank.
    """
    before, after = layer.projections, layer.finish
    projecting = itemsize * (2 * key + 3 * query) + FP32 * (2 * key + 4 * query)
    first = itemsize * (2 * key + 4 * query) + FP32 * query
    further = itemsize * (2 * key + 7 * query)
    finishing = FP32 * sum(after) + tokens * further + _mlp(shape, layer.mlp, piece, itemsize)
    return max(
        FP32 * (layer.parameters - sum(before)) + _sums(before, itemsize) + tokens * projecting,
        _sums(after, itemsize) + tokens * first,
        finishing,
    )


def _sums(parameters: Sequence[int], itemsize: int) -> int:
    """Bytes of sums and of a piece's gradients, at most, while the sums turn wide one by one.

    A narrow sum, which is the gradient of the piece before, is there until its wide one is.
    """
    narrow, whole = itemsize if itemsize < FP32 else 0, sum(parameters)
    wide = list(accumulate(parameters))
    most = (
        FP32 * done + narrow * (whole - done + own)
        for done, own in zip(wide, parameters, strict=True)
    )
    return itemsize * whole + max(most, default=0)


def _mlp(shape: ModelShape, mlp: Mlp, piece: int, itemsize: int) -> int:
    """The fullest of five moments of a piece's backward, beside what the layer's sums and the chunk take."""
    scaled = max(itemsize, FP32) if shape.fp32_routing else itemsize
    cast = itemsize if scaled != itemsize else 0
    # norm, residual sums, what the piece before has left; and of routers their probabilities
    around = itemsize * (4 * shape.hidden + shape.query_width) + FP32 * (shape.hidden + mlp.routers)
    scaling = itemsize * (2 * mlp.up + 2 * mlp.rows) + (3 * scaled + cast) * mlp.rows
    gating = itemsize * (3 * mlp.up + mlp.rows)
    projected = gating + (scaled if cast else itemsize // 2) * mlp.up
    reading = max(itemsize * (mlp.up + 2 * mlp.rows), (5 * FP32 - 2 * itemsize) * shape.hidden)
    return piece * around + max(
        piece * scaling,
        piece * gating + itemsize * mlp.down,
        piece * projected - FP32 * mlp.weights if mlp.rows else 0,
        piece * reading + itemsize * mlp.weights,
    )


def fpdt_chunk_size(
    shape: ModelShape,
    seq_length: int,
    budget: int,
    *,
    micro_batch: int = 1,
    itemsize: int = 2,
    sequence_parallel: int = 1,
    held: SavedInChunks | None = None,
) -> int:
    """The largest power of two of tokens, up to the sequence, whose chunks fit; at least 256.

    Args:
        budget: device bytes beside what is there between two steps.

    Raises:
        ValueError: not even chunks of 256 tokens fit.
    """
    chunk = 1 << max(0, (seq_length - 1).bit_length())
    while True:
        needed = fpdt_bytes(
            shape,
            seq_length,
            chunk,
            micro_batch=micro_batch,
            itemsize=itemsize,
            sequence_parallel=sequence_parallel,
            held=held,
        ).device
        if needed <= budget:
            return chunk
        if chunk <= _SMALLEST_CHUNK:
            raise ValueError(
                f'hmt.fpdt.chunk_size is "auto", but {micro_batch} x {seq_length} tokens do not fit: in chunks of '
                f"{chunk} a rank needs {needed:,} bytes of its device beside weights and states, and has "
                f"{budget:,}. Shorten the sequence, share it with hmt.fpdt.sequence_parallel_size, or use a "
                "higher ZeRO stage."
            )
        chunk //= 2


def longest_fpdt_sequence(
    shape: ModelShape,
    device_budget: int,
    host_budget: int,
    *,
    micro_batch: int = 1,
    itemsize: int = 2,
    sequence_parallel: int = 1,
) -> int:
    """The longest sequence, a multiple of 256 tokens, that fits in chunks of 256; 0 if none does.

    Args:
        device_budget: bytes beside what is there between two steps. host_budget: pinned bytes of a rank.
    """

    def fits(granules: int) -> bool:
        found = fpdt_bytes(
            shape,
            granules * _GRANULE,
            _SMALLEST_CHUNK,
            micro_batch=micro_batch,
            itemsize=itemsize,
            sequence_parallel=sequence_parallel,
        )
        return found.device <= device_budget and found.host <= host_budget

    low, high = 0, 1
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low * _GRANULE
