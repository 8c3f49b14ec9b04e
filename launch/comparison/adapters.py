"""LoRA and QLoRA through peft: adapters on the decoder's linears, everything else frozen."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Missing(RuntimeError):
    """What this machine lacks."""


def add_adapters(
    model: nn.Module, matrices: tuple[str, ...], *, quantized: bool, rank: int, alpha: int
) -> nn.Module:
    """The model with trainable adapters of `rank`, its base frozen and, for QLoRA, in NF4.

    Raises:
        ModuleNotFoundError: peft or, for QLoRA, bitsandbytes is not installed.
        Missing: QLoRA without a CUDA device.
    """
    from peft import LoraConfig, get_peft_model

    wrapped: Any = model
    targets = [name.removesuffix(".weight") for name in matrices]
    if quantized:
        _quantize(model, targets)
        wrapped.is_loaded_in_4bit = True  # how peft knows
    config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=targets, task_type="CAUSAL_LM")
    return get_peft_model(wrapped, config)


def _quantize(model: nn.Module, targets: list[str]) -> None:
    """Replace the linears by bitsandbytes' NF4 ones with the same weights."""
    if next(model.parameters()).device.type != "cuda":
        # 0.50.2 packs weights for the CPU at the first evaluation; its kernel for them has no autograd.
        raise Missing("bitsandbytes trains NF4 on CUDA only: on the CPU its backward is not exact")
    import bitsandbytes as bnb

    for name in targets:
        linear = model.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        quantized = bnb.nn.Linear4bit(
            linear.in_features,
            linear.out_features,
            bias=False,
            compute_dtype=torch.bfloat16,
            quant_type="nf4",
        )
        values = linear.weight.detach().cpu()
        quantized.weight = bnb.nn.Params4bit(values, requires_grad=False, quant_type="nf4")
        model.set_submodule(name, quantized.to("cuda"))  # moving quantises
