"""Projected backward: a linear layer whose weight gradient is never formed.

Ordinary backward saves the input ``X`` (T x n), forms ``G = D^T X`` (m x n) from the output gradient
``D`` and projects it. Since ``G [Q | P] = D^T (X [Q | P])``, it is enough to save ``X [Q | P]``
(T x (r + k)): CompAct's idea (2410.15352) with the optimizer's own basis, and exact. A weight projected from the left needs
``B^T G = (D B)^T X``: the full product is spared, the input is not.
"""

from __future__ import annotations

import weakref
from types import MethodType
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from hmt_deepspeed.kernels.backward import computed_again, is_transformed
from hmt_deepspeed.optim.backward.int8_linear import (
    Int8Weight,
    dequantize,
    encoded_linear,
    encoded_weight,
    stands_for,
)
from hmt_deepspeed.optim.backward.linear_functions import (
    LeftProjectedLinearFunction,
    ProjectedLinearFunction,
)
from hmt_deepspeed.optim.backward.projected_linear import ProjectedLinear, SharedInputs

__all__ = [
    "can_project",
    "patch_linear",
    "unpatch_linear",
]


class _Patch(NamedTuple):
    """The patch of one module; ``weight`` is the Parameter that the optimizer knows."""

    linear: ProjectedLinear
    shared: SharedInputs
    weight: weakref.ref[Tensor]


# Which modules are patched. Weak: a model that is dropped takes its patches along; a deep copy of a
# patched module is not in it and computes an ordinary linear.
_PATCHED: WeakKeyDictionary[nn.Module, _Patch] = WeakKeyDictionary()


def can_project(module: nn.Module) -> bool:
    """Whether the module's forward is exactly ``F.linear(x, weight, bias)``, and is what reads its weight:
    ``nn.MultiheadAttention`` reads that of its output projection itself.

    A patched module and its copies count: a new patch takes the old one's place.
    """
    own = vars(module).get("forward")
    return (
        isinstance(module, nn.Linear)
        and not isinstance(module, NonDynamicallyQuantizableLinear)
        and type(module).forward is nn.Linear.forward
        and (own is None or getattr(own, "__func__", None) is _projected_forward)
    )


def patch_linear(module: nn.Linear, linear: ProjectedLinear, shared: SharedInputs) -> None:
    """Give one linear the projected backward.

    It computes what it always did without grad mode, under ``torch.func`` and forward-mode AD, and with a weight
    that ``functional_call`` puts in its place.
    """
    _PATCHED[module] = _Patch(linear, shared, weakref.ref(module.weight))
    module.forward = MethodType(_projected_forward, module)  # type: ignore[method-assign]


def unpatch_linear(module: nn.Linear, linear: ProjectedLinear | None = None) -> None:
    """Undo :func:`patch_linear`; given ``linear``, only if the module still belongs to it.

    An INT8 weight is decoded for good.
    """
    patch = _PATCHED.get(module)
    if linear is None or (patch is not None and patch.linear is linear):
        dequantize(module)
        _PATCHED.pop(module, None)
        vars(module).pop("forward", None)


@torch._disable_dynamo  # a graph would hold the projection at the time of tracing
def _projected_forward(self: nn.Linear, x: Tensor) -> Tensor:
    weight, bias = self.weight, self.bias
    patch, encoded = _PATCHED.get(self), encoded_weight(self)
    if patch is not None:
        own = patch.weight()
        if weight is not own:  # `torch.func.functional_call` has put another one in its place
            if encoded is not None and not stands_for(weight, own):
                encoded = None
        elif torch.is_grad_enabled() and weight.requires_grad and not is_transformed():
            inner = computed_again()
            if inner is None or id(weight) not in inner:
                y = _project(x, weight, bias, patch, encoded, inner is not None)
                if y is not None:
                    return y
    if encoded is not None:
        return encoded_linear(x, weight, bias, encoded)
    return F.linear(x, weight, bias)


def _project(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    patch: _Patch,
    encoded: Int8Weight | None,
    is_inner: bool,
) -> Tensor | None:
    """The output with a projected backward; None in an accumulation window that forms the full gradient."""
    linear = patch.linear
    patch.shared.meet(x, linear)
    if linear.projection is None:
        return None
    if linear.transposed:
        return LeftProjectedLinearFunction.apply(x, weight, bias, linear, encoded, is_inner)
    product = linear.group.product(x, linear)
    return ProjectedLinearFunction.apply(x, weight, bias, product, linear, encoded, is_inner)
