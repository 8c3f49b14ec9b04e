"""Attributes that the engine, Hugging Face's Trainer and DeepSpeed's tools use on any ZeRO optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.utils import logger
from torch import Tensor

from hmt_deepspeed.optim.hmt import HMT
from hmt_deepspeed.zero.optimizer.verdict import Verdict
from hmt_deepspeed.zero.settings import ZeroSettings
from hmt_deepspeed.zero.sharding.collectives import Collectives

__all__ = ["OptimizerInterface"]


class OptimizerInterface(ZeROOptimizer):
    """Learning rates, loss scales, and the norm and overflow of the last step.

    Args:
        optimizer: carries the parameter groups.
        settings: see :class:`ZeroSettings`.
        loss_scaler: DeepSpeed's; scale 1 without fp16.
    """

    collectives: Collectives

    def __init__(self, optimizer: HMT, settings: ZeroSettings, loss_scaler: Any) -> None:
        super().__init__()
        self.optimizer, self.settings = optimizer, settings
        self.loss_scaler = loss_scaler
        self.dynamic_loss_scale = loss_scaler.dynamic
        self.custom_loss_scaler = False
        self.external_loss_scale = 1.0
        self.torch_autocast_gradscaler = None
        self._overflow = self._is_undecided = False
        self._verdict: Verdict | None = None  # over the last step, which nobody has asked for
        self._when_skipped: list[Callable[[], None]] = []
        self.clip_grad = settings.clip
        self.partition_gradients = settings.stage >= 2
        # set by the engine, inside no_sync too: what backward leaves stays on this rank
        self._coalesce_grad_reduction = False
        self._global_grad_norm: Tensor | float = 0.0
        self.mpu = None
        self.swap_optimizer = False

    # -- whether the last step was taken ----------------------------------------------------------

    @property
    def overflow(self) -> bool:
        """Whether the last step was skipped; waits for the device where it has decided on it."""
        self.settle()
        return self._overflow and self._verdict is None

    def settle(self) -> None:
        """Let the loss scale, and who wanted to know, have the verdict over the last step; not while it is
        :meth:`undecided`."""
        if self._verdict is not None and not self._is_undecided:
            verdict, self._verdict = self._verdict, None
            self._conclude(not verdict.read(), verdict.scale)

    def _conclude(self, overflow: bool, scale: float) -> None:
        self._overflow = overflow
        self.loss_scaler.update_scale(overflow)
        actions, self._when_skipped = self._when_skipped, []
        if overflow:
            scales = f"; loss scale {scale:g}, now {self.loss_scale:g}" if scale != 1.0 else ""
            self._warn(f"a gradient is not finite: this step is skipped{scales}")
            for action in actions:
                action()

    @contextmanager
    def undecided(self, when_skipped: Callable[[], None]) -> Iterator[None]:
        """A step whose verdict is not read in the block: it counts as taken there.

        Args:
            when_skipped: called when it is read, inside :meth:`settle`, and says otherwise.
        """
        self._is_undecided = True
        try:
            yield
        finally:
            self._is_undecided = False
        if self._verdict is not None:
            self._when_skipped.append(when_skipped)

    def _warn(self, text: str) -> None:
        """Once for the whole job."""
        if self.collectives.rank == 0:
            logger.warning(f"hmt: {text}")

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    def set_lr(self, lr: float) -> None:
        """Set the same learning rate for every group."""
        for group in self.param_groups:
            group["lr"] = lr

    def get_lr(self) -> float:
        """Learning rate of the first group."""
        return float(self.param_groups[0]["lr"])

    @property
    def loss_scale(self) -> float:
        """Factor on losses: that of DeepSpeed's scaler, or of :meth:`override_loss_scale`."""
        if self.custom_loss_scaler:
            return float(self.external_loss_scale)
        if self.dynamic_loss_scale:
            self.settle()
        return float(self.loss_scaler.cur_scale)

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        self.loss_scaler.cur_scale = value

    cur_scale = loss_scale

    def override_loss_scale(self, loss_scale: float) -> None:
        """Multiply losses by the caller's scale from now on; the caller adapts it.

        Args:
            loss_scale: factor on losses, which :meth:`step` takes out of gradients.
        """
        self.custom_loss_scaler, self.external_loss_scale = True, loss_scale
