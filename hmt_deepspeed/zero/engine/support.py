"""Refuses what HMT's engine cannot honour, before anything is built.

Values that are refused whatever stands beside them are in :mod:`hmt_deepspeed.zero.engine.deepspeed_keys`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.moe.layer import MoE
from deepspeed.ops.op_builder import AsyncIOBuilder
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum
from torch import nn

from hmt_deepspeed.config import HMTConfig, OptimizerConfig
from hmt_deepspeed.config.activation_checkpointing import ActivationCheckpointing
from hmt_deepspeed.config.activations import (
    ActivationsConfig,
    Policy,
    PolicyOverride,
    codecs_in,
)
from hmt_deepspeed.rules import DENSE
from hmt_deepspeed.zero.activations.chunked import refused_beside_chunks
from hmt_deepspeed.zero.activations.install import choices_of
from hmt_deepspeed.zero.engine.deepspeed_keys import Refusal, refused_keys
from hmt_deepspeed.zero.offload.ssd import MIN_BUFFERS

__all__ = [
    "check_activations",
    "check_engine",
    "check_stock_dtypes",
    "check_supported",
]


def has_other_rules(options: Mapping[str, Any]) -> bool:
    """Whether ``hmt.optimizer.module_rules`` do more than leave modules to AdamW or set rates, which the planner does not
    know."""
    return any(
        rule.get("method") != DENSE
        and any(v is not None for k, v in rule.items() if k != "lr_scale")
        for rule in options["module_rules"].values()
    )


def check_supported(
    config: dict[str, Any], parsed: Any, options: dict[str, Any], offload: dict[str, str]
) -> None:
    """Refuse DeepSpeed features that would be ignored or would change results.

    Args:
        config: the DeepSpeed JSON. parsed: its ``DeepSpeedConfig``. options: fields of ``hmt.optimizer``.
        offload: fields of ``hmt.offload``, those that are given.

    Raises:
        ValueError: naming every key, its value, what is legal and what to do.
    """
    refusals = [*refused_keys(config), *_precision(parsed, options)]
    refusals += _zero(parsed, options, offload)
    refusals += _int8_weights(parsed, options)
    refusals += _optimizer_params(config)
    refusals += _clipping(parsed, options)
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
        ValueError: DeepCompile, whose graphs bypass the modules; a plan beside an SSD whose traffic is not known,
            or beside rules for single modules; a limit of host memory that nothing reads; choices that FPDT's layers, which keep nothing but their input, do
            not have; what becomes of projected inputs, where there are none; what stock ZeRO-3 stops at by an
            assertion.
    """
    activations = hmt.activations
    if options is None:
        _check_stock_stage_3(config)
    _check_host_memory(config, activations)
    if hmt.gives("fpdt"):
        refused = refused_beside_chunks(activations, config.get("activation_checkpointing") or {})
        if messages := list(refused):
            raise ValueError("\n".join(messages))
    zero = config.get("zero_optimization") or {}
    unknown = {"offload_param": "whose swapping DeepSpeed does not count"}
    if options is None:
        unknown["offload_optimizer"] = (
            "where DeepSpeed keeps the states of another optimizer than HMT's, uncounted"
        )
    for key, reason in unknown.items():
        if activations.is_planned and (zero.get(key) or {}).get("device") == "nvme":
            raise ValueError(
                f'hmt.activations.policy is "plan", but zero_optimization.{key}.device is "nvme", {reason}. Legal: '
                '"none", "cpu", or with "nvme" a policy written out.'
            )
    if activations.is_planned and options is not None and has_other_rules(options):
        raise ValueError(
            f"hmt.optimizer.module_rules is {options['module_rules']!r}, whose matrices the planner would take for "
            f'all others: legal with hmt.activations.policy "plan" are rules {{"method": "{DENSE}"}}. Remove the others, '
            "or write the policy out."
        )
    if (config.get("compile") or {}).get("deepcompile"):
        raise ValueError(
            "compile.deepcompile is True, which hmt.activations does not support: legal is false. Compiled "
            "graphs bypass the modules that activations are attributed to: remove one of the two."
        )
    projected = options is not None and options["projected_backward"] is not False
    given: dict[str, Policy | PolicyOverride] = {"policy": activations.policy}
    given |= {f"overrides[{name!r}]": over for name, over in activations.overrides.items()}
    for place, choices in given.items():
        if "projected_inputs" in choices.model_fields_set and not projected:
            raise ValueError(
                f"hmt.activations.{place}.projected_inputs is {choices.projected_inputs!r}, but nothing is "
                'projected without HMT\'s optimizer and its projected backward: remove it, or set "optimizer": '
                '{"type": "HMT"}.'
            )


