"""The language-model loss in chunks of tokens: logits of one chunk at a time, in forward and in backward.

Backward computes them again with the gradient that arrives, so the loss may be scaled after it was
computed, and a projected or quantised head works as it does anywhere else.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.nn import functional as F

from hmt_deepspeed.fpdt.gradients import (
    Around,
    ParameterGradients,
    autocast_of,
    only_first_order,
    refuse_transforms,
    trained_parameters,
)
from hmt_deepspeed.fpdt.inputs import (
    Holder,
    Passage,
    SavedInput,
    WholeInput,
    backward_follows,
    in_turn,
)
from hmt_deepspeed.fpdt.visibility import spans_of

__all__ = ["IGNORED", "chunked_cross_entropy", "count_of", "loss_chunk_size", "shifted"]

IGNORED = -100  # the label that does not count
LOGITS = 2**27  # of one chunk: 512 MiB in fp32


def loss_chunk_size(vocabulary: int, piece_size: int) -> int:
    """Tokens whose logits are there at once: a piece's, or fewer where the vocabulary is large."""
    return max(1, min(piece_size, LOGITS // vocabulary))


def shifted(labels: Tensor) -> Tensor:
    """The next token's label at each token: [B, S], the last column ignored."""
    return F.pad(labels[..., 1:], (0, 1), value=IGNORED)


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        hidden: Tensor,
        targets: Tensor,
        count: Tensor,
        project: Callable[[Tensor], Tensor],
        chunk_size: int,
        around_backward: Around,
        held: SavedInput | None,
        passage: Passage,
        *parameters: Tensor,
    ) -> Tensor:
        first = hidden if held is None else torch.empty(0)
        ctx.around_backward, ctx.passage = around_backward, passage  # type: ignore[attr-defined]
        ctx.save_for_backward(first, targets, count)
        ctx.project, ctx.parameters = project, parameters  # type: ignore[attr-defined]
        ctx.chunk_size = chunk_size  # type: ignore[attr-defined]
        ctx.autocast = autocast_of(hidden.device)  # type: ignore[attr-defined]
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        with autocast_of(hidden.device):
            for begin, end in spans_of(hidden.shape[0], chunk_size):
                part = hidden[begin:end]
                total += _sum_of_losses(project(part), targets[begin:end])
                if held is not None:
                    held.hold((begin, end), part)
        return total / count

    @staticmethod
    @only_first_order
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        first, targets, count = ctx.saved_tensors  # type: ignore[attr-defined]
        passage: Passage = ctx.passage  # type: ignore[attr-defined]
        hidden = passage.arrived(SavedInput) or WholeInput(first)
        wants_hidden = ctx.needs_input_grad[0]  # type: ignore[attr-defined]
        sums = ParameterGradients(ctx)
        d_hidden = hidden.new_gradient() if wants_hidden else None
        each = grad / count
        with ctx.around_backward():  # type: ignore[attr-defined]
            spans = spans_of(hidden.shape[0], ctx.chunk_size)  # type: ignore[attr-defined]
            for (begin, end), piece in in_turn(hidden, spans):
                part = piece.detach().requires_grad_(wants_hidden)
                with sums.computing(), ctx.autocast:  # type: ignore[attr-defined]
                    logits = ctx.project(part)  # type: ignore[attr-defined]
                    loss = _sum_of_losses(logits, targets[begin:end])
                del logits
                (d_part,) = sums.differentiate([loss], [each], [part])
                if d_hidden is not None and d_part is not None:
                    d_hidden[begin:end] = d_part
        return d_hidden, None, None, None, None, None, None, None, *sums.take()


def _sum_of_losses(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), targets, ignore_index=IGNORED, reduction="sum")


def count_of(targets: Tensor, num_items: Tensor | float | None = None) -> Tensor:
    """Divisor of the sum of losses: ``num_items``, or the number of targets that count, at least 1.

    Without a target that counts the loss is 0, where HF's mean is not a number.
    """
    if isinstance(num_items, Tensor):
        return num_items.to(targets.device, non_blocking=True)
    if num_items is not None:
        return torch.full((), num_items, device=targets.device)
    return (targets != IGNORED).sum().clamp(min=1)


def chunked_cross_entropy(
    hidden: Tensor,
    targets: Tensor,
    count: Tensor,
    head: nn.Module,
    project: Callable[[Tensor], Tensor],
    chunk_size: int,
    around_backward: Around = nullcontext,
    holder: Holder | None = None,
) -> Tensor:
    """Cross entropy of ``project(hidden)`` against ``targets``, in fp32.

    Args:
        hidden: [B, S, n]. targets: [B, S], int64, ``IGNORED`` where none; already shifted.
        count: what the sum is divided by, see :func:`count_of`.
        head: whose parameters ``project`` uses.
        project: [T, n] -> [T, vocabulary].
        around_backward: entered for the time of the backward.
        holder: of ``hidden`` between forward and backward; None: autograd saves it.

    Returns:
        A scalar.
    """
    refuse_transforms()
    flat, parameters = hidden.reshape(-1, hidden.shape[-1]), trained_parameters(head)
    held = None
    if holder is not None and backward_follows(flat, parameters):
        held = SavedInput(flat, holder())
    passage = Passage(held)
    with passage.hooks():
        return _ChunkedCrossEntropy.apply(
            flat,
            targets.reshape(-1),
            count,
            project,
            chunk_size,
            around_backward,
            held,
            passage,
            *parameters,
        )
