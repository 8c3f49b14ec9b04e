"""What HMT's engine cannot honour is refused here, before anything is built."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.op_builder import AsyncIOBuilder
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum
from torch import nn

from hmt_deepspeed.config import HMTConfig, SnapshotConfig

__all__ = [
    "check_activations",
    "check_engine",
    "check_snapshot",
    "check_supported",
    "resolved_overlap",
]

Refusal = tuple[str, object, str, str]  # key, value, what is legal, what to do


def check_supported(
    config: dict[str, Any], parsed: Any, options: dict[str, Any], overlap: str | None
) -> None:
    """Refuse DeepSpeed features that would be ignored or would change results.

    Args:
        config: the DeepSpeed JSON. parsed: its ``DeepSpeedConfig``. options: fields of ``hmt.optimizer``.
        overlap: ``hmt.offload.overlap`` where it is given.

    Raises:
        ValueError: naming every key, its value, what is legal and what to do.
    """
    refusals = [*_precision(config, parsed, options), *_zero(parsed, options, overlap)]
    refusals += _parallelism(config, parsed)
    refusals += _int8_weights(parsed, options)
    if refusals:
        raise ValueError(
            "\n".join(
                f"{key} is {value!r}, which HMT does not support: legal is {legal}. {remedy}"
                for key, value, legal, remedy in refusals
            )
        )


def check_activations(
    config: dict[str, Any], hmt: HMTConfig, options: dict[str, Any] | None
) -> None:
    """Refuse what an activation backend cannot see, and what it would ignore.

    Args:
        options: fields of ``hmt.optimizer``; None under another optimizer.

    Raises:
        ValueError: DeepCompile, whose graphs bypass the modules; FPDT, whose layers keep nothing but their
            input; what becomes of projected inputs, where there are none.
    """
    activations = hmt.activations
    if hmt.fpdt.enabled:
        raise ValueError(
            "hmt.fpdt.enabled is true, which hmt.activations does not go with: legal is one of the two. A "
            "layer in chunks keeps only its input, so there is nothing to choose: remove hmt.activations."
        )
    if (config.get("compile") or {}).get("deepcompile"):
        raise ValueError(
            "compile.deepcompile is True, which hmt.activations does not support: legal is false. Compiled "
            "graphs bypass the modules that activations are attributed to: remove one of the two."
        )
    projected = options is not None and options["projected_backward"] is not False
    if "projected_inputs" in activations.model_fields_set and not projected:
        raise ValueError(
            f"hmt.activations.projected_inputs is {activations.projected_inputs!r}, but nothing is projected "
            'without HMT\'s optimizer and its projected backward: remove it, or set "optimizer": {"type": '
            '"HMT"}.'
        )


def check_snapshot(snapshot: SnapshotConfig, parsed: Any) -> None:
    """Refuse snapshots of states that are updated while they would be copied.

    Raises:
        ValueError: beside ``offload_optimizer``.
    """
    offload = parsed.zero_config.offload_optimizer
    if snapshot.path is None or offload is None or offload.device == OffloadDeviceEnum.none:
        return
    raise ValueError(
        f"hmt.snapshot.path is {snapshot.path!r}, but with zero_optimization.offload_optimizer states in host "
        'memory are updated beside training: legal is "device": "none". Remove one of the two, and save '
        "checkpoints with engine.save_checkpoint."
    )


def check_engine(engine: Any) -> None:
    """Refuse what shows only once the engine has looked at the model and the process groups.

    Raises:
        ValueError: experts, embeddings with sparse gradients, model or sequence parallelism, parameters
            that DeepSpeed cannot swap.
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
    offload = engine.zero_offload_param()
    if offload is not None and offload.device == OffloadDeviceEnum.nvme:
        _check_nvme(engine, offload.buffer_size)


