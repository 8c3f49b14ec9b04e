"""LoRA and QLoRA through peft: adapters on the decoder's linears, everything else frozen."""

from __future__ import annotations

import importlib.util

import torch
from torch import nn


class Missing(RuntimeError):
    """What this machine lacks."""


def add_adapters(
    model: nn.Module, matrices: tuple[str, ...], *, quantized: bool, rank: int, alpha: int
) -> nn.Module:
    """The model with trainable adapters of `rank`, its base frozen and, for QLoRA, in NF4.

    Raises:
        Missing: for QLoRA, bitsandbytes or a CUDA device is not there.
        ModuleNotFoundError: peft is not.
    """
    from peft import LoraConfig, get_peft_model

    targets = [name.removesuffix(".weight") for name in matrices]
    if quantized:
        _quantize(model, targets)
    config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=targets, task_type="CAUSAL_LM")
    return get_peft_model(model, config)  # type: ignore[arg-type]


def _quantize(model: nn.Module, targets: list[str]) -> None:
    """Replace the linears by bitsandbytes' NF4 ones with the same weights."""
    if not torch.cuda.is_available():
        raise Missing("QLoRA's NF4 kernels need a CUDA device, and there is none")
    if importlib.util.find_spec("bitsandbytes") is None:
        raise Missing("bitsandbytes is not installed, which QLoRA quantises with")
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
        model.set_submodule(name, quantized.to("cuda"))
