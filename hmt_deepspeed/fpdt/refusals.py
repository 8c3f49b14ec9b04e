"""Refuses what FPDT does not compute: settings of a model, and arguments of a call."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from hmt_deepspeed.families.family import Family
from hmt_deepspeed.families.table import family_of, in_chunks
from hmt_deepspeed.fpdt.attention import ATTENTION
from hmt_deepspeed.fpdt.visibility import Visibility

__all__ = [
    "as_visibility",
    "chunked_family",
    "refuse",
    "refuse_dropout",
    "refuse_loss",
]


def chunked_family(model: Any) -> Family:
    """The row of a model that can run in chunks.

    Raises:
        ValueError: another family, no language-model head, or a setting that would change the result.
    """
    config = getattr(model, "config", None)
    family = family_of(config)
    if family is None or not family.layer:
        kind = getattr(config, "model_type", type(model).__name__)
        raise ValueError(
            f"FPDT replaces the layers of {', '.join(in_chunks())}; this model is {kind!r}: leave hmt.fpdt "
            f'out, or load it with attn_implementation="{ATTENTION}" for chunked attention alone'
        )
    if model.get_output_embeddings() is None or not hasattr(model, "loss_function"):
        raise ValueError(
            f"FPDT trains causal language models, got {type(model).__name__} without a language-model "
            "head: load the model as ForCausalLM"
        )
    config = model.config
    for name in family.dropouts:
        if getattr(config, name, 0.0):
            raise ValueError(
                f"the model's {name} is {getattr(config, name)}: FPDT computes chunks twice and drops "
                f"nothing out. Set {name} to 0 in the model's config"
            )
    for name in (*family.forbidden, "attn_logit_softcapping", "final_logit_softcapping"):
        if getattr(config, name, None):
            raise ValueError(
                f"the model's {name} is {getattr(config, name)!r}, which FPDT does not compute: leave "
                "hmt.fpdt out for this model"
            )
    return family


def refuse_dropout(module: nn.Module) -> None:
    """Refuse modules that drop something out; an adapter's too, of which the model's config does not know.

    Raises:
        ValueError: there is one.
    """
    for name, inner in module.named_modules():
        if isinstance(inner, _DropoutNd) and inner.p > 0:
            raise ValueError(
                f"{name} of the model drops out with p={inner.p}: FPDT computes chunks twice and drops nothing "
                "out. Set it to 0; of an adapter in its own config (lora_dropout)"
            )


_MUST_BE_ABSENT = {
    "cache": "keys and values of earlier tokens: pass use_cache=False (generate() pauses FPDT)",
    "past_key_values": "a cache: pass use_cache=False (generate() pauses FPDT)",
    "layer_past": "a cache: pass use_cache=False (generate() pauses FPDT)",
    "encoder_hidden_states": "cross attention: leave hmt.fpdt out",
    "output_attentions": "attention weights, which are never formed: do not ask for them",
    "dropout": "attention dropout: set it to 0 in the model's config",
    "softcap": "a soft cap on the scores: use another attn_implementation",
    "s_aux": "attention sinks: use another attn_implementation",
    "head_mask": "a head mask: do not pass one",
}


def refuse(**given: Any) -> None:
    """Refuse arguments that ask for what FPDT does not compute.

    Raises:
        ValueError: one of them is given.
    """
    for name, advice in _MUST_BE_ABSENT.items():
        value = given.get(name)
        if value is not None and value is not False and not (name == "dropout" and value == 0):
            raise ValueError(f"FPDT was called with {name}: {advice}")
    if given.get("is_causal") is False:
        raise ValueError("FPDT was called with is_causal=False: it attends causally only")


def refuse_loss(model: Any, logits_to_keep: Any) -> None:
    """Refuse another loss than transformers' ForCausalLMLoss over all tokens.

    Raises:
        ValueError: the model has another, or some logits are asked for.
    """
    from transformers.loss.loss_utils import ForCausalLMLoss

    if not isinstance(logits_to_keep, int) or logits_to_keep:
        raise ValueError(
            f"logits_to_keep is {logits_to_keep!r} beside labels: FPDT's loss is over all tokens, pass 0"
        )
    if model.loss_function is not ForCausalLMLoss:
        raise ValueError(
            "the model has a loss function of its own, FPDT computes transformers' ForCausalLMLoss: leave "
            "it at that, or compute the loss from the logits outside the model"
        )


def as_visibility(attention_mask: Any) -> Visibility:
    """The mask that a layer was called with, which FPDT's own mask function has made.

    Raises:
        ValueError: it is another.
    """
    if not isinstance(attention_mask, Visibility):
        raise ValueError(
            f"FPDT makes its mask from a 2-dimensional attention_mask and position_ids, got "
            f"{type(attention_mask).__name__}: do not pass a mask of your own"
        )
    return attention_mask
