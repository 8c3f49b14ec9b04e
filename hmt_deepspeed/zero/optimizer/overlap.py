"""Schedules updates in host memory: before the overflow decision, within the step, or after it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from hmt_deepspeed.zero.offload.weight import HostWeight
from hmt_deepspeed.zero.optimizer.gates import Gates
from hmt_deepspeed.zero.optimizer.step import ZeroStep
from hmt_deepspeed.zero.parameters.param_state import ParamState

__all__ = ["Overlap", "order_of_use"]


def order_of_use(
    param_states: Sequence[ParamState], names: Mapping[nn.Parameter, str]
) -> list[int]:
    """Places of the parameters as forward meets their weights, taken to be the order of ``names``.

    Those that stay whole at stage 3 are gathered within the step, so they come first.

    Args:
        param_states: of all trained parameters. names: of all parameters, in the model's order.
    """
    places = {param: place for place, param in enumerate(names)}

    def key(place: int) -> tuple[bool, int]:
        param: Any = param_states[place].gradient.param
        return not getattr(param, "ds_persist", False), places[param]

    return sorted(range(len(param_states)), key=key)


class Overlap:
    """Starts updates early and finishes late ones; with nothing in host memory it does nothing.

    Args:
        kind: "none", "backward" or "forward". param_states, step: of the optimizer.
        module: the model. partitioned: whether it is at stage 3.
        loss_scale: the present one.

    Attributes:
        synchronize_copies: waits for copies of weights and states that somebody has under way.
    """

    def __init__(
        self,
        kind: str,
        param_states: Sequence[ParamState],
        step: ZeroStep,
        module: nn.Module,
        partitioned: bool,
        loss_scale: Callable[[], float],
    ) -> None:
        self._step, self._loss_scale = step, loss_scale
        self._on_host = {
            p.gradient.param: p for p in param_states if isinstance(p.weight, HostWeight)
        }
        self._gates: Gates | None = None
        # those with early updates in this accumulation window, in the order of their gradients
        self._begun: list[ParamState] = []
        self.synchronize_copies: Callable[[], None] = lambda: None
        if kind == "forward":
            step.gathers_apart = True
            self._gates = Gates(module, self.finish_for, step.finish, partitioned)
        elif kind == "backward":
            for param_state in self._on_host.values():
                if param_state.gradient.host is not None and param_state.weight.has_master:
                    param_state.gradient.host.complete = partial(self._start, param_state)

    def end_step(self) -> None:
        """Finish what the step has begun, unless the next forward waits for it."""
        if self._gates is None:
            self._step.finish()
        for param_state in self._begun:  # the next backward brings them in this order again
            assert isinstance(param_state.weight, HostWeight)
            param_state.weight.states.expect()
        self._begun.clear()

    def synchronize(self) -> None:
        """Finish or undo updates, so that weights and states are those of the last step.

        Call it before reading or replacing them.

        Raises:
            RuntimeError: an update has begun during backward and cannot be undone.
        """
        self.synchronize_copies()
        self.finish()
        self.undo("was read or saved between backward and step")

    def finish(self) -> None:
        """Finish what a step has begun, on all ranks alike; it counts from now on."""
        self._step.finish()
        self._step.commit()

    def when_committed(self, action: Callable[[], None]) -> None:
        """See :meth:`ZeroStep.when_committed`."""
        self._step.when_committed(action)

    def undo(self, reason: str) -> None:
        """Undo updates begun during backward; ``reason`` says why, should that not be possible.

        Raises:
            RuntimeError: it is not.
        """
        for param_state in self._on_host.values():
            if param_state.host is not None:
                param_state.host.undo(reason)
        self._begun.clear()

    @property
    def finishes_later(self) -> bool:
        """Whether the last step has begun updates that the next use of their weights finishes, on all ranks alike."""
        return self._gates is not None and self._step.has_unfinished

    def before_next_use(self, action: Callable[[], None]) -> None:
        """While :attr:`finishes_later`: call ``action`` before that use."""
        assert self._gates is not None
        self._gates.before_next_use(action)

    def close(self) -> None:
        """Finish what is under way and take the gates away."""
        self.finish()
        if self._gates is not None:
            self._gates.close()

    def _start(self, param_state: ParamState) -> None:
        """Update once a gradient of the whole accumulation window is here, on the guess that it is finite and not clipped."""
        assert param_state.host is not None
        self._step.commit()
        factor = torch.tensor(1.0 / self._loss_scale()).item()  # in fp32, as the step's own
        param_state.host.step_early(factor, param_state.hyper())
        self._begun.append(param_state)

    def finish_for(self, params: Iterable[nn.Parameter]) -> None:
        """Finish updates of these weights, which somebody is about to read."""
        for param in params:
            param_state = self._on_host.get(param)
            if (
                param_state is not None
                and isinstance(param_state.weight, HostWeight)
                and param_state.weight.pending
            ):
                self._step.finish(param_state)
