"""Installs a backend on a model: hooks that track the running module, and the checkpoint that layers call."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.hooks import RemovableHandle

from hmt_deepspeed.activations.caching import active_mode
from hmt_deepspeed.activations.policy import LayerSites
from hmt_deepspeed.activations.recording import Site

__all__ = ["Installation"]

# Runs the forward of a module of known sites: sites, forward, args, kwargs.
_Run = Callable[[LayerSites, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
_OURS = "_hmt_checkpoint"  # marks a checkpoint function as a backend's
_FORWARD_BEFORE, _GENERATE_BEFORE = "_hmt_forward_before", "_hmt_generate_before"


class Installation:
    """A backend on a model, from construction to :meth:`undo`.

    HF layers get the backend's checkpoint as their ``_gradient_checkpointing_func``, and a later
    ``activation_checkpointing_enable`` gives them nothing else; other modules get a forward of ours. Layers
    that ``every_n_layers`` leaves out, before or later, are left to autograd.

    What is put on modules are plain functions, methods of the module itself, and entries in weak
    dictionaries: a deep copy of the model copies no backend. Its HF layers go on being checkpointed by this
    one, all else in it computes what it did before.

    Args:
        checkpoint: for HF layers. run: for other modules, whose sites are known.
        layers: what is checkpointed.

    Raises:
        ValueError: Hugging Face was told to offload.
    """

    def __init__(
        self,
        model: nn.Module,
        checkpoint: Callable[..., Any],
        run: _Run,
        layers: Sequence[LayerSites],
    ) -> None:
        self._undo: list[Callable[[], Any]] = []
        try:
            self._install(model, checkpoint, run, layers)
        except BaseException:
            self.undo()
            raise

    def _install(
        self,
        model: nn.Module,
        checkpoint: Callable[..., Any],
        run: _Run,
        layers: Sequence[LayerSites],
    ) -> None:
        for sites in layers:
            self._enter(_OWNED, sites.module, (run, sites))
            for module, site in ((sites.module, sites.base), *sites.modules):
                for handle in _track(module, site):
                    self._undo.append(handle.remove)
            if not _is_hf_layer(sites.module):
                self._set(sites.module, _FORWARD_BEFORE, vars(sites.module).get("forward"))
                self._set(sites.module, "forward", MethodType(_forward, sites.module))
        hf_layers = {sites.module for sites in layers if _is_hf_layer(sites.module)}
        self._enable(model, hf_layers, _as_function(checkpoint))

    def undo(self) -> None:
        """Everything as before. Idempotent."""
        while self._undo:
            self._undo.pop()()

    def _enable(
        self, model: nn.Module, layers: set[nn.Module], checkpoint: Callable[..., Any]
    ) -> None:
        """Turn on HF's gradient checkpointing of layers, with our function."""
        flagged = {layer for layer in layers if layer.gradient_checkpointing}
        for layer in flagged:
            _refuse_other(getattr(layer, "_gradient_checkpointing_func", None))
        left_out = layers - flagged if flagged else set()
        for module in model.modules():
            if layers.isdisjoint(module.modules()):
                continue
            # The models around the layers have the flag too: with gradients, it keeps them from making a cache.
            if hasattr(module, "gradient_checkpointing"):
                self._set(module, "gradient_checkpointing", module not in left_out)
                self._set(module, "_gradient_checkpointing_func", checkpoint)
            if hasattr(module, "generate"):
                self._set(module, _GENERATE_BEFORE, vars(module).get("generate"))
                self._set(module, "generate", MethodType(_generate, module))
            if hasattr(module, "_set_gradient_checkpointing"):
                self._enter(_ENABLED, module, checkpoint)
                own = MethodType(_set_gradient_checkpointing, module)
                self._set(module, "_set_gradient_checkpointing", own)

    def _enter(
        self, table: WeakKeyDictionary[nn.Module, Any], module: nn.Module, value: Any
    ) -> None:
        table[module] = value
        self._undo.append(lambda: table.pop(module, None))

    def _set(self, module: nn.Module, name: str, value: Any) -> None:
        """Set an attribute, to be restored."""
        own = vars(module)
        if name in own:
            self._undo.append(functools.partial(own.__setitem__, name, own[name]))
        else:
            self._undo.append(functools.partial(own.pop, name, None))
        own[name] = value


