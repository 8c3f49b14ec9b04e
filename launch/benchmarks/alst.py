"""DeepSpeed's ALST on a Llama: its tiled MLP and tiled loss, and layers that are checkpointed."""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["TiledLlama"]


class TiledLlama:
    """A model's training step as ALST has it. Its Ulysses attention is the model's own (sdpa) at one rank.

    Args:
        model: LlamaForCausalLM, changed for good. shards: of MLP and loss, in tokens.
    """

    def __init__(self, model: Any, shards: int) -> None:
        self._model, self._shards = model, shards
        model.gradient_checkpointing_enable()
        model.train()
        for layer in model.model.layers:
            layer.mlp.forward = MethodType(_tiled_mlp(shards), layer.mlp)

    def loss(self, rows: Tensor) -> Tensor:
        """Mean cross entropy of the next tokens, rows [B, S]."""
        from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledFusedLogitsLoss

        hidden = self._model.model(input_ids=rows).last_hidden_state
        targets = F.pad(rows[:, 1:], (0, 1), value=-100)
        head = self._model.lm_head
        total = TiledFusedLogitsLoss.apply(
            _sum_of_losses, head, hidden, targets, None, self._shards, [head.weight], "sum"
        )
        return total / (targets != -100).sum()


def _sum_of_losses(head: Any, hidden: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(head(hidden).float(), targets, ignore_index=-100, reduction="sum")


def _tiled_mlp(shards: int) -> Any:
    from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledMLP

    def one(mlp: Any, x: Tensor) -> Tensor:
        result: Tensor = mlp.down_proj(mlp.act_fn(mlp.gate_proj(x)) * mlp.up_proj(x))
        return result

    def forward(mlp: Any, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return one(mlp, x)
        result: Tensor = TiledMLP.apply(one, mlp, x, shards, list(mlp.parameters()))
        return result

    return forward
