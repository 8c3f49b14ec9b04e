"""The workload of one micro-batch of a :class:`~hmt_deepspeed.planner.model.listed.ListedShape` on a rank.

Counted are products, norms and attention, as the modules have them; see ``coarse`` of the shape for what is assumed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from hmt_deepspeed.config.components import Choice, Component, legal_choices
from hmt_deepspeed.planner.model.flops import Attention, Projected
from hmt_deepspeed.planner.model.layer_sites import OUTSIDE, Site
from hmt_deepspeed.planner.model.listed import (
    AttentionOp,
    LayerGroup,
    Length,
    ListedShape,
    Product,
    Tokens,
)
from hmt_deepspeed.planner.model.shapes import Linear, ModelShape, Role
from hmt_deepspeed.planner.model.workload import (
    Head,
    Layer,
    Workload,
    build_workload,
    check_sizes,
)

__all__ = ["workload_of"]

FP32 = 4


@dataclass(frozen=True)
class _Given:
    """The inputs of a workload."""

    shape: ListedShape
    micro_batch: int
    seq_length: int
    itemsize: int
    eager: bool
    projected: Projected | None

    def count(self, length: Length) -> int:
        """Tokens of a micro-batch."""
        return self.micro_batch * length.of(self.seq_length)

    def attention_flops(self, work: Tokens, length: Length, whole: bool = False) -> int:
        """Attention FLOPs of a forward; ``whole``: of all pairs, as MFU counts them and eager attention computes them."""
        queries = length.of(self.seq_length)
        return sum(
            replace(op, causal=op.causal and not (whole or self.eager)).flops(
                self.micro_batch, queries, self._keys(op, queries)
            )
            for op in work.attentions
        )

    def attention_backward(self, forward: int) -> int:
        """Attention FLOPs of a backward: four products to a forward's two, and that of the scores again of the fused op."""
        return 2 * forward if self.eager else 5 * forward // 2

    def saved(self, work: Tokens, length: Length, freed: frozenset[str] = frozenset()) -> int:
        """Bytes that autograd saves.

        Args:
            freed: names of linears that do without their input.
        """
        queries = length.of(self.seq_length)
        channels = work.activations + work.norms + work.centred_norms
        for product in work.products:
            # what attention puts out, the fused op keeps too
            is_kept = product.name not in freed or (product.place == "out" and not self.eager)
            channels += product.inputs if is_kept and not product.shares_input else 0
            channels += product.outputs if product.keeps_output(freed) else 0
        nbytes = channels * self.itemsize + FP32 * work.norms
        for op in work.attentions:
            scores = self._keys(op, queries) * (FP32 + self.itemsize)
            nbytes += op.heads * (scores if self.eager else FP32)
        return round(self.micro_batch * queries * nbytes)

    def _keys(self, op: AttentionOp, queries: int) -> int:
        return self.shape.source.of(self.seq_length) if op.crossing else queries


def workload_of(
    shape: ModelShape,
    *,
    micro_batch: int,
    seq_length: int,
    itemsize: int = 2,
    attention: Attention = "fused",
    projected: Projected | None = None,
) -> Workload:
    """As :func:`~hmt_deepspeed.planner.model.workload.build_workload`, of a listed model too."""
    if not isinstance(shape, ListedShape):
        return build_workload(
            shape,
            micro_batch=micro_batch,
            seq_length=seq_length,
            itemsize=itemsize,
            attention=attention,
            projected=projected,
        )
    check_sizes(shape, micro_batch, seq_length)
    eager = shape.eager or attention == "eager"
    given = _Given(shape, micro_batch, seq_length, itemsize, eager, projected)
    return Workload(
        shape=shape,
        micro_batch=micro_batch,
        seq_length=seq_length,
        itemsize=given.itemsize,
        attention="eager" if eager else "fused",
        projected=projected,
        layers=tuple(
            _layer(replace(given, projected=own), group, numbers)
            for group in shape.groups
            for own, numbers in _parted(given, group.numbers)
        ),
        head=_head(given),
        shared_bytes=sum(given.saved(part.tokens, part.length) for part in shape.parts),
    )


def _parted(
    given: _Given, numbers: tuple[int, ...]
) -> list[tuple[Projected | None, tuple[int, ...]]]:
    """Layers that are projected alike."""
    found: dict[Projected | None, list[int]] = {}
    for number in numbers:
        projected = given.projected
        own = None if projected is None else projected.at_layer(number, given.shape.names)
        found.setdefault(own, []).append(number)
    return [(own, tuple(alike)) for own, alike in found.items()]