def _check_host_memory(config: dict[str, Any], activations: ActivationsConfig) -> None:
    """Refuse a limit of what nothing swaps: neither a component, nor a plan, nor DeepSpeed's key."""
    limit, swapped = activations.host_memory, codecs_in("host", "ssd")
    keys = ActivationCheckpointing.from_section(config.get("activation_checkpointing"))
    if limit == "auto" or activations.is_planned or keys.cpu_checkpointing:
        return
    given = activations.policy, *activations.overrides.values()
    if not any(choice in swapped for choices in given for choice in choices_of(choices).values()):
        raise ValueError(
            f"hmt.activations.host_memory is {limit}, but nothing is swapped: remove it, set a component to "
            f'{" or ".join(swapped)}, or set "activation_checkpointing": {{"cpu_checkpointing": true}}.'
        )


def _check_stock_stage_3(config: dict[str, Any]) -> None:
    """Refuse what DeepSpeed's own optimizer does not have at stage 3 with ``reduce_scatter``, its default."""
    zero = config.get("zero_optimization") or {}
    if zero.get("stage") != 3 or not zero.get("reduce_scatter", True):
        return
    for key, legal in (("gradient_predivide_factor", 1.0), ("prescale_gradients", False)):
        value = config.get(key, legal)
        if value != legal:
            raise ValueError(
                f"{key} is {value!r}, legal at stage 3 with DeepSpeed's own optimizer is {json.dumps(legal)}: its "
                'reduce_scatter divides by the number of ranks itself. Remove the key, set "reduce_scatter": false '
                'in zero_optimization, or use "optimizer": {"type": "HMT"}.'
            )


def check_stock_dtypes(engine: Any) -> None:
    """Refuse what DeepSpeed's own optimizer does not have without ZeRO.

    Raises:
        ValueError: gradients summed in another dtype than the model's.
    """
    dtype, summed_in = engine.get_data_types()
    if not engine.zero_optimization() and dtype != summed_in:
        names = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
        raise ValueError(
            f"data_types.grad_accum_dtype is {names[summed_in]!r}, legal at stage 0 with DeepSpeed's own optimizer "
            f"is {names[dtype]!r}, the model's dtype. Remove the key, set a higher stage in zero_optimization, or "
            'use "optimizer": {"type": "HMT"}.'
        )


def check_whole(model: Any, stage: int) -> None:
    """Refuse parameters that an engine of stage 3, or zero.Init, has left in parts, where nothing gathers them.

    Raises:
        ValueError: there are some, and the stage is below 3.
    """
    name = next((n for n, p in model.named_parameters() if hasattr(p, "ds_tensor")), None)
    if name is not None and stage < 3:
        raise ValueError(
            f"zero_optimization.stage is {stage}, but {name} lies in parts on all ranks, from zero.Init or an earlier "
            "engine of stage 3; legal for it is 3. Set the stage to 3, or save the weights and load them into a "
            "model that was built outside zero.Init."
        )


