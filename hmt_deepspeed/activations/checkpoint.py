"""One call of a checkpointed function: what it saves in forward, and its second run in backward."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import get_device_states, set_device_states

from hmt_deepspeed.activations.codecs import Codec, SavedTensor
from hmt_deepspeed.activations.following import FollowMode
from hmt_deepspeed.activations.record import RecordMode
from hmt_deepspeed.activations.recording import Recording, storage_of
from hmt_deepspeed.activations.replay import ReplayMode
from hmt_deepspeed.activations.tape import Tape

__all__ = ["Call", "Options", "SavedInputs", "activations_among", "with_positional_activations"]

Holder = Callable[[Tensor], SavedTensor]


class SavedInputs:
    """Inputs that are saved now; one that several calls read is saved once.

    The key says which bytes: a storage whose identity the recordings keep from being given away, how often
    it was written to, and the view of it.
    """

    def __init__(self) -> None:
        self._held: WeakValueDictionary[tuple[Any, ...], Any] = WeakValueDictionary()

    def hold(self, tensor: Tensor, codec: Codec, key: int, name: str) -> tuple[SavedTensor, bool]:
        """The held form of batch x tokens x width, and whether it is new."""
        view = (tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
        identity = (storage_of(tensor), tensor._version, view, id(codec))
        held: SavedTensor | None = self._held.get(identity)
        if held is not None:
            return held, False
        held = codec.encode(tensor, tuple(range(tensor.dim() - 1)), key, name)
        self._held[identity] = held
        return held, True


class Options(NamedTuple):
    """What callers of torch's checkpoint may ask for.

    Attributes:
        preserve_rng_state: compute again with the random numbers of forward.
        early_stop: a second run ends once it has computed all that autograd saved.
        checks: it must save tensors of the same shapes and dtypes.
    """

    preserve_rng_state: bool = True
    early_stop: bool = True
    checks: bool = True


class Call:
    """One call of a checkpointed function, from its forward until its graph is freed.

    Autograd saves numbers in place of tensors. The first one that a backward asks for is the occasion to compute
    all tensors again: by the function's tape, where there is one, else by the function. They are dropped one by one
    as they are read, so that another backward computes them once more.

    Args:
        fn: called with ``args`` and ``kwargs``.
        record: the mode of its forward. replay: makes that of a second run.
        holders: of the activations among ``args``, in order; None: held as it is.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        record: RecordMode | FollowMode,
        replay: Callable[[], ReplayMode],
        holders: Sequence[Holder | None],
        options: Options,
    ) -> None:
        self._fn, self._kwargs, self._options = fn, kwargs, options
        self._args = [None if isinstance(arg, Tensor) else arg for arg in args]
        self._places = [place for place, arg in enumerate(args) if isinstance(arg, Tensor)]
        tensors = [args[place] for place in self._places]
        chosen = dict(zip(activations_among(args), holders, strict=False))
        self._inputs = _save(tensors, record.recording, chosen)
        self._surroundings = Surroundings(tensors, options.preserve_rng_state)
        self._recording, self._ledger = record.recording, record.ledger
        self._replay, self._record = replay, record
        self._geometries: list[tuple[Any, ...]] | None = None
        if not isinstance(record, FollowMode) and options.checks:
            self._geometries = []
        self._num_saved = 0
        self._values: dict[int, Tensor] = {}
        self._tape: Tape | None = None
        self._given: Sequence[Tensor | None] = ()

    def run(self, args: tuple[Any, ...]) -> Any:
        """Forward, with the arguments that this was made for."""
        record = self._record
        try:
            with saved_tensors_hooks(self._pack, self._unpack), record:
                return self._fn(*args, **self._kwargs)
        finally:
            self._tape, self._given = record.tape, record.given[len(self._places) :]
            if self._tape is not None:  # it draws nothing
                self._surroundings.forget_random_states()
            del self._record

    def _pack(self, tensor: Tensor) -> int | Tensor:
        number, self._num_saved = self._num_saved, self._num_saved + 1
        if self._geometries is not None:
            self._geometries.append(_geometry(tensor))
        return self._record.save(number, tensor)

    def _unpack(self, saved: int | Tensor) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        value = self._values.pop(saved, None)
        if value is None:
            self._compute()
            value = self._values.pop(saved)
        return value

    # -- backward -------------------------------------------------------------------------------------

    def _compute(self) -> None:
        """All that autograd saved."""
        recording, ledger, tape = self._recording, self._ledger, self._tape
        recording.bring_back()
        if tape is None or not tape.can_replay or ledger.clock is not None:
            self._run_again(self._replay(), self._inputs())
            return
        inputs = self._inputs()
        given = [*inputs, *self._given]
        if tape.is_checked:
            tape.replay(recording, given, self._values.__setitem__)
            recording.is_coming = False
            for counter in ("rerun", "rerun_flops", "unread"):
                ledger.add(getattr(ledger, counter), getattr(tape, counter))
            return
        replay = self._replay()
        replay.decoded = {}
        self._run_again(replay, inputs)
        tape.is_checked = tape.agrees(recording, given, replay.decoded, self._values)
        tape.can_replay = tape.is_checked

    def _run_again(self, replay: ReplayMode, inputs: Sequence[Tensor]) -> None:
        """By the function itself."""
        args = list(self._args)
        for place, tensor in zip(self._places, inputs, strict=True):
            args[place] = tensor
        values: dict[int, Tensor] = {}

        def pack(tensor: Tensor) -> Tensor:
            value = tensor.detach()  # else it would refer to what refers to it
            number = len(values)
            if number == self._num_saved:
                raise _otherwise(f"it saves more than {number} tensors")
            if self._geometries is not None and _geometry(value) != self._geometries[number]:
                raise _otherwise(
                    f"number {number} of what it saves is {_geometry(value)}, and was "
                    f"{self._geometries[number]}"
                )
            values[number] = value
            if self._options.early_stop and len(values) == self._num_saved:
                raise _Enough
            return value

        try:
            with (
                torch.enable_grad(),
                self._surroundings.again(),
                saved_tensors_hooks(pack, lambda value: value),
                replay,
            ):
                self._fn(*args, **self._kwargs)
        except _Enough:
            pass
        if len(values) < self._num_saved:
            raise _otherwise(f"it saves {len(values)} tensors, and saved {self._num_saved}")
        self._values = values


