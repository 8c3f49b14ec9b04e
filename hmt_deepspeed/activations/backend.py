"""Carries out a policy on a model: checkpoints its functions and saves their activations as the policy says."""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from hmt_deepspeed import ownership
from hmt_deepspeed.activations.caching import active_mode
from hmt_deepspeed.activations.checkpoint import (
    Call,
    Options,
    SavedInputs,
    activations_among,
    with_positional_activations,
)
from hmt_deepspeed.activations.codecs import Codec, Keep, SavedTensor
from hmt_deepspeed.activations.following import FollowMode
from hmt_deepspeed.activations.head import hold_head_input
from hmt_deepspeed.activations.installation import Installation
from hmt_deepspeed.activations.ledger import ActivationReport, Ledger, by_label, by_layer
from hmt_deepspeed.activations.policy import LayerSites, Policy
from hmt_deepspeed.activations.record import RecordMode
from hmt_deepspeed.activations.recording import Recording, Site
from hmt_deepspeed.activations.replay import ReplayMode
from hmt_deepspeed.activations.tape import Tape
from hmt_deepspeed.activations.tapes import Tapes
from hmt_deepspeed.attribution import Attribution
from hmt_deepspeed.config.components import Choice, Component
from hmt_deepspeed.kernels.backward import is_transformed
from hmt_deepspeed.memory.counters import Counters

__all__ = ["ActivationBackend"]

_OPTIONS = ("context_fn", "debug", "determinism_check", "early_stop")  # of torch's checkpoint
_NOTHING: Callable[[], None] = lambda: None  # noqa: E731  a dead weak reference


