"""Attributes that the engine, Hugging Face's Trainer and DeepSpeed's tools use on any ZeRO optimizer."""

from __future__ import annotations

from typing import Any

from deepspeed.runtime.base_optimizer import ZeROOptimizer
from torch import Tensor

from hmt_deepspeed.optim.hmt import HMT
from hmt_deepspeed.zero.settings import ZeroSettings

__all__ = ["OptimizerInterface"]


class OptimizerInterface(ZeROOptimizer):
    """Learning rates, loss scales, and the norm and overflow of the last step.

    Args:
        optimizer: carries the parameter groups.
        settings: see :class:`ZeroSettings`.
        loss_scaler: DeepSpeed's; scale 1 without fp16.
    """

    def __init__(self, optimizer: HMT, settings: ZeroSettings, loss_scaler: Any) -> None:
        super().__init__()
        self.optimizer, self.settings = optimizer, settings
        self.loss_scaler = loss_scaler
        self.dynamic_loss_scale = loss_scaler.dynamic
        self.custom_loss_scaler = False
        self.external_loss_scale = 1.0
        self.torch_autocast_gradscaler = None
        self.overflow = False
        self.clip_grad = settings.clip
        self.partition_gradients = settings.stage >= 2
        # set by the engine, inside no_sync too: what backward leaves stays on this rank
        self._coalesce_grad_reduction = False
        self._global_grad_norm: Tensor | float = 0.0
        self.mpu = None
        self.swap_optimizer = False

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
