"""Takes HF's mask over as a :class:`Visibility`, in place of the S x S values that transformers would write.

Registered under the attention's name, so that HF's own code decides about documents, padding and windows.
Anything else in its rule is refused.

What the host knows is not asked of the device: a batch without masks and positions has neither padding nor
documents, and masks and positions that are in host memory are read there. A rule without tensors in it is compared
with ours on the host, once per shape. So an ordinary forward does not wait; one whose mask comes on the device waits
once, one whose positions do waits for each read of transformers' and ours.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from hmt_deepspeed.fpdt.visibility import Visibility

__all__ = [
    "moved",
    "shared_sequence",
    "visibility_of_batch",
    "visibility_of_mask",
    "visibility_on_host",
    "with_mask",
]

PROBES = 64  # positions at which HF's rule is compared with ours

Rule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


# Of the whole sequence, while the model makes its masks: a rank may compute a part that is not contiguous.
_known: ContextVar[Visibility | None] = ContextVar("known", default=None)


@contextmanager
def shared_sequence(visibility: Visibility) -> Iterator[None]:
    """Masks made inside are those of this sequence, each with its own window."""
    token = _known.set(visibility)
    try:
        yield
    finally:
        _known.reset(token)


def visibility_on_host(given: dict[str, Any], documents: bool) -> Visibility | None:
    """Visibility of a batch by what the host knows of a model's arguments; None where the device must be asked.

    Args:
        given: ``input_ids`` [B, S] or ``inputs_embeds``, ``attention_mask``, ``position_ids``.
        documents: whether the family keeps them apart.

    Raises:
        ValueError: padding that is not on the right.
    """
    tokens = _tokens_of(given)
    if tokens is None:
        return None
    batch, length = tokens.shape[:2]
    mask, positions = given.get("attention_mask"), given.get("position_ids")
    if not all(t is None or _is_on_host(t, length) for t in (mask, positions)):
        return None
    if mask is None and positions is None:
        return Visibility.causal(length, batch)
    if positions is None:
        positions = torch.arange(length).unsqueeze(0)
    return visibility_of_batch(positions.expand(batch, -1), mask, documents)


def _is_on_host(tensor: Any, length: int) -> bool:
    """Whether it is a row for each sequence in host memory, a number for each token."""
    on_host = isinstance(tensor, Tensor) and tensor.device.type == "cpu"
    return on_host and tensor.dim() == 2 and tensor.shape[1] == length


def with_mask(given: dict[str, Any]) -> dict[str, Any]:
    """The arguments with masks and positions on the tokens' device, and a mask in any case: without one
    transformers would look for documents on the device, and wait."""
    tokens = _tokens_of(given)
    assert tokens is not None
    taken = {
        name: moved(given[name], tokens.device)
        for name in ("attention_mask", "position_ids")
        if given.get(name) is not None
    }
    every = torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device)
    return {**given, "attention_mask": every, **taken}


def _tokens_of(given: dict[str, Any]) -> Tensor | None:
    """[B, S] or [B, S, n]."""
    ids = given.get("input_ids")
    return given.get("inputs_embeds") if ids is None else ids


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """On the device, by a copy from pinned memory that nobody waits for."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def visibility_of_batch(
    position_ids: Tensor, attention_mask: Tensor | None, documents: bool
) -> Visibility:
    """Visibility of whole sequences, by transformers' rules. Reads the one that decides back from the device.

    Args:
        position_ids: [B, S]; where they do not go on by one, a document begins.
        attention_mask: [B, S]; with one, transformers looks for no documents.
        documents: whether the family keeps them apart.

    Raises:
        ValueError: padding that is not on the right.
    """
    batch, length = position_ids.shape
    if attention_mask is not None:
        lengths = _valid_lengths(attention_mask.bool().cpu())
        return Visibility(length, ((0,),) * batch, lengths)
    if not documents:
        return Visibility.causal(length, batch)
    begins = (position_ids.diff(dim=1) != 1).cpu()
    return Visibility(length, _documents(begins), (length,) * batch)


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
    """A mask function of transformers (``AttentionMaskInterface``). Waits for the device where the batch's masks
    are not known on the host, see the top of the file.

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
    known = _known.get()
    if known is not None and known.length != q_length:  # of a rank's part the rule says nothing
        return replace(known, window=local_size)
    code, reads_tensors = _code_of(mask_function)
    if reads_tensors:
        return _read(mask_function, attention_mask, batch_size, q_length, local_size, device)
    _check_plain(_Plain(code, batch_size, q_length, local_size, mask_function))
    if known is not None:
        return replace(known, window=local_size)
    found = Visibility.causal(q_length, batch_size, local_size)
    if attention_mask is None:
        return found
    return replace(found, lengths=_valid_lengths(attention_mask.bool().cpu()))


def _read(
    rule: Rule,
    attention_mask: Tensor | None,
    batch: int,
    length: int,
    window: int | None,
    device: torch.device | str,
) -> Visibility:
    """Visibility by a rule that reads tensors of the device."""
    begins, ahead, mask = _neighbours(rule, attention_mask, batch, length, device)
    _refuse_ahead(ahead)
    lengths = (length,) * batch if mask is None else _valid_lengths(mask)
    found = Visibility(length, _documents(begins), lengths, window)
    _compare(found, rule, device)
    return found


def _neighbours(
    rule: Rule,
    attention_mask: Tensor | None,
    batch: int,
    length: int,
    device: torch.device | str,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """In host memory, by one read: whether token t + 1 misses token t, whether t sees t + 1 (both [B, S - 1],
    padding aside; a block that sees itself both ways has such a pair), and the mask [B, S]."""
    rows = torch.arange(batch, device=device).unsqueeze(1)
    later = torch.arange(1, length, device=device).unsqueeze(0)
    head, shape = torch.zeros_like(rows), (batch, length - 1)
    parts = [~rule(rows, head, later, later - 1).expand(shape)]
    parts.append(rule(rows, head, later - 1, later).expand(shape))
    if attention_mask is not None:
        parts.append(attention_mask.bool())
    begins, ahead, *mask = torch.cat(parts, dim=1).cpu().split([p.shape[1] for p in parts], dim=1)
    return begins, ahead, mask[0] if mask else None


def _documents(begins: Tensor) -> tuple[tuple[int, ...], ...]:
    """First tokens of the documents of [B, S - 1], true where the next token begins one."""
    starts: list[list[int]] = [[0] for _ in begins]
    for row, token in begins.nonzero().tolist():
        starts[row].append(token + 1)
    return tuple(map(tuple, starts))


def _valid_lengths(mask: Tensor) -> tuple[int, ...]:
    """Tokens of each sequence of a mask [B, S] in host memory."""
    valid = mask.sum(dim=1)
    on_the_right = (mask == (torch.arange(mask.shape[1]) < valid.unsqueeze(1))).all()
    lengths = valid.tolist()
    if not on_the_right or min(lengths) < 1:
        raise ValueError(
            "FPDT takes padding on the right of at least one token, got an attention_mask with zeros "
            "elsewhere: set padding_side='right' in the tokenizer, or pack documents by position_ids"
        )
    return tuple(lengths)


# -- HF's rule against ours -----------------------------------------------------------------------------


@dataclass(frozen=True)
class _Plain:
    """A rule without tensors, for a shape; equal to others of the same code, constants and shape."""

    code: Hashable
    batch: int
    length: int
    window: int | None
    rule: Rule = field(compare=False)


@lru_cache(maxsize=1024)
def _check_plain(plain: _Plain) -> None:
    """Raises ValueError where it is not causal attention with a window. On the host."""
    with _disable_current_modes():  # whatever watches the model
        begins, ahead, _ = _neighbours(plain.rule, None, plain.batch, plain.length, "cpu")
        _refuse_ahead(ahead)
        for row, token in begins.nonzero()[:1].tolist():
            if plain.window != 1:
                raise _other_attention(row, token + 1, token, sees=False)
        _compare(Visibility.causal(plain.length, plain.batch, plain.window), plain.rule, "cpu")


def _compare(visibility: Visibility, rule: Rule, device: torch.device | str) -> None:
    """Compares the rule with ours, padding aside, at some pairs of tokens: ends, borders, and between."""
    length, batch = visibility.length, len(visibility.documents)
    borders = {t for starts in visibility.documents for b in starts[:8] for t in (b - 1, b, b + 1)}
    window = visibility.window or 0
    spread = {round(i * (length - 1) / 31) for i in range(32)}
    wanted = {0, 1, window - 1, window, length - 2, length - 1} | borders | spread
    tokens = sorted(t for t in wanted if 0 <= t < length)[: 2 * PROBES]
    rows = torch.arange(batch, device=device).view(-1, 1, 1)
    index = torch.tensor(tokens, device=device)
    found = rule(rows, torch.zeros_like(rows), index.view(1, -1, 1), index.view(1, 1, -1))
    seen = found.expand(batch, len(tokens), len(tokens)).tolist()
    unpadded = replace(visibility, lengths=(length,) * batch)
    for row in range(batch):
        for a, query in enumerate(tokens):
            for b, key in enumerate(tokens):
                if seen[row][a][b] != unpadded.allowed(row, query, key):
                    raise _other_attention(row, query, key, seen[row][a][b])


def _refuse_ahead(ahead: Tensor) -> None:
    """Raises ValueError where a token sees the one after it, of [B, S - 1] in host memory."""
    for row, query in ahead.nonzero()[:1].tolist():
        raise _other_attention(row, query, query + 1, sees=True)


def _code_of(value: Any) -> tuple[Hashable, bool]:
    """What a rule is made of (code, and the constants in its closures), and whether it reads tensors."""
    if value is None or isinstance(value, (bool, int, float, str, CodeType)):
        return value, False
    parts: Sequence[Any]
    if isinstance(value, FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        parts = (value.__code__, *cells, *(value.__defaults__ or ()))
    elif isinstance(value, partial):
        parts = (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, (list, tuple)):
        parts = value
    else:
        return repr(type(value)), True
    inner = [_code_of(part) for part in parts]
    return tuple(code for code, _ in inner), any(reads for _, reads in inner)


def _other_attention(row: int, query: int, key: int, sees: bool) -> ValueError:
    return ValueError(
        "FPDT takes causal attention with documents and a sliding window; in this model token "
        f"{query} of sequence {row} {'sees' if sees else 'misses'} token {key}: leave hmt.fpdt out"
    )
