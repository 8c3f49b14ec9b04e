"""FLOPs of one decoder layer: two per multiply-add, as ``torch.utils.flop_counter`` counts them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from hmt_deepspeed.config.optimizer import ExpertBasis
from hmt_deepspeed.config.probes import auto_probes
from hmt_deepspeed.planner.model.shapes import (
    ROLES,
    Linear,
    ModelShape,
    Names,
    Role,
    by_layer,
    is_selected,
    layer_linears,
)
from hmt_deepspeed.rules import rank_at
from hmt_deepspeed.sites import ExpertWeight

__all__ = [
    "Attention",
    "LayerFlops",
    "Projected",
    "attention_flops",
    "layer_flops",
    "on_inputs",
]

# How attention is computed:
#   fused  one op (flash): only the pairs that the mask and the window leave; backward computes the scores
#          again; output and log-sum-exp are kept
#   eager  two products over all pairs of tokens, the probabilities kept
Attention = Literal["fused", "eager"]


@dataclass(frozen=True)
class Projected:
    """Projected backward: columns ``r + k`` that a linear of some shape is projected on.

    Attributes:
        rank, probes, residual, on_gpu: give r and k of every projected linear, see :func:`~hmt_deepspeed.rules.rank_at` and
            :func:`probes_at`.
        side: ``right`` saves ``X [Q | P]`` instead of the input, ``left`` spares FLOPs only; ``auto`` is
            GaLore's rule, the smaller side of each matrix, the right one of a square.
        shared: linears that read one input share one basis.
        whole_at_full: where the basis would span all columns, backward is the ordinary one.
        target_modules, adamw_modules: which linears, see :func:`~hmt_deepspeed.planner.model.shapes.is_selected`.
        expert_basis: of a mixture's experts; own: names of weights whose experts have chosen bases of their own, ``*`` for
            a layer's number, or the number of one that differs.
        others: (name, r, k) of the weights that have others; ``*`` for a layer's number, or the number of one
            whose weight has its own.
    """

    rank: int | float
    probes: int | None
    residual: Literal["none", "probe"] = "probe"
    on_gpu: bool = True
    side: Literal["right", "left", "auto"] = "right"
    shared: bool = False
    whole_at_full: bool = True
    target_modules: tuple[str, ...] | Literal["all"] | None = None
    adamw_modules: tuple[str, ...] = ()
    expert_basis: ExpertBasis = "auto"
    own: tuple[str, ...] = ()
    others: tuple[tuple[str, int, int], ...] = ()

    def __post_init__(self) -> None:
        """Raise ValueError for a rank or a number of probes that no matrix can have."""
        check_rank("Projected: ", self.rank)
        check_probes("Projected: ", self.probes)

    def at_layer(self, number: int, names: Names) -> Projected:
        """As layer ``number`` has it, by names with ``*``."""
        by_name = {name: (rank, probes) for name, rank, probes in self.others}
        of_layer = by_layer(names.layer, [*by_name, *self.own]).get(number)
        if of_layer is None:
            return self
        kept = {name: given for name, given in by_name.items() if "*" in name}
        kept |= {starred: by_name[name] for starred, name in of_layer.items() if name in by_name}
        own = {name for name in self.own if "*" in name}
        own |= {starred for starred, name in of_layer.items() if name in self.own}
        others = tuple((name, *given) for name, given in kept.items())
        return replace(self, others=others, own=tuple(sorted(own)))

    def has_own_bases(self, linear: Linear, names: Names) -> bool:
        """Whether each of a weight's experts has a basis of its own."""
        return self.expert_basis == "own" or _weight(linear, names) in self.own

    def side_of(self, linear: Linear, names: Names) -> Literal["right", "left"] | None:
        """The projected side of one linear, None for neither."""
        if not is_selected(_weight(linear, names), self.target_modules, self.adamw_modules):
            return None
        side = self.side
        if linear.experts is not None:
            on_its_inputs = linear.experts.role == "up" or self.has_own_bases(linear, names)
            side = "right" if on_its_inputs else "left"
        elif side == "auto":
            side = "left" if linear.outputs < linear.inputs else "right"
        rank, _ = self._rank_and_probes(linear, names)
        is_full = rank == _columns(linear, side)
        return None if is_full and self.whole_at_full else side

    def width(self, linear: Linear, side: Literal["right", "left"], names: Names) -> int:
        """Columns r + k of one linear."""
        rank, probes = self._rank_and_probes(linear, names)
        return rank + min(probes, _columns(linear, side) - rank)

    def _rank_and_probes(self, linear: Linear, names: Names) -> tuple[int, int]:
        """(r as far as the matrix has it, k as wanted)."""
        own = {name: (rank, probes) for name, rank, probes in self.others}
        rank = rank_at(self.rank, linear.inputs, linear.outputs)
        probes = probes_at(rank, self.probes, self.residual, self.on_gpu)
        return own.get(_weight(linear, names), (rank, probes))


