"""A checkpointed function as a list of its operations, recorded once for a shape.

Later forwards compare the functions of torch that they call with those of the tape, whose operations they would see at a
higher cost, and take from it what is saved and how. Backward then runs those operations only that lead from
what is saved to what autograd reads, in place of the whole function.

What a tape cannot hold is not recorded: operations that write into their arguments, draw random numbers, read values
on the host or return memory to be filled unseen, that no function of torch has called, and weights that ZeRO-3 gathers.
Such functions are computed again as they are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from hmt_deepspeed.activations.calls import Calls, Places
from hmt_deepspeed.activations.codecs import Codec
from hmt_deepspeed.activations.recording import Blank, Constant, Operation, Part, Recording, Site

__all__ = [
    "Given",
    "Heavy",
    "Made",
    "Several",
    "Source",
    "Step",
    "Tape",
    "geometry_of",
]

_Key = tuple[str, str]  # layer, label


class Made(int):
    """In place of a tensor among an operation's arguments: the number of an output of an earlier one."""


class Given(int):
    """The same for a tensor that the function has not made: its number among those."""


class Several(list[Any]):
    """In place of a list or tuple with tensors in it."""


class Source(NamedTuple):
    """Where forward finds an output of a heavy operation.

    Attributes:
        place: of a tensor of the same memory, see :class:`Calls`.
        shape, strides: of the operation's output where that has others; else None.
    """

    place: int
    shape: tuple[int, ...] | None = None
    strides: tuple[int, ...] | None = None


class Heavy(NamedTuple):
    """What becomes of a heavy operation's outputs.

    Attributes:
        site, label, blanks: see :class:`Operation`.
        codec: of its first output; None: it is run again, if it is needed.
        is_held: its outputs are saved: there is a codec, and somebody needs them. is_blank: nobody does.
        is_product: it is the product of a projected linear.
        dims: along which tokens follow each other in the first output.
        bit: see :class:`Operation`. number: of operations with a bit so far, for the key of the rounding.
        flops: of a run.
        sources: of its outputs; what stands for those that forward does not come to see.
    """

    site: Site
    label: str
    blanks: tuple[Part, ...]
    codec: Codec | None
    is_held: bool
    is_blank: bool
    is_product: bool
    dims: tuple[int, ...]
    bit: int
    number: int
    flops: int
    sources: tuple[Source | Blank | Constant, ...] = ()


@dataclass(eq=False)
class Step:
    """One operation.

    Attributes:
        args, kwargs: with :class:`Made`, :class:`Given` and :class:`Several` in place of tensors.
        single: it returns a tensor and not several values.
        first: number of its first output. num_outputs: how many there are.
        heavy: of one that is worth holding.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    single: bool
    first: int
    num_outputs: int
    heavy: Heavy | None


def geometry_of(tensor: Tensor) -> tuple[Any, ...]:
    """What decides how an operation treats a tensor, but for its values."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


class _Needed(NamedTuple):
    """What backward needs of a step: an output that is held, or to run it.

    Attributes:
        part: number of the output to decode; -1: run the operation.
        held: number of the heavy operation among those of its kind.
        frees: outputs, its own or earlier ones, that nobody reads any more.
        saved: its outputs that autograd saved, each with a number of what was saved.
    """

    step: Step
    part: int
    held: int
    frees: tuple[int, ...]
    saved: tuple[tuple[int, int], ...]


class _Replayed(NamedTuple):
    """What backward does. All that an operation is given or returns has a place in one list.

    Attributes:
        func: to run; None: decode an output of a heavy operation.
        args: places of its arguments. names: of those that are given by keyword, which come last.
        single: it returns a tensor and not several values. first: place of its first output.
        held, part, is_product: what to decode.
        frees: places to clear. saved: places of what autograd saved, each with its number.
    """

    func: Any
    args: Places
    names: tuple[str, ...]
    single: bool
    first: int
    held: int = 0
    part: int = 0
    is_product: bool = False
    frees: tuple[int, ...] = ()
    saved: tuple[tuple[int, int], ...] = ()


