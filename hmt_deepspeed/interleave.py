"""Calls of one model side by side: each layer computes for all of them before the next one begins.

That is the vertical order of accumulation (GreedySnake, 2512.17570): weights that are brought to the device for a layer
serve every micro-batch. Each call runs as a coroutine (greenlet) that gives way wherever it is about to enter a layer.
Autograd goes back in the reverse order of forward, so one backward of the sum of all losses is vertical too.
"""

from __future__ import annotations

import contextvars
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from greenlet import getcurrent, greenlet
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

__all__ = ["Interleaver", "largest_list"]

# Of a layer, in forward or in backward.
Told = Callable[[nn.Module, bool], None]


def largest_list(model: nn.Module, numel: Callable[[nn.Parameter], int]) -> list[nn.Module]:
    """The modules of the list that holds most of a model's parameters: its layers; [] where there is no list.

    Args:
        numel: elements of a parameter, of which a rank may hold a part.
    """
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return list(max(lists, key=lambda one: sum(map(numel, one.parameters())), default=()))


class Interleaver:
    """Runs calls of a model in turn, and says when each layer begins and has ended its work for all of them.

    Args:
        layers: where calls give way; each call enters each of them once.
        begin, end: told of a layer before the first call enters it and once the last has left it, in forward and again
            in backward; the second argument says whether it is backward.
    """

    def __init__(self, layers: Sequence[nn.Module], begin: Told, end: Told) -> None:
        self._begin, self._end = begin, end
        self._calls: set[greenlet] = set()
        self._inside: nn.Module | None = None  # in forward
        self._open: set[nn.Module] = set()  # in backward
        self._expected: Counter[nn.Module] = (
            Counter()
        )  # calls that backward will take out of a layer
        self._hooks: list[Any] = []
        for layer in layers:
            self._hooks += [
                layer.register_forward_pre_hook(self._enter, prepend=True, with_kwargs=True),
                layer.register_forward_hook(self._leave),
            ]

    def close(self) -> None:
        """Take the hooks off the layers. Idempotent."""
        while self._hooks:
            self._hooks.pop().remove()

    def run(self, calls: Iterable[Callable[[], Any]]) -> list[Any]:
        """What the calls return, in their order. An error in one of them ends all."""
        coroutines = [_coroutine(call) for call in calls]
        running = [one for one, _ in coroutines]
        self._calls = set(running)
        try:
            while running:
                for one in running:
                    one.switch()
                running = [one for one in running if not one.dead]
        finally:
            for one in running:
                one.throw()  # ends it, through its with-statements
            self._calls.clear()
            self._go_on_to(None)
        return [result for _, results in coroutines for result in results]

    def end_backward(self) -> None:
        """After a backward: a layer whose input wanted no gradient has ended its work too."""
        for layer in self._open:
            self._end(layer, True)
        self._open.clear()
        self._expected.clear()

    # -- forward ----------------------------------------------------------------------------------

    def _enter(self, layer: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        one = getcurrent()
        if one not in self._calls:
            return None  # a call by itself, or backward computes the layer again
        assert one.parent is not None
        one.parent.switch()
        if self._inside is not layer:
            self._go_on_to(layer)
        return self._marked(layer, args, kwargs) if torch.is_grad_enabled() else None

    def _marked(self, layer: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The arguments, of which the first that wants a gradient tells when backward leaves the layer."""
        given = dict(enumerate(args)) | kwargs
        for key, value in given.items():
            if isinstance(value, Tensor) and value.requires_grad:
                self._expected[layer] += 1
                given[key] = _Entrance.apply(value, partial(self._leave_backward, layer))
                break
        return tuple(given.pop(place) for place in range(len(args))), given

    def _leave(self, layer: nn.Module, _: Any, output: Any) -> None:
        if getcurrent() not in self._calls:
            return
        first = output[0] if isinstance(output, (tuple, list)) else output
        if isinstance(first, Tensor) and first.requires_grad:
            first.register_hook(lambda _: self._enter_backward(layer))

    def _go_on_to(self, layer: nn.Module | None) -> None:
        before, self._inside = self._inside, layer
        if before is not None:
            self._end(before, False)
        if layer is not None:
            self._begin(layer, False)

    # -- backward ---------------------------------------------------------------------------------

    def _enter_backward(self, layer: nn.Module) -> None:
        if layer not in self._open:
            self._open.add(layer)
            self._begin(layer, True)

    def _leave_backward(self, layer: nn.Module) -> None:
        self._expected[layer] -= 1
        if not self._expected[layer] and layer in self._open:
            self._open.remove(layer)
            self._end(layer, True)


def _coroutine(call: Callable[[], Any]) -> tuple[greenlet, list[Any]]:
    """One that makes the call, with context variables of its own, and the list that it leaves the result in."""
    results: list[Any] = []
    one = greenlet(lambda: results.append(call()))
    one.gr_context = contextvars.copy_context()
    return one, results


class _Entrance(torch.autograd.Function):
    """The identity, which calls ``left`` once it has the gradient."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, left: Callable[[], None]) -> Tensor:
        ctx.left = left  # type: ignore[attr-defined]
        return x.view_as(x)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:
        ctx.left()  # type: ignore[attr-defined]
        return grad, None
