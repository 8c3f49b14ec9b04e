"""``module.zero_grad()`` of a patched model: it drops the projected gradients too, which are no ``p.grad``."""

from __future__ import annotations

from collections.abc import Sequence
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from hmt_deepspeed.optim.backward.projected_linear import ProjectedSite

__all__ = ["Accumulated", "patch_zero_grad", "unpatch_zero_grad"]


class Accumulated:
    """What the backwards since the last step have left in the sites of a module.

    Attributes:
        clipped: what clipping has multiplied it by.
    """

    def __init__(self, sites: Sequence[ProjectedSite] = ()) -> None:
        self.sites = sites
        self.clipped: Tensor | None = None

    def drop(self) -> None:
        for site in self.sites:
            site.take()
        self.clipped = None


# Weak, and looked up: a deep copy of a patched module is not in it and drops its own gradients only.
_ACCUMULATED: WeakKeyDictionary[nn.Module, Accumulated] = WeakKeyDictionary()


def patch_zero_grad(
    model: nn.Module, whole: Accumulated, sites: Sequence[tuple[nn.Module, ProjectedSite]]
) -> list[nn.Module]:
    """Let the ``zero_grad`` of a model, and of each of its modules, drop what is in the sites inside it.

    Args:
        whole: of the model. sites: by the linear that they belong to.

    Returns:
        The modules that were patched, the model first.
    """
    by_linear, patched = dict(sites), []
    for module in model.modules():
        inside = [by_linear[inner] for inner in module.modules() if inner in by_linear]
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
