"""``profile`` and ``synchronize_checkpoint_boundary``: DeepSpeed's timers and synchronisation around a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.activation_checkpointing import checkpointing
from deepspeed.utils.timer import FORWARD_GLOBAL_TIMER, SynchronizedWallClockTimer
from torch import Tensor
from torch.autograd.graph import register_multi_grad_hook

from hmt_deepspeed.config.activation_checkpointing import ActivationCheckpointing

__all__ = ["Boundary"]

BACKWARD_TIMER = "backward"  # DeepSpeed's name for it


class Boundary:
    """Runs checkpoints between DeepSpeed's timers and synchronisations, where its keys ask for them.

    The timers are DeepSpeed's own, in ``deepspeed.checkpointing.timers``: "fwd" and "backward", the latter
    from the gradient of a checkpoint's output to that of its inputs, recomputation included. DeepSpeed logs
    them after each checkpoint, for which the host must wait; here one line per pass sums its checkpoints up
    when the next pass begins, and on CUDA nothing waits before.

    Args:
        keys: returns the keys in force.
    """

    def __init__(self, keys: Callable[[], ActivationCheckpointing]) -> None:
        self._keys = keys
        self._running_backward = 0
        self._pass_has_backward = False

    def run(self, checkpoint: Callable[..., Any], function: Any, *args: Any) -> Any:
        """``checkpoint(function, *args)``: a backend's ``around``."""
        keys = self._keys()
        if not keys.profile and not keys.synchronize_checkpoint_boundary:
            return checkpoint(function, *args)
        # gradients arrive at aliases: at the tensors themselves they would wait for those from elsewhere
        args = tuple(arg.view_as(arg) if _has_gradient(arg) else arg for arg in args)
        self._begin_forward(keys)
        try:
            outputs = checkpoint(function, *args)
        finally:
            self._end_forward(keys)
        self._watch(args, outputs, keys)
        return outputs

    def _watch(self, args: tuple[Any, ...], outputs: Any, keys: ActivationCheckpointing) -> None:
        inputs = [arg for arg in args if _has_gradient(arg)]
        several = outputs if isinstance(outputs, (list, tuple)) else (outputs,)
        results = [output for output in several if _has_gradient(output)]
        if inputs and results:
            register_multi_grad_hook(results, lambda _: self._begin_backward(keys), mode="any")
            register_multi_grad_hook(inputs, lambda _: self._end_backward(keys), mode="all")

    def _begin_forward(self, keys: ActivationCheckpointing) -> None:
        if self._pass_has_backward:
            self._end_pass(keys)
        if keys.synchronize_checkpoint_boundary:
            get_accelerator().synchronize()
        if keys.profile:
            _timer(FORWARD_GLOBAL_TIMER).start()

    def _end_forward(self, keys: ActivationCheckpointing) -> None:
        if keys.profile:
            _timer(FORWARD_GLOBAL_TIMER).stop()
        if keys.synchronize_checkpoint_boundary:
            get_accelerator().synchronize()

    def _begin_backward(self, keys: ActivationCheckpointing) -> None:
        if keys.synchronize_checkpoint_boundary:
            get_accelerator().synchronize()
        self._pass_has_backward = True
        self._running_backward += 1
        if keys.profile and self._running_backward == 1:
            _timer(BACKWARD_TIMER).start()

    def _end_backward(self, keys: ActivationCheckpointing) -> None:
        if self._running_backward == 0:
            return  # the gradient came in past the outputs
        self._running_backward -= 1
        if keys.profile and self._running_backward == 0:
            _timer(BACKWARD_TIMER).stop()
        if keys.synchronize_checkpoint_boundary:
            get_accelerator().synchronize()

    def _end_pass(self, keys: ActivationCheckpointing) -> None:
        broken_off = self._running_backward > 0
        self._running_backward, self._pass_has_backward = 0, False
        if keys.profile:
            if broken_off:
                _timer(BACKWARD_TIMER).reset()
            checkpointing.timers.log([FORWARD_GLOBAL_TIMER, BACKWARD_TIMER])


def _timer(name: str) -> Any:
    if checkpointing.timers is None:
        checkpointing.timers = SynchronizedWallClockTimer()
    return checkpointing.timers(name)


def _has_gradient(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad
