"""The two dispatch modes of a checkpointed function: one records its forward, one replays it in backward.

Recording sees every operation below autograd. Of a *heavy* one (matrix product, convolution, attention) it
holds the outputs in the form that the policy has for the module computing it, or nothing. Replaying runs
the function again, hands out what is held in place of running a heavy operation, and runs the rest.

What nobody reads in backward is neither held nor run again, see :mod:`dependence`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar, Token
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from hmt_deepspeed.activations.codecs import Codec, HeldBlocks, Keep
from hmt_deepspeed.activations.dependence import Dependence, tensors_among
from hmt_deepspeed.activations.ledger import Ledger
from hmt_deepspeed.activations.linear import SavingCodes
from hmt_deepspeed.activations.ops import Traits, flops, traits_of
from hmt_deepspeed.activations.recording import (
    Blank,
    Constant,
    Operation,
    Part,
    Recording,
    Site,
    storage_of,
)
from hmt_deepspeed.sites import is_computing_projection, serving_projections

__all__ = ["RecordMode", "ReplayMode", "active_mode"]

_RAW = Keep()


class _Alias(NamedTuple):
    """An output of an operation, held as, or still on its way out of, the function's own tensor."""

    storage: StorageWeakRef
    offset: int
    operation: Operation
    position: int
    codec: Codec


