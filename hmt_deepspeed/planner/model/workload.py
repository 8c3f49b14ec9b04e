"""The workload of one micro-batch on a rank: FLOPs, bytes saved for backward, and recomputation.

The unit is a decoder layer under the activation backend, a row of sites (`layer_sites.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hmt_deepspeed.config.codecs import is_lossy
from hmt_deepspeed.config.components import Choice
from hmt_deepspeed.planner.model.flops import Attention, Projected, layer_flops
from hmt_deepspeed.planner.model.layer_sites import Site, head_sites, layer_sites
from hmt_deepspeed.planner.model.saved import backward_extra, head_saved, layer_saved, shared_saved
from hmt_deepspeed.planner.model.shapes import ModelShape, Role, num_parameters, parameters

__all__ = [
    "Head",
    "Layer",
    "Workload",
    "build_workload",
    "check_sizes",
    "made_again",
    "recompute_flops",
]


@dataclass(frozen=True)
class Layer:
    """Equal decoder layers; every number is of one of them and one micro-batch.

    Attributes:
        layers: their numbers.
        sites: in forward order; the layer's input first.
        forward_flops: of everything heavy in the model itself.
        projection_flops: of the products ``X [Q | P]``, in forward.
        backward_flops: without any recompute but that of the attention op itself.
        model_flops: of an ordinary forward and backward, see :attr:`Workload.model_flops`.
        parameters: elements of its weights.
        freed_inputs: bytes of linears' inputs, by role, that projected backward does without when most is
            alive; the down projection's has gone by then.
        weight_gradient_bytes: of the linear with the largest, whole or projected.
        saved_bytes: activations that autograd would save with no checkpointing at all.
        working_bytes: alive at once while its backward runs, beside what every layer holds; as if nothing but
            its input were held.
    """

    layers: tuple[int, ...]
    sites: tuple[Site, ...]
    forward_flops: int
    projection_flops: int
    backward_flops: int
    model_flops: int
    parameters: int
    freed_inputs: Mapping[Role, int] = field(hash=False)
    weight_gradient_bytes: int
    saved_bytes: int
    working_bytes: int

    @property
    def count(self) -> int:
        """Number of equal layers."""
        return len(self.layers)

    @property
    def projected_bytes(self) -> int:
        """Products ``X [Q | P]`` of one layer."""
        return sum(s.nbytes for s in self.sites if s.component == "projected_inputs")


@dataclass(frozen=True)
class Head:
    """Final norm, language-model head and loss; with them what few FLOPs precede the layers.

    Attributes:
        sites: ``final_norm`` (its input, where there is one) and ``lm_head`` (its input).
        logits_bytes: alive at once at the loss: logits, their fp32 log-softmax and the gradient of both.
        saved_bytes: activations that autograd saves from the final norm to the loss.
    """

    sites: tuple[Site, ...]
    forward_flops: int
    backward_flops: int
    logits_bytes: int
    saved_bytes: int


@dataclass(frozen=True)
class Workload:
    """One micro-batch of a model on one rank.

    Attributes:
        shape: the model. micro_batch, seq_length: of this rank. itemsize: bytes of a computed element.
        layers: groups of equal layers. head: what follows them.
        shared_bytes: saved outside both: rotary tables, the embedding's dropout mask.
    """

    shape: ModelShape
    micro_batch: int
    seq_length: int
    itemsize: int
    attention: Attention
    projected: Projected | None
    layers: tuple[Layer, ...]
    head: Head
    shared_bytes: int

    @property
    def tokens(self) -> int:
        """Tokens of the micro-batch."""
        return self.micro_batch * self.seq_length

    @property
    def sites(self) -> tuple[Site, ...]:
        """Every site: equal layers are one with a count; those of the head come last."""
        return tuple(s for layer in self.layers for s in layer.sites) + self.head.sites

    @property
    def parameters(self) -> int:
        """Elements of the model's parameters, tied ones once."""
        return num_parameters(self.shape)

    @property
    def model_flops(self) -> int:
        """FLOPs of ordinary training, which MFU counts (PaLM, 2204.02311, appendix B).

        Forward and twice as much for backward: 6 per token and weight that it is multiplied with, and
        12 L H Q T for attention over T tokens (those of the window), masked or not; no recompute. What a
        projected backward and a causal kernel leave out is counted: MFU says how fast a model trains, not how
        busy the device is, which is HFU.
        """
        layers = sum(layer.count * layer.model_flops for layer in self.layers)
        return layers + self.head.forward_flops + self.head.backward_flops

    @property
    def forward_flops(self) -> int:
        """FLOPs of a forward, projections included."""
        layers = sum(x.count * (x.forward_flops + x.projection_flops) for x in self.layers)
        return self.head.forward_flops + layers

    @property
    def backward_flops(self) -> int:
        """FLOPs of a backward without recompute."""
        return self.head.backward_flops + sum(x.count * x.backward_flops for x in self.layers)

    @property
    def saved_bytes(self) -> int:
        """Activations saved by a forward with no checkpointing; of the logits their fp32 log-softmax."""
        layers = sum(layer.count * layer.saved_bytes for layer in self.layers)
        return self.shared_bytes + layers + self.head.saved_bytes


