"""Turns an engine's config into plain settings, the loss scaler and stage 3's coordinator."""

from __future__ import annotations

import os
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.fp16.loss_scaler import CreateLossScaler
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
from deepspeed.utils.timer import NoopTimer
from torch import nn

from hmt_deepspeed.config import HMTConfig
from hmt_deepspeed.memory.available import host_memory_share
from hmt_deepspeed.memory.weights import taking_host_memory
from hmt_deepspeed.planner.run.host import what_rounding_takes
from hmt_deepspeed.zero.settings import (
    CacheSettings,
    HostSettings,
    ReductionScale,
    SsdSettings,
    ZeroSettings,
    checks_overflow,
    resolved_overlap,
)
from hmt_deepspeed.zero.weights.residency import prepare_for_ssd

__all__ = [
    "Resolved",
    "aio_section",
    "host_settings",
    "loss_scaler",
    "parameter_offload",
    "zero_settings",
]


@dataclass(frozen=True)
class Resolved:
    """The block's settings of HMT's optimizer, "auto" decided.

    Attributes:
        options: fields of ``hmt.optimizer``. stage: the JSON's, which DeepSpeed is not told when it is 0.
        overlap: "none", "backward" or "forward".
        cache: cache of bases in host memory, None without the section.
        in_chunks: with ``hmt.fpdt``, whose leaves of ZeRO-3 all ranks use alike.
    """

    options: dict[str, Any]
    stage: int
    overlap: str
    cache: CacheSettings | None
    in_chunks: bool

    @classmethod
    def of(cls, hmt: HMTConfig, options: dict[str, Any], parsed: Any) -> Resolved:
        """Resolve the block and DeepSpeed's parsed config.

        Args:
            hmt: the block. options: fields of ``hmt.optimizer``. parsed: DeepSpeed's config.
        """
        offload = hmt.offload.model_dump(exclude_unset=True)
        return cls(
            options,
            int(parsed.zero_optimization_stage),
            resolved_overlap(parsed, offload),
            _cache_settings(hmt),
            hmt.gives("fpdt"),
        )


def zero_settings(engine: DeepSpeedEngine, resolved: Resolved) -> ZeroSettings:
    """The JSON's settings of HMT's ZeRO optimizer.

    Args:
        engine: DeepSpeed's part of it is built. resolved: what the block says.
    """
    model_dtype, accumulate_dtype = engine.get_data_types()
    return ZeroSettings(
        stage=resolved.stage,
        model_dtype=model_dtype,
        accumulate_dtype=accumulate_dtype,
        comm_dtype=engine.communication_data_type,
        clip=float(engine.gradient_clipping()),
        micro_batches=engine.gradient_accumulation_steps(),
        check_overflow=checks_overflow(engine._config),
        overlap=bool(engine.zero_overlap_comm()),
        reduce_elements=int(engine.zero_reduce_bucket_size()),
        gather_elements=_gather_elements(engine, resolved.stage),
        ignore_unused=bool(engine.zero_ignore_unused_parameters()),
        scale=_reduction_scale(engine),
        host=host_settings(engine, resolved),
        cache=resolved.cache,
        weights_on_host=_weights_on_host(engine, resolved.stage),
    )


def _weights_on_host(engine: DeepSpeedEngine, stage: int) -> bool:
    offload = engine.zero_offload_param()
    return stage == 3 and offload is not None and offload.device == OffloadDeviceEnum.cpu


def host_settings(engine: DeepSpeedEngine, resolved: Resolved) -> HostSettings | None:
    """``offload_optimizer``; None when the states stay on the device.

    Args:
        engine: DeepSpeed's part of it is built. resolved: what the block says.
    """
    config = engine.zero_offload_optimizer()
    if config is None or config.device == OffloadDeviceEnum.none:
        return None
    pinned, overlap = bool(config.pin_memory), resolved.overlap
    if config.device == OffloadDeviceEnum.cpu:
        return HostSettings(pinned, overlap)
    return HostSettings(
        pinned,
        overlap,
        SsdSettings(
            path=str(config.nvme_path),
            num_buffers=config.buffer_count,
            read_ahead=_unless_off(config, "pipeline_read"),
            write_behind=_unless_off(config, "pipeline_write"),
            aio=aio_section(engine),
        ),
    )


