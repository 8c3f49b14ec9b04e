"""A decoder-only model as numbers: its linears, its parameters and what its layers have in common.

A :class:`ModelShape` comes from a Hugging Face config (``families.py``) or from plain numbers
(:func:`plain_shape`: the GPT-3-like models of the ZeRO and LoHan papers).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from hmt_deepspeed.planner.model.names import LLAMA_NAMES, Names
from hmt_deepspeed.sites import ADAPTER, LEFT_TO_ADAMW, ExpertWeight

__all__ = [
    "ROLES",
    "Activation",
    "Linear",
    "ModelShape",
    "Parameter",
    "ParameterKind",
    "Role",
    "by_layer",
    "is_selected",
    "layer_linears",
    "num_parameters",
    "parameters",
    "plain_shape",
]

# Place of a linear in its layer; `up` includes the gate, `out` is the attention's output projection.
Role = Literal["qkv", "out", "up", "down"]
ROLES: tuple[Role, ...] = get_args(Role)
# formed: a linear whose backward forms its whole gradient (GPT-2's Conv1D, a Llama-4 router)
ParameterKind = Literal["linear", "formed", "experts", "head", "embedding", "projection", "vector"]
# silu, relu, gelu: one fused op (gelu of either kind); new_gelu: GPT-2's Python formula of the tanh one.
Activation = Literal["silu", "relu", "gelu", "new_gelu"]


@dataclass(frozen=True)
class ModelShape:
    """Sizes and traits of a decoder-only transformer; every layer has the same parameters.

    Attributes:
        hidden, layers, heads, kv_heads, head_dim, intermediate, vocab: elements.
        positions: rows of the learned position embedding, 0 for rotary positions; position_offset: rows that
            no token takes (OPT).
        embedding_size: width of the token embedding where projections lead to and from ``hidden`` (OPT-350m).
        gated: gate and up instead of fc1. fused_up: both in one linear (Phi-3).
        parallel: attention and MLP read the same layer input and are added together (GPT-NeoX, Phi).
        shared_norm: one norm serves both branches of a parallel layer (Phi).
        sandwich: norms after attention and MLP too (Gemma 2 and 3).
        post_norm: norms follow the residual sums instead of preceding the branches (OPT-350m).
        rms_norm: else LayerNorm with bias. offset_norm: RMSNorm whose weight is ``1 + w`` in fp32 (Gemma).
        head_norm: RMSNorm of each query and key head (Qwen 3, Gemma 3).
        rotary_dim: channels of a head that rotate. rotary_cat: joined to the others by ``cat``, which leaves
            queries in another layout, and fused attention's output is copied for the output projection.
        conv1d: linears are GPT-2's ``Conv1D``.
        *_bias: which linears have one. tied: the head is the embedding.
        windows: of each layer, how many tokens attention looks back, 0 for all of them.
        rotary_tables: pairs of cosines and sines (Gemma 3 has one for each kind of layer).
        soft_cap: attention scores are capped, which only eager attention does; final_soft_cap: the logits
            (Gemma 2). fp32_softmax: eager attention's softmax is in fp32.
        router_logits: a mixture's config asks for its routers' logits, which stay until the loss.
        fp32_routing: what a mixture's experts put out is scaled in fp32, else in the model's dtype.
        dropout: probability on the outputs of both branches; attention_dropout: on the probabilities.
        embedding_dropout: on what enters the first layer.
    """

    family: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    names: Names = LLAMA_NAMES
    activation: Activation = "silu"
    positions: int = 0
    position_offset: int = 0
    embedding_size: int = 0
    gated: bool = True
    fused_up: bool = False
    parallel: bool = False
    shared_norm: bool = False
    sandwich: bool = False
    post_norm: bool = False
    rms_norm: bool = True
    offset_norm: bool = False
    head_norm: bool = False
    rotary_dim: int = 0
    rotary_cat: bool = False
    conv1d: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    norm_affine: bool = True
    tied: bool = False
    windows: tuple[int, ...] = ()
    rotary_tables: int = 1
    soft_cap: bool = False
    final_soft_cap: bool = False
    fp32_softmax: bool = True
    router_logits: bool = False
    fp32_routing: bool = True
    dropout: float = 0.0
    attention_dropout: float = 0.0
    embedding_dropout: float = 0.0

    def __post_init__(self) -> None:
        """Raise ValueError for sizes that no model has: field, value, legal range, what to do."""
        for field in ("hidden", "layers", "heads", "kv_heads", "head_dim", "intermediate", "vocab"):
            value = getattr(self, field)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(
                    f"{self.family}: {field} is {value!r}; legal: an integer >= 1. Correct the model's "
                    "config or the shape given."
                )
        if self.heads % self.kv_heads:
            raise ValueError(
                f"{self.family}: kv_heads is {self.kv_heads}; legal: a divisor of heads, {self.heads}. "
                "Correct the model's config or the shape given."
            )
        if self.windows and len(self.windows) != self.layers:
            raise ValueError(
                f"{self.family}: windows has {len(self.windows)} entries; legal: one for each of "
                f"{self.layers} layers, or none. Correct the model's config."
            )

    @property
    def listed(self) -> tuple[Parameter, ...] | None:
        """Every parameter, where they do not follow from the sizes (``listed.py``)."""
        return None

    @property
    def query_width(self) -> int:
        """Channels of all query heads, which is what attention puts out."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Channels of all key heads, or of all value heads."""
        return self.kv_heads * self.head_dim

    @property
    def max_length(self) -> int:
        """Tokens that the learned positions reach; OPT's table has two rows of offset."""
        return self.positions - self.position_offset

    @property
    def num_up(self) -> int:
        """Products of width ``intermediate`` in front of the activation."""
        return 2 if self.gated else 1


