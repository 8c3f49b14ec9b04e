"""AdamW of one parameter on the host, after the overflow and clip decision or before it.

A step taken before it is undone where the decision turns out otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hmt_deepspeed.kernels.noise import Key
from hmt_deepspeed.zero.offload.states import ChunkStates
from hmt_deepspeed.zero.offload.weight import HostWeight, Step
from hmt_deepspeed.zero.offload.worker import HostGradient, chunks, pieces

__all__ = ["HostAdamW"]


class HostAdamW:
    """Steps of one dense parameter.

    Args:
        weight, gradient: of the parameter; its moments are among the weight's states.
        count: number of steps, 0-dim on the host.

    Attributes:
        early: factor and hyperparameters of a step taken before the decision, else None.
    """

    def __init__(self, weight: HostWeight, gradient: HostGradient, count: Tensor) -> None:
        self.weight, self.gradient, self.count = weight, gradient, count
        self.early: tuple[float, dict[str, Any]] | None = None
        self._worker, self._job = weight.worker, 0  # the last of an early step

    def step_early(self, factor: float, hyper: dict[str, Any]) -> None:
        """Begin a step before clipping and overflow are decided, on the master alone; the device's weights stay as they are.

        Args:
            factor: what the gradient's sum is multiplied by. hyper: lr, betas, eps and weight_decay.

        Raises:
            RuntimeError: a second gradient came and nothing can be undone.
        """
        self.undo("got a second gradient in the last micro-batch")
        self.early = (factor, hyper)
        step = self._next_step(factor, hyper)
        states = self.weight.states
        for begin, end in (p for c in chunks(states.num_elements) for p in states.parts(*c)):
            chunk = states.chunk(begin, end, early=True)
            args = (step, begin, end, chunk)
            self._job = self._worker.submit(self.weight.name, self._step_chunk, args, uses=chunk)

    def step(self, factor: float, key: Key, hyper: dict[str, Any]) -> None:
        """Begin the step that was decided on, and what sends the weights; ends with ``weight.finish``.

        Args:
            factor: what the gradient's sum is multiplied by. key: seed of stochastic rounding.
            hyper: lr, betas, eps and weight_decay; the early step is kept where factor and these are what it took.
        """
        if self.early == (factor, hyper):
            self.early = None
            self.weight.send_master()
            return
        self.undo("had its learning rate changed between backward and step")
        self.weight.step_with(self._next_step(factor, hyper), key)

    def undo(self, reason: str) -> None:
        """Undo an early step, if there is one.

        Raises:
            RuntimeError: nothing was kept of before it; ``reason`` says why it would have to be undone.
        """
        if self.early is None:
            return
        if not self.weight.states.can_undo:
            raise RuntimeError(
                f"{self.weight.name} {reason}, but its update has begun during backward. Set "
                '"hmt": {"offload": {"overlap": "none"}}, or leave that out of the training loop.'
            )
        self.early = None
        self.count -= 1
        self._worker.wait(self._job)
        self.weight.states.undo()

    def _next_step(self, factor: float, hyper: dict[str, Any]) -> Step:
        self.count += 1
        taken, total, worker = int(self.count), self.gradient.values(), self._worker

        def step(states: Sequence[Tensor], begin: int, end: int) -> None:
            for first, last in pieces(begin, end):
                part = total[first:last]
                if factor != 1.0:  # the sum itself is kept for a step that may have to be redone
                    part = torch.mul(part, factor, out=worker.scratch[: last - first])
                values, average, square = (s[first - begin : last - begin] for s in states)
                worker.adam.step_(values, part, average, square, taken, **hyper)

        return step

    def _step_chunk(self, step: Step, begin: int, end: int, chunk: ChunkStates, _: Tensor) -> None:
        """Worker thread: one chunk of an early step."""
        with chunk as states:
            step(states, begin, end)
            self.weight.keep(states[0], begin)
