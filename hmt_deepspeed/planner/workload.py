"""What one micro-batch asks of a rank: FLOPs, bytes held for backward and what recomputes from what.

The unit is a decoder layer under the activation backend. Its *sites* are the tensors that a choice is
made for (``sites.py``), its steps the heavy ops (matrix products and the attention op)::

    layer_input -> [attention_qkv] -> [attention_output] -> [residual] -> [mlp_intermediate] -> [down]

A site's ``flops`` make it from its ``depends``; norms, activation functions, rotary positions and sums run
again and are not counted. The down projection's output is the next layer's input and is never made again.
FLOPs are two per multiply-add, as ``torch.utils.flop_counter`` counts them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from hmt_deepspeed.planner.saved import head_saved, layer_saved, shared_saved
from hmt_deepspeed.planner.shapes import (
    Linear,
    ModelShape,
    layer_linears,
    num_parameters,
    parameters,
)
from hmt_deepspeed.sites import LEGAL_CHOICES, Choice, Component, held_bytes

__all__ = [
    "Attention",
    "Head",
    "Layer",
    "Projected",
    "Site",
    "Workload",
    "attention_flops",
    "build_workload",
    "recompute_flops",
]

# How attention is computed:
#   fused  one op (flash): only the pairs that the mask and the window leave; backward computes the scores
#          again; output and log-sum-exp are kept
#   eager  two products over all pairs of tokens, the probabilities kept
Attention = Literal["fused", "eager"]

_LOSSY: tuple[Choice, ...] = ("int8", "fp8")


@dataclass(frozen=True)
class Site:
    """A tensor that backward needs, in ``count`` equal layers.

    Attributes:
        name: unique within a layer: ``layer_input``, ``attention_qkv``, ``attention_output``, ``residual``,
            ``mlp_intermediate``; outside the layers ``final_norm``, ``lm_head``.
        component: whose choice it follows; the first layer's input is ``embedding``.
        layers: numbers of the layers it stands for, (-1,) outside the layers.
        tokens, channels, itemsize: of the tensor, as computed.
        flops: of making it from ``depends``; 0 where nothing heavy makes it.
        raw_bytes: held beside it as they are with every choice but ``recompute`` (log-sum-exp).
        depends: names of the sites of the same layer that making it again reads.
        legal: choices open to it.
    """

    name: str
    component: Component
    layers: tuple[int, ...]
    tokens: int
    channels: int
    itemsize: int
    flops: int
    raw_bytes: int
    depends: tuple[str, ...]
    legal: tuple[Choice, ...]

    @property
    def count(self) -> int:
        """Layers that it stands for."""
        return len(self.layers)

    @property
    def nbytes(self) -> int:
        """Bytes of one such tensor as computed: what a swap moves."""
        return self.tokens * self.channels * self.itemsize

    def device_bytes(self, choice: Choice, block_size: int = 256) -> int:
        """Device bytes that one such tensor holds until backward.

        Raises:
            ValueError: a choice that is not legal here.
        """
        if choice not in self.legal:
            raise ValueError(
                f"{self.name} ({self.component}): choice is {choice!r}; legal: {self.legal}. Choose one "
                "of them."
            )
        raw = 0 if choice == "recompute" else self.raw_bytes
        return raw + held_bytes(choice, self.tokens, self.channels, self.itemsize, block_size)


@dataclass(frozen=True)
class Layer:
    """Equal decoder layers; every number is of one of them and one micro-batch.

    Attributes:
        layers: their numbers.
        sites: in forward order; the layer's input first.
        forward_flops: of everything heavy in the model itself.
        projection_flops: of the products ``X [Q | P]``, in forward; never made again.
        backward_flops: without any recompute.
        parameters: elements of its weights.
        projected_bytes: products ``X [Q | P]`` held for projected backward with every choice.
        saved_bytes: activations that autograd would save with no checkpointing at all.
        working_bytes: alive at once while its backward runs, beyond what is held between layers.
    """

    layers: tuple[int, ...]
    sites: tuple[Site, ...]
    forward_flops: int
    projection_flops: int
    backward_flops: int
    parameters: int
    projected_bytes: int
    saved_bytes: int
    working_bytes: int

    @property
    def count(self) -> int:
        """How many equal layers."""
        return len(self.layers)


@dataclass(frozen=True)
class Head:
    """Final norm, language-model head and loss.

    Attributes:
        sites: ``final_norm`` (its input) and ``lm_head`` (its input).
        logits_bytes: alive at once at the loss: logits, their fp32 log-softmax and the gradient of both.
        saved_bytes: activations that autograd saves from the final norm to the loss.
    """

    sites: tuple[Site, ...]
    forward_flops: int
    backward_flops: int
    logits_bytes: int
    saved_bytes: int


@dataclass(frozen=True)
class Projected:
    """Projected backward: columns ``r + k`` that a linear of some shape is projected on.

    Attributes:
        rank, probes: r and k of every projected linear, lowered to what a smaller matrix has.
        side: ``right`` saves ``X [Q | P]`` instead of the input, ``left`` spares FLOPs only.
        shared: linears that read one input share one basis.
    """

    rank: int
    probes: int
    side: Literal["right", "left"] = "right"
    shared: bool = False

    def __post_init__(self) -> None:
        """Raise ValueError for a rank or a number of probes that no matrix can have."""
        for field, least in (("rank", 1), ("probes", 0)):
            value = getattr(self, field)
            if not isinstance(value, int) or value < least:
                raise ValueError(
                    f"Projected: {field} is {value!r}; legal: an integer >= {least}. Give that."
                )


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
        """FLOPs of forward and backward of the model itself, twice the forward for backward: MFU's count."""
        forward = sum(layer.count * layer.forward_flops for layer in self.layers)
        return 3 * (forward + self.head.forward_flops)

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


