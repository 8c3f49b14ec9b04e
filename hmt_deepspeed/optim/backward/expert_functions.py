"""Experts with projected backwards: the usual forward, and backwards that never form the experts' weight gradients.

Rows are pairs of a token and one of its experts, sorted by expert: S = T x top-k of them, some of which may be
nobody's here (expert parallelism). Each half of a module has a function; one that is not projected is transformers' own,
or of INT8 weights one that does not save what it decodes. Those are decoded whole for each product.

Up: ``Z = X W^T``. From the input side the gradient is ``D_e^T (X B)_e``: with a basis that the experts share ``X B`` is
computed and saved by token, T x w, before the rows are picked.

Down: ``Y_t = sum_s a_s W h_s``, h the gate's output and a the routing weights. Saved are neither h nor what W makes of
it: h is computed again from what the gate saves anyway, and ``da_s = h_s . (W^T dY_t)``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from hmt_deepspeed.kernels.backward import asked_of, computed_again
from hmt_deepspeed.optim.backward.int8_linear import Int8Weight, decoded
from hmt_deepspeed.optim.backward.linear_functions import check_is_there, refusal
from hmt_deepspeed.optim.backward.projected_linear import ProjectedLinear
from hmt_deepspeed.sites import computing_projection, kept_projection

__all__ = ["Half", "Rows", "down", "up"]


class Rows(NamedTuple):
    """Rows sorted by expert.

    Attributes:
        offsets: E int32, the row after the last of each expert.
        order: S, for each row its place in T x top-k; None where the rows are the tokens as they come, and each
            expert has as many of them.
        top_k: experts of a token.
        split: some rows may be nobody's here.
    """

    offsets: Tensor
    order: Tensor | None = None
    top_k: int = 1
    split: bool = False

    def of_tokens(self, values: Tensor) -> Tensor:
        """S x n from T x n."""
        return values if self.order is None else values[self.order // self.top_k]

    def times(self, rows: Tensor, weight: Tensor) -> Tensor:
        """S x out of S x in and E x in x out, each row by its expert's matrix, in the dtype of the weight. What is in
        a row that is nobody's, is not defined."""
        product = self.product(rows, weight)
        return product.flatten(0, 1) if self.order is None else product

    def product(self, rows: Tensor, weight: Tensor) -> Tensor:
        """The same as one operation puts it out: with ``order`` S x out, without it E x S / E x out."""
        rows = rows.to(weight.dtype)
        if self.order is None:
            return torch.bmm(rows.reshape(len(weight), -1, rows.shape[1]), weight)
        from transformers.integrations.moe import _grouped_mm

        sizes = (size * weight.element_size() for size in weight.shape[1:])
        product: Tensor
        if weight.dtype == torch.float64 or any(size % 16 for size in sizes):  # nothing of torch's
            product = torch.ops.transformers.grouped_mm_fallback(rows, weight, offs=self.offsets)
        else:
            product = _grouped_mm(rows, weight, offs=self.offsets)
        return product

    def add_up(self, rows: Tensor) -> Tensor:
        """T x n sums by token of S x n."""
        if self.order is None:
            return rows
        rows_in_order = torch.arange(len(self.order), device=self.order.device)
        # not into empty memory, of which an activation backend takes all that was made before to be read
        place = self.order.scatter(0, self.order, rows_in_order)
        return rows[place].view(-1, self.top_k, rows.shape[-1]).sum(1)

    def experts(self) -> Tensor:
        """S, each row's expert; the last one's of a row that is nobody's."""
        assert self.order is not None
        rows = torch.arange(len(self.order), dtype=torch.int32, device=self.offsets.device)
        found = torch.searchsorted(self.offsets, rows, right=True)
        return found.clamp_(max=len(self.offsets) - 1)

    def cleared(self, rows: Tensor) -> Tensor:
        """With zeros in the rows that are nobody's, which products by expert leave as memory was."""
        if not self.split:
            return rows
        beyond = torch.arange(len(rows), device=rows.device) >= self.offsets[-1]
        return rows.masked_fill(beyond[:, None], 0)


