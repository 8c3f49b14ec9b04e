"""What is there of an input between forward and backward: the tensor itself, or its pieces in another form.

An input that is held in another form is encoded and decoded a piece at a time: there is never a second whole
copy of it, and in backward not even a first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from hmt_deepspeed.fpdt.visibility import Span

__all__ = [
    "HeldInput",
    "HeldPiece",
    "Holder",
    "Input",
    "Passage",
    "WholeInput",
    "in_turn",
    "passage_of",
    "tokens",
]


class HeldPiece(Protocol):
    """Some tokens between forward and backward; frees what it occupies when it is garbage."""

    def prefetch(self) -> None:
        """Starts bringing them back to the device, where that takes time."""

    def decode(self) -> Tensor:
        """They, of the shape and dtype that they had. Any number of times."""


# Called where a forward begins that backward will follow. What it returns is given the pieces [..., T, n] in
# order; it may read each as long as its copy takes, and the caller does not write to them.
Holder = Callable[[], Callable[[Tensor], HeldPiece]]


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


class HeldInput(Input):
    """Pieces in another form. What is read are the parts that were held."""

    def __init__(self, x: Tensor, hold: Callable[[Tensor], HeldPiece]) -> None:
        super().__init__(x)
        self._hold = hold
        self._pieces: dict[Span, HeldPiece] = {}

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


class Passage:
    """Takes a held input from a Function's forward to its backward as autograd takes saved tensors.

    It is then freed where they are: after a backward that does not retain the graph, although the graph's
    nodes live on as long as somebody has the loss. In forward the first tensor saved stands for it.
    """

    def __init__(self, held: HeldInput) -> None:
        self.held = held
        self._departing: list[HeldInput] = [held]
        self._arrived: list[HeldInput] = []

    def hooks(self) -> saved_tensors_hooks:
        """Around ``Function.apply``."""
        return saved_tensors_hooks(self._pack, self._unpack)

    def ticket(self) -> Tensor:
        """What forward saves first, in place of the input."""
        del self.held
        return torch.empty(0)

    def arrived(self) -> HeldInput:
        """The input, in backward, once the saved tensors have been looked up."""
        return self._arrived.pop()

    def _pack(self, tensor: Tensor) -> Tensor | HeldInput:
        return self._departing.pop() if self._departing else tensor

    def _unpack(self, packed: Tensor | HeldInput) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        self._arrived.append(packed)
        return torch.empty(0)


def passage_of(x: Tensor, holder: Holder | None, parameters: Sequence[Tensor]) -> Passage | None:
    """For a function of ``x`` and ``parameters``; None where nothing but autograd holds ``x``, or no backward
    will follow."""
    follows = torch.is_grad_enabled() and (x.requires_grad or bool(parameters))
    return Passage(HeldInput(x, holder())) if holder is not None and follows else None
