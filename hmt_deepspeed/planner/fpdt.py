"""What FPDT needs of device and host for chunks of a size, and the size to choose (2408.16978, section 4).

The fullest moment of a layer is attention's backward, chunk of keys j outside and of queries i inside. There are
then on the device, in tensors of a chunk (Qw, Kw: channels of queries and of keys; e: bytes of an element)::

    K, V and Q, O, dO of the pair                    e (2 Kw + 3 Qw)
    the same of the next pair, double-buffered       e (2 Kw + 3 Qw)
    dK, dV; dQ of i and the final one of j, fp32     4 (2 Kw + 2 Qw)
    what the pair's backward returns                 e (2 Kw + Qw)
    dQ on their way, two out and one in, fp32        4 (3 Qw)
    two log-sum-exps, fp32                           4 (2 heads)

and, as long as the sequence, every layer's input, a layer's output with its gradient and that of its input.
"""

from __future__ import annotations

from dataclasses import dataclass

from hmt_deepspeed.planner.shapes import ModelShape, parameters

__all__ = ["FpdtBytes", "fpdt_bytes", "fpdt_chunk_size", "longest_fpdt_sequence"]

FP32 = 4
_SMALLEST_CHUNK = 256  # tokens; below it kernels do not fill a GPU
_GRANULE = 256  # tokens, to which the longest sequence is found


@dataclass(frozen=True)
class FpdtBytes:
    """Bytes of one rank.

    Attributes:
        chunks: device bytes of the chunks at hand.
        stream: device bytes that are as long as this rank's part of the sequence.
        gradients: device bytes of a layer's weight gradients, summed in fp32 over the chunks.
        host: pinned bytes of a layer's chunks between their uses.
    """

    chunks: int
    stream: int
    gradients: int
    host: int

    @property
    def device(self) -> int:
        """All on the device, beside what is there between two steps."""
        return self.chunks + self.stream + self.gradients


def fpdt_bytes(
    shape: ModelShape,
    seq_length: int,
    chunk_size: int,
    *,
    micro_batch: int = 1,
    itemsize: int = 2,
    sequence_parallel: int = 1,
) -> FpdtBytes:
    """What FPDT needs for a sequence in chunks of ``chunk_size`` tokens, of which there are three or more.

    Args:
        seq_length, chunk_size: tokens of the whole sequence and of a whole chunk.
        sequence_parallel: ranks that share the sequence; each has a part of the heads in attention and a part
            of the tokens elsewhere.
    """
    tokens = micro_batch * min(chunk_size, seq_length)
    query = shape.query_width // sequence_parallel
    key = max(shape.head_dim, shape.kv_width // sequence_parallel)
    heads = shape.heads // sequence_parallel
    unit = 2 * key + 3 * query
    per_token = itemsize * (2 * unit + 2 * key + query)
    per_token += FP32 * (2 * key + 5 * query + 2 * heads)
    own = micro_batch * -(-seq_length // sequence_parallel)
    held = itemsize * unit + FP32 * (query + heads)
    of_a_layer = sum(p.numel for p in parameters(shape) if p.name.startswith(shape.names.layer))
    return FpdtBytes(
        chunks=tokens * per_token,
        stream=(shape.layers + 3) * own * shape.hidden * itemsize,
        gradients=FP32 * of_a_layer,
        host=micro_batch * seq_length * held,
    )


def fpdt_chunk_size(
    shape: ModelShape,
    seq_length: int,
    budget: int,
    *,
    micro_batch: int = 1,
    itemsize: int = 2,
    sequence_parallel: int = 1,
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
