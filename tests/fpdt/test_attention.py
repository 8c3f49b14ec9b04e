"""Attention alone against torch's own with a mask written out."""

import random

import pytest
import torch
from torch.nn import functional as F

from hmt_deepspeed.fpdt import ops
from hmt_deepspeed.fpdt.attention import OnlineAttention, chunked_attention
from hmt_deepspeed.fpdt.chunks import AttentionShape, ChunkMemory, Chunks, DeviceStore, host_bytes
from hmt_deepspeed.fpdt.visibility import Tile, Visibility, spans_of

CASES = {
    "causal": Visibility.causal(53, batch=2),
    "window": Visibility.causal(53, batch=2, window=11),
    "documents": Visibility(53, ((0, 1, 9, 30), (0, 20)), (53, 53)),
    "padding": Visibility(53, ((0,), (0,)), (53, 31)),
    "documents and window": Visibility(53, ((0, 13), (0,)), (53, 53), 6),
    "padding and window": Visibility(53, ((0,), (0,)), (53, 31), 30),
}


def mask_of(visibility):
    n = visibility.length
    rows = len(visibility.lengths)
    seen = [
        [[visibility.allowed(r, q, k) for k in range(n)] for q in range(n)] for r in range(rows)
    ]
    return torch.tensor(seen).unsqueeze(1)


def tensors(visibility, heads=(4, 2), size=8, dtype=torch.float32, spread=1.0):
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, h, visibility.length, size) for h in (heads[0], heads[1], heads[1], heads[0])]
    made = [torch.randn(s, generator=generator) for s in shapes]
    made[0] *= spread
    return [t.to(dtype).requires_grad_(i < 3) for i, t in enumerate(made)]


def gradients(attend, q, k, v, grad):
    out = attend(q, k, v)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), grad)]


def whole(visibility, scale):
    mask = mask_of(visibility)
    return lambda q, k, v: F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, scale=scale, enable_gqa=True
    )


def relative(found, expected):
    return max(
        float((f.double() - e.double()).norm() / e.double().norm())
        for f, e in zip(found, expected, strict=True)
    )


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_output_and_gradients_in_fp32(name, heads, monkeypatch):
    monkeypatch.setattr(ops, "BAND_QUERIES", 5)
    visibility = CASES[name]
    q, k, v, grad = tensors(visibility, heads)
    reference = gradients(whole(visibility, 0.3), q.double(), k.double(), v.double(), grad.double())
    for chunk_size in (8, 64) if heads == (4, 2) else (20,):
        found = gradients(
            lambda q, k, v, n=chunk_size: chunked_attention(q, k, v, visibility, n, 0.3),
            q,
            k,
            v,
            grad,
        )
        assert relative(found, reference) <= 1e-6


@pytest.mark.parametrize("name", CASES)
def test_bf16_is_as_good_as_torch(name):
    visibility = CASES[name]
    q, k, v, grad = tensors(visibility, dtype=torch.bfloat16)
    exact = gradients(
        whole(visibility, 0.3),
        *(t.detach().double().requires_grad_() for t in (q, k, v)),
        grad.double(),
    )
    theirs = relative(gradients(whole(visibility, 0.3), q, k, v, grad), exact)
    ours = relative(
        gradients(lambda q, k, v: chunked_attention(q, k, v, visibility, 8, 0.3), q, k, v, grad),
        exact,
    )
    assert ours <= 2 * theirs


def test_gaps_in_log_sum_exp_above_100():
    """Scores so large that one chunk outweighs another by e^100 and more."""
    visibility = CASES["causal"]
    q, k, v, grad = tensors(visibility, spread=200.0)
    scores = (q[:, :2] @ k.transpose(-1, -2))[..., -1, :].detach()
    per_chunk = torch.stack([scores[..., a:b].logsumexp(-1) for a, b in spans_of(53, 8)])
    assert (per_chunk.amax(0) - per_chunk.amin(0)).max() > 100
    found = gradients(lambda q, k, v: chunked_attention(q, k, v, visibility, 8, 1.0), q, k, v, grad)
    expected = gradients(whole(visibility, 1.0), q.double(), k.double(), v.double(), grad.double())
    assert all(torch.isfinite(t).all() for t in found)
    # Scores of some 1000 are rounded to 6e-5 in fp32, and so are weights.
    assert relative(found, expected) <= 1e-3


