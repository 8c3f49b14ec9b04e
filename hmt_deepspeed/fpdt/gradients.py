"""Sums of parameter gradients over chunks, handed to autograd once.

A gradient hook must see each parameter once per backward, not once per chunk, or ZeRO would reduce parts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import wraps

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from hmt_deepspeed.kernels.backward import asked_of, computing_again, is_transformed

__all__ = [
    "Around",
    "ParameterGradients",
    "autocast_of",
    "only_first_order",
    "refuse_transforms",
    "trained_parameters",
]


Around = Callable[[], AbstractContextManager[object]]
Backward = Callable[..., tuple[Tensor | None, ...]]

_REFUSAL = (
    "FPDT computes a part in chunks, whose backward runs autograd itself: it gives first gradients, but was called "
    "{}. Legal: loss.backward(), and torch.autograd.grad without create_graph. For the other, remove "
    "hmt.fpdt (or choose another attn_implementation)."
)


def only_first_order(backward: Backward) -> Backward:
    """Marks the backward of a function that cannot be differentiated again.

    Raises:
        ValueError: within a backward with ``create_graph=True``.
    """

    @wraps(backward)
    def checked(ctx: FunctionCtx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise ValueError(_REFUSAL.format("with create_graph=True"))
        return backward(ctx, *grads)

    return checked


def refuse_transforms() -> None:
    """Raises ValueError within a transform of ``torch.func`` and under forward-mode AD."""
    if is_transformed():
        raise ValueError(_REFUSAL.format("by a transform of torch.func, or under forward-mode AD"))


def trained_parameters(module: nn.Module) -> list[nn.Parameter]:
    """The parameters of a module that want a gradient, each once."""
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


class ParameterGradients:
    """Adds up the gradients of a function's parameters: in their dtype for one chunk, in fp32 for several.

    Args:
        ctx: of the function whose backward runs; ``ctx.parameters`` are its last inputs.
    """

    def __init__(self, ctx: FunctionCtx) -> None:
        self.parameters: Sequence[Tensor] = ctx.parameters  # type: ignore[attr-defined]
        edges = ctx.next_functions  # type: ignore[attr-defined]  # of the inputs that are tensors
        edges = edges[len(edges) - len(self.parameters) :]
        asked = [asked_of(node) for node, _ in edges]
        self._wanted = [index for index, answer in enumerate(asked) if answer is not None]
        self._returned = [
            p for p, answer in zip(self.parameters, asked, strict=True) if answer == "returned"
        ]
        self._sums: list[Tensor | None] = [None] * len(self.parameters)

    def computing(self) -> AbstractContextManager[None]:
        """To compute a part again, with grad, that :meth:`differentiate` is then called for."""
        return computing_again(self._returned)

    def differentiate(
        self,
        outputs: Sequence[Tensor],
        grads: Sequence[Tensor],
        inputs: Sequence[Tensor],
    ) -> tuple[Tensor | None, ...]:
        """Gradients of ``inputs`` (those that want one); those of the parameters are added up where this
        backward is for them.

        A projected linear returns no gradient for its weight; neither does this.
        """
        wanted = [tensor for tensor in inputs if tensor.requires_grad]
        pairs = [pair for pair in zip(outputs, grads, strict=True) if pair[0].requires_grad]
        if not pairs:  # all is frozen
            return (None,) * len(inputs)
        outputs, grads = zip(*pairs, strict=True)
        parameters = [self.parameters[index] for index in self._wanted]
        with torch.autocast(outputs[0].device.type, enabled=False):  # as in any backward
            found = torch.autograd.grad(outputs, [*wanted, *parameters], grads, allow_unused=True)
        for index, grad in zip(self._wanted, found[len(wanted) :], strict=True):
            self._add(index, grad)
        of_inputs = iter(found[: len(wanted)])
        return tuple(next(of_inputs) if tensor.requires_grad else None for tensor in inputs)

    def _add(self, index: int, grad: Tensor | None) -> None:
        if grad is None:
            return
        total = self._sums[index]
        if total is None:
            self._sums[index] = grad
        else:
            wide = torch.promote_types(total.dtype, torch.float32)
            self._sums[index] = total.to(wide).add_(grad)

    def take(self) -> list[Tensor | None]:
        """The sums in the parameters' dtypes; the wide ones are freed one by one."""
        taken: list[Tensor | None] = []
        for index, parameter in enumerate(self.parameters):
            total, self._sums[index] = self._sums[index], None
            taken.append(None if total is None else total.to(parameter.dtype))
        return taken


def autocast_of(device: torch.device) -> AbstractContextManager[None]:
    """The caller's autocast, to be entered again in backward."""
    kind = device.type
    return torch.autocast(
        kind,
        enabled=torch.is_autocast_enabled(kind),
        dtype=torch.get_autocast_dtype(kind),
        cache_enabled=torch.is_autocast_cache_enabled(),
    )
