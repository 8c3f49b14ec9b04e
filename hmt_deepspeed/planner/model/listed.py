"""A model of any architecture as numbers: its parameters one by one, and its layers by their products.

Where no family's row fits (``families.py``), ``structure.py`` reads a :class:`ListedShape` off the model itself, built
without weights. Parameters are exact. What a layer computes and saves is counted from its modules: of products,
norms and attention, and of nothing else; what is assumed is in ``coarse``, which reports print.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from hmt_deepspeed.planner.model.shapes import Linear, ModelShape, Parameter, Role
from hmt_deepspeed.sites import ExpertWeight

__all__ = [
    "AttentionOp",
    "LayerGroup",
    "Length",
    "ListedShape",
    "Part",
    "Product",
    "Tokens",
]

# Place of a product in its layer: a linear's role, or what the activation backend has no component for.
# ``mlp_out``: the way back to the stream of an MLP whose output a norm reads. ``experts``: of a mixture, both ways.
Place = Literal["qkv", "out", "up", "down", "mlp_out", "experts", "router", "other"]


@dataclass(frozen=True)
class Length:
    """Tokens of a part for each sequence: a number of its own (patches, frames), or so many for each token."""

    fixed: int = 0
    rate: float = 1.0

    def of(self, seq_length: int) -> int:
        """At a sequence length."""
        return max(1, round(self.rate * (self.fixed or seq_length)))


@dataclass(frozen=True)
class Product:
    """A matrix product that each token of a part goes through.

    Attributes:
        name: of the module, within its layer.
        elements: of weights that one token is multiplied with: of experts those that it is sent to, or where every one
            computes all tokens (Llama-4), all of them.
        inputs, outputs: channels read and written for one token. shares_input: another of its module reads the
            same.
        linear: the weight whose backward can be projected, of experts one matrix of it; None for convolutions and the
            like.
        useful: share of the elements that the model asks for, and that MFU counts.
    """

    name: str
    place: Place
    elements: float
    inputs: float
    outputs: float
    shares_input: bool = False
    linear: Linear | None = None
    useful: float = 1.0

    @property
    def experts(self) -> ExpertWeight | None:
        """Of one that is of a mixture's experts, all in one weight."""
        return None if self.linear is None else self.linear.experts

    def keeps_output(self, freed: Collection[str]) -> bool:
        """Whether backward reads what it puts out.

        Args:
            freed: names of the products that are projected, and do without their input. The routing weights read what
                experts put out, unless ``down`` is projected; Llama-4 scales what they read.
        """
        if self.experts is not None and self.experts.role == "down":
            return self.experts.is_routed and self.name not in freed
        return self.place in ("qkv", "up", "experts", "router", "other")

    def images(self, own: bool) -> float:
        """Rows ``x [Q | P]`` of one token that experts compute: one, or each of those that compute it theirs.

        Args:
            own: each has a basis of its own. Llama-4's read rows of their own in any case.
        """
        assert self.linear is not None
        assert self.linear.experts is not None
        by_row = own or not self.linear.experts.is_routed
        return self.elements / self.linear.elements if by_row else 1.0

    @property
    def role(self) -> Role | None:
        """As a decoder's linear has one."""
        if self.experts is not None:
            return self.experts.role
        roles: dict[Place, Role] = {
            "qkv": "qkv",
            "out": "out",
            "up": "up",
            "down": "down",
            "mlp_out": "down",
        }
        return roles.get(self.place)


@dataclass(frozen=True)
class AttentionOp:
    """``width`` channels of ``heads`` query heads.

    crossing: the keys are another part's. causal: half of all pairs. is_known: the activation backend holds its output.
    """

    width: int
    heads: int
    crossing: bool = False
    causal: bool = False
    is_known: bool = False

    def flops(self, batch: int, queries: int, keys: int) -> int:
        """FLOPs of a forward: two products over the pairs."""
        pairs = queries * keys
        return 4 * batch * self.width * (pairs - pairs // 2 if self.causal else pairs)


@dataclass(frozen=True)
class Tokens:
    """The work of a stack of modules on each of its tokens.

    Attributes:
        activations: channels that activation functions save beside the products' inputs and outputs.
        norms, centred_norms: channels of RMSNorms, and of LayerNorms.
    """

    products: tuple[Product, ...] = ()
    attentions: tuple[AttentionOp, ...] = ()
    activations: float = 0.0
    norms: int = 0
    centred_norms: int = 0

    def elements(self, *places: Place) -> float:
        """Elements of weights that one token meets; of all places, or of those given."""
        return sum(p.elements for p in self.products if not places or p.place in places)

    def useful_elements(self) -> float:
        """Elements that the model asks for, for one token."""
        return sum(p.useful * p.elements for p in self.products)

    def outputs(self, place: Place) -> int:
        """Channels that the products of a place write for one token."""
        return round(sum(p.outputs for p in self.products if p.place == place))


@dataclass(frozen=True)
class LayerGroup:
    """Equal layers: their numbers, the parameters of one of them (counted for all), its work."""

    numbers: tuple[int, ...]
    parameters: tuple[Parameter, ...]
    tokens: Tokens


@dataclass(frozen=True)
class Part:
    """A part outside the planned layers with tokens of its own: an encoder, a tower, a classifier."""

    name: str
    length: Length
    tokens: Tokens


@dataclass(frozen=True)
class ListedShape(ModelShape):
    """A model read module by module; of :class:`ModelShape` the sizes that a report and the head need.

    Attributes:
        outside: parameters outside the layers. groups: of the layers.
        parts: work outside the layers.
        length: tokens of the layers. source: of the keys that their cross-attention reads.
        is_managed: whether ``hmt.activations`` has components for these layers; else all is kept.
        has_head: whether a language-model head follows. eager: attention's probabilities are saved.
        active: elements of the parameters that one token meets, embeddings included.
        coarse: what is estimated roughly, and how.
    """

    outside: tuple[Parameter, ...] = ()
    groups: tuple[LayerGroup, ...] = ()
    parts: tuple[Part, ...] = ()
    length: Length = Length()
    source: Length = Length()
    is_managed: bool = False
    has_head: bool = False
    eager: bool = False
    active: int = 0
    coarse: tuple[str, ...] = ()

    @property
    def experts(self) -> dict[str, Product]:
        """Products of mixtures' experts whose backward can be projected, by the name of their weight, ``*`` for a layer's
        number."""
        return {
            f"{self.names.layer}.{product.linear.weight}": product
            for group in self.groups
            for product in group.tokens.products
            if product.linear is not None and product.experts is not None
        }

    @property
    def listed(self) -> tuple[Parameter, ...]:
        """Every parameter."""
        return (*self.outside, *(p for group in self.groups for p in group.parameters))
