"""``module.zero_grad()`` of a patched model also drops the projected gradients, which are no ``p.grad``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from hmt_deepspeed.optim.backward.projected_linear import ProjectedLinear

__all__ = ["Accumulated", "patch_zero_grad", "unpatch_zero_grad"]


class Accumulated:
    """Projected gradients that backwards have left in the linears of a module since the last step.

    Attributes:
        linears: those of the module.
        clipped: the factor that clipping has multiplied them by; None for none.
    """

    def __init__(self, linears: Sequence[ProjectedLinear] = ()) -> None:
        self.linears = linears
        self.clipped: Tensor | None = None

    def drop(self) -> None:
        for linear in self.linears:
            linear.take()
        self.clipped = None


# Weak, and looked up: a deep copy of a patched module is not in it and drops its own gradients only.
_ACCUMULATED: WeakKeyDictionary[nn.Module, Accumulated] = WeakKeyDictionary()


def patch_zero_grad(
    model: nn.Module, whole: Accumulated, linears: Sequence[tuple[nn.Module, ProjectedLinear]]
) -> list[nn.Module]:
    """Let the ``zero_grad`` of a model, and of each of its modules, drop the projected gradients inside it.

    Args:
        whole: those of the whole model. linears: each patched module with its projected linears.

    Returns:
        The modules that were patched, the model first.
    """
    by_module, patched = defaultdict(list), []
    for module, linear in linears:
        by_module[module].append(linear)
    for module in model.modules():
        inside = [one for inner in module.modules() for one in by_module.get(inner, ())]
        if inside:
            _ACCUMULATED[module] = whole if module is model else Accumulated(inside)
            module.zero_grad = MethodType(_zero_grad, module)  # type: ignore[method-assign]
            patched.append(module)
    return patched


def unpatch_zero_grad(modules: Sequence[nn.Module], whole: Accumulated) -> None:
    """Undo :func:`patch_zero_grad`, unless the model has been patched anew since."""
    if modules and _ACCUMULATED.get(modules[0]) is whole:
        for module in modules:
            _ACCUMULATED.pop(module, None)
            vars(module).pop("zero_grad", None)


def _zero_grad(self: nn.Module, *args: Any, **keywords: Any) -> None:
    if self in _ACCUMULATED:
        _ACCUMULATED[self].drop()
    type(self).zero_grad(self, *args, **keywords)
