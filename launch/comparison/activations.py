"""`hmt.activations` on a contender's model: the package's own backend, as its DeepSpeed engine installs it."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import mean
from typing import Any

from torch import nn

from hmt_deepspeed.config import HMTConfig
from hmt_deepspeed.config.activation_checkpointing import ActivationCheckpointing

# Steps between two measurements of what encoding loses.
ERROR_INTERVAL = 10


class Backend:
    """The activation backend of one model in training, from construction to :meth:`close`.

    Nothing is encoded in evaluation. Rounding noise and measured steps follow `step` alone, so that a
    resumed cell goes on as the uninterrupted one.

    Args:
        block: the "hmt" block, as JSON holds it.

    Attributes:
        step: of the coming forward, from 0.
        installed: the package's.

    Raises:
        ValueError: what the package refuses of the block, and a policy that is to be planned.
    """

    def __init__(self, model: nn.Module, block: Mapping[str, Any]) -> None:
        # Imports DeepSpeed, which processes of other variants need not hold.
        from hmt_deepspeed.zero.activations.install import Activations

        config = HMTConfig.from_block(dict(block)).activations
        if config.is_planned:
            raise ValueError(
                'hmt.activations.policy is "plan", which an engine carries out: write the policy out'
            )
        self.step = 0
        self.installed = Activations(
            model,
            config,
            ActivationCheckpointing(),
            device=next(model.parameters()).device,
            mpu=None,
            aio=None,
            current_step=lambda: self.step,
            error_interval=ERROR_INTERVAL,
        )

    def metrics(self) -> dict[str, Any]:
        """Of the step whose forward was last."""
        errors = self.installed.backend.report().errors
        return {**self.installed.metrics(), "activation_error_per_component": dict(errors)}

    def close(self) -> None:
        """The model computes as before."""
        self.installed.close()


class SavedActivations:
    """What a backend held for backward and lost in encoding, over the steps of a run.

    Args:
        kept: the `kept` of a checkpoint.
    """

    def __init__(self, kept: Mapping[str, Any] | None = None) -> None:
        self.kept: dict[str, Any] = dict(kept or {"steps": 0, "bytes": {}, "errors": {}})

    def add(self, metrics: Mapping[str, Any]) -> None:
        """Count a step's :meth:`Backend.metrics` after its backward."""
        self.kept["steps"] += 1
        held = self.kept["bytes"]
        for component, size in metrics["activation_bytes_per_component"].items():
            held[component] = held.get(component, 0) + size
        for component, error in metrics["activation_error_per_component"].items():
            self.kept["errors"].setdefault(component, []).append(error)

    def record(self) -> dict[str, Any]:
        """Means over the run, empty where no backend was installed.

        Returns:
            activation_bytes: held at the fullest moment of a step, over all steps;
            activation_bytes_per_component, which add up to it; codec_error, by component: the relative
            error (Frobenius) of what was encoded, over the steps that measured it.
        """
        steps = self.kept["steps"]
        if not steps:
            return {}
        sizes = {component: size / steps for component, size in self.kept["bytes"].items()}
        return {
            "activation_bytes": sum(sizes.values()),
            "activation_bytes_per_component": sizes,
            "codec_error": {name: mean(errors) for name, errors in self.kept["errors"].items()},
        }