# -- FLOPs ------------------------------------------------------------------------------------------


def attention_flops(
    shape: ModelShape, micro_batch: int, seq_length: int, attention: Attention, window: int = 0
) -> tuple[int, int]:
    """FLOPs of one layer's attention op, forward and backward.

    Args:
        window: tokens that a query sees, itself included; 0 for all before it.
    """
    pairs = seq_length * seq_length
    if attention == "fused":
        reach = min(window, seq_length) if window else seq_length
        pairs = reach * (reach + 1) // 2 + (seq_length - reach) * reach
    product = 2 * micro_batch * shape.heads * shape.head_dim * pairs  # Q K^T, and as much P V
    return 2 * product, (5 if attention == "fused" else 4) * product


def projection_widths(linears: Sequence[Linear], projected: Projected | None) -> list[int]:
    """Columns ``r + k`` of each linear; 0 where it is not projected."""
    if projected is None:
        return [0] * len(linears)
    widths = []
    for linear in linears:
        side = linear.inputs if projected.side == "right" else linear.outputs
        rank = min(projected.rank, linear.inputs, linear.outputs)
        widths.append(rank + min(projected.probes, side - rank))
    return widths


def _projection_flops(
    linears: Sequence[Linear], widths: Sequence[int], tokens: int, projected: Projected | None
) -> tuple[int, int, int]:
    """FLOPs in forward and backward for the weight gradients of one layer, and bytes/itemsize held.

    Full: ``D^T X``. Right: ``X [Q | P]`` in forward, ``D^T (X [Q | P])`` in backward. Left: ``D B`` and
    ``(D B)^T X``, both in backward, X held by who holds it.
    """
    forward = backward = columns = 0
    for role in ("qkv", "out", "up", "down"):
        seen = False
        for linear, width in zip(linears, widths, strict=True):
            if linear.role != role:
                continue
            if projected is None or width == 0:
                backward += 2 * tokens * linear.inputs * linear.outputs
            elif projected.side == "left":
                backward += 2 * tokens * width * (linear.inputs + linear.outputs)
            else:
                if not (projected.shared and seen):
                    forward += 2 * tokens * linear.inputs * width
                    columns += width
                backward += 2 * tokens * linear.outputs * width
            seen = True
    return forward, backward, columns


# -- sites ------------------------------------------------------------------------------------------

_DEPENDS = {
    "attention_qkv": ("layer_input",),
    "attention_output": ("attention_qkv",),
    "residual": ("attention_output",),
    "mlp_intermediate": ("layer_input", "residual"),
}


def _layer_sites(
    shape: ModelShape,
    layers: tuple[int, ...],
    tokens: int,
    itemsize: int,
    flops: Mapping[str, int],
    log_sum_exp: int,
) -> tuple[Site, ...]:
    """The five sites of a group of equal layers."""
    first = layers == (0,)
    channels: dict[str, tuple[Component, int]] = {
        "layer_input": ("embedding" if first else "residual", shape.hidden),
        "attention_qkv": ("attention_qkv", shape.query_width + 2 * shape.kv_width),
        "attention_output": ("attention_output", shape.query_width),
        "residual": ("residual", shape.hidden),
        "mlp_intermediate": ("mlp_intermediate", shape.num_up * shape.intermediate),
    }
    sites = []
    for name, (component, width) in channels.items():
        legal = LEGAL_CHOICES[component]
        if name == "layer_input":  # nothing within the layer could make it again
            legal = tuple(choice for choice in legal if choice != "recompute")
        depends = _DEPENDS.get(name, ())
        if name == "mlp_intermediate" and shape.parallel:
            depends = ("layer_input",)
        raw = log_sum_exp if name == "attention_output" else 0
        made = flops.get(name, 0)
        site = Site(name, component, layers, tokens, width, itemsize, made, raw, depends, legal)
        sites.append(site)
    return tuple(sites)