class Tape:
    """The operations of a function, for tensors of one geometry.

    Attributes:
        calls: of functions of torch that run them.
        heavy: the heavy operations, in call order.
        kept: numbers of what autograd may save as it is: views of what the function has not made and what is there
            anyhow.
        can_replay: backward may run it; else the function is computed again as it is.
        is_checked: backward has once found it equal to that.
        misses: calls in a row that did otherwise.
        charges: device bytes of what is held, by layer and label.
        hits: heavy operations by layer and label. rerun, rerun_flops: those that backward runs. unread: those that are
            held and that it does not read.
        read: numbers of the outputs of heavy operations that backward reads.
    """

    def __init__(
        self,
        steps: list[Step],
        calls: Calls,
        packs: list[Made | Given],
        kept: set[int],
        num_given: int,
        num_made: int,
        charges: Mapping[_Key, int],
    ) -> None:
        self.charges = dict(charges)
        self.calls, self.kept = calls, kept
        self.can_replay, self.is_checked, self.misses = True, False, 0
        self.heavy = [step for step in steps if step.heavy is not None]
        heavy = [step.heavy for step in self.heavy if step.heavy is not None]
        self.hits: Counter[_Key] = Counter((h.site.layer, h.label) for h in heavy)
        others = [(i, source) for i, source in enumerate(packs) if i not in kept]
        needed = _needed(steps, others)
        self._replayed, self._others = _compiled(needed, num_given, num_made)
        self._saved_given = [(i, source) for i, source in others if isinstance(source, Given)]
        run = [r.step.heavy for r in needed if r.part < 0 and r.step.heavy is not None]
        self.rerun: Counter[_Key] = Counter((h.site.layer, h.label) for h in run)
        self.rerun_flops: Counter[_Key] = Counter()
        for h in run:
            self.rerun_flops[h.site.layer, h.label] += h.flops
        self.read = {r.step.first + r.part for r in needed if r.part >= 0}
        self.unread: Counter[_Key] = Counter(
            (step.heavy.site.layer, step.heavy.label)
            for step in steps
            if step.heavy is not None
            and step.heavy.is_held
            and self.read.isdisjoint(range(step.first, step.first + step.num_outputs))
        )

    @torch.no_grad()
    def replay(
        self,
        recording: Recording,
        given: Sequence[Tensor | None],
        save: Callable[[int, Tensor], object],
        decode: Callable[[Operation, int], Tensor] = Operation.decode,
    ) -> None:
        """Compute what autograd saved in forward.

        Args:
            recording: of the call.
            given: the tensors that the function has not made.
            save: is given each with its number.
            decode: an output of an operation, by its number.
        """
        for index, source in self._saved_given:
            tensor = given[source]
            assert tensor is not None
            save(index, tensor.detach())
        values: list[Any] = [*given, *self._others]
        with torch._C._DisableAutocast():
            for (
                func,
                args,
                names,
                single,
                first,
                held,
                part,
                is_product,
                frees,
                saved,
            ) in self._replayed:
                if func is None:
                    kept = recording.products if is_product else recording.operations
                    values[first] = decode(kept[held], part)
                else:
                    if names:
                        found = args.of(values)
                        named = dict(zip(names, found[-len(names) :], strict=True))
                        out = func(*found[: -len(names)], **named)
                    else:
                        out = func(*args.of(values))
                    if single:
                        values[first] = out
                    else:
                        values[first : first + len(out)] = out
                for place, index in saved:
                    save(index, values[place])
                for place in frees:
                    values[place] = None

    def agrees(
        self,
        recording: Recording,
        given: Sequence[Tensor | None],
        decoded: Mapping[int, Tensor],
        expected: Mapping[int, Tensor],
    ) -> bool:
        """Whether it gives what the function gave when it was computed again. Waits for the device.

        Args:
            decoded: what the function was handed out, by the identity of what was held.
            expected: what autograd saves, by number.
        """
        equal: list[bool] = []

        def decode(operation: Operation, part: int) -> Tensor:
            assert operation.held is not None
            found = decoded.get(id(operation.held[part]))
            return operation.decode(part) if found is None else found

        def compare(number: int, tensor: Tensor) -> None:
            equal.append(_equal(tensor, expected[number]))

        self.replay(recording, given, compare, decode)
        return all(equal)