def on_inputs(experts: ExpertWeight, basis: ExpertBasis) -> bool:
    """Whether bases of experts are of what they read; a shared one is of the stream, which ``down`` writes to."""
    return experts.role == "up" or basis == "own"


def probes_at(rank: int, probes: int | None, residual: str, on_gpu: bool) -> int:
    """k at a rank: as given, or "auto" of a residual and a device."""
    return auto_probes(rank, residual, on_gpu) if probes is None else probes


def check_rank(prefix: str, rank: object) -> None:
    """Raise ValueError for what is no rank, its name behind ``prefix``."""
    whole = isinstance(rank, int) and rank >= 1
    if not whole and not (isinstance(rank, float) and 0 < rank <= 1):
        raise ValueError(
            f"{prefix}rank is {rank!r}; legal: an integer >= 1, or a float above 0, at most 1, a share of the "
            "smaller side. Give one of them."
        )


def check_probes(prefix: str, probes: object) -> None:
    """Raise ValueError for what is no number of probes, its name behind ``prefix``."""
    if probes is not None and (not isinstance(probes, int) or probes < 0):
        raise ValueError(f"{prefix}probes is {probes!r}; legal: an integer >= 0. Give that.")


def _columns(linear: Linear, side: Literal["right", "left"]) -> int:
    """Columns of the matrix as it is projected."""
    return linear.inputs if side == "right" else linear.outputs


def _weight(linear: Linear, names: Names) -> str:
    return f"{names.layer}.{linear.weight}"


class LayerFlops(NamedTuple):
    """FLOPs of one layer.

    Attributes:
        forward: of the linears of each role. attention, attention_backward: of the attention op.
        input_gradients: of all linears. weight_gradients: likewise, projected or not.
        projections: of ``X [Q | P]``, in forward. projection_columns: of all such products of the layer.
        freed: roles whose input no linear needs for its weight gradient.
        largest_gradient: elements of the largest weight gradient.
    """

    forward: dict[Role, int]
    attention: int
    attention_backward: int
    input_gradients: int
    weight_gradients: int
    projections: int
    projection_columns: int
    freed: frozenset[Role]
    largest_gradient: int


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


def layer_flops(
    shape: ModelShape,
    micro_batch: int,
    seq_length: int,
    attention: Attention,
    window: int,
    projected: Projected | None,
) -> LayerFlops:
    """FLOPs of one layer; see :func:`attention_flops` for ``window``.

    A weight gradient is ``D^T X``; projected from the right ``X [Q | P]`` in forward and
    ``D^T (X [Q | P])`` in backward; from the left ``D B`` and ``(D B)^T X``, both in backward.
    """
    tokens = micro_batch * seq_length
    forward: dict[Role, int] = dict.fromkeys(ROLES, 0)
    freed, sharing = set(ROLES), set()
    weight_gradients = projections = columns = largest = 0
    for linear in layer_linears(shape):
        forward[linear.role] += 2 * tokens * linear.elements
        side = None if projected is None else projected.side_of(linear, shape.names)
        if side != "right":
            freed.discard(linear.role)
        if projected is None or side is None:
            weight_gradients += 2 * tokens * linear.elements
            largest = max(largest, linear.elements)
            continue
        width = projected.width(linear, side, shape.names)
        if side == "left":
            weight_gradients += 2 * tokens * width * (linear.inputs + linear.outputs)
            largest = max(largest, linear.inputs * width)
            continue
        weight_gradients += 2 * tokens * linear.outputs * width
        largest = max(largest, linear.outputs * width)
        if not (projected.shared and linear.role in sharing):
            projections += 2 * tokens * linear.inputs * width
            columns += width
        sharing.add(linear.role)
    return LayerFlops(
        forward,
        *attention_flops(shape, micro_batch, seq_length, attention, window),
        input_gradients=sum(forward.values()),
        weight_gradients=weight_gradients,
        projections=projections,
        projection_columns=columns,
        freed=frozenset(freed),
        largest_gradient=largest,
    )