@dataclass(frozen=True)
class Linear:
    """One linear of a layer: ``outputs x inputs`` weight. Linears of a role read the same input.

    experts: of the matrices of a mixture, all in one weight; sizes are then those of one.
    """

    name: str
    role: Role
    inputs: int
    outputs: int
    bias: bool
    experts: ExpertWeight | None = None

    @property
    def elements(self) -> int:
        """Elements of one matrix."""
        return self.outputs * self.inputs

    @property
    def weight(self) -> str:
        """Name of its weight within the layer."""
        return self.name if self.experts else f"{self.name}.weight"

    @property
    def count(self) -> int:
        """Matrices in the weight."""
        return 1 if self.experts is None else self.experts.count


@dataclass(frozen=True)
class Parameter:
    """A parameter, or ``count`` equal ones of as many layers (``*`` in the name is the layer's number).

    trained: false for one that is held and computed with, and never updated.
    experts: what its matrices are, where it holds those of a mixture's experts.
    """

    name: str
    shape: tuple[int, ...]
    kind: ParameterKind
    count: int = 1
    trained: bool = True
    experts: ExpertWeight | None = None

    @property
    def num_matrices(self) -> int:
        """How many matrices it holds, each of its last two dimensions."""
        return 1 if self.experts is None else self.experts.count

    @property
    def numel(self) -> int:
        """Elements of one."""
        product = 1
        for size in self.shape:
            product *= size
        return product

    @property
    def total(self) -> int:
        """Elements of all of them."""
        return self.numel * self.count


def layer_linears(shape: ModelShape) -> tuple[Linear, ...]:
    """The linears of one layer in forward order."""
    names, q, kv = shape.names, shape.query_width, shape.kv_width
    fused = len(names.qkv) == 1
    qkv = [(names.qkv[0], q + 2 * kv)] if fused else list(zip(names.qkv, (q, kv, kv), strict=True))
    up_width = shape.intermediate * (2 if shape.fused_up else 1)
    return (
        *(Linear(n, "qkv", shape.hidden, width, shape.qkv_bias) for n, width in qkv),
        Linear(names.out, "out", q, shape.hidden, shape.out_bias),
        *(Linear(n, "up", shape.hidden, up_width, shape.mlp_bias) for n in names.up),
        Linear(names.down, "down", shape.intermediate, shape.hidden, shape.mlp_bias),
    )


def parameters(shape: ModelShape) -> tuple[Parameter, ...]:
    """Every parameter of the model, tied ones once, those of equal layers as one entry with a count."""
    if shape.listed is not None:
        return shape.listed
    names, hidden = shape.names, shape.hidden
    width = shape.embedding_size or hidden
    found = [Parameter(f"{names.embedding}.weight", (shape.vocab, width), "embedding")]
    if shape.positions:
        rows = (shape.positions, hidden)
        found.append(Parameter(f"{names.positions}.weight", rows, "embedding"))
    if width != hidden:
        root = names.embedding.rpartition(".")[0]
        found.append(Parameter(f"{root}.project_in.weight", (hidden, width), "projection"))
        found.append(Parameter(f"{root}.project_out.weight", (width, hidden), "projection"))
    for linear in layer_linears(shape):
        size = (linear.outputs, linear.inputs)
        kind: ParameterKind = "formed" if shape.conv1d else "linear"
        path = f"{names.layer}.{linear.name}"
        stored = size[::-1] if shape.conv1d else size
        found.append(Parameter(f"{path}.weight", stored, kind, shape.layers))
        if linear.bias:
            found.append(Parameter(f"{path}.bias", size[:1], "vector", shape.layers))
    norms = [(f"{names.layer}.{norm}", hidden, shape.layers) for norm in names.norms]
    norms += [
        (f"{names.layer}.{norm}", shape.head_dim, shape.layers)
        for norm in names.head_norms
        if shape.head_norm
    ]
    norms += [(names.final_norm, hidden, 1)] if names.final_norm else []
    for path, channels, count in norms if shape.norm_affine else []:
        found.append(Parameter(f"{path}.weight", (channels,), "vector", count))
        if not shape.rms_norm:
            found.append(Parameter(f"{path}.bias", (channels,), "vector", count))
    if not shape.tied:
        found.append(Parameter(f"{names.head}.weight", (shape.vocab, width), "head"))
    if shape.head_bias:
        found.append(Parameter(f"{names.head}.bias", (shape.vocab,), "vector"))
    return tuple(found)