def _equal(a: Tensor, b: Tensor) -> bool:
    """In every bit, and in geometry; a NaN is equal to any."""
    if geometry_of(a) != geometry_of(b):
        return False
    if isinstance(a, FakeTensor) or torch.equal(a, b):
        return True
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


def _needed(steps: Sequence[Step], packs: Sequence[tuple[int, Made | Given]]) -> list[_Needed]:
    """What leads to the saved tensors, given with their numbers, in call order."""
    saved: dict[int, list[int]] = {}
    for index, source in packs:
        if isinstance(source, Made):
            saved.setdefault(int(source), []).append(index)
    wanted = set(saved)
    found: list[tuple[Step, int, int]] = []
    counts = Counter(step.heavy.is_product for step in steps if step.heavy is not None)
    last: set[int] = set()  # outputs that a later step reads
    frees: list[list[int]] = []
    for step in reversed(steps):
        held = -1
        if step.heavy is not None:
            counts[step.heavy.is_product] -= 1
            held = counts[step.heavy.is_product]
        outputs = range(step.first, step.first + step.num_outputs)
        read = [number for number in outputs if number in wanted]
        if not read:
            continue
        if step.heavy is not None and step.heavy.is_held:
            for number in reversed(read):
                found.append((step, number - step.first, held))
                frees.append([] if number in last else [number])
            continue
        inputs = {int(made) for made in _made_among((*step.args, *step.kwargs.values()))}
        ended = [number for number in (*inputs, *outputs) if number not in last]
        frees.append([*dict.fromkeys(ended)])
        last |= inputs
        wanted |= inputs
        found.append((step, -1, held))
    result = []
    for (step, part, held), ended in zip(reversed(found), reversed(frees), strict=True):
        outputs = (
            range(step.first + part, step.first + part + 1)
            if part >= 0
            else range(step.first, step.first + step.num_outputs)
        )
        kept = tuple((number, index) for number in outputs for index in saved.get(number, ()))
        result.append(_Needed(step, part, held, tuple(ended), kept))
    return result


def _compiled(
    needed: Sequence[_Needed], num_given: int, num_made: int
) -> tuple[list[_Replayed], list[Any]]:
    """What backward does, and what is in its list after the tensors that are given: places for what is made, constants
    and places for arguments that are lists."""
    others: list[Any] = [None] * num_made
    result: list[_Replayed] = []
    lists: list[int] = []

    def place_of(arg: Any) -> int:
        if isinstance(arg, Given):
            return int(arg)
        if isinstance(arg, Made):
            return num_given + arg
        items = [place_of(item) for item in arg] if isinstance(arg, Several) else None
        others.append(arg if items is None else None)
        place = num_given + len(others) - 1
        if items is not None:
            lists.append(place)
            result.append(_Replayed(_listed, Places(items), (), True, place))
        return place

    for step, part, held, frees, saved in needed:
        lists.clear()
        is_decoded = part >= 0
        given = () if is_decoded else (*step.args, *step.kwargs.values())
        args = Places([place_of(arg) for arg in given])
        result.append(
            _Replayed(
                None if is_decoded else step.func,
                args,
                tuple(step.kwargs),
                step.single,
                num_given + step.first + max(part, 0),
                held,
                part,
                step.heavy is not None and step.heavy.is_product,
                (*(num_given + number for number in frees), *lists),
                tuple((num_given + number, index) for number, index in saved),
            )
        )
    return result, others


def _listed(*items: Any) -> list[Any]:
    return [*items]


def _made_among(values: Iterable[Any]) -> list[Made]:
    found: list[Made] = []
    for value in values:
        if isinstance(value, Made):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += _made_among(value)
    return found