@dataclass
class _Projection:
    """Effect of projected backward on the linears of a layer: FLOPs and columns for one token."""

    flops: float = 0.0
    columns: float = 0.0
    gradient_flops: float = 0.0
    largest: int = 0
    freed: frozenset[str] = frozenset()


def _projection(given: _Given, work: Tokens) -> _Projection:
    found, projected, names = _Projection(), given.projected, given.shape.names
    for product in work.products:
        linear = product.linear
        side = None if projected is None or linear is None else projected.side_of(linear, names)
        if projected is None or linear is None or side is None:
            found.gradient_flops += 2 * product.elements
            whole = product.elements if linear is None else linear.count * linear.elements
            found.largest = max(found.largest, round(whole))
            continue
        width, times = projected.width(linear, side, names), product.elements / linear.elements
        if linear.experts is not None:
            own = projected.has_own_bases(linear, names)
            _project_experts(found, product, linear, width, times, own)
            continue
        if side == "left":
            found.gradient_flops += 2 * times * width * (linear.inputs + linear.outputs)
            found.largest = max(found.largest, linear.inputs * width)
            continue
        found.gradient_flops += 2 * times * linear.outputs * width
        found.largest = max(found.largest, linear.outputs * width)
        found.flops += 2 * times * linear.inputs * width
        found.columns += times * width
        found.freed |= {product.name}
    return found


def _project_experts(
    found: _Projection, product: Product, linear: Linear, width: int, times: float, own: bool
) -> None:
    """Add the projected backward of experts; ``times``: experts that compute a token.

    ``up`` saves ``X B`` of tokens, or of rows (pairs of a token and an expert) with bases of their own. ``down`` saves
    nothing: its input is made again from what the gate saves. Its shared basis is of the output, whose gradient is
    projected by token.
    """
    rows = linear.inputs if linear.role == "down" and not own else linear.outputs
    found.gradient_flops += 2 * times * rows * width
    found.largest = max(found.largest, linear.count * rows * width)
    found.freed |= {product.name}
    images = product.images(own)
    if linear.role == "up":
        found.flops += 2 * images * linear.inputs * width
        found.columns += images * width
    else:
        found.gradient_flops += 2 * images * (linear.inputs if own else linear.outputs) * width


def _layer(given: _Given, group: LayerGroup, numbers: tuple[int, ...]) -> Layer:
    shape, work, length = given.shape, group.tokens, given.shape.length
    tokens = given.count(length)
    projection = _projection(given, work)
    forward = round(2 * tokens * work.elements())
    useful = round(2 * tokens * work.useful_elements())
    attention = given.attention_flops(work, length)
    columns = round(projection.columns)
    saved = given.saved(work, length, projection.freed) + tokens * columns * given.itemsize
    widest = max((product.outputs for product in work.products), default=0)
    freed: dict[Role, int] = {}
    for product in work.products:
        role = product.role
        if role is not None and role != "down" and product.name in projection.freed:
            own = 0 if product.shares_input else round(product.inputs * tokens * given.itemsize)
            freed[role] = freed.get(role, 0) + own
    return Layer(
        layers=numbers,
        sites=tuple(_sites(given, work, numbers, tokens, saved, columns, projection)),
        forward_flops=forward + attention,
        projection_flops=round(tokens * projection.flops),
        backward_flops=forward
        + round(tokens * projection.gradient_flops)
        + given.attention_backward(attention),
        model_flops=3 * (useful + given.attention_flops(work, length, whole=True)),
        parameters=sum(parameter.numel for parameter in group.parameters),
        freed_inputs=freed,
        weight_gradient_bytes=projection.largest * given.itemsize,
        saved_bytes=saved,
        # two gradients as wide as the widest product, and the stream's
        working_bytes=saved + round(tokens * (2 * widest + shape.hidden)) * given.itemsize,
    )


