"""Takes HF's mask over as a :class:`Visibility`, in place of the S x S values that transformers would write.

Registered under the attention's name, so that HF's own code decides about documents, padding and windows.
Anything else in its rule is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hmt_deepspeed.fpdt.visibility import Visibility

__all__ = ["shared_sequence", "visibility_of_batch", "visibility_of_mask"]

PROBES = 64  # positions at which HF's rule is compared with ours

Rule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


# Of the whole sequence, while a rank computes its part of it: what HF sees then is not contiguous.
_shared: ContextVar[Visibility | None] = ContextVar("shared", default=None)


@contextmanager
def shared_sequence(visibility: Visibility) -> Iterator[None]:
    """Masks made inside are those of this sequence, each with its own window."""
    token = _shared.set(visibility)
    try:
        yield
    finally:
        _shared.reset(token)


def visibility_of_batch(
    position_ids: Tensor, attention_mask: Tensor | None, documents: bool
) -> Visibility:
    """Visibility of whole sequences, by transformers' rules. Reads document borders back from the device.

    Args:
        position_ids: [B, S]; where they do not go on by one, a document begins.
        attention_mask: [B, S]; with one, transformers looks for no documents.
        documents: whether the family keeps them apart.

    Raises:
        ValueError: padding that is not on the right.
    """
    batch, length = position_ids.shape
    starts: list[list[int]] = [[0] for _ in range(batch)]
    if documents and attention_mask is None:
        for row, token in (position_ids.diff(dim=1) != 1).nonzero().tolist():
            starts[row].append(token + 1)
    lengths = _valid_lengths(attention_mask, batch, length)
    return Visibility(length, tuple(map(tuple, starts)), lengths)


def visibility_of_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Rule | None = None,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **_: Any,
) -> Visibility:
    """A mask function of transformers (``AttentionMaskInterface``). Reads the document borders back from the
    device, once per forward.

    Args:
        attention_mask: [B, S], true where a token is not padding.
        mask_function: the rule, given batch, head, query and key indices that broadcast.
        local_size: the sliding window.

    Raises:
        ValueError: a cache, padding that is not on the right, or a rule that is not causal attention with
            documents and a window.
    """
    if q_length != kv_length or q_offset or kv_offset:
        raise ValueError(
            f"FPDT attends from all tokens to all tokens, got {q_length} queries at {q_offset} and "
            f"{kv_length} keys at {kv_offset}: pass use_cache=False (generate() pauses FPDT)"
        )
    if mask_function is None or use_vmap:
        raise ValueError(
            "FPDT takes causal attention with documents and a sliding window, got a mask of the model's "
            "own: leave hmt.fpdt out for this model"
        )
    whole = _shared.get()
    if whole is not None:
        return replace(whole, window=local_size)
    visibility = Visibility(
        length=q_length,
        documents=_documents(mask_function, batch_size, q_length, device),
        lengths=_valid_lengths(attention_mask, batch_size, q_length),
        window=local_size,
    )
    _check(visibility, mask_function, device)
    return visibility


def _documents(
    rule: Rule, batch: int, length: int, device: torch.device | str
) -> tuple[tuple[int, ...], ...]:
    """First tokens of the documents: a token that does not see the one before it begins one."""
    rows = torch.arange(batch, device=device).unsqueeze(1)
    later = torch.arange(1, length, device=device).unsqueeze(0)
    begins = ~rule(rows, torch.zeros_like(rows), later, later - 1).expand(batch, length - 1)
    starts: list[list[int]] = [[0] for _ in range(batch)]
    for row, token in begins.nonzero().tolist():
        starts[row].append(token + 1)
    return tuple(map(tuple, starts))


def _valid_lengths(attention_mask: Tensor | None, batch: int, length: int) -> tuple[int, ...]:
    if attention_mask is None:
        return (length,) * batch
    mask = attention_mask.bool()
    valid = mask.sum(dim=1)
    on_the_right = (mask == (torch.arange(length, device=mask.device) < valid.unsqueeze(1))).all()
    lengths = valid.tolist()
    if not on_the_right or min(lengths) < 1:
        raise ValueError(
            "FPDT takes padding on the right of at least one token, got an attention_mask with zeros "
            "elsewhere: set padding_side='right' in the tokenizer, or pack documents by position_ids"
        )
    return tuple(lengths)


def _check(visibility: Visibility, rule: Rule, device: torch.device | str) -> None:
    """Compares the rule with ours, padding aside: at every neighbour ahead, which a block that sees itself
    both ways has, and at some pairs: ends, borders, and between."""
    length, batch = visibility.length, len(visibility.documents)
    row_index = torch.arange(batch, device=device).unsqueeze(1)
    later = torch.arange(1, length, device=device).unsqueeze(0)
    ahead = rule(row_index, torch.zeros_like(row_index), later - 1, later).nonzero()
    for row, query in ahead[:1].tolist():
        raise _other_attention(row, query, query + 1, sees=True)
    borders = {t for starts in visibility.documents for b in starts[:8] for t in (b - 1, b, b + 1)}
    window = visibility.window or 0
    spread = {round(i * (length - 1) / 31) for i in range(32)}
    wanted = {0, 1, window - 1, window, length - 2, length - 1} | borders | spread
    tokens = sorted(t for t in wanted if 0 <= t < length)[: 2 * PROBES]
    rows = torch.arange(batch, device=device).view(-1, 1, 1)
    index = torch.tensor(tokens, device=device)
    found = rule(rows, torch.zeros_like(rows), index.view(1, -1, 1), index.view(1, 1, -1))
    seen = found.expand(batch, len(tokens), len(tokens)).tolist()
    unpadded = Visibility(length, visibility.documents, (length,) * batch, visibility.window)
    for row in range(batch):
        for a, query in enumerate(tokens):
            for b, key in enumerate(tokens):
                if seen[row][a][b] != unpadded.allowed(row, query, key):
                    raise _other_attention(row, query, key, seen[row][a][b])


def _other_attention(row: int, query: int, key: int, sees: bool) -> ValueError:
    return ValueError(
        "FPDT takes causal attention with documents and a sliding window; in this model token "
        f"{query} of sequence {row} {'sees' if sees else 'misses'} token {key}: leave hmt.fpdt out"
    )