class _UpFunction(torch.autograd.Function):
    """``Z = X W^T`` by row, which saves ``X B`` for the weight, or X itself where the output side is projected.

    features: T x w of a shared basis, S x w of own ones, or None from the output side.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        features: Tensor | None,
        offsets: Tensor,
        order: Tensor | None,
        top_k: int,
        split: bool,
        link: ProjectedLinear,
        is_transposed: bool,
        encoded: Int8Weight | None,
    ) -> Tensor:
        # The Parameter itself is saved: under ZeRO-3 its data is gathered again before backward.
        ctx.save_for_backward(weight, x if features is None else features, offsets, order)
        ctx.reader = None if encoded is None else encoded.reader()
        ctx.link, ctx.is_transposed, ctx.input_dtype = link, is_transposed, x.dtype
        ctx.from_input, ctx.by_row = features is not None, features is not None and link.own
        ctx.layout, ctx.is_inner = (top_k, split), computed_again() is not None
        rows = Rows(offsets, order, top_k, split)
        value = weight if encoded is None else encoded.decode()
        return rows.times(rows.of_tokens(x), _inwards(value, is_transposed))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight, saved, offsets, order = ctx.saved_tensors
        rows, link = Rows(offsets, order, *ctx.layout), ctx.link
        if _is_asked(ctx):
            if ctx.from_input:
                features = saved if ctx.by_row else rows.of_tokens(saved)
                link.add_experts(grad, features, offsets)
            else:
                features = _image(grad, link, rows)
                link.add_experts(rows.of_tokens(saved), features, offsets)
        dx = None
        if ctx.needs_input_grad[0]:
            dx = _input_gradient(grad, weight, rows, ctx)
            dx = rows.add_up(rows.cleared(dx)).to(ctx.input_dtype)
        return dx, *[None] * 9


class _DownFunction(torch.autograd.Function):
    """``Y_t = sum_s a_s (W h_s + b)``, or with a None the rows ``W h_s`` themselves.

    gate: gives h of z anew.
    """

    @staticmethod
    def forward(
        ctx: Any,
        h: Tensor,
        weight: Tensor,
        z: Tensor,
        scales: Tensor | None,
        bias: Tensor | None,
        offsets: Tensor,
        order: Tensor | None,
        top_k: int,
        split: bool,
        link: ProjectedLinear,
        is_transposed: bool,
        encoded: Int8Weight | None,
        gate: Callable[[Tensor], Tensor],
    ) -> Tensor:
        ctx.save_for_backward(weight, z, scales, bias, offsets, order)
        ctx.reader = None if encoded is None else encoded.reader()
        ctx.link, ctx.is_transposed, ctx.gate, ctx.input_dtype = link, is_transposed, gate, h.dtype
        ctx.layout, ctx.is_inner = (top_k, split), computed_again() is not None
        rows = Rows(offsets, order, top_k, split)
        value = weight if encoded is None else encoded.decode()
        y = rows.times(h, _inwards(value, is_transposed))
        if scales is None:
            return y
        if bias is not None:
            y += bias[rows.experts()]
        return rows.add_up(rows.cleared(y) * scales[:, None])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        scales: Any
        weight, z, scales, bias, offsets, order = ctx.saved_tensors
        rows, needs = Rows(offsets, order, *ctx.layout), ctx.needs_input_grad
        grad = grad.to(weight.dtype)
        delta = grad if scales is None else rows.of_tokens(grad)
        asked = _is_asked(ctx)
        # modules of the gate have hooks (FlopCounterMode's) that stop at a tensor with a graph where none is built
        inner = z if torch.is_grad_enabled() else z.detach()
        h: Any = ctx.gate(inner) if asked or needs[3] else None
        if asked:
            _add_of_down(ctx, rows, h, grad, delta, scales)
        dh = ds = db = None
        if needs[0] or needs[3]:
            image = rows.cleared(_input_gradient(delta, weight, rows, ctx))  # W^T dY_t
            dh = (image if scales is None else image * scales[:, None]).to(ctx.input_dtype)
        if needs[3]:
            ds = (image.to(scales.dtype) * h).sum(-1)
            if bias is not None:
                own = bias[rows.experts()].to(scales.dtype)
                ds = ds + (rows.cleared(delta) * own).sum(-1)
            ds = ds.to(scales.dtype)
        if needs[4]:
            scaled = rows.cleared(delta * scales[:, None])
            zeros = scaled.new_zeros(bias.shape)
            db = zeros.index_put((rows.experts(),), scaled, accumulate=True).to(bias.dtype)
        return dh, None, None, ds, db, *[None] * 8


class _EncodedFunction(torch.autograd.Function):
    """S x out of S x in by an INT8 weight, with the whole gradient for its Parameter."""

    @staticmethod
    def forward(
        ctx: Any,
        values: Tensor,
        weight: Tensor,
        offsets: Tensor,
        order: Tensor | None,
        top_k: int,
        split: bool,
        encoded: Int8Weight,
        is_transposed: bool,
    ) -> Tensor:
        ctx.save_for_backward(values, weight, offsets, order)
        ctx.reader, ctx.layout, ctx.is_transposed = encoded.reader(), (top_k, split), is_transposed
        rows = Rows(offsets, order, top_k, split)
        return rows.times(values, _inwards(encoded.decode(), is_transposed))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        values, weight, offsets, order = ctx.saved_tensors
        rows, again = Rows(offsets, order, *ctx.layout), torch.is_grad_enabled()
        with torch.enable_grad():  # the product once more, for torch's own backward of it
            given = values if again else values.detach().requires_grad_(values.requires_grad)
            value = decoded(weight, ctx.reader)
            product = rows.times(given, _inwards(value, ctx.is_transposed))
            wanted = [one for one in (given, value) if one.requires_grad]
            found = iter(torch.autograd.grad(product, wanted, grad, create_graph=again))
        dx, dw = (next(found) if one.requires_grad else None for one in (given, value))
        return dx, dw, *[None] * 6


def _add_of_down(
    ctx: Any, rows: Rows, h: Tensor, grad: Tensor, delta: Tensor, scales: Tensor | None
) -> None:
    """Leave the projected gradient of a down projection in its link.

    Args:
        h: S x in. grad: the output's gradient, T x out (S x out without ``scales``). delta: its rows, S x out.
    """
    link = ctx.link
    if link.transposed == ctx.is_transposed:  # from the input side
        features, other = _image(h, link, rows), delta
    elif link.own:
        features, other = _image(delta, link, rows), h
    else:
        features, other = _image(grad, link, rows), h
        features = features if scales is None else rows.of_tokens(features)
    if scales is not None:
        features = features * scales[:, None].to(features.dtype)
    link.add_experts(other, features, rows.offsets)


def _is_asked(ctx: Any) -> bool:
    """Whether this backward is to leave the projected gradient of the weight.

    Raises:
        ValueError: the whole gradient is asked for.
    """
    asked = asked_of(ctx.next_functions[1][0])  # of x or h, weight, ...
    if asked is None:
        return False
    # of a part computed again, the function around it has asked `autograd.grad` for what goes on
    if torch.is_grad_enabled() or (asked == "returned" and not ctx.is_inner):
        raise ValueError(refusal(ctx.link.name, "goes_on" if ctx.is_inner else asked))
    return True


def _inwards(weight: Tensor, is_transposed: bool) -> Tensor:
    """E x in x out."""
    return weight if is_transposed else weight.transpose(1, 2)


def _image(values: Tensor, link: ProjectedLinear, rows: Rows) -> Tensor:
    """Any rows by the projection of all experts, or S of them each by its expert's own."""
    columns = link.columns()  # constant until the accumulation window ends
    if not link.own:
        return values.to(columns.dtype) @ columns
    return rows.times(values, _padded(columns))[:, : columns.shape[2]]