class _CachingMode(TorchDispatchMode):
    """What both modes share: where in the model the function is, and copies before writes."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Checkpointed calls are hidden from dynamo as a whole; hiding each operation costs twice the mode."""
        return False

    def __init__(self, recording: Recording, base: Site | None, ledger: Ledger) -> None:
        super().__init__()
        self.recording, self.ledger, self._base = recording, ledger, base
        self._sites: list[Site] = []
        self._tokens: list[Token[_CachingMode | None]] = []
        self._aliases: dict[int, list[_Alias]] = {}  # by storage
        self._saving: list[tuple[Site, SavingCodes]] = []
        self._is_busy = False  # with tensors of its own, which are none of the function's

    def __enter__(self) -> Any:
        self._sites = [] if self._base is None else [self._base]
        self._tokens.append(_active.set(self))
        return super().__enter__()

    def __exit__(self, *error: Any) -> Any:
        _active.reset(self._tokens.pop())
        while self._saving:
            self._end_saving()
        self._aliases.clear()
        return super().__exit__(*error)

    # -- where the function is ----------------------------------------------------------------------

    @property
    def site(self) -> Site | None:
        """The innermost attributed module that is being computed."""
        return self._sites[-1] if self._sites else None

    def enter(self, site: Site, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """A module begins; returns other arguments if it is to have others."""
        self._sites.append(site)
        if site.input_codec is None or not args or not isinstance(args[0], Tensor):
            return None
        self._is_busy = True
        try:
            substitute, codes = self.substitute(site, site.input_codec, args[0])
        finally:
            self._is_busy = False
        if codes is not None:
            saving = SavingCodes(args[0] if substitute is None else substitute, codes)
            saving.__enter__()
            self._saving.append((site, saving))
        return None if substitute is None else (substitute, *args[1:])

    def leave(self, site: Site) -> None:
        """A module ends, and with it those inside it that an exception left."""
        left = None
        while self._sites and left is not site:
            left = self._sites.pop()
            if self._saving and self._saving[-1][0] is left:
                self._end_saving()

    def _end_saving(self) -> None:
        _, saving = self._saving.pop()
        saving.__exit__(None, None, None)

    def substitute(
        self, site: Site, codec: Codec, tensor: Tensor
    ) -> tuple[Tensor | None, HeldBlocks | None]:
        """What an output projection whose input is held reads instead of ``tensor`` (None: that), and the
        codes to save of it for its weight's gradient, if there are."""
        raise NotImplementedError

    # -- copy on write ------------------------------------------------------------------------------

    def _watch(self, operation: Operation, position: int, tensor: Tensor, codec: Codec) -> None:
        """A write to the tensor is to be preceded by a copy, as long as its codec makes none."""
        if not codec.lossy:
            offset = int(tensor.storage_offset())
            storage = StorageWeakRef(tensor.untyped_storage())
            alias = _Alias(storage, offset, operation, position, codec)
            self._aliases.setdefault(storage_of(tensor), []).append(alias)

    def _copy_before_write(self, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            for alias in self._aliases.pop(storage_of(tensor), ()):
                operation = alias.operation
                if alias.storage.expired() or operation.held is None or operation.is_blank:
                    continue
                blank = operation.blanks[alias.position]
                assert isinstance(blank, Blank)
                value = torch.empty(0, dtype=blank.dtype, device=blank.device)
                value.set_(tensor.untyped_storage(), alias.offset, blank.shape, blank.strides)
                parts = list(operation.held)
                with _tracked():
                    parts[alias.position] = alias.codec.encode(value.clone(), name=operation.name)
                operation.held = tuple(parts)


# A context variable, because modes are a thread's own and backward may run in a thread of autograd.
_active: ContextVar[_CachingMode | None] = ContextVar("active", default=None)


def active_mode() -> _CachingMode | None:
    """The mode under which the caller's thread is recording or replaying."""
    return _active.get()


class RecordMode(_CachingMode):
    """Forward.

    Args:
        base: site of the function itself; None: it is no attributed layer's, though it may call some.
        key: of the noise of a rounding, by the number of the operation.
        measures: whether what is encoded with a loss is compared.
        holds_products: whether ``X [Q | P]`` of projected linears is held, else it is computed again.
    """

    def __init__(
        self,
        recording: Recording,
        base: Site | None,
        ledger: Ledger,
        key: Callable[[int], int],
        measures: bool,
        holds_products: bool,
    ) -> None:
        super().__init__(recording, base, ledger)
        self._product_codec = _RAW if holds_products else None
        self._key, self._measures = key, measures
        self._dependence = Dependence()
        self._hooks: saved_tensors_hooks | None = None

    def __enter__(self) -> Any:
        self._hooks = self._listen()
        self._hooks.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> Any:
        assert self._hooks is not None
        try:
            return super().__exit__(*error)
        finally:
            self._hooks.__exit__()
            self._hooks = None
            if error[0] is None:
                self._settle()

    # -- what is needed -----------------------------------------------------------------------------

    def _listen(self) -> saved_tensors_hooks:
        """The checkpoint's own hooks, and what they are given is noted."""
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
        assert hooks is not None, "recorded outside of a checkpoint"
        pack, unpack = hooks

        def note(tensor: Tensor) -> Any:
            self._dependence.need((tensor,))
            return pack(tensor)

        return saved_tensors_hooks(note, unpack)

    def _settle(self) -> None:
        """Let go of what no saved tensor depends on."""
        needed = self._dependence.needed
        for operation in self.recording.all_operations():
            operation.decodes = bool(needed & operation.bit)
            if not needed & (operation.bit | operation.codes_bit):
                operation.held = operation.blanks
            elif operation.held is not None:
                nbytes = sum(part.nbytes for part in operation.held)
                self.recording.charge(operation.site.layer, operation.label, nbytes)
        self.ledger.hold(self.recording, self.recording.charges)

    # -- operations ---------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._is_busy:
            return func(*args, **kwargs)
        traits = traits_of(func)
        if traits.writes and self._aliases:
            self._copy_before_write(tensors_among(traits.written(args, kwargs)))
        out = func(*args, **kwargs)
        site = self.site
        if traits.heavy and site is not None:
            self._record(func, traits, site, args, kwargs, out)
        elif self._dependence.num_bits or traits.fresh:
            self._dependence.follow(traits, (*args, *kwargs.values()), out)
        return out

    def _record(
        self, func: Any, traits: Traits, site: Site, args: Any, kwargs: Any, out: Any
    ) -> None:
        recording = self.recording
        inputs = self._dependence.origin((*args, *kwargs.values()))
        is_product = is_computing_projection()
        label, codec = self._choose(traits, site, inputs)
        if is_product:
            label, codec = "projected_inputs", self._product_codec
        operation = self._new_operation(func, site, label, out)
        (recording.products if is_product else recording.operations).append(operation)
        self.ledger.count(self.ledger.hits, site.layer, label)
        outputs = out if isinstance(out, (list, tuple)) else (out,)
        if recording.redraws and traits.drew(args, kwargs):
            operation.random_state = _random_state(outputs[0].device)
        if codec is not None:
            self._hold(operation, outputs, codec, _token_dims(traits, outputs[0]))
        self._dependence.set(outputs, operation.bit | (0 if codec else inputs))

    def _choose(self, traits: Traits, site: Site, inputs: int) -> tuple[str, Codec | None]:
        """Whose output it is, and what holds it."""
        if not site.attention or traits.attention:
            return site.label, site.codec
        if not traits.batched:
            return "unattributed", _RAW
        # Unfused attention: the product that depends on another one, the scores, is the output.
        scores = (o.bit for o in self.recording.operations if o.label == "attention_scores")
        if any(bit & inputs for bit in scores):
            return site.label, site.codec
        return "attention_scores", None

    def _new_operation(self, func: Any, site: Site, label: str, out: Any) -> Operation:
        single = not isinstance(out, (list, tuple))
        blanks = tuple(_blank(output) for output in ((out,) if single else out))
        return Operation(func, site, label, self._dependence.new_bit(), blanks, single=single)

    def _hold(
        self, operation: Operation, outputs: Sequence[Any], codec: Codec, dims: tuple[int, ...]
    ) -> None:
        """Output 0 by the codec, further ones raw: attention's log-sum-exp is small and must be exact."""
        parts: list[Part] = []
        for index, output in enumerate(outputs):
            if not isinstance(output, Tensor) or not output.is_floating_point():
                parts.append(Constant(output.detach() if isinstance(output, Tensor) else output))
                continue
            chosen = codec if index == 0 else _RAW
            key = self._key(self._dependence.num_bits)
            with _tracked():
                held = chosen.encode(output, dims if index == 0 else 0, key, operation.name)
            self._watch(operation, index, output, chosen)
            if self._measures and chosen.lossy:
                self.ledger.measure(operation.label, output, held)
            parts.append(held)
        operation.codec, operation.held = codec, tuple(parts)

    @torch.no_grad()
    def substitute(
        self, site: Site, codec: Codec, tensor: Tensor
    ) -> tuple[None, HeldBlocks | None]:
        """Hold it; the forward reads what it always did."""
        operation = self._new_operation(None, site, "attention_output", tensor)
        self.recording.substitutes.append(operation)
        self._hold(operation, (tensor.detach(),), codec, tuple(range(tensor.dim() - 1)))
        self._dependence.set((tensor,), operation.bit)
        codes = operation.codes
        if codes is not None:
            operation.codes_bit = self._dependence.new_bit()
            self._dependence.set((codes.codes, codes.scales), operation.codes_bit)
        return None, codes


class ReplayMode(_CachingMode):
    """Recompute in backward; as often as backward is run."""

    def __init__(self, recording: Recording, base: Site | None, ledger: Ledger) -> None:
        super().__init__(recording, base, ledger)
        self._serving: AbstractContextManager[None] | None = None
        self._next: dict[str, int] = {}

    def __enter__(self) -> Any:
        self._next = dict.fromkeys(("operations", "products", "substitutes"), 0)
        self.recording.bring_back()
        self._serving = serving_projections(self._product)
        self._serving.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> Any:
        assert self._serving is not None
        self._serving.__exit__(None, None, None)
        self._serving = None
        self.recording.is_coming = False
        for operation in self.recording.all_operations():
            if operation.held is not None and not operation.is_blank and not operation.read:
                self.ledger.count(self.ledger.unread, operation.site.layer, operation.label)
        return super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._is_busy:
            return func(*args, **kwargs)
        traits = traits_of(func)
        if traits.heavy and self.site is not None:
            if is_computing_projection():
                return self._run_again(func, self.site.layer, "projected_inputs", args, kwargs)
            return self._replay(func, args, kwargs)
        if traits.writes and self._aliases:
            self._copy_before_write(tensors_among(traits.written(args, kwargs)))
        return func(*args, **kwargs)

    def _replay(self, func: Any, args: Any, kwargs: Any) -> Any:
        operation = self._recorded("operations", func)
        if operation.held is not None:
            return self._hand_out(operation)
        return self._run_again(func, operation.site.layer, operation.label, args, kwargs)

    def _run_again(self, func: Any, layer: str, label: str, args: Any, kwargs: Any) -> Any:
        clock = self.ledger.clock
        begin = 0.0 if clock is None else clock()
        out = func(*args, **kwargs)
        if clock is not None:
            self.ledger.count_seconds(label, clock() - begin)
        self.ledger.count(self.ledger.rerun, layer, label)
        self.ledger.count(self.ledger.rerun_flops, layer, label, flops(func, args, kwargs, out))
        return out

    def _recorded(self, kind: str, func: Any) -> Operation:
        """The next one of a kind."""
        operations: list[Operation] = getattr(self.recording, kind)
        index = self._next[kind]
        self._next[kind] = index + 1
        found = operations[index] if index < len(operations) else None
        if found is None or found.site is not self.site or (func and found.func is not func):
            site = self.site
            where = "outside of the layers" if site is None else f"{site.label} of {site.layer}"
            raise RuntimeError(
                f"backward computes a layer otherwise than forward did: {func or kind} in {where} is not "
                f"what forward had as number {index} of its {kind}. A checkpointed layer must compute the "
                "same operations each time; does it depend on something that has changed in between?"
            )
        return found

    def _hand_out(self, operation: Operation) -> Any:
        assert operation.held is not None
        operation.read = True
        values = []
        for index, part in enumerate(operation.held):
            with _tracked():
                value = part.decode()
                if isinstance(value, Tensor):
                    value = value.detach()  # else it would get this graph's history
            if isinstance(part, Blank | Constant):
                pass
            elif index > 0 or isinstance(operation.codec, Keep):
                self._watch(operation, index, value, _RAW)
            values.append(value)
        if operation.random_state is not None:
            _set_random_state(operation.blanks[0], operation.random_state)
        return values[0] if operation.single else tuple(values)

    def _product(self) -> Tensor | None:
        if self.site is None or self._next["products"] >= len(self.recording.products):
            return None
        operation = self._recorded("products", None)
        if operation.held is None:
            return None
        self._is_busy = True
        try:
            product: Tensor = self._hand_out(operation)
        finally:
            self._is_busy = False
        return product

    @torch.no_grad()
    def substitute(
        self, site: Site, codec: Codec, tensor: Tensor
    ) -> tuple[Tensor | None, HeldBlocks | None]:
        operation = self._recorded("substitutes", None)
        if operation.is_blank:
            return None, None
        if not operation.decodes:  # nobody reads it, whatever it is
            operation.read = True
            return None, operation.codes
        substitute: Tensor = self._hand_out(operation)
        return substitute.requires_grad_(tensor.requires_grad), operation.codes


# -- small things -----------------------------------------------------------------------------------


def _blank(output: Any) -> Part:
    return Blank(output) if isinstance(output, Tensor) else Constant(output)


def _token_dims(traits: Traits, output: Tensor) -> tuple[int, ...]:
    """Dimensions of an output along which tokens follow each other."""
    if traits.attention:
        if output.dim() < 4:
            return (0,)  # packed: tokens, heads, width
        return (0, 2) if traits.heads_first else (0, 1)
    if traits.batched:
        return (1,)  # batch and heads in one, tokens, width
    return tuple(range(output.dim() - 1))


def _tracked() -> Any:
    """Views made below autograd share the version count of what they view."""
    return torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False)


def _random_state(device: torch.device) -> Tensor:
    if device.type == "cpu":
        return torch.get_rng_state()
    state: Tensor = torch.get_device_module(device.type).get_rng_state(device)
    return state


def _set_random_state(output: Part, state: Tensor) -> None:
    assert isinstance(output, Blank)
    if output.device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(output.device.type).set_rng_state(state, output.device)
