"""FPDT on a Hugging Face model, reversibly; and its attention alone, under a name of its own."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from functools import wraps
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from hmt_deepspeed import ownership
from hmt_deepspeed.families.family import Family
from hmt_deepspeed.families.table import family_of, in_chunks
from hmt_deepspeed.fpdt.attention import chunked_attention
from hmt_deepspeed.fpdt.block import ChunkedLayer
from hmt_deepspeed.fpdt.chunks import ChunkMemory
from hmt_deepspeed.fpdt.gradients import Around
from hmt_deepspeed.fpdt.inputs import AttentionHolder, Holder
from hmt_deepspeed.fpdt.layer import check_layer, heads_of, resolve
from hmt_deepspeed.fpdt.loss import chunked_cross_entropy, count_of, loss_chunk_size, shifted
from hmt_deepspeed.fpdt.masks import visibility_of_mask
from hmt_deepspeed.fpdt.mlp import chunked_tokenwise
from hmt_deepspeed.fpdt.part import SequencePart
from hmt_deepspeed.fpdt.sequence import Group, SequenceParallel
from hmt_deepspeed.fpdt.visibility import Visibility

__all__ = [
    "ATTENTION",
    "Installation",
    "clear_for_fpdt",
    "decoder_layers",
    "install",
    "register_attention",
]

ATTENTION = "hmt_fpdt"
CHUNK_SIZE = 65536  # tokens; the paper's


class Installation:
    """What :func:`install` changed; stays until :meth:`remove`, or until another owner takes the model over.

    Args:
        model: that it is on. engine: whose installation it is, for messages; nothing takes an engine's place while
            that lives.

    Attributes:
        memory: the chunks' store, with its transfer counters.
        sequence: the ranks that share each sequence.
    """

    dropped = False  # the model keeps it

    def __init__(
        self, model: nn.Module, memory: ChunkMemory, sequence: SequenceParallel, engine: str = ""
    ) -> None:
        self.model, self.engine = model, engine
        self.memory, self.sequence = memory, sequence
        self._changes: list[tuple[Callable[[], object], Callable[[], object]]] = []
        self._replaced: list[nn.Module] = []

    def replace_method(self, module: Any, name: str, method: Callable[..., Any]) -> None:
        """Gives one module another method until :meth:`remove`."""
        before = vars(module).get(name)
        bound = MethodType(method, module)

        def undo() -> None:
            if before is None:
                delattr(module, name)
            else:
                setattr(module, name, before)

        self._change(lambda: setattr(module, name, bound), undo)
        self._replaced.append(module)

    def set_config(self, config: Any, name: str, value: object) -> None:
        """Sets an attribute until :meth:`remove`."""
        before = getattr(config, name)
        self._change(lambda: setattr(config, name, value), lambda: setattr(config, name, before))

    def _change(self, do: Callable[[], object], undo: Callable[[], object]) -> None:
        do()
        self._changes.append((do, undo))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """The model is its own for a while: caches and all."""
        for _, undo in reversed(self._changes):
            undo()
        try:
            yield
        finally:
            for do, _ in self._changes:
                do()

    def remove(self) -> None:
        """Restores the model and frees the host memory. Idempotent."""
        ownership.leave(self)
        while self._changes:
            self._changes.pop()[1]()
        self.memory.close()

    def owner_name(self) -> str:
        """See :class:`hmt_deepspeed.ownership.Owner`."""
        return f"an earlier FPDT installation on {type(self.model).__name__}"

    def owned(self) -> Iterable[nn.Module]:
        """The modules whose forward is replaced, and the model."""
        return [self.model, *self._replaced]

    def unfinished(self) -> str:
        """The engine that it belongs to."""
        return f"it is that of {self.engine}, which is in use" if self.engine else ""

    def give_up(self, to: str) -> None:
        """As :meth:`remove`."""
        self.remove()


def install(
    model: Any,
    chunk_size: int = CHUNK_SIZE,
    piece_size: int | None = None,
    offload_kv: bool = True,
    group: Group | None = None,
    around_backward: Around = nullcontext,
    holders: Mapping[nn.Module, Holder] | None = None,
    attention_holders: Mapping[nn.Module, AttentionHolder] | None = None,
    engine: str = "",
) -> Installation:
    """Replaces the forward of a causal language model's decoder layers, last norm and loss.

    Everything computes what it did; with labels the model returns the loss without logits, and layers keep
    their input only. ``use_cache`` is off until :meth:`Installation.remove`.

    Args:
        model: of transformers, of a family whose row names its layer.
        chunk_size: tokens of a chunk in attention.
        piece_size: tokens that projections, MLP and loss take at once; default a quarter of a chunk, since
            MLP and vocabulary are several times as wide as the rest.
        offload_kv: keep chunks in pinned host memory between their uses.
        group: ranks that share each sequence. They call the model with the same whole rows, with labels;
            each computes its part, returns the loss of all, and has gradients whose mean over the ranks is
            the loss's.
        around_backward: entered for the time of each layer's backward, and of the head's.
        holders: of the inputs of layers, and of the head, between forward and backward, piece by piece;
            autograd saves those of other modules as they are.
        attention_holders: of layers' attention, whose backward then does not attend again.
        engine: see :class:`Installation`.

    Raises:
        ValueError: another family, or a setting that would change the result.
    """
    if chunk_size < 1 or (piece_size is not None and piece_size < 1):
        raise ValueError(
            f"fpdt.chunk_size and piece_size are tokens, at least 1; got {chunk_size}, {piece_size}"
        )
    clear_for_fpdt(model)
    layers, family = decoder_layers(model), _family_of(model)
    base = getattr(model, model.base_model_prefix)
    sequence = SequenceParallel(group)
    sequence.check_heads(*heads_of(layers[0], family)[:2])
    if chunk_size < sequence.size:
        raise ValueError(
            f"fpdt.chunk_size is {chunk_size}, fewer tokens than the {sequence.size} ranks that share it"
        )
    from transformers import AttentionInterface

    if ATTENTION not in AttentionInterface():
        register_attention()
    holders, attention_holders = holders or {}, attention_holders or {}
    installation = Installation(model, ChunkMemory(offload_kv), sequence, engine)
    piece_size = piece_size or max(1, chunk_size // 4)
    with ExitStack() as undo:
        undo.callback(installation.remove)
        for layer in layers:
            chunked = ChunkedLayer(
                layer,
                family,
                chunk_size,
                piece_size,
                installation.memory,
                sequence,
                around_backward,
                holders.get(layer),
                attention_holders.get(layer),
            )
            forward = _layer_forward(type(layer).forward, chunked)
            installation.replace_method(layer, "forward", forward)
            if hasattr(layer, "gradient_checkpointing"):  # it would run the whole layer once more
                installation.set_config(layer, "gradient_checkpointing", False)
        norm = resolve(base, family.final_norm)
        if norm is not None:
            forward = _tokenwise_forward(norm.forward, piece_size)
            installation.replace_method(norm, "forward", forward)
        head = model.get_output_embeddings()
        size = loss_chunk_size(model.config.vocab_size, piece_size)
        part = SequencePart(family, sequence, chunk_size)
        forward = _head_forward(head.forward, size, around_backward, holders.get(head))
        installation.replace_method(head, "forward", forward)
        installation.replace_method(model, "forward", _model_forward(type(model).forward, part))
        installation.replace_method(
            model, "generate", _generate(type(model).generate, installation)
        )
        checkpointing = _set_checkpointing(model._set_gradient_checkpointing, layers)
        installation.replace_method(model, "_set_gradient_checkpointing", checkpointing)
        installation.set_config(model.config, "_attn_implementation", ATTENTION)
        installation.set_config(model.config, "use_cache", False)
        undo.pop_all()
    ownership.claim(installation)
    return installation


def clear_for_fpdt(model: nn.Module) -> None:
    """Take the model's modules over from earlier activation backends and installations.

    Raises:
        ValueError: one of them is in use.
    """
    ownership.take_over(model.modules(), "FPDT", warnings.warn)


def decoder_layers(model: Any) -> nn.ModuleList:
    """The layers that :func:`install` would replace; ValueError when it would refuse."""
    family = _family_of(model)
    base = getattr(model, model.base_model_prefix)
    layers: nn.ModuleList = resolve(base, family.layers)
    for layer in layers:
        check_layer(layer, family)
    for module in (layers, resolve(base, family.final_norm), model.get_output_embeddings()):
        if module is not None:  # OPT may have no last norm
            _refuse_dropout(module)
    return layers


def register_attention(chunk_size: int = CHUNK_SIZE) -> None:
    """Registers ``attn_implementation="hmt_fpdt"`` with transformers: attention alone, in chunks.

    For models whose layers are not replaced: Q, K and V are there as a whole, attention's workspace is
    that of a chunk, documents and windows cost only what is seen. Repeat with another ``chunk_size`` to
    change it.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        dropout: float = 0.0,
        scaling: float | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        _refuse(dropout=dropout, **kwargs)
        visibility = _as_visibility(attention_mask)
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        out = chunked_attention(query, key, value, visibility, chunk_size, scale)
        return out.transpose(1, 2).contiguous(), None

    AttentionInterface.register(ATTENTION, attention)
    # Without one of its own, HF would drop a padding mask without a word.
    AttentionMaskInterface.register(ATTENTION, visibility_of_mask)


