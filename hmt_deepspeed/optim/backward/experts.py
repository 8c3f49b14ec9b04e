"""Experts of a mixture whose weights are 3-D, E x out x in or E x in x out: which of them a backward can be projected
for, and the patches that do it.

A module of transformers' experts interface computes ``down(gate(up(x)))`` of the tokens that each expert has, sorted
by expert, and adds up by token what the routing weights scale. Llama-4's gets the tokens of every expert side by side.
"""

from __future__ import annotations

import functools
import inspect
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import MethodType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from hmt_deepspeed import sites
from hmt_deepspeed.kernels.backward import computed_again, is_transformed
from hmt_deepspeed.optim.backward.expert_forwards import (
    Links,
    Role,
    batched_experts,
    routed_experts,
)
from hmt_deepspeed.optim.backward.int8_linear import (
    Int8Weight,
    decoded,
    dequantize,
    encoded_weights,
    stands_for,
)
from hmt_deepspeed.optim.backward.projected_linear import ProjectedLinear
from hmt_deepspeed.optim.settings.assign import tied_weights

__all__ = ["ExpertSite", "expert_sites", "patch_experts", "unpatch_experts"]


class ExpertSite(NamedTuple):
    """A 3-D weight of E matrices and the module that reads it.

    Attributes:
        role: what reads the module's input, or what writes its output; None of a weight that is known as neither.
        is_transposed: stored E x in x out, else E x out x in.
        reason: why a backward cannot be projected; empty if it can.
    """

    module: nn.Module
    role: Role | None
    is_transposed: bool
    reason: str = ""


class _Patch(NamedTuple):
    """The patch of one module: how it is computed, of its links by role and its arguments; the links with the names of
    their weights, and the Parameters that the optimizer knows."""

    forward: Callable[..., Tensor]
    links: dict[Role, ProjectedLinear]
    weights: dict[Role, tuple[str, weakref.ref[Tensor]]]


# Weak, and looked up: a deep copy of a patched module is not in it and computes what its class does.
_PATCHED: WeakKeyDictionary[nn.Module, _Patch] = WeakKeyDictionary()


def expert_sites(model: nn.Module) -> dict[str, ExpertSite]:
    """The model's 3-D weights of two and more matrices, by parameter name. Weights of torch's own modules, such as
    convolutions, are none."""
    found, tied = {}, tied_weights(model)
    for path, module in model.named_modules():
        if type(module).__module__.startswith("torch.nn."):
            continue
        known = sites.expert_weights(module)
        for key, weight in module.named_parameters(recurse=False, remove_duplicate=False):
            shape = getattr(weight, "ds_shape", weight.shape)  # ZeRO-3's
            if len(shape) != 3 or min(shape) < 2:
                continue
            name, forward = f"{path}.{key}" if path else key, _forward_of(module)
            reason = forward if isinstance(forward, str) else ""
            if name in tied:
                reason = f"is also {tied[name]} (tied)"
            elif hasattr(weight, "device_mesh"):
                reason = "is a DTensor"
            elif not reason and key not in known:
                reason = f"is not what {type(module).__name__} computes its experts by"
            kind = known.get(key)
            role, is_transposed = (None, False) if kind is None else (kind.role, kind.is_transposed)
            found[name] = ExpertSite(module, role, is_transposed, reason)
    return found


def _forward_of(module: nn.Module) -> Callable[..., Tensor] | str:
    """How a module's experts are computed with projected backwards, or why that cannot be known."""
    name = type(module).__name__
    own = vars(module).get("forward")
    if own is not None and getattr(own, "__func__", None) is not _projected_forward:
        return f"belongs to a {name} whose forward has been replaced"
    forward = type(module).forward
    if _is_of_interface(forward):
        chosen = _unknown_implementation(module)
        if chosen is None:
            return routed_experts
        return (
            f"belongs to a {name} whose experts implementation is {chosen!r}, not transformers' own"
        )
    llama4 = sys.modules.get("transformers.models.llama4.modeling_llama4")
    if llama4 is not None and forward is llama4.Llama4TextExperts.forward:
        return batched_experts
    return f"belongs to a {name}, whose forward is not known to be that of experts"


def _is_of_interface(forward: Any) -> bool:
    """Whether a class's forward is what transformers' ``use_experts_implementation`` makes of it."""
    moe = sys.modules.get("transformers.integrations.moe")
    if moe is None or getattr(forward, "__code__", None) is not _interface_code():
        return False
    theirs = moe.ALL_EXPERTS_FUNCTIONS
    return inspect.getclosurevars(forward).nonlocals.get("experts_interface", theirs) is theirs


