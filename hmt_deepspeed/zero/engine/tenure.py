"""Ownership of a model by an engine, from construction until it is destroyed, dropped, or replaced by another owner."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import torch.distributed as dist
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.utils import logger
from torch import nn

from hmt_deepspeed import ownership
from hmt_deepspeed.ownership import Owner
from hmt_deepspeed.zero.interfaces import Engine

__all__ = ["Tenure", "hold_weakly", "weakly"]

# functions of the engine in its own attributes, which only ZenFlow calls
_OF_ZENFLOW = (
    "_configure_zenflow",
    "_is_zenflow_update_boundary",
    "_zenflow_step",
    "_sync_zenflow_optimizer_lr",
)


class Tenure:
    """Owns an engine's parameters for it (:class:`hmt_deepspeed.ownership.Owner`).

    Args:
        engine: only a weak reference to it is kept.
        model: as it was given to the engine. stage: ZeRO's.
        trained: parameters that the engine will train, by name; at stage 3 it owns all, since it gathers all.
        is_plain: nothing of HMT is in the engine. Plain engines leave one another alone, as DeepSpeed's do.

    Attributes:
        undo: removes what the engine has put on its model.
        ended: why the engine can no longer be used; empty while it can.
        dropped: the engine's user has no reference to it any more.
        has_gradients: backwards have left gradients that no step has used.
    """

    def __init__(
        self,
        engine: Engine,
        model: nn.Module,
        stage: int,
        trained: Iterable[tuple[str, nn.Parameter]],
        is_plain: bool,
    ) -> None:
        self._engine = weakref.ref(engine)
        params = model.parameters() if stage == 3 else (param for _, param in trained)
        self._params, self.is_plain = list(params), is_plain
        self._kind = f"{type(model).__name__}, ZeRO stage {stage}"
        self.undo = ExitStack()
        self.ended = ""
        self.has_gradients = self.dropped = False

    def begin(self) -> None:
        """Take the parameters over from earlier owners, before anything is put on the model.

        Raises:
            ValueError: one of them is in the middle of an accumulation window.
        """
        ownership.take_over(self._params, f"a new engine ({self._kind})", _say, self._displaces)

    def _displaces(self, owner: Owner) -> bool:
        return not (self.is_plain and isinstance(owner, Tenure) and owner.is_plain)

    def hold(self, engine: Engine, dropped: bool = False) -> None:
        """Note the engine by a weak reference, once it is built.

        Args:
            engine: the built one. dropped: its user has dropped it; it lives on until its updates are finished.
        """
        self.dropped = dropped
        self._engine = weakref.ref(engine)
        ownership.claim(self)

    def end(self, why: str) -> None:
        """The engine is about to be taken apart. A plain one that its user destroys is what it is in DeepSpeed."""
        if not self.is_plain:
            self.ended = self.ended or why
        ownership.leave(self)

    def check(self, what: str) -> None:
        """Raises RuntimeError if the engine can no longer be used."""
        if self.ended:
            raise RuntimeError(
                f"{what} of an engine ({self._kind}) that {self.ended}: it would train nothing. Use the engine "
                "that has the model now, or build another one."
            )

    # -- as an owner ------------------------------------------------------------------------------

    def owner_name(self) -> str:
        engine = self._engine()
        steps = 0 if engine is None else int(engine.global_steps)
        return f"an earlier engine ({self._kind}, {steps} steps done)"

    def owned(self) -> Iterable[Any]:
        return self._params

    def unfinished(self) -> str:
        return "it has accumulated gradients that no step() has used" if self.has_gradients else ""

    def give_up(self, to: str) -> None:
        engine = self._engine()
        self.ended = f"was taken apart when {to} was built on its parameters"
        if engine is not None:
            engine.destroy()


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """A bound method for others to call and hold, which does not keep its object alive; does nothing without it."""
    found = weakref.WeakMethod(method)

    def call(*args: Any, **keyword: Any) -> Any:
        alive = found()
        return None if alive is None else alive(*args, **keyword)

    return call


def hold_weakly(engine: Engine) -> None:
    """Take DeepSpeed's references from an engine's parts to itself away: dropped, it goes at once, as its
    parameters' hooks and patched linears must with it."""
    built = vars(engine)  # perhaps not all of it
    optimizer = built.get("optimizer")
    if isinstance(optimizer, ZeROOptimizer):
        optimizer.unregister_grad_acc_post_hooks()
        if built.get("_support_torch_style_backward"):
            optimizer.register_grad_acc_post_hook(weakly(engine._backward_post_hook))
    if not built.get("zenflow"):
        for name in _OF_ZENFLOW:
            engine.__dict__.pop(name, None)


def _say(text: str) -> None:
    if not dist.is_initialized() or dist.get_rank() == 0:
        logger.warning(f"hmt: {text}")
