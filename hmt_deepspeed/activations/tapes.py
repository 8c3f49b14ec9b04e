"""Records tapes, and finds the one of a function and a shape."""

from __future__ import annotations

import types
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from hmt_deepspeed.activations.calls import CallLog, Calls, is_container, signature_of
from hmt_deepspeed.activations.dependence import tensors_among
from hmt_deepspeed.activations.ops import Traits, flops
from hmt_deepspeed.activations.recording import Blank, Constant, Operation, storage_of
from hmt_deepspeed.activations.tape import (
    Given,
    Heavy,
    Made,
    Several,
    Source,
    Step,
    Tape,
    geometry_of,
)

__all__ = ["TapeBuilder", "Tapes"]

_GEOMETRIES = 16  # of one function that are remembered
# What a call may be given and return beside tensors and containers.
_VALUES: tuple[type, ...] = (
    *(bool, int, float, complex, str, slice, type, types.EllipsisType, types.NoneType),
    *(torch.Size, torch.dtype, torch.device, torch.layout, torch.memory_format),
)


class _CallLog(CallLog):
    """Knows where in the log functions are, and whether one is being called."""

    def __init__(self, args: Sequence[Tensor]) -> None:
        super().__init__(args)
        self.functions: set[int] = set()
        self.is_called = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.functions.add(len(self.log))
        self.is_called = True
        try:
            return super().__torch_function__(func, types, args, kwargs)
        finally:
            self.is_called = False