def _padded(columns: Tensor) -> Tensor:
    """Own projections with columns of zeros, for which grouped products need not ask the host where rows end."""
    missing = -columns.shape[2] % (16 // columns.element_size())
    return F.pad(columns, (0, missing)) if missing else columns


def _input_gradient(delta: Tensor, weight: Tensor, rows: Rows, ctx: Any) -> Tensor:
    """``D W`` by row, of the Parameter or its INT8 weight decoded once more. With ``create_graph`` it can be
    differentiated again, and gives the weight its share whole."""
    value = weight if ctx.reader is None else decoded(weight, ctx.reader)
    dx = rows.times(delta, _inwards(value, ctx.is_transposed).transpose(1, 2))
    if dx.requires_grad and ctx.reader is None:
        dx.register_hook(lambda _: check_is_there(weight, ctx.link.name))
    return dx


class Half(NamedTuple):
    """A weight with how it is stored, its link if it is projected, and what it stands for if it is in INT8."""

    weight: Tensor
    is_transposed: bool
    link: ProjectedLinear | None
    encoded: Int8Weight | None = None

    def times(self, values: Tensor, rows: Rows) -> Tensor:
        """S x out of S x in, without a projection."""
        if self.encoded is None:
            return rows.times(values, _inwards(self.weight, self.is_transposed))
        if not torch.is_grad_enabled():
            return rows.times(values, _inwards(self.encoded.decode(), self.is_transposed))
        y: Tensor = _EncodedFunction.apply(
            values, self.weight, *rows, self.encoded, self.is_transposed
        )
        return y


def up(x: Tensor, half: Half, rows: Rows) -> Tensor:
    """Z, S x out."""
    weight, is_transposed, link, encoded = half
    if link is None:
        return half.times(rows.cleared(rows.of_tokens(x)), rows)
    features = None
    if link.transposed == is_transposed:  # from the input side
        features = _features(x, rows, link)
    z: Tensor = _UpFunction.apply(x, weight, features, *rows, link, is_transposed, encoded)
    return z


def _features(x: Tensor, rows: Rows, link: ProjectedLinear) -> Tensor:
    """``X B``: T x w of a shared basis, S x w of own ones."""
    if not link.own:
        return link.group.product(x, link)
    columns = link.columns()
    product: Tensor | None = kept_projection()
    if product is None:
        with torch.no_grad(), computing_projection():
            product = rows.product(rows.of_tokens(x), _padded(columns))
    return product.view(-1, product.shape[-1])[:, : columns.shape[2]]


def down(
    h: Tensor,
    half: Half,
    rows: Rows,
    z: Tensor,
    gate: Callable[[Tensor], Tensor],
    scales: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Y: T x out with ``scales``, the rows S x out without."""
    weight, is_transposed, link, encoded = half
    if link is not None:
        y: Tensor = _DownFunction.apply(
            h, weight, z, scales, bias, *rows, link, is_transposed, encoded, gate
        )
        return y
    y = half.times(h, rows)
    if scales is None:
        return y
    if bias is not None:
        y.add_(bias[rows.experts()])
    return rows.add_up(rows.cleared(y) * scales[:, None])
