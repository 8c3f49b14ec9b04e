"""What a function does, as functions of torch that it calls and tensors that autograd saves of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter, is_, itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

__all__ = ["CallLog", "Calls", "Places", "is_container", "signature_of"]

_traits = attrgetter("dtype", "requires_grad", "shape")


def signature_of(tensor: Tensor) -> tuple[Any, ...]:
    """What decides how a function of torch treats a tensor, but for its values."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad


class CallLog(TorchFunctionMode):
    """Logs each call of a function of torch: it, its arguments and what it returns.

    Args:
        args: the tensors among the arguments of the function that makes the calls.

    Attributes:
        log: these, and then what is logged. It keeps all tensors alive.
    """

    def __init__(self, args: Sequence[Tensor]) -> None:
        super().__init__()
        self.log: list[Any] = [*args]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        log = self.log
        log.append(func)
        log.extend(args)
        if kwargs:
            log.append(kwargs)
            out = func(*args, **kwargs)
        else:
            out = func(*args)
        log.append(out)
        return out


class Calls:
    """A log to compare later ones with, as a few lists, which are compared faster than calls one by one.

    A log is the same if, at every place, there is an object of the same type, which is

    - a tensor that came before: the one from that place;
    - another tensor: of the same dtype and shape, with or without gradients, and, if the function was given it, of the
      same strides and device;
    - anything else: equal.

    Args:
        log: to compare with; it is extended with what is in its lists, tuples and dicts.
    """

    def __init__(self, log: list[Any]) -> None:
        self._num_logged = len(log)
        self._containers = [place for place, item in enumerate(log) if is_container(item)]
        for place in self._containers:
            _flatten(log[place], log)
        self._types = [*map(type, log)]
        first: dict[int, int] = {}
        repeated: list[tuple[int, int]] = []
        others: list[int] = []
        for place, item in enumerate(log):
            if not isinstance(item, Tensor):
                if not is_container(item):
                    others.append(place)
            elif first.setdefault(id(item), place) < place:
                repeated.append((place, first[id(item)]))
        self._first, self._others = Places(first.values()), Places(others)
        self._again = Places(place for place, _ in repeated)
        self._before = Places(place for _, place in repeated)
        self._traits = [*map(_traits, self._first.of(log))]
        self._values = self._others.of(log)
        self.check(log, (), ())

    def check(self, log: list[Any], given: Iterable[int], nodes: Iterable[int]) -> None:
        """Compare more of it.

        Args:
            log: that of the beginning.
            given: places of tensors that no logged function has made.
            nodes: places of tensors whose autograd nodes have to be of the same name.
        """
        self.given, self._nodes = Places(given), Places(nodes)
        self._signatures = [*map(signature_of, self.given.of(log))]
        self._names = [*map(_node_of, self._nodes.of(log))]

    def agree(self, log: list[Any]) -> bool:
        """Whether a log is the same; it is extended as the other one."""
        if len(log) != self._num_logged:
            return False
        for place in self._containers:
            if not is_container(log[place]):
                return False
            _flatten(log[place], log)
        return (
            [*map(type, log)] == self._types
            and self._others.of(log) == self._values
            and all(map(is_, self._again.of(log), self._before.of(log)))
            and [*map(_traits, self._first.of(log))] == self._traits
            and [*map(signature_of, self.given.of(log))] == self._signatures
            and [*map(_node_of, self._nodes.of(log))] == self._names
        )


class Places:
    """Takes the items at some places of a list."""

    def __init__(self, places: Iterable[int]) -> None:
        found = [*places]
        self._single = found[0] if len(found) == 1 else None
        self._get = itemgetter(*found) if len(found) > 1 else None

    def of(self, items: Sequence[Any]) -> tuple[Any, ...]:
        if self._get is not None:
            return self._get(items)
        return () if self._single is None else (items[self._single],)


def is_container(item: object) -> bool:
    """Whether what is in it is compared, and not it as a whole."""
    return isinstance(item, (list, tuple, dict)) and not isinstance(item, torch.Size)


def _flatten(items: Any, into: list[Any]) -> None:
    """What is in a list, tuple or dict, in those within it too, each with its length."""
    if isinstance(items, dict):
        into.extend(items)
        items = items.values()
    into.append(len(items))
    into.extend(items)
    for item in items:
        if is_container(item):
            _flatten(item, into)


def _node_of(tensor: Tensor) -> str:
    node = tensor.grad_fn
    return "" if node is None else node.name()