def check_moe_layers(model: nn.Module, hmt: HMTConfig, options: dict[str, Any], stage: int) -> None:
    """Refuse what does not know that ranks may hold different experts.

    Args:
        model: of the user. options: fields of ``hmt.optimizer``. stage: of ZeRO.

    Raises:
        ValueError: the model has DeepSpeed's MoE layers, and the JSON asks for something that they are not tested with.
    """
    name = next((name for name, module in model.named_modules() if isinstance(module, MoE)), None)
    if name is None:
        return
    given = f"but {name or 'the model'} is a DeepSpeed MoE layer"
    if stage == 3:
        raise ValueError(
            f"zero_optimization.stage is 3, {given}: legal are 0, 1 and 2, as with DeepSpeed's own optimizers. Lower the "
            "stage, or train a mixture that is a leaf module (zero_optimization.leaf_module)."
        )
    if options["weight_dtype"] == "int8":
        raise ValueError(
            f'hmt.optimizer.weight_dtype is "int8", {given}: legal is "auto". DeepSpeed gives all ranks the first one\'s '
            "weights as they are encoded, but ranks hold different experts. Remove the key."
        )
    for section in ("activations", "fpdt", "basis_cache", "snapshot"):
        if hmt.gives(section):
            raise ValueError(
                f"hmt.{section} is given, {given}: legal is hmt.optimizer alone. Remove the section."
            )


def check_vertical(engine: Any) -> None:
    """Refuse vertical accumulation where it gains nothing, or is not known.

    Raises:
        ValueError: weights are whole on every rank, or on an SSD.
    """
    given = 'hmt.accumulation is "vertical"'
    if engine.zero_optimization_stage() != 3:
        raise ValueError(
            f"{given}, but at zero_optimization.stage {engine.zero_optimization_stage()} every rank has all weights, which "
            'travel once a step in any order; legal is "horizontal". Remove the key, or use stage 3.'
        )
    offload = engine.zero_offload_param()
    if offload is not None and offload.device == OffloadDeviceEnum.nvme:
        raise ValueError(
            f'{given}, but zero_optimization.offload_param.device is "nvme"; legal beside it: "cpu" and "none". Buffers of '
            "DeepSpeed's hold no whole layer. Change the device, or remove the key."
        )
    held = engine.hmt_activations
    head = None if held is None or engine.hmt_fpdt is not None else held.policy["lm_head"]
    if head in ("int8", "fp8"):
        raise ValueError(
            f'hmt.activations.policy.lm_head is "{head}" and {given}, whose head computes in chunks; legal beside it: '
            '"keep", "swap_host" and "swap_ssd".'
        )


def check_engine(engine: Any) -> None:
    """Refuse what shows only once the engine has looked at the model and the process groups.

    Raises:
        ValueError: embeddings with sparse gradients, model or sequence parallelism, parameters
            that DeepSpeed cannot swap.
    """
    for name, module in engine.module.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            raise ValueError(
                f"{name or 'the model'} is an embedding with sparse=True, legal with HMT is False: "
                "gradients are reduced dense. Build it with sparse=False."
            )
    for name, size in (
        ("model parallel", engine.mp_world_size),
        ("sequence parallel", engine.sequence_parallel_size),
    ):
        if size > 1:
            raise ValueError(
                f"the {name} size is {size}, legal with HMT is 1. Use data parallelism with ZeRO, and for long "
                "sequences hmt.fpdt.sequence_parallel_size."
            )
    offload = engine.zero_offload_param()
    if offload is not None and offload.device == OffloadDeviceEnum.nvme:
        _check_nvme(engine, offload.buffer_size)


def _check_nvme(engine: Any, buffer_size: int) -> None:
    """Refuse what DeepSpeed's swapper would store in another dtype, or fail on by an assertion."""
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
    """The dtype in which DeepSpeed will swap: its swapper's, where ``zero.Init`` has built one.

    Else that of the first parameter, but ``Init._set_dtype`` of DeepSpeed 0.19 overrules it by bf16 where the
    accelerator has no fp16.
    """
    params: list[Any] = list(module.parameters())
    for param in params:
        if getattr(param, "nvme_swapper", None) is not None:
            dtype: torch.dtype = param.nvme_swapper.dtype
            return dtype
    return params[0].dtype if get_accelerator().is_fp16_supported() else torch.bfloat16


