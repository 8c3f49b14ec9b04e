"""Router logits of a mixture in chunks.

Where ``output_router_logits`` asks for them, transformers' own hooks collect what each router puts out, by forward of
the whole model. A layer in chunks calls its routers for each piece, without grad, and again in backward: it collects
each piece's by itself, and the model gets those of the whole sequence, with their gradient.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from hmt_deepspeed.fpdt.masks import moved
from hmt_deepspeed.fpdt.visibility import Span

__all__ = ["WholeLogits", "asked_for_logits", "auxiliary_loss", "logits_of_a_piece"]

_KEY = "router_logits"


def asked_for_logits() -> list[Tensor] | None:
    """Where the model's forward collects router logits [B T, E] of its layers; None if nobody asked for them."""
    collected = _collector().get()
    return None if collected is None else collected.get(_KEY)


@contextmanager
def logits_of_a_piece(wanted: bool) -> Iterator[list[Tensor]]:
    """Collects what a layer's routers put out inside, [B T, E] each; nothing where they are not wanted."""
    found: list[Tensor] = []
    collector = _collector()
    token = collector.set({_KEY: found} if wanted else None)
    try:
        yield found
    finally:
        collector.reset(token)


def _collector() -> Any:
    from transformers.utils.output_capturing import _active_collector

    return _active_collector


class WholeLogits:
    """The logits of a layer's routers for a sequence, put together from pieces.

    Args:
        batch, tokens: rows, and the tokens of each that this rank holds.
    """

    def __init__(self, batch: int, tokens: int) -> None:
        self._size = batch, tokens
        self._whole: list[Tensor] = []

    def put(self, part: Span, found: Sequence[Tensor]) -> None:
        """The routers' logits [B T, E] of the tokens of ``part``."""
        for index, logits in enumerate(found):
            if index == len(self._whole):
                self._whole.append(logits.new_empty(*self._size, logits.shape[-1]))
            self._whole[index][:, part[0] : part[1]] = logits.unflatten(0, (self._size[0], -1))

    def take(self) -> list[Tensor]:
        """[B T, E] of each router, as the whole sequence would have given them."""
        return [logits.flatten(0, 1) for logits in self._whole]


def auxiliary_loss(model: Any, logits: tuple[Tensor, ...], mask: Tensor | None) -> Tensor:
    """The load-balancing loss that a causal model of transformers adds to its loss, without its factor.

    Args:
        logits: [B S, E] of each router, of all tokens. mask: [B, S], 0 for padding, or None.

    Raises:
        ValueError: the model's forward computes another one.
    """
    known = getattr(inspect.unwrap(type(model).forward), "__globals__", {})
    function = known.get("load_balancing_loss_func")
    if function is None:
        raise ValueError(
            f"output_router_logits is True, but {type(model).__name__}'s forward does not use transformers' "
            "load_balancing_loss_func, the auxiliary loss that FPDT computes: set output_router_logits to False, "
            "or leave hmt.fpdt out"
        )
    if mask is not None:
        mask = moved(mask, logits[0].device)
    loss: Tensor = function(logits, model.num_experts, model.num_experts_per_tok, mask)
    return loss