def by_layer(layer: str, names: Iterable[str]) -> dict[int, dict[str, str]]:
    """Groups names by the layer's number that they have in the place of ``*``: {number: {name with ``*``: name}}.

    Args:
        layer: path of a layer, as in :class:`Names`.
    """
    numbered = re.compile(re.escape(layer).replace(re.escape("*"), "([0-9]+)") + "[.](.*)")
    found: dict[int, dict[str, str]] = {}
    for name in names:
        match = numbered.fullmatch(name)
        if match:
            found.setdefault(int(match[1]), {})[f"{layer}.{match[2]}"] = name
    return found


def is_selected(
    name: str, target_modules: Sequence[str] | Literal["all"] | None, adamw_modules: Sequence[str]
) -> bool:
    """Whether ``hmt.optimizer``'s patterns leave a matrix of this name on the low-rank rule.

    Args:
        target_modules: regular expressions searched in the name; None for every linear, "all" for every matrix.
        adamw_modules: likewise, of the module rules that leave their matches to AdamW; these are not selected, nor
            are those of :data:`~hmt_deepspeed.sites.LEFT_TO_ADAMW`, of which "all" takes all but adapters.
    """
    left = (ADAPTER,) if target_modules == "all" else LEFT_TO_ADAMW
    if any(re.search(pattern, name) for pattern in (*adamw_modules, *left)):
        return False
    return target_modules in (None, "all") or any(
        re.search(pattern, name) for pattern in target_modules
    )


def num_parameters(shape: ModelShape) -> int:
    """Elements of all parameters, tied ones once."""
    return sum(parameter.total for parameter in parameters(shape))


_GPT_NAMES = Names(
    layer="layers.*",
    embedding="embedding",
    positions="positions",
    final_norm="final_norm",
    qkv=("attention.query_key_value",),
    out="attention.out",
    up=("mlp.up",),
    down="mlp.down",
    norms=("attention_norm", "mlp_norm"),
)


def plain_shape(
    *,
    layers: int,
    hidden: int,
    heads: int,
    vocab: int,
    kv_heads: int | None = None,
    intermediate: int | None = None,
    gated: bool = False,
    positions: int = 0,
    dropout: float = 0.1,
    tied: bool = True,
) -> ModelShape:
    """A model given by numbers alone.

    Args:
        kv_heads: None for as many as ``heads``. intermediate: None for 4 ``hidden``.
        gated: a Llama-like model (RMSNorm, no biases, no dropout) instead of a GPT-3-like one.
        positions: rows of a learned position embedding of the GPT-3-like model.

    Raises:
        ValueError: sizes that are not positive or do not divide.
    """
    if not isinstance(heads, int) or heads < 1 or hidden % heads:
        raise ValueError(
            f"heads is {heads!r}; legal: a divisor of hidden, {hidden}. Correct the shape given."
        )
    sizes: dict[str, Any] = {
        "hidden": hidden,
        "layers": layers,
        "heads": heads,
        "kv_heads": heads if kv_heads is None else kv_heads,
        "head_dim": hidden // heads,
        "intermediate": 4 * hidden if intermediate is None else intermediate,
        "vocab": vocab,
    }
    if gated:
        return ModelShape("plain, gated", **sizes, rotary_dim=hidden // heads, tied=tied)
    return ModelShape(
        "plain",
        **sizes,
        names=_GPT_NAMES,
        activation="gelu",
        gated=False,
        rms_norm=False,
        positions=positions,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        tied=tied,
        fp32_softmax=False,
        dropout=dropout,
        attention_dropout=dropout,
    )