def _precision(parsed: Any, options: dict[str, Any]) -> Iterator[Refusal]:
    if options["master_weights"] == "none" and parsed.float16_config.enabled:
        yield (
            "hmt.optimizer.master_weights",
            "none",
            '"fp32", or "none" with bf16 or fp32 weights',
            "Stochastic rounding is defined on bf16 weights: use bf16, or keep fp32 masters.",
        )
    if parsed.float16_config.enabled and not get_accelerator().is_fp16_supported():
        device = get_accelerator().device_name()
        yield "fp16.enabled", True, f"false on this device ({device})", "Use bf16, or fp32."
    if parsed.torch_autocast_enabled and parsed.torch_autocast_dtype != torch.bfloat16:
        remedy = 'Its float16 needs a loss scaler of torch\'s: use bfloat16, or "fp16": {"enabled": true}.'
        yield "torch_autocast.dtype", parsed.torch_autocast_dtype, '"bfloat16"', remedy


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


def _clipping(parsed: Any, options: dict[str, Any]) -> Iterator[Refusal]:
    """Refuse clipping without probe columns, since the norm outside the bases is then unknown."""
    if parsed.gradient_clipping and options["probes"] == 0:
        legal = f'"auto" or at least 1 with "gradient_clipping": {parsed.gradient_clipping!r}'
        yield (
            "hmt.optimizer.probes",
            0,
            legal,
            'The gradient norm is estimated from them: set "auto", or remove "gradient_clipping".',
        )


def _optimizer_params(config: dict[str, Any]) -> Iterator[Refusal]:
    """Refuse params of another optimizer, and fields of the block, which would not reach the engine."""
    for key, value in ((config.get("optimizer") or {}).get("params") or {}).items():
        if key in ("lr", "betas", "eps", "weight_decay"):
            continue
        remedy = "Remove it."
        if key in OptimizerConfig.model_fields:
            remedy = f"Give it as hmt.optimizer.{key}."
        elif key == "max_grad_norm":
            remedy = 'Give it as "gradient_clipping".'
        legal = "only lr, betas, eps and weight_decay beside an HMT optimizer"
        yield f"optimizer.params.{key}", value, legal, remedy


def _zero(parsed: Any, options: dict[str, Any], given: dict[str, str]) -> Iterator[Refusal]:
    zero = parsed.zero_config
    offload = zero.offload_optimizer
    if offload is not None and offload.device != OffloadDeviceEnum.none:
        yield from _offload_optimizer(zero.stage, offload, zero.offload_param, options)
    elif "overlap" in given:
        remedy = "There is nothing to overlap: remove the key, or add offload_optimizer."
        legal = 'unset without "offload_optimizer"'
        yield "hmt.offload.overlap", given["overlap"], legal, remedy
    if offload is not None and offload.device == OffloadDeviceEnum.nvme:
        yield from _states_on_ssd(offload)
    param = zero.offload_param
    if param is not None and param.device == OffloadDeviceEnum.nvme:
        yield from _nvme(zero.stage, param)


def _offload_optimizer(
    stage: int, offload: Any, param: Any, options: dict[str, Any]
) -> Iterator[Refusal]:
    key = "zero_optimization.offload_optimizer"
    device = str(getattr(offload.device, "value", offload.device))
    if param is not None and param.device == OffloadDeviceEnum.nvme:
        remedy = 'Parameters on an SSD beside states elsewhere than on the device are not tested: use "cpu".'
        legal = '"none" or "cpu" with offload_optimizer'
        yield "zero_optimization.offload_param.device", "nvme", legal, remedy
    if stage == 0:
        remedy = "At stage 0 every rank would keep all states on its host: use stage 1, 2 or 3."
        yield f"{key}.device", device, '"none" at stage 0', remedy
    if options["state_dtype"] not in ("auto", "fp32"):
        yield (
            "hmt.optimizer.state_dtype",
            options["state_dtype"],
            '"auto" or "fp32" with offload_optimizer',
            "The CPU Adam kernel takes fp32 moments: remove the key, or offload_optimizer.",
        )


def _states_on_ssd(offload: Any) -> Iterator[Refusal]:
    section = "zero_optimization.offload_optimizer"
    if offload.nvme_path is None:
        remedy = "Name one that every rank can write."
        yield f"{section}.nvme_path", None, "a folder on the SSD", remedy
    if offload.buffer_count < MIN_BUFFERS:
        remedy = "Each holds a piece of the states that is being read, updated or written."
        yield f"{section}.buffer_count", offload.buffer_count, f"at least {MIN_BUFFERS}", remedy


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