class _Enough(Exception):
    """A second run has computed what is needed of it."""


def _otherwise(how: str) -> RuntimeError:
    return RuntimeError(
        f"backward computes a layer otherwise than forward did: {how}. A checkpointed layer must compute the same "
        "operations each time; does it depend on something that has changed in between?"
    )


def _geometry(tensor: Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.dtype, tensor.device


class Surroundings:
    """Autocast and random states of a forward, for its second run.

    Args:
        tensors: the function's arguments, whose devices count; none is kept. draws: whether it needs random states.
    """

    def __init__(self, tensors: Sequence[Tensor], draws: bool) -> None:
        there = [t for t in tensors if t.device.type not in ("cpu", "meta")]
        self._kind = there[0].device.type if there else "cuda"  # of the devices with random states
        self._autocasts = [
            (
                kind,
                torch.get_autocast_dtype(kind),
                torch.is_autocast_enabled(kind),
                torch.is_autocast_cache_enabled(),
            )
            for kind in {"cpu", *(t.device.type for t in there)}
        ]
        self._states: tuple[Tensor, list[int], list[Tensor]] | None = None
        if draws:
            self._states = (torch.get_rng_state(), *get_device_states(*there))

    def forget_random_states(self) -> None:
        """Nothing is drawn."""
        self._states = None

    @contextmanager
    def again(self) -> Iterator[None]:
        """As they were; afterwards as they are now."""
        with ExitStack() as stack:
            if self._states is not None:
                random, devices, states = self._states
                stack.enter_context(torch.random.fork_rng(devices, device_type=self._kind))
                torch.set_rng_state(random)
                set_device_states(devices, states, device_type=self._kind)
            for kind, dtype, enabled, cached in self._autocasts:
                autocast = torch.autocast(kind, dtype, enabled=enabled, cache_enabled=cached)
                stack.enter_context(autocast)
            yield


def activations_among(args: Sequence[Any]) -> list[int]:
    """Positions, among the tensors of ``args``, of the hidden states and what else requires grad.

    The hidden states are the first floating-point tensor that is no parameter.
    """
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    found: list[int] = []
    for position, tensor in enumerate(tensors):
        is_weight = isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)
        if tensor.is_floating_point() and not is_weight and (not found or tensor.requires_grad):
            found.append(position)
    return found


def with_positional_activations(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """The same call with keyword arguments that require grad made positional, if no activation is.

    Of arguments in a closure, torch's checkpoint keeps the tensors themselves, out of reach of any holder.
    """
    given = {**fn.keywords, **kwargs} if isinstance(fn, functools.partial) else kwargs
    names = [k for k, v in given.items() if isinstance(v, Tensor) and v.requires_grad]
    if not names or activations_among(args):
        return fn, args, kwargs
    inner = functools.partial(fn.func, *fn.args) if isinstance(fn, functools.partial) else fn
    rest = {name: value for name, value in given.items() if name not in names}
    split = len(args)

    def call(*values: Any) -> Any:
        return inner(*values[:split], **dict(zip(names, values[split:], strict=True)), **rest)

    return call, (*args, *(given[name] for name in names)), {}


# -- the arguments ------------------------------------------------------------------------------------


class _Save(torch.autograd.Function):
    """Saves tensors as autograd does, through the hooks of whoever is around."""

    @staticmethod
    def forward(ctx: FunctionCtx, _: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return torch.empty(0)

    @staticmethod
    def backward(ctx: FunctionCtx, *_: Tensor) -> Any:
        raise AssertionError("its output goes nowhere")


def _save(
    tensors: Sequence[Tensor], recording: Recording, holders: Mapping[int, Holder | None]
) -> Callable[[], tuple[Tensor, ...]]:
    """Save a call's arguments, some of them by holders; what is returned gives them back."""
    positions = itertools.count()

    def pack(tensor: Tensor) -> Tensor | SavedTensor:
        hold = holders.get(next(positions))
        if hold is None:
            return tensor
        recording.input_storages.append(StorageWeakRef(tensor.untyped_storage()))
        held = hold(tensor)
        recording.inputs.append(held)
        return held

    def unpack(packed: Tensor | SavedTensor) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        recording.bring_back()
        with torch.no_grad():
            return packed.decode()

    is_held = any(holders.values())
    with saved_tensors_hooks(pack, unpack) if is_held else nullcontext():
        saver: Any = _Save.apply(torch.empty(0, requires_grad=True), *tensors)
    # Up to torch 2.11 it is the output that keeps its node, and what that saved, alive.
    return lambda: saver.grad_fn.saved_tensors
