"""A decoder layer in chunks: forward and backward of everything between its input and its output.

Forward saves only the layer's input, as it is or in pieces of another form, and attention's output where a holder
of it is given. Backward runs forward again chunk by chunk, without attention if its output is saved, and takes each
chunk's output gradient through MLP and output projection. Then it runs attention backward with chunks of keys
outside, and takes dQ, dK, dV of each chunk through the projections as they become final.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from hmt_deepspeed.families.family import Family
from hmt_deepspeed.fpdt import layer as tokenwise
from hmt_deepspeed.fpdt.attention import OnlineAttention
from hmt_deepspeed.fpdt.chunks import AttentionShape, ChunkMemory, Chunks
from hmt_deepspeed.fpdt.gradients import (
    Around,
    ParameterGradients,
    autocast_of,
    only_first_order,
    refuse_transforms,
    trained_parameters,
)
from hmt_deepspeed.fpdt.inputs import (
    AttentionHolder,
    Holder,
    Input,
    Passage,
    SavedInput,
    SavedOutputs,
    WholeInput,
    backward_follows,
    in_turn,
    tokens,
)
from hmt_deepspeed.fpdt.layer import Rotary
from hmt_deepspeed.fpdt.routers import WholeLogits, asked_for_logits, logits_of_a_piece
from hmt_deepspeed.fpdt.sequence import SequenceParallel, TokenSharding
from hmt_deepspeed.fpdt.visibility import Span, Visibility, spans_of

__all__ = ["ChunkedLayer"]


@dataclass(frozen=True)
class ChunkedLayer:
    """One decoder layer and how it is cut.

    Attributes:
        layer, family: what it is.
        chunk_size: tokens of a chunk in attention.
        piece_size: tokens that projections and MLP take at once.
        memory: stores chunks between their uses.
        sequence: the ranks that share the sequence, of which ``x`` holds this one's tokens.
        around_backward: entered for the time of a backward.
        holder: of the input between forward and backward; None: autograd saves it.
        attention_holder: of attention's output; None: backward attends again.
    """

    layer: nn.Module
    family: Family
    chunk_size: int
    piece_size: int
    memory: ChunkMemory
    sequence: SequenceParallel
    around_backward: Around
    holder: Holder | None = None
    attention_holder: AttentionHolder | None = None

    def __call__(self, x: Tensor, visibility: Visibility, rotary: Rotary | None) -> Tensor:
        """The layer's output.

        Args:
            x: [B, T, n], this rank's tokens of the sequence: all, unless several share it.
            visibility: of the whole sequence.
            rotary: cos and sin, [1 or B, T, D], where the family rotates.
        """
        refuse_transforms()
        cos, sin = rotary or (None, None)
        parameters = trained_parameters(self.layer)
        follows, held, outputs = backward_follows(x, parameters), None, None
        if follows and self.holder is not None:
            held = SavedInput(x, self.holder())
        if follows and self.attention_holder is not None:
            outputs = SavedOutputs(self.attention_holder())
        passage, collected = Passage(held, outputs), asked_for_logits()
        arguments = self, visibility, held, outputs, passage, collected is not None
        with passage.hooks():
            out, *logits = _Layer.apply(x, cos, sin, *arguments, *parameters)
        if collected is not None:
            collected += logits
        return out

    def forward(
        self,
        x: Tensor,
        visibility: Visibility,
        rotary: Rotary | None,
        held: SavedInput | None = None,
        outputs: SavedOutputs | None = None,
        wants_logits: bool = False,
    ) -> tuple[Tensor, ...]:
        """The output and, if wanted, the logits [B T, E] of each router in the layer, without grad. Each piece of
        ``x`` goes to ``held`` once it has been used, and each chunk's attention to ``outputs``."""
        out, logits = torch.empty_like(x), WholeLogits(*x.shape[:2])
        whole = WholeInput(x)
        sharding = self._sharding(whole, visibility)
        with self._open(whole, visibility, backward=False) as chunks:
            attention = OnlineAttention(visibility, self.chunk_size, self._scale, chunks)
            for index, span in enumerate(sharding.local_spans(self.sequence.rank)):
                parts = sharding.parts[index]
                shard, log_sum_exp = attention.forward(
                    index, self._projector(whole, rotary, span, parts)
                )
                if outputs is not None:
                    outputs.hold(shard, log_sum_exp)
                attended = self._own_tokens(shard, parts)
                for part, piece in in_turn(whole, self._pieces(span)):
                    with logits_of_a_piece(wants_logits) as found:
                        out[:, part[0] : part[1]] = tokenwise.finish(
                            self.layer, self.family, piece, tokens(attended, part, span[0])
                        )
                    logits.put(part, found)
                    if held is not None:
                        held.hold(part, piece)
        return out, *logits.take()

    def backward(
        self,
        x: Input,
        grads: Sequence[Tensor],
        visibility: Visibility,
        rotary: Rotary | None,
        wants_x: bool,
        sums: ParameterGradients,
        outputs: SavedOutputs | None = None,
    ) -> Tensor | None:
        """Gradient of the input, if wanted; those of the parameters go to ``sums``.

        Args:
            grads: of the output [B, T, n] and of each router's logits [B, T, E] that forward returned.
        """
        dx = x.new_gradient() if wants_x else None
        sharding = self._sharding(x, visibility)
        spans = sharding.local_spans(self.sequence.rank)
        pieces = [self._pieces(span) for span in spans]
        next_pieces = [next(iter(following), None) for following in (*pieces[1:], [])]
        with self._open(x, visibility, backward=True) as chunks:
            attention = OnlineAttention(visibility, self.chunk_size, self._scale, chunks)
            for index, span in enumerate(spans):
                parts = sharding.parts[index]
                project = self._projector(x, rotary, span, parts)
                if outputs is None:
                    shard, log_sum_exp = attention.forward(index, project, for_backward=True)
                else:
                    attention.skip_forward(index, project)
                    shard, log_sum_exp = outputs.read(index)
                attended = self._own_tokens(shard, parts)
                turn = in_turn(x, pieces[index], next_pieces[index])
                d_attended = self._finish_backward(turn, attended, grads, dx, span, sums)
                d_shard = self.sequence.to_heads(d_attended, parts)
                attention.keep_gradient(index, shard, log_sum_exp, d_shard)
                del shard, log_sum_exp, attended, d_attended, d_shard

            def project_backward(chunk: int, *grads: Tensor) -> None:
                turn = in_turn(x, pieces[chunk], next_pieces[chunk])
                self._project_backward(
                    turn, rotary, grads, dx, spans[chunk], sharding.parts[chunk], sums
                )

            attention.backward(project_backward)
        return dx

    # -- steps ----------------------------------------------------------------------------------------

    def _projector(
        self, x: Input, rotary: Rotary | None, span: Span, parts: Sequence[int]
    ) -> Callable[[], tuple[Tensor, Tensor, Tensor]]:
        """Makes Q, K and V of a chunk for this rank's heads, without grad."""

        def project() -> tuple[Tensor, Tensor, Tensor]:
            turn = self._pieces(span)
            pieces = [
                tokenwise.project(self.layer, self.family, piece, _rotary_of(rotary, part))
                for part, piece in in_turn(x, turn, then=next(iter(turn), None))
            ]
            if not pieces:
                q, k, v = self._no_tokens(x)
            elif len(pieces) == 1:
                q, k, v = map(tokenwise.owned, pieces[0])
            else:
                q, k, v = (torch.cat(tensors, dim=2) for tensors in zip(*pieces, strict=True))
            to_heads = self.sequence.to_heads
            return to_heads(q, parts), to_heads(k, parts), to_heads(v, parts)

        return project

    def _finish_backward(
        self,
        pieces: Iterator[tuple[Span, Tensor]],
        attended: Tensor,
        grads: Sequence[Tensor],
        dx: Tensor | None,
        span: Span,
        sums: ParameterGradients,
    ) -> Tensor:
        """dO [B, Hq, T, D] of ``attended`` [B, T, Hq D]; the residual's share of dX is written."""
        d_attended = torch.empty_like(attended)
        for part, piece in pieces:
            inputs = [
                piece.detach().requires_grad_(dx is not None),
                tokens(attended, part, span[0]).detach().requires_grad_(),
            ]
            with sums.computing(), logits_of_a_piece(len(grads) > 1) as logits:
                out = tokenwise.finish(self.layer, self.family, *inputs)
            d_out, *d_logits = (tokens(grad, part) for grad in grads)
            d_logits = [grad.flatten(0, 1) for grad in d_logits]
            d_x, d_part = sums.differentiate([out, *logits], [d_out, *d_logits], inputs)
            assert d_part is not None
            d_attended[:, part[0] - span[0] : part[1] - span[0]] = d_part
            if dx is not None and d_x is not None:
                dx[:, part[0] : part[1]] = d_x
        query_heads, _, head_size = self._heads
        return d_attended.unflatten(-1, (query_heads, head_size)).transpose(1, 2)

    def _project_backward(
        self,
        pieces: Iterator[tuple[Span, Tensor]],
        rotary: Rotary | None,
        grads: tuple[Tensor, ...],
        dx: Tensor | None,
        span: Span,
        parts: Sequence[int],
        sums: ParameterGradients,
    ) -> None:
        """Takes dQ, dK, dV of this rank's heads through the projections of its tokens."""
        query_heads, key_heads, _ = self._heads
        heads = query_heads, key_heads, key_heads
        grads = tuple(
            self.sequence.to_tokens(d, parts, n) for d, n in zip(grads, heads, strict=True)
        )
        for part, piece in pieces:
            x_part = piece.detach().requires_grad_(dx is not None)
            with sums.computing():
                outs = tokenwise.project(self.layer, self.family, x_part, _rotary_of(rotary, part))
            begin, end = part[0] - span[0], part[1] - span[0]
            d_outs = [d[:, :, begin:end].to(out.dtype) for d, out in zip(grads, outs, strict=True)]
            (d_x,) = sums.differentiate(outs, d_outs, [x_part])
            if dx is not None and d_x is not None:
                dx[:, part[0] : part[1]] += d_x

    def _pieces(self, span: Span) -> list[Span]:
        return [
            (span[0] + begin, span[0] + end)
            for begin, end in spans_of(span[1] - span[0], self.piece_size)
        ]

    def _no_tokens(self, x: Input) -> tuple[Tensor, Tensor, Tensor]:
        """Q, K and V of a rank that has no token of a short last chunk.

        Its submodules are not called: tensors without elements all have the same address, by which
        projected linears tell who shares an input.
        """
        query_heads, key_heads, head_size = self._heads
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        q, k, v = (
            torch.empty(x.shape[0], heads, 0, head_size, dtype=dtype, device=x.device)
            for heads in (query_heads, key_heads, key_heads)
        )
        return q, k, v

    @property
    def _scale(self) -> float:
        return tokenwise.scale_of(self.layer, self.family)

    @property
    def _heads(self) -> tuple[int, int, int]:
        return tokenwise.heads_of(self.layer, self.family)

    def _own_tokens(self, shard: Tensor, parts: Sequence[int]) -> Tensor:
        """Attention's output for this rank's heads as [B, T, Hq D] of its tokens."""
        local = self.sequence.to_tokens(shard, parts, self._heads[0])
        return local.transpose(1, 2).flatten(2)

    def _sharding(self, x: Input, visibility: Visibility) -> TokenSharding:
        sharding = TokenSharding(visibility.length, self.chunk_size, self.sequence.size)
        expected = sum(part[self.sequence.rank] for part in sharding.parts)
        if x.shape[1] != expected:
            raise ValueError(
                f"of {visibility.length} tokens rank {self.sequence.rank} of {self.sequence.size} holds "
                f"{expected}, the layer got {x.shape[1]}: call the whole model, which takes its part"
            )
        return sharding

    def _open(self, x: Input, visibility: Visibility, backward: bool) -> Chunks:
        query_heads, key_heads, head_size = self._heads
        shape = AttentionShape(
            x.shape[0],
            visibility.length,
            query_heads // self.sequence.size,
            max(1, key_heads // self.sequence.size),
            head_size,
            x.dtype.itemsize,
        )
        return self.memory.open(x.device, shape, self.chunk_size, backward)


def _rotary_of(rotary: Rotary | None, part: Span) -> Rotary | None:
    if rotary is None:
        return None
    cos, sin = (t[:, part[0] : part[1]] for t in rotary)
    return cos, sin


class _Layer(torch.autograd.Function):
    """Saves the layer's input by ``save_for_backward``, where saved-tensor hooks can swap it; or its passage."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        x: Tensor,
        cos: Tensor | None,
        sin: Tensor | None,
        layer: ChunkedLayer,
        visibility: Visibility,
        held: SavedInput | None,
        outputs: SavedOutputs | None,
        passage: Passage,
        wants_logits: bool,
        *parameters: Tensor,
    ) -> tuple[Tensor, ...]:
        # in the places of the first two tensors goes what is held, see `Passage`
        first = x if held is None else torch.empty(0)
        second = [] if outputs is None else [torch.empty(0)]
        ctx.save_for_backward(first, *second, cos, sin)  # type: ignore[arg-type]
        ctx.passage = passage  # type: ignore[attr-defined]
        ctx.layer, ctx.visibility = layer, visibility  # type: ignore[attr-defined]
        ctx.parameters = parameters  # type: ignore[attr-defined]
        ctx.autocast = autocast_of(x.device)  # type: ignore[attr-defined]
        with autocast_of(x.device):
            rotary = None if cos is None or sin is None else (cos, sin)
            return layer.forward(x, visibility, rotary, held, outputs, wants_logits)

    @staticmethod
    @only_first_order
    def backward(ctx: FunctionCtx, grad: Tensor, *of_logits: Tensor) -> tuple[Tensor | None, ...]:
        first, *_, cos, sin = ctx.saved_tensors  # type: ignore[attr-defined]
        passage: Passage = ctx.passage  # type: ignore[attr-defined]
        x = passage.arrived(SavedInput) or WholeInput(first)
        outputs = passage.arrived(SavedOutputs)
        sums = ParameterGradients(ctx)
        grads = grad, *(one.unflatten(0, grad.shape[:2]) for one in of_logits)
        with ctx.autocast, ctx.layer.around_backward():  # type: ignore[attr-defined]
            dx = ctx.layer.backward(  # type: ignore[attr-defined]
                x,
                grads,
                ctx.visibility,  # type: ignore[attr-defined]
                None if cos is None else (cos, sin),
                ctx.needs_input_grad[0],  # type: ignore[attr-defined]
                sums,
                outputs,
            )
        return dx, *[None] * 8, *sums.take()
