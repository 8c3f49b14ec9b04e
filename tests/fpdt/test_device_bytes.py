"""Device bytes, counted: storages that computation makes, the host's pools aside."""

from itertools import pairwise

import pytest
import torch
from tiny import batch, fpdt, tiny

from benchmarks.live_bytes import LiveBytes
from hmt_deepspeed.fpdt.attention import OnlineAttention
from hmt_deepspeed.fpdt.chunks import AttentionShape, ChunkMemory
from hmt_deepspeed.fpdt.loss import chunked_cross_entropy
from hmt_deepspeed.fpdt.visibility import Visibility

CHUNK, HEADS, SIZE = 64, 2, 8  # one tensor of a chunk is one page of host memory


def attention_peak(num_chunks, offload=True, window=None):
    """Most device bytes of forward and backward of one attention whose inputs are made chunk by chunk."""
    length = CHUNK * num_chunks
    shape = AttentionShape(1, length, HEADS, HEADS, SIZE, 4)
    memory = ChunkMemory(offload)
    with (
        memory.open(torch.device("cpu"), shape, CHUNK, backward=True) as chunks,
        LiveBytes() as live,
    ):
        visibility = Visibility.causal(length, window=window)
        attention = OnlineAttention(visibility, CHUNK, 0.3, chunks)

        def make():
            return tuple(torch.ones(1, HEADS, CHUNK, SIZE) for _ in range(3))

        for index in range(num_chunks):
            out, lse = attention.forward(index, make, for_backward=True)
            attention.keep_gradient(index, out, lse, torch.ones_like(out))
            del out, lse
        attention.backward(lambda *_: None)
    memory.close()
    return live.peak


@pytest.mark.parametrize(("window", "tensors"), [(None, 24), (80, 30)])
def test_a_fixed_number_of_chunks_is_on_the_device(window, tensors):
    """However many there are: as many bytes at 16 chunks as at 8, and at most the double buffers.

    K, V, dK, dV and the next K, V; the final dQ; Q, O, dO, dQ of two chunks; dQ, dK, dV of the pair: 18.
    The twin delays copies out by as much as it may, one unit of 5. A window adds the mask of a piece.
    """
    peaks = [attention_peak(n, window=window) for n in (8, 16)]
    assert peaks[0] == peaks[1]
    assert peaks[0] <= tensors * CHUNK * HEADS * SIZE * 4


def test_forward_holds_two_chunks_of_keys_and_values():
    """The chunk at hand and the one on its way, or its own; before each fetch the last one is gone."""
    shape = AttentionShape(1, 8 * CHUNK, HEADS, HEADS, SIZE, 4)
    memory = ChunkMemory(offload=True)
    with memory.open(torch.device("cpu"), shape, CHUNK, backward=False) as chunks:
        attention = OnlineAttention(Visibility.causal(8 * CHUNK), CHUNK, 0.3, chunks)
        make = lambda: tuple(torch.ones(1, HEADS, CHUNK, SIZE) for _ in range(3))  # noqa: E731
        for index in range(7):
            attention.forward(index, make)
        memory.engine.streams.drain()
        with LiveBytes() as live:
            attention.forward(7, make)
    memory.close()
    tensor = CHUNK * HEADS * SIZE * 4
    # Q, two pairs of K and V, the sum in fp32, this pair's output and its weighted sum, log-sum-exps
    assert live.peak <= 8 * tensor + 6 * tensor // SIZE


def test_resident_chunks_grow_with_the_sequence():
    """What the count would show if nothing left the device."""
    small, large = (attention_peak(n, offload=False) for n in (8, 16))
    assert large > 1.7 * small


def layer_workspace(chunk_size, length=1024):
    """Peak of forward and backward of one layer, beyond its output and its input's gradient."""
    model = tiny("llama, 4 heads on 4, biases", num_hidden_layers=1, max_position_embeddings=length)
    layer = model.model.layers[0]
    x = torch.randn(1, length, 32, requires_grad=True)
    rotary = model.model.rotary_emb(x, torch.arange(length)[None])
    visibility, grad = Visibility.causal(length), torch.randn_like(x)

    def run():
        out = layer(x, attention_mask=visibility, position_embeddings=rotary)
        out.backward(grad)
        x.grad = None
        model.zero_grad()

    with fpdt(model, chunk_size):
        run()  # makes the host's pool
        with LiveBytes() as live:
            run()
    weights = 2 * sum(
        p.nbytes for p in layer.parameters()
    )  # gradients, and one piece's beside the sums
    return live.peak - 2 * x.nbytes - weights


def test_a_layers_device_bytes_fall_as_one_over_chunks():
    peaks = [layer_workspace(chunk_size) for chunk_size in (512, 256, 128)]
    for larger, smaller in pairwise(peaks):
        assert 1.7 <= larger / smaller <= 2.3


def test_a_plain_model_needs_eight_times_more():
    model = tiny(num_hidden_layers=2, max_position_embeddings=1024, vocab_size=512)
    inputs = batch(1024, rows=1)

    def peak():
        model(**inputs).loss.backward()
        model.zero_grad()
        with LiveBytes() as live:
            model(**inputs).loss.backward()
        model.zero_grad()
        return live.peak

    plain = peak()
    with fpdt(model, 64):
        ours = peak()
    assert plain >= 8 * ours


def test_logits_are_never_there_for_more_than_a_chunk():
    head = torch.nn.Linear(8, 500)
    hidden = torch.randn(1, 256, 8, requires_grad=True)
    targets = torch.randint(500, (1, 256))
    with LiveBytes() as live:
        loss = chunked_cross_entropy(hidden, targets, torch.tensor(256), head, head, chunk_size=16)
        (loss * 0.25).backward()
    logits = 16 * 500 * 4
    assert live.peak <= 4 * logits + 3 * hidden.nbytes + 3 * head.weight.nbytes
    assert live.peak < 256 * 500 * 4