def recompute_flops(layer: Layer, choices: Mapping[str, Choice]) -> int:
    """FLOPs that backward of one layer spends on making again what is not held.

    Backward reads every site, so each that is not held is made again, and what it depends on is there. One
    that is held is made again all the same where its pair is not what forward had: attention's output and
    log-sum-exp belong to the queries, keys and values they came from, and those, made again from a lossily
    held input, are others (``reference/activations.md``: 1.7 to 2.1 times the gradient error).

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
    if choices["layer_input"] in _LOSSY and "attention_qkv" in again:
        again.add("attention_output")
    return sum(site.flops for site in layer.sites if site.name in again)


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
    _check(shape, micro_batch, seq_length, itemsize, attention)
    if shape.conv1d:
        projected = None
    groups: dict[int, list[int]] = {}
    for number in range(1, shape.layers):
        groups.setdefault(shape.windows[number] if shape.windows else 0, []).append(number)
    first = shape.windows[0] if shape.windows else 0
    parts = [(first, (0,)), *((window, tuple(numbers)) for window, numbers in groups.items())]
    sizes = (micro_batch, seq_length, itemsize)
    return Workload(
        shape,
        *sizes,
        attention,
        projected,
        tuple(
            _layer(shape, numbers, *sizes, attention, window, projected)
            for window, numbers in parts
        ),
        _head(shape, micro_batch * seq_length, itemsize),
        sum(shared_saved(shape, *sizes).values()),
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
    linears = layer_linears(shape)
    by_role = {
        role: sum(2 * tokens * x.inputs * x.outputs for x in linears if x.role == role)
        for role in ("qkv", "out", "up", "down")
    }
    forward_attention, backward_attention = attention_flops(
        shape, micro_batch, seq_length, attention, window
    )
    widths = projection_widths(linears, projected)
    extra, weights, columns = _projection_flops(linears, widths, tokens, projected)
    flops = {
        "attention_qkv": by_role["qkv"],
        "attention_output": forward_attention,
        "residual": by_role["out"],
        "mlp_intermediate": by_role["up"],
    }
    right = projected is not None and projected.side == "right"
    sizes = (micro_batch, seq_length, itemsize)
    saved = sum(layer_saved(shape, *sizes, fused=fused, projected=right).values())
    held = columns * tokens * itemsize
    wide = tokens * shape.intermediate * itemsize
    matrices = sum(by_role.values())
    return Layer(
        numbers,
        _layer_sites(
            shape, numbers, tokens, itemsize, flops, tokens * shape.heads * 4 if fused else 0
        ),
        matrices + forward_attention,
        extra,
        matrices + weights + backward_attention,
        sum(p.numel for p in parameters(shape) if p.name.startswith(shape.names.layer)),
        held,
        saved + held,
        # gradients at the activation function, and that of the stream, beside all that is saved
        saved + held + (shape.num_up + 1) * wide + tokens * shape.hidden * itemsize,
    )


def _head(shape: ModelShape, tokens: int, itemsize: int) -> Head:
    width = shape.embedding_size or shape.hidden
    product = 2 * tokens * width * shape.vocab
    if width != shape.hidden:
        product += 2 * tokens * width * shape.hidden  # project_out
    sites = (
        Site(
            "final_norm",
            "layernorm",
            (-1,),
            tokens,
            shape.hidden,
            itemsize,
            0,
            0,
            (),
            LEGAL_CHOICES["layernorm"],
        ),
        Site(
            "lm_head",
            "lm_head",
            (-1,),
            tokens,
            width,
            itemsize,
            0,
            0,
            ("final_norm",),
            LEGAL_CHOICES["lm_head"],
        ),
    )
    logits = tokens * shape.vocab
    return Head(
        sites,
        product,
        2 * product,
        # logits; fp32 log-softmax and the two gradients of it, in its backward
        logits * (itemsize + 3 * 4),
        sum(head_saved(shape, tokens, itemsize).values()),
    )


def _check(
    shape: ModelShape, micro_batch: int, seq_length: int, itemsize: int, attention: Attention
) -> None:
    for field, value in (("micro_batch", micro_batch), ("seq_length", seq_length)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{field} is {value!r}; legal: an integer >= 1. Give that.")
    if itemsize not in (2, 4):
        raise ValueError(
            f"itemsize is {itemsize!r}; legal: 2 (bf16, fp16) or 4 (fp32). Give one of them."
        )
    if shape.positions and seq_length > shape.max_length:
        raise ValueError(
            f"seq_length is {seq_length}; legal for {shape.family}: at most {shape.max_length}, its learned "
            "positions. Shorten the sequences or take a model with more positions."
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
