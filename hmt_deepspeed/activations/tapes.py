"""Records tapes, and finds the one of a function and a shape."""

from __future__ import annotations

import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from torch import Tensor

from hmt_deepspeed.activations.dependence import tensors_among
from hmt_deepspeed.activations.ops import Traits, flops
from hmt_deepspeed.activations.recording import Operation, storage_of
from hmt_deepspeed.activations.tape import Given, Heavy, Made, Several, Step, Tape, geometry_of

__all__ = ["TapeBuilder", "Tapes"]

_GEOMETRIES = 16  # of one function that are remembered


class TapeBuilder:
    """Records the operations of one call.

    Args:
        args: the tensors among the function's arguments.
        keep: is given the tape, or None where there can be none.

    Attributes:
        is_usable: nothing has come up yet that a tape cannot hold.
    """

    def __init__(self, args: Sequence[Tensor], keep: Callable[[Tape | None], None]) -> None:
        self.is_usable, self._keep = True, keep
        self.steps: list[Step] = []
        self.packs: list[tuple[int, Made | Given]] = []
        self._operations: list[Operation | None] = []  # of the heavy steps
        self._made: dict[int, tuple[weakref.ref[Tensor], Made]] = {}  # by id
        self._num_made = 0
        self._given, self._num_args = list(args), len(args)
        self._views: set[Made] = set()
        self._numbers = {id(tensor): Given(n) for n, tensor in enumerate(self._given)}
        self._storages: set[int] = set()  # of what was made

    def give_up(self) -> None:
        """There is something that a tape cannot hold."""
        self.is_usable = False
        self.steps.clear()
        self._given.clear()

    def add(
        self,
        func: Any,
        traits: Traits,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: Any,
        origin: Callable[[Sequence[Tensor]], int],
        heavy: tuple[Operation, bool, tuple[int, ...], int] | None = None,
    ) -> None:
        """An operation has been run.

        Args:
            origin: the set of heavy operations that tensors depend on.
            heavy: of a heavy one its record, whether it is a projected linear's product, its dimensions of
                tokens and the number of operations so far.
        """
        if not self.is_usable:
            return
        if traits.is_untaped or traits.drew(args, kwargs):
            self.give_up()
            return
        taken = tuple(self._taken(arg) for arg in args)
        named = {name: self._taken(value) for name, value in kwargs.items()}
        outputs = out if isinstance(out, (list, tuple)) else (out,)
        first, origins = self._num_made, []
        givens = {storage_of(tensor): n for n, tensor in enumerate(self._given)}
        for output in outputs:
            if isinstance(output, Tensor):
                made = Made(self._num_made)
                self._made[id(output)] = weakref.ref(output), made
                self._numbers.pop(id(output), None)
                viewed = givens.get(storage_of(output))
                if viewed is None:
                    self._storages.add(storage_of(output))
                elif viewed >= self._num_args and not _comes_and_goes(self._given[viewed]):
                    self._views.add(made)
            origins.append(origin((output,)) if isinstance(output, Tensor) else 0)
            self._num_made += 1
        if not self.is_usable:
            return
        described, operation = None, None
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
        single = not isinstance(out, (list, tuple))
        self.steps.append(Step(func, taken, named, single, first, tuple(origins), described))
        self._operations.append(operation)

    def save(self, tensor: Tensor) -> bool:
        """Autograd saves a tensor; whether it may do so as it is, see :attr:`Tape.kept`."""
        if not self.is_usable:
            return False
        source = self._number(tensor)
        self.packs.append((len(self.steps), source))
        return isinstance(source, Made) and source in self._views

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

    def build(self) -> tuple[Tape | None, list[Tensor | None]]:
        """The tape, once the call has ended and it is known what is needed, and the tensors that the function has
        not made; None where there can be no tape."""
        if not self.is_usable:
            self._keep(None)
            return None, []
        charges: Counter[tuple[str, str]] = Counter()
        for step, operation in zip(self.steps, self._operations, strict=True):
            if operation is not None and step.heavy is not None:
                is_blank = operation.is_blank
                is_held = operation.held is not None and not is_blank
                step.heavy = step.heavy._replace(is_held=is_held, is_blank=is_blank)
                charges[operation.site.layer, operation.label] += operation.nbytes
        can_replay = not any(map(_comes_and_goes, self._given))
        geometry = [geometry_of(tensor) for tensor in self._given]
        tape = Tape(
            self.steps, self.packs, self._num_made, geometry, can_replay, charges, self._views
        )
        self._keep(tape)
        return tape, list(self._given)


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
        geometry = tuple((*geometry_of(arg), arg.requires_grad) for arg in args)
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
