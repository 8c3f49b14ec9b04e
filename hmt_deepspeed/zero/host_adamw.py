"""AdamW of one parameter in host memory: after the verdict over a step, or before it and taken back."""

from __future__ import annotations

from concurrent.futures import Future
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hmt_deepspeed.zero.host_weight import HostWeight
from hmt_deepspeed.zero.host_worker import HostGradient, chunks

__all__ = ["HostAdamW"]


class HostAdamW:
    """Moments of one dense parameter and their steps.

    Args:
        weight, gradient: of the parameter.
        state: (exp_avg, exp_avg_sq, number of steps), fp32 on the host.
        undo: keep what an early step overwrites (12 bytes an element), so that it can be taken back.

    Attributes:
        early: factor and hyperparameters of a step taken before the verdict, else None.
    """

    def __init__(
        self,
        weight: HostWeight,
        gradient: HostGradient,
        state: tuple[Tensor, Tensor, Tensor],
        undo: bool,
    ) -> None:
        self.weight, self.gradient = weight, gradient
        self.first, self.second, self.count = state
        self.early: tuple[float, dict[str, Any]] | None = None
        self._worker, self._jobs = weight.worker, list[Future[None]]()
        self._log: list[Tensor] | None = None
        if undo:
            owner, numel = f"the undo log of {weight.name}", weight.num_elements
            self._log = [self._worker.zeros(numel, owner) for _ in range(3)]

    def step_early(self, factor: float, hyper: dict[str, Any]) -> None:
        """Begin a step before the verdict, on the master alone; the device's weights stay as they are.

        Raises:
            RuntimeError: a second gradient came and nothing can be taken back.
        """
        self.take_back("got a second gradient in the last micro-batch")
        self.early = (factor, hyper)
        step = self._next_step(factor, hyper)
        for begin, end in chunks(self.weight.num_elements):
            job = partial(self._logged, step, begin, end)
            self._jobs.append(self._worker.submit(self.weight.name, job))

    def step(self, factor: float, key: int, hyper: dict[str, Any]) -> None:
        """Begin the step that the verdict decided on, and what sends the weights; ends with ``weight.finish``.

        Args:
            factor: what the gradient's sum is multiplied by. key: seed of stochastic rounding.
        """
        if self.early == (factor, hyper):
            self.early = None
            self._jobs.clear()
            self.weight.send_master(key)
            return
        self.take_back("had its learning rate changed between backward and step")
        self.weight.step_with(self._next_step(factor, hyper), key)

    def take_back(self, reason: str) -> None:
        """Undo an early step, if there is one.

        Raises:
            RuntimeError: without a log; ``reason`` says why it would have to be taken back.
        """
        if self.early is None:
            return
        if self._log is None:
            raise RuntimeError(
                f"{self.weight.name} {reason}, but its update has begun during backward. Set "
                '"hmt": {"offload": {"overlap": "none"}}, or leave that out of the training loop.'
            )
        self.early = None
        self.count -= 1
        self._worker.wait(self._jobs)
        self._jobs.clear()
        for kept, target in zip(self._log, self._states(), strict=True):
            target.copy_(kept)

    def _next_step(self, factor: float, hyper: dict[str, Any]) -> Any:
        self.count += 1
        taken, total, worker = int(self.count), self.gradient.values(), self._worker

        def step(values: Tensor, begin: int, end: int) -> None:
            part = total[begin:end]
            if factor != 1.0:  # the sum itself is kept for a step that may have to be redone
                part = torch.mul(part, factor, out=worker.scratch[: end - begin])
            moments = (self.first[begin:end], self.second[begin:end])
            worker.adam.step_(values, part, *moments, taken, **hyper)

        return step

    def _logged(self, step: Any, begin: int, end: int, _: Tensor) -> None:
        """Worker thread: one chunk of an early step."""
        states = self._states()
        if self._log is not None:
            for kept, target in zip(self._log, states, strict=True):
                kept[begin:end].copy_(target[begin:end])
        step(states[0][begin:end], begin, end)

    def _states(self) -> list[Tensor]:
        assert self.weight.master is not None  # early steps are for masters only
        return [self.weight.master, self.first, self.second]