def test_trap_causal_is_aligned_to_the_top_left():
    """What a causal tile with more queries than keys relies on (padding on the right)."""
    q, k = torch.randn(1, 1, 6, 8), torch.randn(1, 1, 4, 8)
    tile = Tile((0, 1), (10, 16), (10, 14), None)
    assert tile.shape == "causal"
    out, _ = ops.CpuAttention().forward(q, k, k, tile, 1.0)
    mask = torch.ones(6, 4).tril().bool()
    expected = F.scaled_dot_product_attention(q, k, k, attn_mask=mask, scale=1.0)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)


def test_trap_a_fully_masked_query_would_return_a_log_sum_exp_of_0():
    """Why tiles leave such queries out: merged, 0 would weigh as much as a key."""
    q = torch.randn(1, 1, 2, 8)
    bias = torch.tensor([[0.0, 0.0], [float("-inf")] * 2])
    _, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, q, q, attn_mask=bias)
    assert lse[0, 0, 1] == 0


@pytest.mark.parametrize("name", CASES)
def test_offloaded_is_bit_equal_to_resident(name):
    """On the twin, whose unread copies hold NaN: an early read or a late wait would show."""
    visibility = CASES[name]
    q, k, v, grad = (t.detach() for t in tensors(visibility))
    shape = AttentionShape(2, 53, 4, 2, 8, 4)
    results = []
    for offload in (False, True):
        memory = ChunkMemory(offload)
        with memory.open(q.device, shape, 8, backward=True) as chunks:
            results.append(both_ways(OnlineAttention(visibility, 8, 0.3, chunks), q, k, v, grad))
        memory.close()
    for resident, offloaded in zip(*results, strict=True):
        assert torch.equal(resident, offloaded)


def both_ways(attention, q, k, v, grad):
    found = []
    for index, (begin, end) in enumerate(attention.spans):
        parts = tuple(t[:, :, begin:end].contiguous() for t in (q, k, v))
        out, lse = attention.forward(index, lambda parts=parts: parts, for_backward=True)
        found += [out, lse]
        attention.keep_gradient(index, out, lse, grad[:, :, begin:end].contiguous())
    attention.backward(lambda chunk, *grads: found.extend(grads))
    return found


def test_bytes_moved_are_those_of_the_schedule():
    """Forward: K and V out once (not the last chunk's), back for each later chunk that sees them."""
    visibility, shape = Visibility.causal(32, batch=1), AttentionShape(1, 32, 4, 2, 8, 4)
    q, k, v = torch.randn(1, 4, 32, 8), torch.randn(1, 2, 32, 8), torch.randn(1, 2, 32, 8)
    memory = ChunkMemory(offload=True)
    with memory.open(q.device, shape, 8, backward=False) as chunks:
        attention = OnlineAttention(visibility, 8, 0.3, chunks)
        for index, (begin, end) in enumerate(attention.spans):
            parts = tuple(t[:, :, begin:end].contiguous() for t in (q, k, v))
            attention.forward(index, lambda parts=parts: parts)
    unit = 2 * 2 * 8 * 8 * 4
    assert memory.engine.counters.bytes_out == 3 * unit
    assert memory.engine.counters.bytes_in == 6 * unit
    memory.close()


def test_backward_fetches_queries_once_where_the_next_row_begins_with_them():
    """With a window that reaches into one chunk before, no sum of dQ leaves the device either."""
    visibility, shape = Visibility.causal(48, window=8), AttentionShape(1, 48, 4, 2, 8, 4)
    q, k, v, grad = (torch.randn(1, heads, 48, 8) for heads in (4, 2, 2, 4))
    memory = ChunkMemory(offload=True)
    with memory.open(q.device, shape, 8, backward=True) as chunks:
        attention = OnlineAttention(visibility, 8, 0.3, chunks)
        for index, (begin, end) in enumerate(attention.spans):
            parts = tuple(t[:, :, begin:end].contiguous() for t in (q, k, v))
            out, lse = attention.forward(index, lambda parts=parts: parts, for_backward=True)
            attention.keep_gradient(index, out, lse, grad[:, :, begin:end].contiguous())
        counters = memory.engine.counters
        before = counters.bytes_in, counters.bytes_out
        attention.backward(lambda *_: None)
    keys, queries, sums = 2 * 8 * 8 * 4, 4 * 8 * 8 * 4, 4 * 8 * 4
    assert counters.bytes_in - before[0] == 6 * (2 * keys + 3 * queries + sums)
    assert counters.bytes_out == before[1]
    memory.close()