@functools.cache
def _interface_code() -> Any:
    from transformers.integrations.moe import use_experts_implementation

    class Plain(nn.Module):
        pass

    return use_experts_implementation(Plain).forward.__code__


def _unknown_implementation(module: nn.Module) -> str | None:
    """The experts implementation of a module where it is not one of transformers', which all compute the same."""
    chosen: str | None = getattr(module.config, "_experts_implementation", None)
    if chosen is None or chosen == "eager":
        return None
    function = sys.modules["transformers.integrations.moe"].ALL_EXPERTS_FUNCTIONS.get(chosen)
    is_theirs = function is not None and function.__module__.startswith("transformers.")
    return None if is_theirs else chosen


def patch_experts(links: Iterable[tuple[ExpertSite, ProjectedLinear]]) -> None:
    """Give experts the projected backward of the weights that a link has a projection for.

    A module computes what it always did in a window without a projection, without grad mode, under ``torch.func`` and
    forward-mode AD, and of a weight that ``functional_call`` puts in its place. INT8 weights are decoded for it.

    Args:
        links: each with its site, which has no ``reason``. Its ``transposed`` says that the projected side is the
            first dimension of each expert's matrix as it is stored, E x a x b: what backward leaves is E x b x width;
            of the last E x a x width.
    """
    patches: dict[nn.Module, _Patch] = {}
    for site, link in links:
        forward = _forward_of(site.module)
        assert not isinstance(forward, str)
        assert site.role is not None
        patch = patches.setdefault(site.module, _Patch(forward, {}, {}))
        patch.links[site.role] = link
        known = sites.expert_weights(site.module)
        key = next(key for key, weight in known.items() if weight.role == site.role)
        patch.weights[site.role] = key, weakref.ref(getattr(site.module, key))
    for module, patch in patches.items():
        _PATCHED[module] = patch
        module.forward = MethodType(_projected_forward, module)


def unpatch_experts(module: nn.Module, link: ProjectedLinear | None = None) -> None:
    """Undo :func:`patch_experts` of a module; given ``link``, only if the module still belongs to it.

    INT8 weights are decoded for good.
    """
    patch = _PATCHED.get(module)
    if link is None or (patch is not None and any(link is own for own in patch.links.values())):
        dequantize(module)
        _PATCHED.pop(module, None)
        vars(module).pop("forward", None)


@torch._disable_dynamo  # a graph would hold the projection at the time of tracing
def _projected_forward(self: nn.Module, *args: Any, **keywords: Any) -> Tensor:
    patch = _PATCHED.get(self)
    encoded = _encoded(self, patch)
    if patch is not None and not is_transformed() and _is_known(self, patch):
        links = _active(self, patch)
        if links or encoded:
            own = {role: encoded.get(key) for role, (key, _) in patch.weights.items()}
            return patch.forward(self, links, own, *args, **keywords)
    with _decoded_weights(self, encoded):
        y: Tensor = type(self).forward(self, *args, **keywords)
    return y


def _encoded(module: nn.Module, patch: _Patch | None) -> dict[str, Int8Weight]:
    """The INT8 weights that a forward reads, by the names of their Parameters, but for those in whose place
    ``functional_call`` puts others."""
    found = dict(encoded_weights(module))
    for key, reference in () if patch is None or not found else patch.weights.values():
        own, given = reference(), getattr(module, key)
        if given is not own and not stands_for(given, own):
            found.pop(key, None)
    return found


@contextmanager
def _decoded_weights(module: nn.Module, encoded: Mapping[str, Int8Weight]) -> Iterator[None]:
    """Let code that reads a module's weights find their values."""
    values = {key: decoded(getattr(module, key), one.decode) for key, one in encoded.items()}
    vars(module).update(values)  # found before Parameters are
    try:
        yield
    finally:
        for key in values:
            del vars(module)[key]


def _is_known(module: nn.Module, patch: _Patch) -> bool:
    """Whether a module computes its experts as its patch does, which may have been changed since."""
    return patch.forward is not routed_experts or _unknown_implementation(module) is None


def _active(module: nn.Module, patch: _Patch) -> Links:
    """The links that this forward projects for."""
    if not torch.is_grad_enabled():
        return {}
    inner, active = computed_again(), {}
    for role, link in patch.links.items():
        key, reference = patch.weights[role]
        own = reference()
        # `torch.func.functional_call` puts another one in its place
        if own is None or own is not getattr(module, key) or not own.requires_grad:
            continue
        if link.projection is not None and (inner is None or id(own) not in inner):
            active[role] = link
    return active
