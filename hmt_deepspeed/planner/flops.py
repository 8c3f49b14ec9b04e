"""FLOPs of one decoder layer: two per multiply-add, as ``torch.utils.flop_counter`` counts them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from hmt_deepspeed.planner.shapes import Linear, ModelShape, Role, layer_linears

__all__ = ["Attention", "LayerFlops", "Projected", "attention_flops", "layer_flops"]

# How attention is computed:
#   fused  one op (flash): only the pairs that the mask and the window leave; backward computes the scores
#          again; output and log-sum-exp are kept
#   eager  two products over all pairs of tokens, the probabilities kept
Attention = Literal["fused", "eager"]


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

    def width(self, linear: Linear) -> int:
        """Columns r + k of one linear."""
        rank = min(self.rank, linear.inputs, linear.outputs)
        side = linear.inputs if self.side == "right" else linear.outputs
        return rank + min(self.probes, side - rank)


class LayerFlops(NamedTuple):
    """FLOPs of one layer.

    Attributes:
        forward: of the linears of each role. attention, attention_backward: of the attention op.
        input_gradients: of all linears. weight_gradients: likewise, projected or not.
        projections: of ``X [Q | P]``, in forward. projection_columns: of all such products of the layer.
    """

    forward: dict[Role, int]
    attention: int
    attention_backward: int
    input_gradients: int
    weight_gradients: int
    projections: int
    projection_columns: int


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
    forward: dict[Role, int] = {}
    weight_gradients = projections = columns = 0
    for linear in layer_linears(shape):
        first = linear.role not in forward  # of those that read one input
        whole = 2 * tokens * linear.inputs * linear.outputs
        forward[linear.role] = forward.get(linear.role, 0) + whole
        if projected is None:
            weight_gradients += whole
            continue
        width = projected.width(linear)
        if projected.side == "left":
            weight_gradients += 2 * tokens * width * (linear.inputs + linear.outputs)
            continue
        weight_gradients += 2 * tokens * linear.outputs * width
        if first or not projected.shared:
            projections += 2 * tokens * linear.inputs * width
            columns += width
    return LayerFlops(
        forward,
        *attention_flops(shape, micro_batch, seq_length, attention, window),
        input_gradients=sum(forward.values()),
        weight_gradients=weight_gradients,
        projections=projections,
        projection_columns=columns,
    )