# -- recompute --------------------------------------------------------------------------------------


def made_again(layer: Layer, choices: Mapping[str, Choice]) -> tuple[Site, ...]:
    """The sites that backward of one layer makes again, because they are not held.

    Backward reads every site, so each that is not held is made again, and what it depends on is there. One
    that is held is made again all the same where its pair is not what forward had: attention's output and
    log-sum-exp belong to the queries, keys and values they came from, and those that come back with an error,
    from their own codec or from their lossily held input, are others, with 1.7 to 2.1 times the
    gradient error.

    Args:
        choices: by name of the layer's sites.

    Raises:
        ValueError: a site without a choice, or one that is not legal for it.
    """
    again: set[str] = set()
    for site in layer.sites:
        choice = choices.get(site.name)
        if choice not in site.legal:
            raise ValueError(
                f"{site.name} of layers {layer.layers[0]}..{layer.layers[-1]}: choice is {choice!r}; "
                f"legal: {site.legal}. Give every site of the layer one of its choices."
            )
        if choice == "recompute":
            again.add(site.name)
    qkv = choices.get("attention_qkv")  # layers without attention have none
    if qkv is not None and is_lossy(choices["layer_input"] if qkv == "recompute" else qkv):
        again.add("attention_output")
    return tuple(site for site in layer.sites if site.name in again)


def recompute_flops(layer: Layer, choices: Mapping[str, Choice]) -> int:
    """FLOPs of :func:`made_again`."""
    return sum(site.flops for site in made_again(layer, choices))


# -- building ---------------------------------------------------------------------------------------


def build_workload(
    shape: ModelShape,
    *,
    micro_batch: int,
    seq_length: int,
    itemsize: int = 2,
    attention: Attention = "fused",
    projected: Projected | None = None,
) -> Workload:
    """The work of one micro-batch.

    Args:
        itemsize: 2 for bf16 and fp16, 4 for fp32.
        attention: how it is computed; a model whose scores are capped has ``eager``.
        projected: of projected backward; linears that it cannot patch (GPT-2's ``Conv1D``) stay as they are.

    Raises:
        ValueError: a size below 1, a sequence longer than the learned positions, or fused attention asked of
            a model that has none.
    """
    check_sizes(shape, micro_batch, seq_length)
    _check(shape, itemsize, attention)
    if shape.conv1d:
        projected = None
    windows = shape.windows or (0,) * shape.layers
    groups: dict[
        tuple[int, Projected | None], list[int]
    ] = {}  # alike but for those with ranks of their own
    for number, window in enumerate(windows):
        own = None if projected is None else projected.at_layer(number, shape.names)
        groups.setdefault((window, own), []).append(number)
    sizes = (micro_batch, seq_length, itemsize)
    return Workload(
        shape=shape,
        micro_batch=micro_batch,
        seq_length=seq_length,
        itemsize=itemsize,
        attention=attention,
        projected=projected,
        layers=tuple(
            _layer(shape, tuple(numbers), *sizes, attention, window, own)
            for (window, own), numbers in groups.items()
        ),
        head=_head(shape, micro_batch * seq_length, itemsize),
        shared_bytes=sum(shared_saved(shape, *sizes).values()),
    )