# -- the replaced forwards ------------------------------------------------------------------------------


def _layer_forward(original: Callable[..., Any], chunked: ChunkedLayer) -> Callable[..., Tensor]:
    signature = inspect.signature(original)

    @wraps(original)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        given = signature.bind(self, *args, **kwargs).arguments
        _refuse(**given, **given.get("kwargs", {}))
        visibility = _as_visibility(given.get("attention_mask"))
        return chunked(given["hidden_states"], visibility, given.get("position_embeddings"))

    return forward


def _tokenwise_forward(
    original: Callable[[Tensor], Tensor], piece_size: int
) -> Callable[[nn.Module, Tensor], Tensor]:
    """Chunks go through the forward itself, so that the module's own hooks fire once for all of them."""

    @wraps(original)
    def forward(self: nn.Module, hidden_states: Tensor) -> Tensor:
        return chunked_tokenwise(self, original, hidden_states, piece_size)

    return forward


def _head_forward(
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


def _model_forward(original: Callable[..., Any], part: SequencePart) -> Callable[..., Any]:
    from transformers.modeling_outputs import CausalLMOutputWithPast
    from transformers.utils.generic import can_return_tuple

    signature = inspect.signature(original)

    @wraps(original)
    @can_return_tuple
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind(self, *args, **kwargs).arguments
        given.pop(next(iter(given)))  # self
        given.update(given.pop("kwargs", {}))
        _refuse(**given)
        labels, targets = given.pop("labels", None), given.pop("shift_labels", None)
        if labels is None and targets is None:
            part.check_alone()
            return original(self, **given)
        _refuse_loss(self, given.pop("logits_to_keep", 0))
        targets = shifted(labels) if targets is None else targets
        count = count_of(targets, given.pop("num_items_in_batch", None))
        with part.of(given, targets) as (given, targets):
            outputs = getattr(self, self.base_model_prefix)(**given)
            head = self.get_output_embeddings()
            loss = head(outputs.last_hidden_state, targets=targets, count=part.share(count))
        return CausalLMOutputWithPast(
            loss=part.loss_of_all(loss), hidden_states=outputs.hidden_states
        )

    return forward


def _generate(original: Callable[..., Any], installation: Installation) -> Callable[..., Any]:
    @wraps(original)
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        with installation.paused():  # generate() is what it was before FPDT
            return self.generate(*args, **kwargs)

    return generate


def _set_checkpointing(before: Callable[..., None], layers: Iterable[Any]) -> Callable[..., None]:
    """Hugging Face may turn its checkpointing on and off: a chunked layer would run once more for it."""

    @wraps(before)
    def set_checkpointing(self: Any, *args: Any, **kwargs: Any) -> None:
        before(*args, **kwargs)
        for layer in layers:
            if hasattr(layer, "gradient_checkpointing"):
                layer.gradient_checkpointing = False

    return set_checkpointing


# -- refusals -------------------------------------------------------------------------------------------


def _family_of(model: Any) -> Family:
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


def _refuse_dropout(module: nn.Module) -> None:
    """An adapter's too, of which the model's config does not know."""
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


def _refuse(**given: Any) -> None:
    for name, advice in _MUST_BE_ABSENT.items():
        value = given.get(name)
        if value is not None and value is not False and not (name == "dropout" and value == 0):
            raise ValueError(f"FPDT was called with {name}: {advice}")
    if given.get("is_causal") is False:
        raise ValueError("FPDT was called with is_causal=False: it attends causally only")


def _refuse_loss(model: Any, logits_to_keep: Any) -> None:
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


def _as_visibility(attention_mask: Any) -> Visibility:
    if not isinstance(attention_mask, Visibility):
        raise ValueError(
            f"FPDT makes its mask from a 2-dimensional attention_mask and position_ids, got "
            f"{type(attention_mask).__name__}: do not pass a mask of your own"
        )
    return attention_mask
