"""Saves a layer's input between forward and backward, as it is or in pieces of another form; and attention's
output where attention shall not run again.

An input saved in another form is encoded and decoded a piece at a time. So there is never a second whole copy of
it, and in backward not even a first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from hmt_deepspeed.fpdt.visibility import Span

__all__ = [
    "AttentionHolder",
    "Holder",
    "Input",
    "Passage",
    "SavedAttention",
    "SavedInput",
    "SavedOutputs",
    "SavedPiece",
    "WholeInput",
    "backward_follows",
    "in_turn",
    "tokens",
]

T = TypeVar("T")


class SavedPiece(Protocol):
    """Some tokens between forward and backward; frees what it occupies when it is garbage."""

    def prefetch(self) -> None:
        """Starts bringing them back to the device, where that takes time."""

    def decode(self) -> Tensor:
        """They, of the shape and dtype that they had. Any number of times."""


# Called where a forward begins that backward will follow. What it returns is given the pieces [..., T, n] in
# order; it may read each as long as its copy takes, and the caller does not write to them.
Holder = Callable[[], Callable[[Tensor], SavedPiece]]


class SavedAttention(Protocol):
    """One chunk's output and log-sum-exp between forward and backward."""

    def prefetch(self) -> None:
        """Starts bringing them back to the device, where that takes time."""

    def decode(self) -> tuple[Tensor, Tensor]:
        """They, of the shapes and dtypes that they had."""


# The same for attention: given output [B, T, n] and log-sum-exp [B, H, T] of one chunk after the other.
AttentionHolder = Callable[[], Callable[[Tensor, Tensor], SavedAttention]]


class Input:
    """[..., T, n], read in pieces of tokens."""

    def __init__(self, x: Tensor) -> None:
        self.shape, self.dtype, self.device = x.shape, x.dtype, x.device

    def read(self, part: Span) -> Tensor:
        """The tokens of ``part``, contiguous as modules expect them."""
        raise NotImplementedError

    def prefetch(self, part: Span) -> None:
        """``part`` will be read next."""

    def new_gradient(self) -> Tensor:
        """Uninitialised memory for the gradient of the whole."""
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)


class WholeInput(Input):
    """The tensor as it is."""

    def __init__(self, x: Tensor) -> None:
        super().__init__(x)
        self._x = x

    def read(self, part: Span) -> Tensor:
        return tokens(self._x, part)


class SavedInput(Input):
    """Pieces in another form, read in the parts in which they were saved."""

    def __init__(self, x: Tensor, hold: Callable[[Tensor], SavedPiece]) -> None:
        super().__init__(x)
        self._hold = hold
        self._pieces: dict[Span, SavedPiece] = {}

    def hold(self, part: Span, piece: Tensor) -> None:
        """Forward has used the tokens of ``part``."""
        self._pieces[part] = self._hold(piece)

    def read(self, part: Span) -> Tensor:
        return self._pieces[part].decode()

    def prefetch(self, part: Span) -> None:
        self._pieces[part].prefetch()


def tokens(tensor: Tensor, part: Span, begin: int = 0) -> Tensor:
    """Tokens of [..., T, n] that begins at token ``begin``, contiguous."""
    return tensor[..., part[0] - begin : part[1] - begin, :].contiguous()


def in_turn(
    x: Input, parts: Sequence[Span], then: Span | None = None
) -> Iterator[tuple[Span, Tensor]]:
    """Parts with their tokens, each on its way while the one before it is used; ``then`` is read after them."""
    for part, following in zip(parts, [*parts, then][1:], strict=True):
        piece = x.read(part)
        if following is not None:
            x.prefetch(following)
        yield part, piece
        del piece


class SavedOutputs:
    """Attention's output and log-sum-exp of each chunk, in another form or another place."""

    def __init__(self, hold: Callable[[Tensor, Tensor], SavedAttention]) -> None:
        self._hold = hold
        self._chunks: list[SavedAttention] = []

    def hold(self, out: Tensor, log_sum_exp: Tensor) -> None:
        """Save the output [B, H, T, D] and fp32 log-sum-exp [B, H, T] of the next chunk."""
        self._chunks.append(self._hold(out.transpose(1, 2).flatten(2), log_sum_exp))

    def read(self, chunk: int) -> tuple[Tensor, Tensor]:
        """As they were held; the chunk after it is on its way when this returns."""
        out, log_sum_exp = self._chunks[chunk].decode()
        if chunk + 1 < len(self._chunks):
            self._chunks[chunk + 1].prefetch()
        return out.unflatten(-1, (log_sum_exp.shape[1], -1)).transpose(1, 2), log_sum_exp


class Passage:
    """Takes saved pieces from a Function's forward to its backward as autograd takes saved tensors.

    It is then freed where they are: after a backward that does not retain the graph, although the graph's
    nodes live on as long as somebody has the loss.

    Args:
        held: in place of the first, second, ... tensor that forward saves; None leaves that one to autograd.
    """

    def __init__(self, *held: object) -> None:
        self._departing = list(held)
        self._arrived: list[Any] = []

    def hooks(self) -> AbstractContextManager[Any]:
        """Around ``Function.apply``."""
        if all(held is None for held in self._departing):
            return nullcontext()
        return saved_tensors_hooks(self._pack, self._unpack)

    def arrived(self, kind: type[T]) -> T | None:
        """The saved object of this type, in backward, once the saved tensors have been looked up."""
        found = next((held for held in self._arrived if isinstance(held, kind)), None)
        self._arrived = [held for held in self._arrived if held is not found]
        return found

    def _pack(self, tensor: Tensor) -> object:
        held = self._departing.pop(0) if self._departing else None
        return tensor if held is None else held

    def _unpack(self, packed: object) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        self._arrived.append(packed)
        return torch.empty(0)


def backward_follows(x: Tensor, parameters: Sequence[Tensor]) -> bool:
    """Whether a function of ``x`` and ``parameters`` that is called now may be differentiated."""
    return torch.is_grad_enabled() and (x.requires_grad or bool(parameters))