class ActivationBackend:
    """A policy on a model, installed as its gradient checkpointing.

    Args:
        model: the one that ``attribution`` describes.
        attribution: see :func:`hmt_deepspeed.attribution.attribute`.
        policy, overrides, codecs, of_inputs: see :class:`Policy`.
        around: runs each checkpointed call; it is given what does that, the function and its arguments.
        seed: of the noise of stochastic rounding.
        error_interval: steps between two measurements of what encoding loses; 0: never.
        transfers: counters of what swaps move.
        engine: whose backend this is, for messages; another backend does not take an engine's place while that
            lives.

    Attributes:
        calls: checkpointed calls so far, counted into the noise.
        steps: steps begun so far, of which every ``error_interval``-th measures. A resumed run continues both.

    Raises:
        ValueError: see :class:`Policy`; a torch that does not show saved-tensor hooks.
    """

    dropped = False  # the model keeps it

    def __init__(
        self,
        model: nn.Module,
        attribution: Attribution,
        policy: Mapping[Component, Choice],
        codecs: Mapping[Choice, Codec],
        overrides: Mapping[str, Mapping[Component, Choice]] | None = None,
        *,
        of_inputs: Callable[[Codec, int], Codec] | None = None,
        around: Callable[..., Any] | None = None,
        seed: int = 0,
        error_interval: int = 0,
        transfers: Iterable[Counters] = (),
        engine: str = "",
    ) -> None:
        if not hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks"):
            raise ValueError(
                f"hmt.activations needs torch 2.8 or later, this is {torch.__version__}: install one, or "
                "remove the section"
            )
        self.model, self.attribution = model, attribution
        self._policy = Policy(policy, overrides or {}, codecs, of_inputs)
        self._layers: dict[nn.Module, LayerSites] = {}
        for layer in attribution.layers:
            self._layers.setdefault(layer.module, self._policy.layer(layer))
        self._around = around
        self._seed, self._error_interval = seed, error_interval
        self._transfers, self._engine = tuple(transfers), engine
        self._ledger, self._inputs, self._tapes = Ledger(), SavedInputs(), Tapes()
        self._last: Callable[[], Recording | None] = _NOTHING
        self._installed: ExitStack | None = None
        self.calls = self.steps = self._head_calls = 0
        self._moved_before = self._moved()

    # -- calls --------------------------------------------------------------------------------------

    @torch._disable_dynamo
    def checkpoint(
        self,
        fn: Callable[..., Any],
        *args: Any,
        use_reentrant: bool | None = None,
        preserve_rng_state: bool = True,
        redraws: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """``fn(*args, **kwargs)``, computed again in backward except for what the policy holds.

        In place of ``torch.utils.checkpoint.checkpoint`` and ``deepspeed.checkpointing.checkpoint``. Of
        layers that are attributed the policy's components are held, whether ``fn`` is a layer's forward or
        calls several; any other function is computed again whole. Within a checkpointed call, without
        grad mode, under ``torch.func`` and forward-mode AD, ``fn`` is just called. ``torch.compile``
        leaves a checkpointed call as it is.

        Args:
            use_reentrant: for the callers' sake: both mean the same here, none is ever reentrant.
            preserve_rng_state: compute again with the random numbers of forward.
            redraws: whether that happens, if ``fn`` sees to it; by default ``preserve_rng_state``.
            kwargs: of ``fn``, and ``determinism_check`` and ``early_stop`` of torch's checkpoint.

        Raises:
            ValueError: ``context_fn`` or ``debug``, for which it has no place.
        """
        owner = _owner(fn)
        sites = None if owner is None else self._layers.get(owner)
        options = {name: kwargs.pop(name) for name in _OPTIONS if name in kwargs}
        for name in ("context_fn", "debug"):
            if options.pop(name, None):
                raise ValueError(
                    f"{name} was given to a checkpoint of hmt.activations, which has modes of its own: do not "
                    f"give {name}, or remove the section"
                )
        given = Options(
            preserve_rng_state,
            early_stop=options.get("early_stop", True),
            checks=options.get("determinism_check", "default") == "default",
        )
        redraws = preserve_rng_state if redraws is None else redraws
        return self._run(sites, fn, args, kwargs, given, redraws)

    def _run(
        self,
        sites: LayerSites | None,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        options: Options = Options(),  # noqa: B008  immutable
        redraws: bool = True,
    ) -> Any:
        if not torch.is_grad_enabled() or active_mode() is not None or is_transformed():
            return fn(*args, **kwargs)
        fn, args, kwargs = with_positional_activations(fn, args, kwargs)
        base = None if sites is None else sites.base
        recording = Recording(redraws, previous=self._last)
        self._last = weakref.ref(recording)
        self.calls = call = self.calls + 1
        key = functools.partial(_key, self._seed, call)
        holds_products = self._policy.holds_products() if sites is None else sites.holds_products
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
        tape = None if sites is None else self._tapes.find(sites, tensors)
        ledger, measures = self._ledger, self._measures
        record: RecordMode | FollowMode
        if isinstance(tape, Tape):
            record = FollowMode(recording, ledger, key, measures, tape, tensors)
        else:
            record = RecordMode(recording, base, ledger, key, measures, holds_products, tape)
        replay = functools.partial(ReplayMode, recording, base, ledger)
        holders = self._holders(recording, sites, args, key)

        def run(fn: Callable[..., Any], *args: Any) -> Any:
            checkpointed = Call(fn, args, kwargs, record, replay, holders, options)
            return checkpointed.run(args)

        return run(fn, *args) if self._around is None else self._around(run, fn, *args)

    def _holders(
        self,
        recording: Recording,
        sites: LayerSites | None,
        args: tuple[Any, ...],
        key: Callable[[int], int],
    ) -> list[Callable[[Tensor], SavedTensor] | None]:
        """Codecs' encoders for the activations that enter a function; None where autograd saves them."""
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
        layer = "" if sites is None else sites.base.layer
        if sites is not None:
            self._ledger.visit(layer)
        holders: list[Callable[[Tensor], SavedTensor] | None] = []
        for number, position in enumerate(activations_among(args)):
            label: str
            if sites is not None and number == 0:
                label, codec = sites.input_label, sites.input_codec
            else:
                label, codec = "inputs", self._policy.input_codec("keep", number)
            if isinstance(codec, Keep):
                recording.charge(layer, label, tensors[position].untyped_storage().nbytes())
                holders.append(None)
            else:
                seed = key(-1 - number)
                holders.append(
                    functools.partial(self._hold_input, recording, layer, label, codec, seed)
                )
        return holders

    def _hold_input(
        self,
        recording: Recording,
        layer: str,
        label: str,
        codec: Codec,
        key: int,
        tensor: Tensor,
    ) -> SavedTensor:
        held, is_new = self._inputs.hold(tensor, codec, key, f"{layer or 'checkpoint'}: {label}")
        if is_new:
            recording.charge(layer, label, held.nbytes)
            if self._measures and codec.lossy:
                self._ledger.measure(label, tensor, held)
        return held

    @property
    def _measures(self) -> bool:
        return self._error_interval > 0 and self.steps % self._error_interval == 0

    # -- steps and numbers ----------------------------------------------------------------------------

    def time_reruns(self, clock: Callable[[], float] | None) -> None:
        """Time what is run again, or stop it (None), see :attr:`Ledger.clock`."""
        self._ledger.clock = clock

    def begin_step(self) -> None:
        """A training step begins: the report starts anew."""
        self.steps += 1
        self._head_calls = 0
        self._ledger.reset()
        self._moved_before = self._moved()

    def _moved(self) -> tuple[int, int, float]:
        return (
            sum(counters.bytes_out for counters in self._transfers),
            sum(counters.bytes_in for counters in self._transfers),
            sum(counters.seconds_waited for counters in self._transfers),
        )

    @property
    def held_bytes(self) -> int:
        """Device bytes held now."""
        return sum(self._ledger.held.values())

    def report(self) -> ActivationReport:
        """Numbers since :meth:`begin_step`. Waits for the device if errors were measured."""
        ledger = self._ledger
        out, back, waited = (
            now - before for now, before in zip(self._moved(), self._moved_before, strict=True)
        )
        seen = ledger.layers | {layer for layer, _ in ledger.hits}
        missed = [
            f"{sites.base.layer}: {component}"
            for sites in self._layers.values()
            for component in sorted(sites.expected)
            if sites.base.layer in seen and not ledger.hits[sites.base.layer, component]
        ]
        return ActivationReport(
            held_bytes=by_layer(ledger.peak),
            hits=by_layer(ledger.hits),
            missed=tuple(missed),
            unread=by_label(ledger.unread),
            rerun=by_label(ledger.rerun),
            rerun_flops=by_label(ledger.rerun_flops),
            rerun_seconds=dict(ledger.rerun_seconds),
            errors=ledger.errors(),
            swapped_out_bytes=int(out),
            swapped_in_bytes=int(back),
            seconds_waited=float(waited),
        )

    # -- installation ---------------------------------------------------------------------------------

    def install(self) -> None:
        """Checkpoint every attributed layer and the final norm from now on, see :class:`Installation`, and
        hold what the head reads. It stays until :meth:`uninstall`, or until another takes its place.

        Raises:
            ValueError: another backend is in use, or see :func:`hold_head_input`.
        """
        if self._installed is not None:
            return
        layers = [*self._layers.values(), *self._final_norm()]
        by = "an activation backend"
        ownership.take_over([sites.module for sites in layers], by, warnings.warn)
        with ExitStack() as undo:
            undo.callback(self._hold_head_input())
            undo.callback(Installation(self.model, self.checkpoint, self._run, layers).undo)
            self._installed = undo.pop_all()
        ownership.claim(self)

    def owner_name(self) -> str:
        """See :class:`hmt_deepspeed.ownership.Owner`."""
        return f"an earlier activation backend of {type(self.model).__name__}"

    def owned(self) -> Iterable[nn.Module]:
        """The modules that it checkpoints."""
        return [*self._layers, *(sites.module for sites in self._final_norm())]

    def unfinished(self) -> str:
        """A forward whose backward has not run, or the engine that it belongs to."""
        if self._engine:
            return f"it is that of {self._engine}, which is in use"
        return "" if self._last() is None else "it has a forward whose backward has not run"

    def give_up(self, to: str) -> None:
        """As :meth:`uninstall`."""
        self.uninstall()

    def _hold_head_input(self) -> Callable[[], None]:
        name = self.attribution.head
        if name is None:
            return _NOTHING
        codec = self._policy.head_codec(name)

        def count(tensor: Tensor, held: SavedTensor, owner: object) -> None:
            if held.nbytes:
                self._ledger.hold(owner, {(name, "lm_head"): held.nbytes})
            if self._measures and codec.lossy:
                self._ledger.measure("lm_head", tensor, held)

        head = self.model.get_submodule(name)
        return hold_head_input(head, name, codec, self._next_head_key, count)

    def _next_head_key(self) -> int:
        """A key that no checkpointed call has: those leave the highest bit alone."""
        self._head_calls += 1
        return 1 << 63 | _key(self._seed, self.calls, self._head_calls)

    def _final_norm(self) -> list[LayerSites]:
        """Its input is held as it is, its internals are computed again."""
        name = self.attribution.final_norm
        if name is None:
            return []
        base = Site(name, "layernorm", None)
        norm = self.model.get_submodule(name)
        return [LayerSites(norm, base, (), "layernorm", Keep(), False, frozenset())]

    def uninstall(self) -> None:
        """Everything as before :meth:`install`."""
        ownership.leave(self)
        if self._installed is not None:
            self._installed.close()
            self._installed = None


def _owner(fn: Callable[..., Any]) -> nn.Module | None:
    """The module whose forward a function is, if any."""
    found: Any = fn
    while found is not None:
        is_partial = isinstance(found, functools.partial)
        first = found.args[:1] if is_partial else ()
        for module in (found, getattr(found, "__self__", None), *first):
            if isinstance(module, nn.Module):
                return module
        found = found.func if is_partial else getattr(found, "__wrapped__", None)
    return None


def _key(seed: int, call: int, operation: int) -> int:
    """64 bits, different for all roundings of a run; what draws from them mixes them."""
    return (seed << 48 ^ call << 12 ^ operation & 0xFFF) & (1 << 64) - 1
