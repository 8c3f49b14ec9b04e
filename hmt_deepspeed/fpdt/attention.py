"""Online attention over chunks of keys and values (FPDT, 2408.16978, section 4).

Forward takes one chunk of queries after the other through the chunks of keys it sees, merging outputs by
their log-sum-exp. Backward takes one chunk of keys after the other through the queries that see it: with
the merged output and log-sum-exp each pair's gradients are exact and add up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from hmt_deepspeed.fpdt.chunks import Chunks, DeviceStore
from hmt_deepspeed.fpdt.gradients import only_first_order, refuse_transforms
from hmt_deepspeed.fpdt.merge import merge_
from hmt_deepspeed.fpdt.ops import AttentionOps, attention_ops
from hmt_deepspeed.fpdt.schedule import Step, Unit, backward_steps, forward_steps, seen_by
from hmt_deepspeed.fpdt.visibility import Span, Tile, Visibility, spans_of

__all__ = ["ATTENTION", "OnlineAttention", "chunked_attention"]

ATTENTION = "hmt_fpdt"  # chunked attention alone, as transformers knows it


@dataclass
class _Queries:
    """One chunk of queries in backward; ``grad_query`` is the fp32 sum so far."""

    query: Tensor
    out: Tensor
    grad: Tensor
    log_sum_exp: Tensor
    grad_query: Tensor


@dataclass
class _Keys:
    """One chunk of keys and values, and the fp32 sums of their gradients."""

    key: Tensor
    value: Tensor
    grad_key: Tensor
    grad_value: Tensor


def _at(tensor: Tensor, batch: Span, tokens: Span, chunk: Span) -> Tensor:
    """The part of a chunk's tensor [B, H, T, ...] that a tile needs."""
    return tensor[batch[0] : batch[1], :, tokens[0] - chunk[0] : tokens[1] - chunk[0]]