@pytest.mark.parametrize("chunk_size", [8, 20])
def test_host_memory_is_what_the_formula_says(chunk_size):
    visibility, shape = Visibility.causal(53, batch=2), AttentionShape(2, 53, 4, 2, 8, 4)
    q, k, v, grad = (t.detach() for t in tensors(visibility))
    memory = ChunkMemory(offload=True)
    with memory.open(q.device, shape, chunk_size, backward=True) as chunks:
        both_ways(OnlineAttention(visibility, chunk_size, 0.3, chunks), q, k, v, grad)
    needed, _ = host_bytes(shape, chunk_size, backward=True)
    assert memory._host.pool.peak_bytes <= needed
    assert memory._host.pool.used_bytes == 0
    memory.close()


def test_an_error_in_the_middle_leaves_the_store_empty():
    memory = ChunkMemory(offload=True)
    shape = AttentionShape(1, 16, 1, 1, 8, 4)

    def fail():
        with memory.open(torch.device("cpu"), shape, 8, backward=True) as chunks:
            chunks.put("k", 0, torch.zeros(1, 1, 8, 8))
            raise RuntimeError("stop")

    for _ in range(2):  # the second would find the names taken
        with pytest.raises(RuntimeError, match="stop"):
            fail()
    memory.close()


def test_chunks_know_what_was_put():
    with Chunks(DeviceStore()) as chunks:
        chunks.put("k", 3, torch.zeros(1))
        assert ("k", 3) in chunks
        with pytest.raises(ValueError, match="already stored"):
            chunks.put("k", 3, torch.zeros(1))
    assert ("k", 3) not in chunks


def test_refuses_what_flash_attention_on_cuda_cannot():
    on_meta = torch.empty(1, 1, 1, 8, device="meta")
    with pytest.raises(ValueError, match="on meta"):
        ops.attention_ops(on_meta)


def flash_limits(tile):
    """``_flash_window`` as torch's flash_api.cpp takes it: Tk or more is no limit, a lone none is Tk."""
    num_keys = tile.keys[1] - tile.keys[0]
    left, right = (-1 if limit >= num_keys else limit for limit in ops._flash_window(tile))
    if (left < 0) != (right < 0):
        left, right = (num_keys if limit < 0 else limit for limit in (left, right))
    return left, right


@pytest.mark.parametrize("window", [None, 1, 5, 9])
def test_flash_windows_are_aligned_to_the_bottom_right(window):
    """left and right of FlashAttention, whose query a of Tq sees a + Tk - Tq - left ... + right.

    Padding and documents that begin before a chunk border make tiles of more queries than keys.
    """
    draw, split = random.Random(0), 0
    for _ in range(40):
        starts = (0, *sorted(draw.sample(range(1, 40), draw.randrange(3))))
        visibility = Visibility(40, (starts,), (draw.randrange(1, 41),), window)
        for queries in spans_of(40, 8):
            for keys in spans_of(40, 8):
                for tile in visibility.tiles(queries, keys):
                    pieces = ops.CudaAttention().split(tile)
                    split += len(pieces) > 1
                    asked = [q for piece in pieces for q in range(*piece.queries)]
                    assert asked == list(range(*tile.queries))
                    for piece in pieces:
                        check_flash_rows(piece, visibility, keys)
    assert (split > 5) == (window != 1)


def check_flash_rows(tile, visibility, keys):
    left, right = flash_limits(tile)
    (q0, q1), (k0, k1) = tile.queries, tile.keys
    for a in range(q1 - q0):
        middle = a + (k1 - k0) - (q1 - q0)
        low = 0 if left < 0 else middle - left
        high = k1 - k0 if right < 0 else middle + right
        seen = [k0 + s for s in range(k1 - k0) if low <= s <= high]
        assert seen == [k for k in range(*keys) if visibility.allowed(0, q0 + a, k)]