class TapeBuilder:
    """Records the operations of one call, and the functions of torch that called them.

    Args:
        args: the tensors among the function's arguments.
        keep: is given the tape, or None where there can be none.

    Attributes:
        is_usable: nothing has come up yet that a tape cannot hold.
        calls: the mode that logs the functions of torch.
    """

    def __init__(self, args: Sequence[Tensor], keep: Callable[[Tape | None], None]) -> None:
        self.is_usable, self._keep = True, keep
        self.calls = _CallLog(args)
        self._steps: list[Step] = []
        self._operations: list[
            tuple[Operation, Sequence[Any]] | None
        ] = []  # of steps, with outputs
        self._packs: list[Made | Given] = []
        self._kept: set[int] = set()
        self._made: dict[int, tuple[weakref.ref[Tensor], Made]] = {}  # by id
        self._num_made = 0
        self._given, self._num_args = list(args), len(args)
        self._views: set[Made] = set()
        self._numbers = {id(tensor): Given(n) for n, tensor in enumerate(self._given)}
        self._storages: set[int] = set()  # of what was made

    def give_up(self) -> None:
        """There is something that a tape cannot hold."""
        self.is_usable = False
        for items in (self.calls.log, self._steps, self._operations, self._given):
            items.clear()

    # -- operations ---------------------------------------------------------------------------------

    def add(
        self,
        func: Any,
        traits: Traits,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: Any,
        heavy: tuple[Operation, bool, tuple[int, ...], int] | None = None,
    ) -> None:
        """An operation has been run.

        Args:
            heavy: of a heavy one its record, whether it is a projected linear's product, its dimensions of
                tokens and the number of operations so far.
        """
        if not self.is_usable:
            return
        if not self.calls.is_called or traits.is_untaped or traits.drew(args, kwargs):
            self.give_up()
            return
        taken = tuple(self._taken(arg) for arg in args)
        named = {name: self._taken(value) for name, value in kwargs.items()}
        outputs = out if isinstance(out, (list, tuple)) else (out,)
        first = self._num_made
        givens = {storage_of(tensor): n for n, tensor in enumerate(self._given)}
        for output in outputs:
            if isinstance(output, Tensor):
                made = Made(self._num_made)
                self._made[id(output)] = weakref.ref(output), made
                self._numbers.pop(id(output), None)
                viewed = givens.get(storage_of(output))
                if viewed is None:
                    self._storages.add(storage_of(output))
                elif viewed >= self._num_args:
                    self._views.add(made)
            self._num_made += 1
        if not self.is_usable:
            return
        described, noted = None, None
        if heavy is not None:
            operation, is_product, dims, number = heavy
            described = Heavy(
                operation.site,
                operation.label,
                operation.blanks,
                operation.codec,
                False,
                False,
                is_product,
                dims,
                operation.bit,
                number,
                flops(func, args, kwargs, out),
            )
            noted = operation, outputs
        single = not isinstance(out, (list, tuple))
        self._steps.append(Step(func, taken, named, single, first, len(outputs), described))
        self._operations.append(noted)

    def _taken(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._number(value)
        if isinstance(value, (list, tuple)) and tensors_among(value):
            return Several(self._taken(item) for item in value)
        return value

    def _number(self, tensor: Tensor) -> Made | Given:
        ref, number = self._made.get(id(tensor), (None, None))
        if ref is not None and ref() is tensor and number is not None:
            return number
        if id(tensor) in self._numbers:
            return self._numbers[id(tensor)]
        if storage_of(tensor) in self._storages:  # another object for what an operation made
            self.give_up()
            return Given(0)
        given = self._numbers[id(tensor)] = Given(len(self._given))
        self._given.append(tensor)
        return given

    def save(self, tensor: Tensor) -> bool:
        """Autograd saves a tensor; whether it may do so as it is, see :attr:`Tape.kept`."""
        if not self.is_usable:
            return False
        source = self._number(tensor)
        is_kept = isinstance(source, Made) and source in self._views
        if is_kept:
            self._kept.add(len(self._packs))
        self._packs.append(source)
        self.calls.log.append(tensor)
        return is_kept

    def build(self) -> tuple[Tape | None, list[Tensor | None]]:
        """The tape, once the call has ended and it is known what is needed, and the tensors that the function has
        not made; None where there can be no tape."""
        tape = self._tape() if self.is_usable else None
        self._keep(tape)
        given: list[Tensor | None] = [] if tape is None else [*self._given]
        self.give_up()
        return tape, given

    def _tape(self) -> Tape | None:
        if any(map(_comes_and_goes, self._given)):
            return None
        log = self.calls.log
        calls = Calls(log)
        if not all(map(self._is_comparable, range(len(log)), log)):
            return None
        places: dict[int, int] = {}
        for place, item in enumerate(log):
            places.setdefault(id(item), place)
        given = [places.get(id(tensor)) for tensor in self._given]
        charges: Counter[tuple[str, str]] = Counter()
        nodes: list[int] = []
        for step, noted in zip(self._steps, self._operations, strict=True):
            if noted is not None and step.heavy is not None:
                operation, outputs = noted
                is_blank = operation.is_blank
                is_held = operation.held is not None and not is_blank
                sources = tuple(_source(output, log) for output in outputs)
                step.heavy = step.heavy._replace(
                    is_held=is_held, is_blank=is_blank, sources=sources
                )
                charges[operation.site.layer, operation.label] += operation.nbytes
                nodes += [source.place for source in sources if isinstance(source, Source)]
        tape = Tape(
            self._steps, calls, self._packs, self._kept, len(given), self._num_made, charges
        )
        unseen = {
            step.first + number
            for step in tape.heavy
            for number, source in enumerate(step.heavy.sources if step.heavy else ())
            if isinstance(source, Blank)
        }
        if None in given or not unseen.isdisjoint(tape.read):
            return None
        calls.check(log, [place for place in given if place is not None], nodes)
        return tape

    def _is_comparable(self, place: int, item: Any) -> bool:
        if place in self.calls.functions:
            return _is_of_torch(item)
        return isinstance(item, (Tensor, *_VALUES)) or is_container(item)


def _is_of_torch(func: Any) -> bool:
    """Whether its arguments decide what a function does. One that sets an attribute does it unseen."""
    if isinstance(func, types.FunctionType):
        return func.__module__.partition(".")[0] == "torch"
    return getattr(func, "__name__", "") != "__set__"


def _source(value: Any, log: Sequence[Any]) -> Source | Blank | Constant:
    """Where later forwards find an output of a heavy operation: the first tensor of its geometry, or of its memory."""
    if not isinstance(value, Tensor):
        return Constant(value)
    start = (storage_of(value), value.storage_offset(), value.dtype, value.numel())
    same = [
        (place, item)
        for place, item in enumerate(log)
        if isinstance(item, Tensor)
        and (storage_of(item), item.storage_offset(), item.dtype, item.numel()) == start
    ]
    for place, item in same:
        if geometry_of(item) == geometry_of(value):
            return Source(place)
    if same:
        return Source(same[0][0], tuple(value.shape), value.stride())
    return Blank(value)


def _comes_and_goes(tensor: Tensor) -> bool:
    """Whether it is a weight of ZeRO-3, which the function's hooks gather."""
    return hasattr(tensor, "ds_id")


class Tapes:
    """Tapes by function and geometry of its arguments.

    A geometry is recorded when it comes for the second time, and anew when two calls in a row did otherwise.
    """

    def __init__(self) -> None:
        self._found: dict[object, OrderedDict[Hashable, Tape | bool]] = {}

    def find(self, owner: object, args: Sequence[Tensor]) -> Tape | TapeBuilder | None:
        """The tape of a call, what records one, or None."""
        tapes = self._found.setdefault(owner, OrderedDict())
        kinds = {"cpu", *(arg.device.type for arg in args)}
        geometry = (
            *map(signature_of, args),
            *((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds),
        )
        found = tapes.get(geometry)
        if found is None:
            tapes[geometry] = True  # it may be recorded
            if len(tapes) > _GEOMETRIES:
                tapes.popitem(last=False)
            return None
        tapes.move_to_end(geometry)
        if isinstance(found, Tape) and found.misses < 2:
            return found

        def keep(tape: Tape | None) -> None:
            tapes[geometry] = False if tape is None else tape

        return TapeBuilder(args, keep) if found else None