class OnlineAttention:
    """The attention of one layer, chunk by chunk.

    Args:
        visibility: who sees whom.
        chunk_size: tokens of a chunk.
        scale: factor on the scores.
        chunks: stores chunks between their uses.

    Attributes:
        spans: the chunks' tokens.
    """

    def __init__(
        self, visibility: Visibility, chunk_size: int, scale: float, chunks: Chunks
    ) -> None:
        self.visibility, self.scale, self.chunks = visibility, scale, chunks
        self.spans = spans_of(visibility.length, chunk_size)
        self._keys = seen_by(
            len(self.spans), lambda i, j: visibility.sees(self.spans[i], self.spans[j])
        )
        self._seen_later = {key for keys in self._keys for key in keys}

    def _pieces(self, ops: AttentionOps, step: Step) -> list[Tile]:
        tiles = self.visibility.tiles(self.spans[step.query], self.spans[step.key])
        return [piece for tile in tiles for piece in ops.split(tile)]

    # -- forward --------------------------------------------------------------------------------------

    def forward(
        self,
        chunk: int,
        project: Callable[[], tuple[Tensor, Tensor, Tensor]],
        for_backward: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Attends from one chunk, whose number is one more than the last call's.

        Args:
            project: makes the chunk's queries [B, Hq, T, D] and keys and values [B, Hkv, T, D]; only
                this method holds them, so that they leave the device as soon as they can.
            for_backward: store what :meth:`backward` needs.

        Returns:
            The output in the queries' dtype, and its log-sum-exp (fp32, [B, Hq, T]).
        """
        query, key, value = project()
        ops = attention_ops(query)
        if for_backward:
            self._store(chunk, query, key, value)
        elif chunk in self._seen_later:
            self._store(chunk, None, key, value)
        out = torch.zeros_like(query, dtype=torch.float32, memory_format=torch.contiguous_format)
        log_sum_exp = out.new_full(out.shape[:-1], float("-inf"))
        for step in forward_steps(chunk, self._keys[chunk]):
            for unit in step.fetch:
                self.chunks.prefetch(unit)
            if step.key != chunk:
                key, value = self.chunks.get("k", step.key), self.chunks.get("v", step.key)
            for tile in self._pieces(ops, step):
                queries = tile.batch, tile.queries, self.spans[chunk]
                keys = tile.batch, tile.keys, self.spans[step.key]
                more = ops.forward(
                    _at(query, *queries), _at(key, *keys), _at(value, *keys), tile, self.scale
                )
                merge_(_at(out, *queries), _at(log_sum_exp, *queries), *more)
            del key, value  # released before the next pair's are waited for
        return out.to(query.dtype), log_sum_exp

    def _store(self, chunk: int, query: Tensor | None, key: Tensor, value: Tensor) -> None:
        self.chunks.put("k", chunk, key)
        self.chunks.put("v", chunk, value)
        if query is not None:
            self.chunks.put("q", chunk, query)

    # -- backward -------------------------------------------------------------------------------------

    def skip_forward(
        self, chunk: int, project: Callable[[], tuple[Tensor, Tensor, Tensor]]
    ) -> None:
        """In place of :meth:`forward` for :meth:`backward`, when the output is known; see there."""
        self._store(chunk, *project())

    def keep_gradient(self, chunk: int, out: Tensor, log_sum_exp: Tensor, grad: Tensor) -> None:
        """Stores O, its log-sum-exp and dO of a chunk, for :meth:`backward`."""
        self.chunks.put("o", chunk, out)
        self.chunks.put("l", chunk, log_sum_exp)
        self.chunks.put("g", chunk, grad)

    def backward(self, finish: Callable[[int, Tensor, Tensor, Tensor], None]) -> None:
        """Gradients of all chunks.

        Args:
            finish: called for each chunk in order with its number, dQ [B, Hq, T, D] and dK, dV
                [B, Hkv, T, D], final and in fp32.
        """
        first, steps = backward_steps(self._keys)
        for unit in first:
            self.chunks.prefetch(unit)
        keys: _Keys | None = None
        queries: _Queries | None = None
        final: Tensor | None = None  # dQ of the chunk of keys at hand
        for step in steps:
            for unit in step.fetch:
                self.chunks.prefetch(unit)
            keys = keys or self._load_keys(step.key)
            queries = queries or self._load_queries(step.query)
            self._accumulate(step, queries, keys)
            if step.query == step.key:
                final = queries.grad_query
            if Unit("query", step.query) in step.release:
                if step.query != step.key:
                    self.chunks.put("d", step.query, queries.grad_query)
                queries = None
            if step.last:
                assert final is not None
                grads, keys, final = (final, keys.grad_key, keys.grad_value), None, None
                finish(step.key, *grads)
                del grads
                for kind in ("k", "v", "q", "o", "g", "l"):
                    self.chunks.drop(kind, step.key)

    def _load_keys(self, chunk: int) -> _Keys:
        key, value = self.chunks.get("k", chunk), self.chunks.get("v", chunk)
        sums = [torch.zeros_like(t, dtype=torch.float32) for t in (key, value)]
        return _Keys(key, value, *sums)

    def _load_queries(self, chunk: int) -> _Queries:
        query, out, grad, log_sum_exp = (self.chunks.get(kind, chunk) for kind in "qogl")
        if ("d", chunk) in self.chunks:
            grad_query = self.chunks.get("d", chunk)
            self.chunks.drop("d", chunk)
        else:
            grad_query = torch.zeros_like(query, dtype=torch.float32)
        return _Queries(query, out, grad, log_sum_exp, grad_query)

    def _accumulate(self, step: Step, queries: _Queries, keys: _Keys) -> None:
        ops = attention_ops(queries.query)
        for tile in self._pieces(ops, step):
            q = tile.batch, tile.queries, self.spans[step.query]
            k = tile.batch, tile.keys, self.spans[step.key]
            dq, dk, dv = ops.backward(
                _at(queries.grad, *q),
                _at(queries.query, *q),
                _at(keys.key, *k),
                _at(keys.value, *k),
                _at(queries.out, *q),
                _at(queries.log_sum_exp, *q),
                tile,
                self.scale,
            )
            _at(queries.grad_query, *q).add_(dq)
            _at(keys.grad_key, *k).add_(dk)
            _at(keys.grad_value, *k).add_(dv)


def _same(parts: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    return parts


class _ChunkedAttention(torch.autograd.Function):
    """Attention alone: Q, K and V are there as a whole, and so is what is saved of them."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        visibility: Visibility,
        chunk_size: int,
        scale: float,
    ) -> Tensor:
        with Chunks(DeviceStore()) as chunks:
            attention = OnlineAttention(visibility, chunk_size, scale, chunks)
            outs, sums = [], []
            for index, (begin, end) in enumerate(attention.spans):
                parts = query[:, :, begin:end], key[:, :, begin:end], value[:, :, begin:end]
                out, log_sum_exp = attention.forward(index, partial(_same, parts))
                outs.append(out)
                sums.append(log_sum_exp)
        whole = torch.cat(outs, dim=2)
        ctx.save_for_backward(query, key, value, whole, torch.cat(sums, dim=2))
        ctx.settings = visibility, chunk_size, scale  # type: ignore[attr-defined]
        return whole

    @staticmethod
    @only_first_order
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, log_sum_exp = ctx.saved_tensors  # type: ignore[attr-defined]
        inputs = (query, key, value)
        visibility, chunk_size, scale = ctx.settings  # type: ignore[attr-defined]
        grads = [torch.empty_like(t) for t in inputs]
        with Chunks(DeviceStore()) as chunks:
            attention = OnlineAttention(visibility, chunk_size, scale, chunks)

            def finish(chunk: int, *parts: Tensor) -> None:
                begin, end = attention.spans[chunk]
                for whole, part in zip(grads, parts, strict=True):
                    whole[:, :, begin:end] = part

            for index, (begin, end) in enumerate(attention.spans):
                for kind, tensor in zip("kvq", (key, value, query), strict=True):
                    chunks.put(kind, index, tensor[:, :, begin:end])
                attention.keep_gradient(
                    index, out[:, :, begin:end], log_sum_exp[:, :, begin:end], grad[:, :, begin:end]
                )
            attention.backward(finish)
        return *grads, None, None, None


def chunked_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visibility: Visibility,
    chunk_size: int,
    scale: float,
) -> Tensor:
    """Differentiable attention whose workspace is that of one pair of chunks.

    Args:
        query: [B, Hq, S, D]. key, value: [B, Hkv, S, D], Hkv divides Hq.

    Returns:
        [B, Hq, S, D] in the queries' dtype.
    """
    refuse_transforms()
    return _ChunkedAttention.apply(query, key, value, visibility, chunk_size, scale)
