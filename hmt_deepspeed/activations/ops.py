"""Table of aten operations: which are worth saving, what they write to, and whether they draw random numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

__all__ = ["Traits", "flops", "traits_of"]

aten = torch.ops.aten
Shape = Sequence[int]


def _attention(q: Shape, k: Shape, *rest: Any, out_val: Shape, **_: Any) -> int:
    """Two products; batch x tokens x heads x width, or packed, whose longest sequence stands for all."""
    keys = k[1] if len(k) == 4 else rest[4]  # max_k, after v, two lists of beginnings and max_q
    return 4 * math.prod(q) * int(keys)


def _inner_products(a: Shape, *_: Any, out_val: Shape, **__: Any) -> int:
    """2 x elements of the output x length of the inner products."""
    return 2 * math.prod(out_val) * a[-1]


def _inner_products_added(_: Shape, a: Shape, *__: Any, out_val: Shape, **___: Any) -> int:
    return _inner_products(a, out_val=out_val)


def _heads_first(q: Shape, k: Shape, v: Shape, *_: Any, **__: Any) -> int:
    """Two products; batch x heads x tokens x width, of keys and values perhaps fewer heads."""
    return 2 * math.prod(q[:-1]) * k[-2] * (q[-1] + v[-1])


def _heads_first_backward(_: Shape, q: Shape, k: Shape, v: Shape, *__: Any, **___: Any) -> int:
    """Five products: the scores again, and the gradients of probabilities, queries, keys and values."""
    return 2 * math.prod(q[:-1]) * k[-2] * (3 * q[-1] + 2 * v[-1])


_ATTENTIONS = [
    f"_scaled_dot_product_{kind}_attention" for kind in ("flash", "efficient", "cudnn", "fused")
]
_ENDINGS = ("", "_for_cpu", "_overrideable")

# FLOPs from shapes, of what torch's registry leaves out, reads from the device or, up to torch 2.11, refuses: fewer
# heads of keys than of queries.
_FORMULAS: dict[str, Callable[..., int]] = {
    **{name + end: _heads_first for name in _ATTENTIONS for end in _ENDINGS},
    **{f"{name}{end}_backward": _heads_first_backward for name in _ATTENTIONS for end in _ENDINGS},
    "_flash_attention_forward": _attention,
    "_efficient_attention_forward": lambda q, k, v, _, *rest, **kwargs: _attention(
        q, k, v, *rest, **kwargs
    ),
    "_grouped_mm": _inner_products,
    "_scaled_grouped_mm": _inner_products,
    "grouped_mm_fallback": _inner_products,  # of transformers, where there is no grouped_mm
    "_int_mm": _inner_products,
    "_addmm_activation": _inner_products_added,
}

# Fresh memory: whoever fills it past the dispatcher (a raw Triton kernel) does it unseen.
_FRESH = (
    aten.empty,
    aten.empty_like,
    aten.empty_strided,
    aten.new_empty,
    aten.new_empty_strided,
    aten.zeros,
    aten.zeros_like,
    aten.new_zeros,
    aten.full,
    aten.full_like,
    aten.new_full,
)
_DYNAMIC = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}


class Traits(NamedTuple):
    """Properties of an operation that the dispatch modes need.

    Attributes:
        heavy: worth holding: matrix products, convolutions, attention.
        attention: a fused attention operation, whose first output is attention's.
        heads_first: of which that is batch x heads x tokens x width, and not batch x tokens x heads x width.
        batched: a batched product, of which unfused attention is made.
        writes: positions of the arguments it writes to. writes_to: names of those given by keyword.
        fresh: returns memory that is there to be written to.
        draws: may consume random numbers. dropout: position of its ``dropout_p``; -1 if it has none.
        fills: overwrites its argument with random numbers.
        masks: the dropout operation, whose mask depends on nothing.
        is_untaped: another call of the same shape, or the same one repeated, may differ in more than values: it
            writes, returns fresh memory, or values decide the shape or what the host does next.
    """

    heavy: bool = False
    attention: bool = False
    heads_first: bool = False
    batched: bool = False
    writes: tuple[int, ...] = ()
    writes_to: tuple[str, ...] = ()
    fresh: bool = False
    draws: bool = False
    dropout: int = -1
    fills: bool = False
    masks: bool = False
    is_untaped: bool = True

    def written(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """The arguments that a call writes to."""
        found = [args[i] for i in self.writes if i < len(args)]
        return found + [kwargs[name] for name in self.writes_to if name in kwargs]

    def drew(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether a call consumes random numbers."""
        if not self.draws or self.dropout < 0:
            return self.draws
        default = args[self.dropout] if self.dropout < len(args) else 0.0
        return float(kwargs.get("dropout_p", default)) > 0


@cache
def traits_of(func: Any) -> Traits:
    """Traits of an operator overload."""
    packet = getattr(func, "_overloadpacket", None)
    if packet is None:  # a higher-order operator
        return Traits()
    namespace, _, name = func._schema.name.partition("::")
    arguments = func._schema.arguments
    writes = [i for i, a in enumerate(arguments) if a.alias_info and a.alias_info.is_write]
    attention = "attention" in name or "attn" in name
    custom_attention = attention and namespace not in ("aten", "prim")
    known = packet in flop_registry or name in _FORMULAS
    dropout = next((i for i, a in enumerate(arguments) if a.name == "dropout_p"), -1)
    seeded = torch.Tag.nondeterministic_seeded in func.tags
    is_dynamic = not _DYNAMIC.isdisjoint(func.tags)
    return Traits(
        heavy=(known or custom_attention) and not writes and "backward" not in name,
        attention=attention,
        heads_first=name.startswith("_scaled_dot_product"),
        batched=packet in (aten.bmm, aten.baddbmm),
        writes=tuple(writes),
        writes_to=tuple(arguments[i].name for i in writes),
        fresh=packet in _FRESH,
        draws=seeded or dropout >= 0,  # few custom operations carry the tag
        dropout=dropout,
        fills=seeded and writes == [0] and name.endswith("_"),
        masks=packet is aten.native_dropout,
        is_untaped=bool(writes) or packet in _FRESH or is_dynamic,
    )


def flops(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> int:
    """Floating-point operations of an operation's call; 0 for one of unknown formula."""
    if _formula_of(func) is None:
        return 0
    first = out[0] if isinstance(out, (list, tuple)) else out
    return _flops(
        func, _shapes(args), tuple(zip(kwargs, _shapes(kwargs.values()), strict=True)), first.shape
    )


def _shapes(values: Iterable[Any]) -> tuple[Any, ...]:
    """Tensors as their shapes; hashable."""
    return tuple(
        value.shape
        if isinstance(value, Tensor)
        else tuple(value)
        if isinstance(value, list)
        else value
        for value in values
    )


@cache
def _formula_of(func: Any) -> Callable[..., int] | None:
    packet = getattr(func, "_overloadpacket", None)
    name = "" if packet is None else func._schema.name.partition("::")[2]
    return _FORMULAS.get(name) or flop_registry.get(packet)


@lru_cache(maxsize=4096)
def _flops(func: Any, args: tuple[Any, ...], kwargs: tuple[Any, ...], out: Shape) -> int:
    formula = _formula_of(func)
    assert formula is not None
    return int(formula(*args, **dict(kwargs), out_val=out))