def aio_section(engine: DeepSpeedEngine) -> dict[str, Any] | None:
    """DeepSpeed's ``aio`` where the JSON has it, with its defaults."""
    return engine._config.aio_config if "aio" in engine.config else None


def loss_scaler(engine: DeepSpeedEngine) -> Any:
    """DeepSpeed's loss scaler, static or dynamic."""
    return CreateLossScaler(
        dtype=engine.get_data_types()[0],
        static_loss_scale=engine.loss_scale(),
        dynamic_scaling=engine.dynamic_loss_scale(),
        dynamic_loss_args=engine.dynamic_loss_scale_args(),
    )


def _weight_bytes(model: nn.Module) -> int:
    return sum(getattr(p, "ds_numel", p.numel()) * p.element_size() for p in model.parameters())


def parameter_offload(engine: DeepSpeedEngine) -> Any:
    """DeepSpeed's own coordinator, which gathers and partitions the parameters of stage 3."""
    config, zero = engine.zero_offload_param(), engine._config.zero_config
    on_nvme = config is not None and config.device == OffloadDeviceEnum.nvme
    reuse_distance = engine.zero_max_reuse_distance()
    if on_nvme and "max_reuse_distance" not in zero.model_fields_set:
        reuse_distance = 0  # what waits for reuse keeps its swap buffer, and there are five
    in_ram = config is not None and config.device == OffloadDeviceEnum.cpu
    if in_ram and config.pin_memory and engine.global_rank == 0 and engine.device.type == "cuda":
        _say_what_rounding_takes(engine)
    with taking_host_memory(lambda: _weight_bytes(engine.module)) if in_ram else nullcontext():
        offload = DeepSpeedZeRoOffload(
            engine.module,
            timers=engine.timers if engine.wall_clock_breakdown() else NoopTimer(),
            ds_config=engine.config,
            overlap_comm=engine.zero_overlap_comm(),
            prefetch_bucket_size=1
            if engine.zero_allgather_sequential()
            else engine.zero_prefetch_bucket_size(),
            max_reuse_distance=reuse_distance,
            max_live_parameters=engine.zero_max_live_parameters(),
            param_persistence_threshold=engine.zero_param_persistence_threshold(),
            model_persistence_threshold=engine.zero_model_persistence_threshold(),
            dp_process_group=engine.seq_data_parallel_group,
            offload_param_config=config,
            mpu=engine.mpu,
            zero_module_granularity_threshold=engine.zero_module_granularity_threshold(),
            log_trace_cache_warnings=engine.zero_log_trace_cache_warnings(),
        )
    if on_nvme:
        prepare_for_ssd(offload, config.max_in_cpu, config.pin_memory)
    return offload


def _say_what_rounding_takes(engine: DeepSpeedEngine) -> None:
    ranks = engine.seq_dp_world_size
    parts = (-(-getattr(p, "ds_numel", p.numel()) // ranks) for p in engine.module.parameters())
    itemsize = engine.get_data_types()[0].itemsize
    if line := what_rounding_takes((part * itemsize for part in parts), os.environ):
        print(f"hmt: {line}", flush=True)


def _cache_settings(hmt: HMTConfig) -> CacheSettings | None:
    if not hmt.gives("basis_cache"):
        return None
    return CacheSettings(host_memory_share(), hmt.basis_cache.history)


def _gather_elements(engine: DeepSpeedEngine, stage: int) -> int:
    """Elements of a gather bucket; at stage 3 ``sub_group_size`` bounds it too, where the JSON gives one."""
    bucket, group = int(engine.zero_allgather_bucket_size()), int(engine.zero_sub_group_size())
    return min(bucket, group) if stage == 3 and group else bucket


def _reduction_scale(engine: DeepSpeedEngine) -> ReductionScale:
    """Factors of the mean over ranks, divided where ``prescale_gradients`` and its factor say."""
    if engine.seq_dp_world_size == 1:
        return ReductionScale(1.0, 1.0)  # nothing is reduced, so nothing is divided
    world = engine.seq_dp_world_size if engine.gradient_average else 1
    if not engine.postscale_gradients():
        return ReductionScale(1.0 / world, 1.0)
    before = float(engine.gradient_predivide_factor())
    return ReductionScale(1.0 / before, before / world)


def _unless_off(config: Any, key: str) -> bool:
    """A key of ``offload_optimizer`` that is true where the JSON does not say otherwise."""
    return key not in config.model_fields_set or bool(getattr(config, key))
