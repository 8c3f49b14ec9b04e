"""What HMT's engine cannot honour is refused here, before anything is built."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum
from torch import nn

__all__ = ["check_engine", "check_supported"]

Refusal = tuple[str, object, str, str]  # key, value, what is legal, what to do


def check_supported(config: dict[str, Any], parsed: Any, options: dict[str, Any]) -> None:
    """Refuse DeepSpeed features that would be ignored or would change results.

    Args:
        config: the DeepSpeed JSON. parsed: its ``DeepSpeedConfig``. options: fields of ``hmt.optimizer``.

    Raises:
        ValueError: naming every key, its value, what is legal and what to do.
    """
    refusals = [*_precision(config, parsed, options), *_zero(parsed), *_parallelism(config, parsed)]
    refusals += _int8_weights(parsed, options)
    if refusals:
        raise ValueError(
            "\n".join(
                f"{key} is {value!r}, which HMT does not support: legal is {legal}. {remedy}"
                for key, value, legal, remedy in refusals
            )
        )


def check_engine(engine: Any) -> None:
    """Refuse what shows only once the engine has looked at the model and the process groups.

    Raises:
        ValueError: experts, embeddings with sparse gradients, model or sequence parallelism.
    """
    for name, module in engine.module.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            raise ValueError(
                f"{name or 'the model'} is an embedding with sparse=True, legal with HMT is False: "
                "gradients are reduced dense. Build it with sparse=False."
            )
    if engine.has_moe_layers:
        raise ValueError(
            "the model has DeepSpeed MoE layers, whose experts are reduced over groups of their own; HMT "
            "reduces over all data-parallel ranks. Train it without the hmt block."
        )
    for name, size in (
        ("model parallel", engine.mp_world_size),
        ("sequence parallel", engine.sequence_parallel_size),
    ):
        if size > 1:
            raise ValueError(
                f"the {name} size is {size}, legal with HMT is 1. Use data parallelism with ZeRO."
            )


def _precision(config: dict[str, Any], parsed: Any, options: dict[str, Any]) -> Iterator[Refusal]:
    bf16 = bool(parsed.bfloat16_config.enabled)
    if options["master_weights"] == "none" and not bf16:
        yield (
            "hmt.optimizer.master_weights",
            "none",
            '"fp32", or "none" with "bf16": {"enabled": true}',
            "Stochastic rounding is defined on bf16 weights: turn bf16 on, or keep fp32 masters.",
        )
    if (config.get("torch_autocast") or {}).get("enabled"):
        yield (
            "torch_autocast.enabled",
            True,
            "false",
            'Use "bf16": {"enabled": true} or "fp16": {"enabled": true} instead.',
        )
    for section in ("fp16", "bf16"):
        for key in ("fp16_master_weights_and_grads", "bf16_master_weights_and_grads", "auto_cast"):
            if (config.get(section) or {}).get(key):
                remedy = (
                    'Remove it; "hmt": {"optimizer": {"master_weights": "none"}} drops masters.'
                )
                yield f"{section}.{key}", True, "false", remedy
    if (config.get("bf16") or {}).get("bf16_optimizer_states"):
        yield "bf16.bf16_optimizer_states", True, "false", "Remove it; moments are fp32."
    if config.get("amp", {}).get("enabled"):
        yield "amp.enabled", True, "false", "Use bf16 or fp16."


def _int8_weights(parsed: Any, options: dict[str, Any]) -> Iterator[Refusal]:
    if options["weight_dtype"] != "int8":
        return
    given = 'with "hmt": {"optimizer": {"weight_dtype": "int8"}}'
    if parsed.zero_optimization_stage == 3:
        yield (
            "zero_optimization.stage",
            3,
            f"0, 1 or 2 {given}",
            "Every rank holds all codes, which stage 3 would split: lower the stage, or keep the model's "
            'dtype with "weight_dtype": "auto".',
        )
    if parsed.float16_config.enabled:
        remedy = 'Codes decode to bf16 or fp32: use "bf16": {"enabled": true}.'
        yield "fp16.enabled", True, f"false {given}", remedy


def _zero(parsed: Any) -> Iterator[Refusal]:
    zero = parsed.zero_config
    offload = zero.offload_optimizer
    if offload is not None and offload.device != OffloadDeviceEnum.none:
        yield (
            "zero_optimization.offload_optimizer.device",
            str(getattr(offload.device, "value", offload.device)),
            '"none"',
            "Remove the section: HMT keeps the moments in the low-rank space, on the device.",
        )
    param = zero.offload_param
    if param is not None and param.device == OffloadDeviceEnum.nvme:
        yield (
            "zero_optimization.offload_param.device",
            "nvme",
            '"none" or "cpu"',
            'Use "cpu"; parameters on SSD would be read and written around every update.',
        )
    switches = {
        "zenflow": getattr(zero, "zenflow", None),
        "zero_quantized_weights": zero.zero_quantized_weights,
        "zero_quantized_nontrainable_weights": zero.zero_quantized_nontrainable_weights,
        "zero_quantized_gradients": zero.zero_quantized_gradients,
    }
    for key, value in switches.items():
        if value:
            yield f"zero_optimization.{key}", True, "false", "Remove the key."
    if zero.zero_hpz_partition_size != 1:
        size, remedy = zero.zero_hpz_partition_size, "Partition over all ranks: remove the key."
        yield "zero_optimization.zero_hpz_partition_size", size, "1", remedy
    if not getattr(zero, "compute_grad_norm", True):
        remedy = "Remove it: the norm falls out of the probe columns."
        yield "zero_optimization.compute_grad_norm", False, "true", remedy


def _parallelism(config: dict[str, Any], parsed: Any) -> Iterator[Refusal]:
    autotp = (config.get("tensor_parallel") or {}).get("autotp_size", 0)
    if autotp and autotp > 1:
        remedy = "Use ZeRO-3 to split weights over ranks."
        yield "tensor_parallel.autotp_size", autotp, "0 or 1", remedy
    sequence = config.get("sequence_parallel_size", 1)
    if sequence and sequence > 1:
        yield "sequence_parallel_size", sequence, "1", "Use data parallelism over all ranks."
    if getattr(getattr(parsed, "hybrid_engine", None), "enabled", False):
        yield "hybrid_engine.enabled", True, "false", "Train without the hybrid engine."
    if (config.get("checkpoint") or {}).get("load_universal"):
        remedy = (
            "HMT checkpoints load under any world size and stage without conversion: remove it."
        )
        yield "checkpoint.load_universal", True, "false", remedy
    if (config.get("compile") or {}).get("deepcompile"):
        yield (
            "compile.deepcompile",
            True,
            "false",
            "Remove it: compiled graphs bypass gradient hooks.",
        )
