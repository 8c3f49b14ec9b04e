"""Replaces the forwards of layers, norms, the head and the model."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from hmt_deepspeed.fpdt.block import ChunkedLayer
from hmt_deepspeed.fpdt.gradients import Around
from hmt_deepspeed.fpdt.inputs import Holder
from hmt_deepspeed.fpdt.installation import Installation
from hmt_deepspeed.fpdt.loss import chunked_cross_entropy, count_of, shifted
from hmt_deepspeed.fpdt.mlp import chunked_tokenwise
from hmt_deepspeed.fpdt.part import SequencePart
from hmt_deepspeed.fpdt.refusals import as_visibility, refuse, refuse_loss
from hmt_deepspeed.fpdt.routers import auxiliary_loss

__all__ = [
    "checkpointing_off",
    "generate_paused",
    "head_forward",
    "layer_forward",
    "model_forward",
    "tokenwise_forward",
]


def layer_forward(original: Callable[..., Any], chunked: ChunkedLayer) -> Callable[..., Tensor]:
    """Forward of a decoder layer: of the same arguments FPDT takes the stream, the mask and the rotary tables."""
    signature = inspect.signature(original)

    @wraps(original)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        given = signature.bind(self, *args, **kwargs).arguments
        refuse(**given, **given.get("kwargs", {}))
        visibility = as_visibility(given.get("attention_mask"))
        return chunked(given["hidden_states"], visibility, given.get("position_embeddings"))

    return forward


def tokenwise_forward(
    original: Callable[[Tensor], Tensor], piece_size: int
) -> Callable[[nn.Module, Tensor], Tensor]:
    """Chunks go through the forward itself, so that the module's own hooks fire once for all of them."""

    @wraps(original)
    def forward(self: nn.Module, hidden_states: Tensor) -> Tensor:
        return chunked_tokenwise(self, original, hidden_states, piece_size)

    return forward


def head_forward(
    original: Callable[..., Any], size: int, around_backward: Around, holder: Holder | None
) -> Callable[..., Tensor]:
    """With targets the head returns the loss: its own hooks, ZeRO-3's gather, fire once for all chunks."""

    @wraps(original)
    def forward(
        self: nn.Module,
        hidden_states: Tensor,
        targets: Tensor | None = None,
        count: Tensor | None = None,
    ) -> Tensor:
        if targets is None or count is None:
            if holder is not None and torch.is_grad_enabled():
                raise ValueError(
                    "the head's input is held in another form between forward and backward, which FPDT does "
                    "for its own loss: pass labels, compute logits under torch.no_grad(), or keep lm_head"
                )
            return original(hidden_states)
        return chunked_cross_entropy(
            hidden_states, targets, count, self, original, size, around_backward, holder
        )

    return forward


def model_forward(original: Callable[..., Any], part: SequencePart) -> Callable[..., Any]:
    """Forward of the causal model: with labels its loss, without logits; else its usual result."""
    from transformers.modeling_outputs import CausalLMOutputWithPast, MoeCausalLMOutputWithPast
    from transformers.utils.generic import can_return_tuple

    signature = inspect.signature(original)

    @wraps(original)
    @can_return_tuple
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind(self, *args, **kwargs).arguments
        given.pop(next(iter(given)))  # self
        given.update(given.pop("kwargs", {}))
        refuse(**given)
        labels, targets = given.pop("labels", None), given.pop("shift_labels", None)
        if labels is None and targets is None:
            part.check_alone()
            with part.masks(given) as given:
                return original(self, **given)
        refuse_loss(self, given.pop("logits_to_keep", 0))
        targets = shifted(labels) if targets is None else targets
        count = count_of(targets, given.pop("num_items_in_batch", None))
        if given.get("output_router_logits") is None:  # the config decides
            given.pop("output_router_logits", None)
        mask = given.get("attention_mask")
        with part.of(given, targets) as (given, own):
            outputs = getattr(self, self.base_model_prefix)(**given)
            head = self.get_output_embeddings()
            loss = head(outputs.last_hidden_state, targets=own, count=part.share(count))
        loss, hidden_states = part.loss_of_all(loss), outputs.hidden_states
        logits = getattr(outputs, "router_logits", None)
        if not logits:
            return CausalLMOutputWithPast(loss=loss, hidden_states=hidden_states)
        logits = tuple(part.logits_of_all(one, targets.shape) for one in logits)
        aux_loss = auxiliary_loss(self, logits, mask)
        return MoeCausalLMOutputWithPast(
            loss=loss + self.router_aux_loss_coef * aux_loss,
            aux_loss=aux_loss,
            hidden_states=hidden_states,
            router_logits=logits,
        )

    return forward


def generate_paused(original: Callable[..., Any], installation: Installation) -> Callable[..., Any]:
    """generate() as it was before."""

    @wraps(original)
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        with installation.paused():
            return self.generate(*args, **kwargs)

    return generate


def checkpointing_off(before: Callable[..., None], layers: Iterable[Any]) -> Callable[..., None]:
    """Hugging Face may turn its checkpointing on and off: a chunked layer would run once more for it."""

    @wraps(before)
    def set_checkpointing(self: Any, *args: Any, **kwargs: Any) -> None:
        before(*args, **kwargs)
        for layer in layers:
            if hasattr(layer, "gradient_checkpointing"):
                layer.gradient_checkpointing = False

    return set_checkpointing