def _sites(
    given: _Given,
    work: Tokens,
    numbers: tuple[int, ...],
    tokens: int,
    saved: int,
    columns: int,
    projection: _Projection,
) -> Iterator[Site]:
    """A layer's sites of a decoder; one site of all that it saves where the backend has no components."""
    shape = given.shape
    rows: list[tuple[str, Component, int, float, tuple[str, ...]]] = [
        ("layer_input", "layer_input", shape.hidden, 0.0, ())
    ]
    if not shape.is_managed:
        rest = max(0, saved // (tokens * given.itemsize) - shape.hidden)
        rows.append(("saved", "mlp_intermediate", rest, 0.0, ("layer_input",)))
    else:
        qkv, up = work.outputs("qkv"), work.outputs("up")
        known = replace(work, attentions=tuple(op for op in work.attentions if op.is_known))
        width = sum(op.width for op in known.attentions)
        attention = given.attention_flops(known, shape.length) / tokens
        if qkv:
            rows += [
                ("attention_qkv", "attention_qkv", qkv, 2 * work.elements("qkv"), ("layer_input",))
            ]
        if width:
            rows += [("attention_output", "attention_output", width, attention, (rows[-1][0],))]
        if work.outputs("out"):
            before = rows[-1][0]
            rows += [("residual", "residual", shape.hidden, 2 * work.elements("out"), (before,))]
        if up:
            made = 2 * work.elements("up")
            rows += [("mlp_intermediate", "mlp_intermediate", up, made, (rows[-1][0],))]
        read: tuple[str, ...] = (rows[-1][0],)
        if routers := work.outputs("router"):
            rows += [("router", "experts", routers, 2 * work.elements("router"), read)]
            read += ("router",)
        experts = [
            p for p in work.products if p.place == "experts" and p.keeps_output(projection.freed)
        ]
        if experts:
            wide = round(sum(p.outputs for p in experts))
            made = 2 * sum(p.elements for p in experts)
            rows += [("experts", "experts", wide, made, read)]
        if work.outputs("mlp_out"):
            made = 2 * work.elements("mlp_out")
            rows += [("mlp_output", "residual", shape.hidden, made, (rows[-1][0],))]
        if columns:
            read = tuple(row[0] for row in rows)
            rows += [("projected_inputs", "projected_inputs", columns, projection.flops, read)]
    heads = sum(op.heads for op in work.attentions if op.is_known)
    beside = {"attention_output": 0 if given.eager else heads * FP32}
    if shape.is_managed:  # outputs that no choice is known for
        beside["layer_input"] = work.outputs("other") * given.itemsize
    row_count = {"experts": tokens * _experts_of_a_token(work)}  # pairs of a token and an expert
    for name, component, channels, flops, depends in rows:
        count = row_count.get(name, tokens)
        legal: tuple[Choice, ...] = legal_choices(component) if shape.is_managed else ("keep",)
        if name == "router":  # no token is sent elsewhere the second time
            legal = ("keep",)
        yield Site(
            name=name,
            component=component,
            layers=numbers,
            tokens=count,
            channels=channels * tokens // count,
            itemsize=given.itemsize,
            flops=round(tokens * flops),
            raw_bytes=tokens * beside.get(name, 0),
            depends=depends,
            legal=legal,
        )


def _experts_of_a_token(work: Tokens) -> int:
    """How many compute it, one row each; 1 where their rows lie side by side (Llama-4), or in weights of their own."""
    for product in work.products:
        if product.linear is None or product.experts is None:
            continue
        if product.experts.is_routed:
            return round(product.elements / product.linear.elements)
    return 1


def _head(given: _Given) -> Head:
    """The language-model head, and the work of all that is outside the layers."""
    shape = given.shape
    tokens = given.count(shape.length)
    outside = [
        (
            round(2 * given.count(part.length) * part.tokens.elements()),
            given.attention_flops(part.tokens, part.length),
        )
        for part in shape.parts
    ]
    products, attention = (sum(each) for each in zip(*outside, strict=True)) if outside else (0, 0)
    vocab = shape.vocab if shape.has_head else 0
    products += 2 * tokens * shape.hidden * vocab
    inputs: list[tuple[str, Component]] = [("final_norm", "layernorm")]
    inputs += [("lm_head", "lm_head")] if shape.is_managed and shape.has_head else []
    return Head(
        sites=tuple(
            Site(
                name=name,
                component=component,
                layers=(OUTSIDE,),
                tokens=tokens,
                channels=shape.hidden,
                itemsize=given.itemsize,
                flops=0,
                raw_bytes=0,
                depends=(),
                legal=legal_choices(component),
            )
            for name, component in inputs
        ),
        forward_flops=products + attention,
        backward_flops=2 * products + given.attention_backward(attention),
        # the logits, and in fp32 their log-softmax, its gradient and theirs
        logits_bytes=tokens * vocab * (given.itemsize + 3 * FP32),
        saved_bytes=tokens * (vocab * FP32 + 2 * shape.hidden * given.itemsize),
    )