def _layer(
    shape: ModelShape,
    numbers: tuple[int, ...],
    micro_batch: int,
    seq_length: int,
    itemsize: int,
    attention: Attention,
    window: int,
    projected: Projected | None,
) -> Layer:
    tokens, fused = micro_batch * seq_length, attention == "fused"
    reach = min(window, seq_length) if window else seq_length
    flops = layer_flops(shape, micro_batch, seq_length, attention, window, projected)
    saved = layer_saved(shape, micro_batch, seq_length, itemsize, fused=fused, freed=flops.freed)
    every = layer_saved(shape, micro_batch, seq_length, itemsize, fused=fused)
    saved_bytes = sum(saved.values()) + flops.projection_columns * tokens * itemsize
    return Layer(
        layers=numbers,
        sites=layer_sites(shape, numbers, tokens, itemsize, fused, flops),
        forward_flops=sum(flops.forward.values()) + flops.attention,
        projection_flops=flops.projections,
        backward_flops=flops.input_gradients + flops.weight_gradients + flops.attention_backward,
        model_flops=3 * (sum(flops.forward.values()) + _whole_attention(shape, tokens, reach)),
        parameters=sum(p.numel for p in parameters(shape) if p.name.startswith(shape.names.layer)),
        freed_inputs={
            role: every.get(f"{role}_input", 0) for role in flops.freed if role != "down"
        },
        weight_gradient_bytes=flops.largest_gradient * itemsize,
        saved_bytes=saved_bytes,
        working_bytes=saved_bytes + backward_extra(shape, tokens, itemsize, flops.freed),
    )


def _whole_attention(shape: ModelShape, tokens: int, reach: int) -> int:
    """FLOPs of a forward's two products of ``reach`` keys for each query."""
    return 4 * tokens * shape.query_width * reach


def _head(shape: ModelShape, tokens: int, itemsize: int) -> Head:
    width = shape.embedding_size or shape.hidden
    product = 2 * tokens * width * shape.vocab
    if width != shape.hidden:  # project_in and project_out
        product += 4 * tokens * width * shape.hidden
    logits = tokens * shape.vocab
    return Head(
        sites=head_sites(shape, tokens, itemsize),
        forward_flops=product,
        backward_flops=2 * product,
        # the logits, and in fp32 their log-softmax, its gradient and theirs
        logits_bytes=logits * (itemsize + 3 * 4),
        saved_bytes=sum(head_saved(shape, tokens, itemsize).values()),
    )


def check_sizes(shape: ModelShape, micro_batch: int, seq_length: int) -> None:
    """Refuse a batch or a sequence that a model cannot have.

    Raises:
        ValueError: a size below 1, or a sequence longer than the learned positions.
    """
    for name, value in (("micro_batch", micro_batch), ("seq_length", seq_length)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name} is {value!r}; legal: an integer >= 1. Give that.")
    if shape.positions and seq_length > shape.max_length:
        raise ValueError(
            f"seq_length is {seq_length}; legal for {shape.family}: at most {shape.max_length}, its learned "
            "positions. Shorten the sequences or take a model with more positions."
        )


def _check(shape: ModelShape, itemsize: int, attention: Attention) -> None:
    if itemsize not in (2, 4):
        raise ValueError(
            f"itemsize is {itemsize!r}; legal: 2 (bf16, fp16) or 4 (fp32). Give one of them."
        )
    if attention not in ("fused", "eager"):
        raise ValueError(
            f"attention is {attention!r}; legal: 'fused' or 'eager'. Give one of them."
        )
    if shape.soft_cap and attention == "fused":
        raise ValueError(
            f"attention is 'fused', but {shape.family} caps its scores, which only 'eager' does here; "
            "legal: 'eager'. Give that."
        )
