"""A causal model's loss at its head, in chunks of tokens, with all else of the model's forward as it is.

Where forwards of several micro-batches precede their backwards, logits of all of them would wait. Here the head returns
the sum of the losses of its tokens, by labels that the call was given, and the model's loss function divides it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from hmt_deepspeed.families.table import family_of
from hmt_deepspeed.fpdt.forwards import tokenwise_forward
from hmt_deepspeed.fpdt.gradients import Around
from hmt_deepspeed.fpdt.layer import resolve
from hmt_deepspeed.fpdt.loss import chunked_cross_entropy, count_of, loss_chunk_size, shifted

__all__ = ["HeadLoss", "replace", "why_not"]

PIECE = 16384  # tokens, of a norm and of a loss at once; fewer where the vocabulary is large


def why_not(model: Any) -> str:
    """Why a model's loss cannot be taken at its head; "" where it can."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    head = getattr(model, "get_output_embeddings", lambda: None)()
    if head is None:
        return "it has no language-model head"
    if getattr(model, "loss_function", None) is not ForCausalLMLoss:
        return "its loss is not transformers' ForCausalLMLoss"
    cap = getattr(model.config, "final_logit_softcapping", None)
    return f"its logits have a soft cap, {cap}" if cap else ""


class HeadLoss:
    """Makes calls of a model with labels return the loss without logits, for the time of a block.

    Args:
        model: of which :func:`why_not` says "". around_backward: entered for the time of the head's backward.
    """

    def __init__(self, model: Any, around_backward: Around) -> None:
        self._model, self._around = model, around_backward
        self._signature = inspect.signature(type(model).forward)
        self._targets: ContextVar[Tensor | None] = ContextVar("targets", default=None)
        self._returned: ContextVar[Any] = ContextVar("returned", default=None)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """For the block the head, the norm in front of it and the loss function are replaced."""
        model = self._model
        head: nn.Module = model.get_output_embeddings()
        size = loss_chunk_size(model.config.vocab_size, PIECE)
        with ExitStack() as undo:
            project = head.forward
            replace(head, "forward", lambda x: self._sum(head, project, size, x), undo)
            replace(model, "_loss_function", self._loss, undo)
            # after all others, ZeRO's too: what the model gets
            undo.callback(head.register_forward_hook(self._note).remove)
            family = family_of(model.config)
            base = getattr(model, model.base_model_prefix, None)
            norm = None if family is None or base is None else resolve(base, family.final_norm)
            if norm is not None:
                in_chunks = tokenwise_forward(norm.forward, PIECE)
                replace(norm, "forward", in_chunks.__get__(norm), undo)
            yield

    def call(self, forward: Callable[..., Any], *args: Any, **named: Any) -> Any:
        """The model's output, in the block and in a context of its own; no logits where it has labels."""
        from transformers.utils import ModelOutput

        given = self._signature.bind(self._model, *args, **named).arguments
        given = given | given.get("kwargs", {})
        labels, targets = given.get("labels"), given.get("shift_labels")
        if labels is not None and targets is None:
            targets = shifted(labels)
        self._targets.set(targets)
        output = forward(*args, **named)
        if targets is None or not isinstance(output, ModelOutput):
            return output
        return type(output)(**{key: value for key, value in output.items() if key != "logits"})

    # -- what takes the place of the model's own --------------------------------------------------

    def _sum(
        self, head: nn.Module, project: Callable[[Tensor], Tensor], size: int, x: Tensor
    ) -> Tensor:
        targets = self._targets.get()
        if targets is None:
            return project(x)
        if x.shape[:-1] != targets.shape:
            raise ValueError(
                f"the head got {tuple(x.shape[:-1])} tokens, but there are labels of {tuple(targets.shape)}; legal with "
                'hmt.accumulation "vertical": a loss over all tokens. Leave out logits_to_keep.'
            )
        one = torch.ones((), device=x.device)
        return chunked_cross_entropy(x, targets, one, head, project, size, self._around)

    def _note(self, _: nn.Module, __: Any, output: Any) -> None:
        self._returned.set(output)

    def _loss(
        self, logits: Tensor, labels: Tensor, *_: Any, num_items_in_batch: Any = None, **__: Any
    ) -> Tensor:
        targets = self._targets.get()
        if targets is None or logits is not self._returned.get():
            raise ValueError(
                "the model changes its logits between head and loss, or computes a loss without labels of its call; "
                'legal for it: hmt.accumulation "horizontal".'
            )
        return logits / count_of(targets, num_items_in_batch)


def replace(thing: Any, name: str, value: Any, undo: ExitStack) -> None:
    """Set an attribute of an object's own until ``undo`` closes."""
    own = vars(thing)
    if name in own:
        undo.callback(setattr, thing, name, own[name])
    else:
        undo.callback(own.pop, name, None)
    setattr(thing, name, value)