def _check_nvme(engine: Any, buffer_size: int) -> None:
    """What DeepSpeed's swapper would store in another dtype, or fail on by an assertion."""
    swapped_as = _swapper_dtype(engine.module)
    for param, name in engine.param_names.items():
        if param.dtype != swapped_as:
            raise ValueError(
                f'zero_optimization.offload_param.device is "nvme", but DeepSpeed would keep {name}, which is '
                f"{param.dtype}, as {swapped_as}: legal is one dtype for all parameters, and fp32 only where "
                f'the accelerator supports fp16. Turn bf16 on, or use "cpu".'
            )
        numel = getattr(param, "ds_numel", param.numel())
        part = -(-numel // engine.seq_dp_world_size)
        if part > buffer_size:
            raise ValueError(
                f"zero_optimization.offload_param.buffer_size is {buffer_size} elements, but this rank's part "
                f"of {name} has {part}. Give at least that."
            )


def _swapper_dtype(module: nn.Module) -> torch.dtype:
    """In which DeepSpeed will swap: of its swapper, where ``zero.Init`` has built one.

    Else that of the first parameter, but ``Init._set_dtype`` of DeepSpeed 0.19 overrules it by bf16 where the
    accelerator has no fp16.
    """
    params: list[Any] = list(module.parameters())
    for param in params:
        if getattr(param, "nvme_swapper", None) is not None:
            dtype: torch.dtype = param.nvme_swapper.dtype
            return dtype
    return params[0].dtype if get_accelerator().is_fp16_supported() else torch.bfloat16


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


def resolved_overlap(parsed: Any, wanted: str | None) -> str:
    """What ``hmt.offload.overlap`` means for a config: "none", "backward" or "forward".

    "auto" never doubles the states' memory, as "backward" does where an update may have to be taken back, and
    never lets weights be read that a gate does not see, as "forward" does below stage 3.
    """
    if wanted not in (None, "auto"):
        assert wanted is not None
        return wanted
    if not (parsed.gradient_clipping or parsed.float16_config.enabled or _checks_overflow(parsed)):
        return "backward"
    return "forward" if parsed.zero_optimization_stage == 3 else "none"


def _checks_overflow(parsed: Any) -> bool:
    return bool(parsed.bfloat16_config.enabled and parsed.bfloat16_config.check_grad_overflow)


def _zero(parsed: Any, options: dict[str, Any], overlap: str | None) -> Iterator[Refusal]:
    zero = parsed.zero_config
    offload = zero.offload_optimizer
    if offload is not None and offload.device != OffloadDeviceEnum.none:
        yield from _offload_optimizer(zero.stage, offload, zero.offload_param, options)
    elif overlap is not None:
        remedy = "There is nothing to overlap: remove the key, or add offload_optimizer."
        yield "hmt.offload.overlap", overlap, 'unset without "offload_optimizer"', remedy
    param = zero.offload_param
    if param is not None and param.device == OffloadDeviceEnum.nvme:
        yield from _nvme(zero.stage, param)
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


def _offload_optimizer(
    stage: int, offload: Any, param: Any, options: dict[str, Any]
) -> Iterator[Refusal]:
    key = "zero_optimization.offload_optimizer"
    device = str(getattr(offload.device, "value", offload.device))
    if device != "cpu":
        remedy = 'States on an SSD are not supported yet: use "cpu".'
        yield f"{key}.device", device, '"none" or "cpu"', remedy
    if param is not None and param.device == OffloadDeviceEnum.nvme:
        remedy = (
            'Parameters on an SSD and states in host memory are not tested together: use "cpu".'
        )
        legal = '"none" or "cpu" with offload_optimizer'
        yield "zero_optimization.offload_param.device", "nvme", legal, remedy
    if stage == 0:
        remedy = "At stage 0 every rank would keep all states on its host: use stage 1, 2 or 3."
        yield f"{key}.device", device, '"none" at stage 0', remedy
    if offload.super_offload:
        yield f"{key}.super_offload", True, "false", "Remove the key."
    if offload.ratio != 1.0:
        remedy = "What is offloaded is offloaded whole: remove the key."
        yield f"{key}.ratio", offload.ratio, "1.0", remedy
    if options["state_dtype"] != "fp32":
        yield (
            "hmt.optimizer.state_dtype",
            options["state_dtype"],
            '"fp32" with offload_optimizer',
            "The CPU Adam kernel takes fp32 moments: remove the key, or offload_optimizer.",
        )


def _nvme(stage: int, param: Any) -> Iterator[Refusal]:
    key = "zero_optimization.offload_param"
    if stage != 3:
        remedy = "Below stage 3 parameters are not partitioned: use stage 3, or remove the section."
        yield f"{key}.device", "nvme", f'"none" at stage {int(stage)}', remedy
    elif param.nvme_path is None:
        yield f"{key}.nvme_path", None, "a folder on the SSD", "Name one that every rank can write."
    elif not AsyncIOBuilder().is_compatible(verbose=False):
        yield (
            f"{key}.device",
            "nvme",
            '"none" or "cpu" where DeepSpeed\'s async_io does not build',
            "It needs libaio's headers: install libaio-dev (Debian, Ubuntu) or libaio-devel (Fedora), or "
            'use "cpu".',
        )


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
