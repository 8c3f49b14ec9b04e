"""Training calls of an engine: DeepSpeed's, with HMT's work before and after each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any

import torch
from deepspeed.runtime.dataloader import RepeatingLoader
from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK
from torch import Tensor
from torch.profiler import record_function

from hmt_deepspeed.zero.engine.accumulation import (
    Call,
    VerticalOrder,
    arguments_of,
    next_batches,
    output_loss,
)
from hmt_deepspeed.zero.engine.checkpoints import CheckpointingEngine
from hmt_deepspeed.zero.planning.planner import RunPlanner
from hmt_deepspeed.zero.saving.snapshot import Snapshots

__all__ = ["TrainingEngine"]


class TrainingEngine(CheckpointingEngine):
    """Forward, backward and step: measured, planned, and refused once another owner has the parameters."""

    hmt_planner: RunPlanner | None
    hmt_snapshots: Snapshots | None
    hmt_vertical: VerticalOrder | None
    _skipped_steps = 0
    _own_batches: Iterator[Any] | None = None  # of the engine's training data
    _num_open_modules: int  # of forwards that had begun when the engine was built

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """As in DeepSpeed; a run that plans its activations looks at its batches here.

        Raises:
            RuntimeError: another owner has taken the parameters over, and this would be for training.
        """
        trains = self.module.training and torch.is_grad_enabled()
        if trains:
            self._tenure.check("a forward for training")
        if self.hmt_enabled:
            self.optimizer.offloaded.require("forward()", ["lp_params"])
        if self.hmt_planner is None or not trains:
            return super().forward(*inputs, **kwargs)
        self.hmt_planner.begin_forward(inputs, kwargs)
        output = super().forward(*inputs, **kwargs)
        self.hmt_planner.end_forward()
        return output

    def train_batch(
        self,
        data_iter: Iterable[Any] | None = None,
        loss_of: Callable[[Any, int], Tensor] = output_loss,
    ) -> Tensor:
        """One optimizer step, of the next ``gradient_accumulation_steps`` micro-batches, in the order that
        ``hmt.accumulation`` says.

        Args:
            data_iter: of micro-batches: mappings of the model's arguments, tuples of them, or the first one; None:
                the engine's ``training_data``, over and over.
            loss_of: gives the loss by the model's output and the micro-batch's place in the step.

        Returns:
            The mean loss of the micro-batches on this rank, (), without grad.

        Raises:
            StopIteration: too few micro-batches are left.
            ValueError: neither a ``data_iter`` nor training data.
        """
        number = int(self.gradient_accumulation_steps())
        batches = next_batches(self._training_batches(data_iter), number)
        calls = [arguments_of(batch, self.device) for batch in batches]
        if self.hmt_vertical is None:
            losses = [self._take(call, place, loss_of) for place, call in enumerate(calls)]
            return torch.stack(losses).mean()
        with self.hmt_vertical.step(), self._ends_step(number):
            with record_function("forward"):
                outputs = self(calls)
            found = torch.stack([loss_of(output, place) for place, output in enumerate(outputs)])
            del outputs
            with record_function("backward"):
                self.backward(found.sum())
        with record_function("optimizer"):
            self.step()
        return found.detach().mean()

    @contextmanager
    def _ends_step(self, number: int) -> Iterator[None]:
        """One forward and backward, of ``number`` micro-batches, ends the step."""
        self.micro_steps += number - 1
        try:
            yield
        except BaseException:
            self.micro_steps -= number - 1
            raise

    def _take(self, call: Call, place: int, loss_of: Callable[[Any, int], Tensor]) -> Tensor:
        """Forward, backward and step of one micro-batch."""
        args, named = call
        with record_function("forward"):
            loss = loss_of(self(*args, **named), place)
        with record_function("backward"):
            self.backward(loss)
        with record_function("optimizer"):
            self.step()
        return loss.detach()

    def _training_batches(self, data_iter: Iterable[Any] | None) -> Iterable[Any]:
        if data_iter is not None:
            return data_iter
        if self.training_dataloader is None:
            raise ValueError(
                "train_batch() without a data_iter takes the engine's training data, and there is none. Hand it an iterator "
                "of micro-batches, or give initialize() training_data."
            )
        if self._own_batches is None:
            self._own_batches = iter(RepeatingLoader(self.training_dataloader))
        return self._own_batches

    def _refine_include_states(self, include: Any) -> Any:
        """All that is asked for: ``offload_optimizer``, by which DeepSpeed takes some away, keeps low-rank states
        on the device."""
        return include if self.hmt_enabled else super()._refine_include_states(include)

    def backward(self, *args: Any, **kwargs: Any) -> Any:
        """As in DeepSpeed.

        Raises:
            RuntimeError: another owner has taken the parameters over.
        """
        self._tenure.check("backward()")
        return super().backward(*args, **kwargs)

    def zero_grad(self) -> None:
        """Drop everything accumulated since the last step, reduced or not."""
        super().zero_grad()
        self._tenure.has_gradients = False
        if self.hmt_enabled:
            self.optimizer.zero_grad()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate without reducing; stages 0 and 1, as in DeepSpeed."""
        with super().no_sync():
            if not self.hmt_enabled:
                yield
                return
            self.optimizer._coalesce_grad_reduction = True
            try:
                yield
            finally:
                self.optimizer._coalesce_grad_reduction = False

    # The end of DeepSpeed's coalesce_grad_reduction, which reads the buckets of its own stages.

    def _flush_coalesced_reduction_zero12(self, optimizer: Any) -> None:
        if self.hmt_enabled:
            self._reduce_own()
        else:
            super()._flush_coalesced_reduction_zero12(optimizer)

    def _flush_coalesced_reduction_zero3(self, optimizer: Any) -> None:
        if self.hmt_enabled:
            self._reduce_own()
        else:
            super()._flush_coalesced_reduction_zero3(optimizer)

    def _reduce_own(self) -> None:
        self.hmt_metrics.phases.start("reduce")
        self.optimizer.reducer.flush_own()
        self.hmt_metrics.phases.stop("reduce")

    # -- the verdict over a step ----------------------------------------------------------------------

    @property
    def skipped_steps(self) -> int:
        """Steps without an update, the last one included: waits for the device where it has decided on that."""
        if self.hmt_enabled:
            self.optimizer.settle()
        return self._skipped_steps

    @skipped_steps.setter
    def skipped_steps(self, number: int) -> None:
        self._skipped_steps = number

    def was_step_applied(self) -> bool:
        """As in DeepSpeed."""
        if self.hmt_enabled:
            self.optimizer.settle()
        return bool(super().was_step_applied())

    def get_lr(self) -> list[float]:
        """As in DeepSpeed."""
        if self.hmt_enabled:
            self.optimizer.settle()
        return list(super().get_lr())

    def _take_model_step(self, lr_kwargs: Any) -> None:
        """As in DeepSpeed; the scheduler steps as if the step was taken, and back once it is known that it was not."""
        if not self.hmt_enabled:
            super()._take_model_step(lr_kwargs)
            return
        self.optimizer.settle()  # over the step before: it may change the schedule that is noted now
        with self.optimizer.undecided(self._undo_schedule()):
            super()._take_model_step(lr_kwargs)

    def _undo_schedule(self) -> Callable[[], None]:
        """How to go back to the learning rates of now."""
        scheduler = self.lr_scheduler
        known = None if scheduler is None else copy(scheduler.state_dict())
        groups = [
            {key: value for key, value in group.items() if key != "params"}
            for group in self.optimizer.param_groups
        ]

        def undo() -> None:
            self._skipped_steps += 1
            self._step_applied = False
            if scheduler is not None:
                scheduler.load_state_dict(known)
                for group, before in zip(self.optimizer.param_groups, groups, strict=True):
                    group.update(before)

        return undo

    # -- what a step does, measured -----------------------------------------------------------------

    def _is_for_inputs(self) -> bool:
        """Whether the backward that runs now is an ``autograd.grad`` that accumulates nothing."""
        return self.hmt_enabled and not self.optimizer.is_asked_for_gradients()

    def _backward_prologue_per_tensor(self, grad: Tensor | None) -> Tensor | None:
        if self._is_for_inputs():
            return grad  # DeepSpeed would take it for one of several micro-batches
        scaled: Tensor | None = super()._backward_prologue_per_tensor(grad)
        return scaled

    def _backward_prologue(self) -> None:
        if self._is_for_inputs():
            return  # no end of a micro-batch follows
        if self.hmt_enabled:
            self.optimizer.offloaded.require("backward()", ["lp_params", "lp_grads"])
        self.hmt_metrics.phases.start("backward")
        super()._backward_prologue()
        self._tenure.has_gradients = True

    def _backward_epilogue(self) -> None:
        self._tenure.has_gradients = True  # of losses computed past the engine's forward, too
        super()._backward_epilogue()
        self.hmt_metrics.end_phase("backward")

    def allreduce_gradients(self, *args: Any, **kwargs: Any) -> None:
        """As in DeepSpeed; the part of the reduction that backward did not hide."""
        self.hmt_metrics.phases.start("reduce")
        super().allreduce_gradients(*args, **kwargs)
        self.hmt_metrics.phases.stop("reduce")

    def step(self, lr_kwargs: Any = None) -> None:
        """As in DeepSpeed; after an optimizer step a snapshot may begin, and the monitors get the metrics.

        Raises:
            RuntimeError: an earlier snapshot could not be written, or another owner has taken the parameters over.
        """
        self._tenure.check("step()")
        before = self.global_steps
        if self.hmt_planner is not None:
            self.hmt_planner.begin_step()
        self.hmt_metrics.phases.start("optimizer")
        super().step(lr_kwargs)
        # Stage 3 notes here which forwards have begun. One that computes again until backward has what it needs
        # is broken off there, and would stay.
        del FWD_MODULE_STACK[self._num_open_modules :]
        self.hmt_metrics.end_phase("optimizer")
        has_stepped = self.global_steps > before
        self._tenure.has_gradients &= not has_stepped
        if self.hmt_planner is not None:
            self.hmt_planner.end_step(has_stepped)
        if self.hmt_snapshots is not None:
            self.hmt_snapshots.after_step()
        if has_stepped:
            self.hmt_metrics.end_step()
