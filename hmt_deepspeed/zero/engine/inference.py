"""Engines without an optimizer: reference, reward and teacher models, and evaluation before any training.

Trainers build them from the JSON of the run, the "optimizer" section taken out. Such an engine ignores the "hmt"
block, which is all about training, and refuses to train.
"""

from __future__ import annotations

from typing import Any

from deepspeed.runtime.engine import DeepSpeedEngine

__all__ = ["IGNORED", "InferenceEngine", "check_inference_stage", "is_for_inference"]

IGNORED = (
    'hmt: neither the config nor the call names an optimizer, so this engine is for inference: the "hmt" block is '
    "ignored, and backward and step are refused"
)
_REMEDY = (
    'To train, set "optimizer": {"type": "HMT", ...} in the config or pass an HMT object to initialize. Trainer takes '
    "the section out when it evaluates before it trains: train with another Trainer."
)


def is_for_inference(config: Any, client_optimizer: Any) -> bool:
    """Whether an engine has an "hmt" block and nobody names an optimizer, in the JSON or by an object."""
    if not isinstance(config, dict) or config.get("hmt") is None or client_optimizer is not None:
        return False
    return (config.get("optimizer") or {}).get("type") is None


def check_inference_stage(stage: int) -> None:
    """Refuse what DeepSpeed stops at by an assertion.

    Raises:
        ValueError: ZeRO stage 1 or 2, which shard what only an optimizer has.
    """
    if stage in (1, 2):
        raise ValueError(
            f"zero_optimization.stage is {int(stage)} and no optimizer is named: legal without one, for inference, "
            f"is 0 or 3. {_REMEDY}"
        )


class InferenceEngine(DeepSpeedEngine):
    """DeepSpeed's engine, which refuses to train where :func:`is_for_inference` says so."""

    _for_inference = False  # set before DeepSpeed's part is built

    def _refuse(self, what: str) -> None:
        if self._for_inference:
            raise ValueError(
                f'{what}: this engine was built without an optimizer, so it ignores its "hmt" block and cannot '
                f"train. {_REMEDY}"
            )

    def _configure_bf16_optimizer(self, optimizer: Any) -> Any:
        """None at stage 0: stock's makes fp32 copies and hooks, which another engine on the model would meet."""
        return None if self._for_inference else super()._configure_bf16_optimizer(optimizer)

    def backward(self, *args: Any, **kwargs: Any) -> Any:
        """As in DeepSpeed."""
        self._refuse("backward")
        return super().backward(*args, **kwargs)

    def scale(self, loss: Any) -> Any:
        """As in DeepSpeed."""
        self._refuse("scale")
        return super().scale(loss)

    def _backward_prologue(self) -> None:
        self._refuse("backward")  # by loss.backward(), without the engine
        super()._backward_prologue()

    def step(self, lr_kwargs: Any = None) -> None:
        """As in DeepSpeed."""
        self._refuse("step")
        super().step(lr_kwargs)