_OWNED: WeakKeyDictionary[nn.Module, tuple[_Run, LayerSites]] = WeakKeyDictionary()
_ENABLED: WeakKeyDictionary[nn.Module, Callable[..., Any]] = WeakKeyDictionary()


@torch._disable_dynamo
def _forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Forward of a module that does not checkpoint itself."""
    before = vars(self)[_FORWARD_BEFORE] or functools.partial(type(self).forward, self)
    owned = _OWNED.get(self)
    if owned is None or not self.training:
        return before(*args, **kwargs)
    run, sites = owned
    return run(sites, before, args, kwargs)


def _set_gradient_checkpointing(
    self: Any,
    enable: bool = True,
    gradient_checkpointing_func: Callable[..., Any] | None = None,
    every_n_layers: int = 1,
) -> None:
    """Called by HF's ``activation_checkpointing_enable`` and ``_disable``."""
    function, ours = gradient_checkpointing_func, _ENABLED.get(self)
    if ours is not None and enable:
        _refuse_other(function)
        function = ours
    given: dict[str, Any] = {}
    if function is not None:
        given["gradient_checkpointing_func"] = function
    if every_n_layers != 1:  # older transformers do not know the word
        given["every_n_layers"] = every_n_layers
    type(self)._set_gradient_checkpointing(self, enable=enable, **given)


def _refuse_other(function: Callable[..., Any] | None) -> None:
    """A checkpoint of Hugging Face's that does more than to checkpoint; a copied model has ours."""
    known = function is None or hasattr(function, _OURS)
    if not known and getattr(function, "func", function) is not torch_checkpoint:
        raise ValueError(
            "activation_checkpointing_enable was asked to offload, but hmt.activations decides what "
            'becomes of activations: leave offload out and set "layer_input": "swap_host"'
        )


def _generate(self: Any, *args: Any, **kwargs: Any) -> Any:
    """While training too: layers that checkpoint drop their caches, in some families silently."""
    before = vars(self)[_GENERATE_BEFORE] or functools.partial(type(self).generate, self)
    flagged = [m for m in self.modules() if getattr(m, "gradient_checkpointing", False)]
    for module in flagged:
        module.gradient_checkpointing = False
    try:
        return before(*args, **kwargs)
    finally:
        for module in flagged:
            module.gradient_checkpointing = True


def _as_function(checkpoint: Callable[..., Any]) -> Callable[..., Any]:
    """A plain function in place of a bound method, which a deep copy of the model would copy."""

    @torch._disable_dynamo
    def call(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return checkpoint(fn, *args, **kwargs)

    setattr(call, _OURS, True)
    return call


def _track(module: nn.Module, site: Site) -> Iterable[RemovableHandle]:
    """Tell the active mode when a module begins and ends."""

    def begin(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        mode = active_mode()
        return None if mode is None else mode.enter(site, args)

    def end(*_: object) -> None:
        mode = active_mode()
        if mode is not None:
            mode.leave(site)

    # A replay may stop in the middle of a module; what began for its input ends there.
    always = site.input_codec is not None
    return (
        module.register_forward_pre_hook(begin),
        module.register_forward_hook(end, always_call=always),
    )


def _is_hf_layer(module: nn.Module) -> bool:
    """Whether a layer checkpoints itself; one whose forward was replaced on the instance does not."""
    bases = {base.__name__ for base in type(module).__mro__}
    return "GradientCheckpointingLayer" in bases and "forward" not in vars(module)
