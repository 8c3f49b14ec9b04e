"""Table of DeepSpeed's JSON keys: who honours each when HMT's optimizer runs, or why it is refused.

A row covers a key and, where they have no rows of their own, all keys below it. Refusals that depend on a second key
(the stage, a field of the block) are in :mod:`hmt_deepspeed.zero.engine.support`; here a value is legal or not by itself.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["KEYS", "DeepSpeeds", "Honoured", "Refusal", "Refused", "refused_keys", "row_of"]

Refusal = tuple[str, object, str, str]  # key, value, what is legal, what to do


@dataclass(frozen=True)
class Honoured:
    """HMT's engine or optimizer reads it, or does always what it asks for."""

    how: str


@dataclass(frozen=True)
class DeepSpeeds:
    """DeepSpeed reads it itself, whatever the optimizer."""

    reader: str


@dataclass(frozen=True)
class Refused:
    """Another value than the neutral ones would be ignored, or change what HMT computes.

    Attributes:
        neutral: values that ask for nothing. legal: what is legal in words, where ``neutral`` does not say it.
    """

    neutral: tuple[object, ...]
    remedy: str
    legal: str = ""

    @property
    def legal_text(self) -> str:
        return self.legal or " or ".join(json.dumps(value) for value in self.neutral)


_ENGINE = DeepSpeeds("the engine")
_COORDINATOR = Honoured("passed to DeepSpeed's coordinator of stage 3's parameters")
_SCALER = Honoured("passed to DeepSpeed's loss scaler")
_GATHERS = DeepSpeeds("partitioned parameters, when they are gathered")
_OF_REFUSED = DeepSpeeds("read only beside a key that is refused")
_OFF = (False,)
_MASTERS = 'Remove it; "hmt": {"optimizer": {"master_weights": "none"}} drops masters.'
_PLUS_PLUS = "Remove the key."
_UNREAD = "Nothing reads it: remove the key."

KEYS: Mapping[str, Honoured | DeepSpeeds | Refused] = {
    # batches, logging, data
    "train_batch_size": _ENGINE,
    "train_micro_batch_size_per_gpu": _ENGINE,
    "gradient_accumulation_steps": Honoured("the accumulation window"),
    "managed_gradient_accumulation": _ENGINE,
    "steps_per_print": _ENGINE,
    "wall_clock_breakdown": Honoured("timers of the engine and of stage 3's coordinator"),
    "memory_breakdown": _ENGINE,
    "dump_state": _ENGINE,
    "log_level": _ENGINE,
    "disable_python_gc": _ENGINE,
    "dataloader_drop_last": _ENGINE,
    "timers": _ENGINE,
    "flops_profiler": _ENGINE,
    "comms_logger": DeepSpeeds("deepspeed.comm, which HMT's collectives go through"),
    "tensorboard": _ENGINE,
    "wandb": _ENGINE,
    "csv_monitor": _ENGINE,
    "comet": _ENGINE,
    "vocabulary_size": DeepSpeeds("its config, for a warning"),
    "data_efficiency": DeepSpeeds("the engine: curricula, samplers, random layer-token drop"),
    "autotuning": DeepSpeeds("the launcher, and the engine's timers"),
    # optimizer and schedule
    "optimizer.type": Honoured('"HMT" builds it'),
    "optimizer.params": Honoured("lr, betas, eps and weight_decay; any other is refused"),
    "optimizer.legacy_fusion": Refused(_OFF, _UNREAD),
    "scheduler": _ENGINE,
    "gradient_clipping": Honoured("the step, from the norm that the probes estimate"),
    "zero_allow_untested_optimizer": Honoured("HMT needs no leave"),
    "zero_force_ds_cpu_optimizer": Honoured("DeepSpeed's CPU Adam kernel, with either value"),
    # reduction
    "communication_data_type": Honoured("dtype of the buckets"),
    "seq_parallel_communication_data_type": Refused(
        ("fp32",), 'Give "communication_data_type": DeepSpeed\'s sequence parallelism is off.'
    ),
    "prescale_gradients": Honoured("factors around the sum over ranks"),
    "gradient_predivide_factor": Honoured("factors around the sum over ranks"),
    "gradient_allreduce_op": Honoured("factors around the sum over ranks"),
    "disable_allgather": Refused(_OFF, _UNREAD),
    # precision
    "fp16.enabled": Honoured("dtype of the weights"),
    "fp16.auto_cast": _ENGINE,
    "fp16.loss_scale": _SCALER,
    "fp16.initial_scale_power": _SCALER,
    "fp16.loss_scale_window": _SCALER,
    "fp16.hysteresis": _SCALER,
    "fp16.consecutive_hysteresis": _SCALER,
    "fp16.min_loss_scale": _SCALER,
    "fp16.fp16_master_weights_and_grads": Refused(_OFF, _MASTERS),
    "bf16.enabled": Honoured("dtype of the weights"),
    "bf16.check_grad_overflow": Honoured("whether a step that is not finite is skipped"),
    "bf16.immediate_grad_update": Honoured("always so: hooks accumulate while backward goes on"),
    "bf16.bf16_master_weights_and_grads": Refused(_OFF, _MASTERS),
    "bf16.bf16_optimizer_states": Refused(
        _OFF, 'Remove it; "hmt": {"optimizer": {"state_dtype": "bf16"}} makes moments bf16.'
    ),
    "torch_autocast.enabled": DeepSpeeds("the engine, around forward"),
    "torch_autocast.dtype": Honoured("bf16"),
    "torch_autocast.lower_precision_safe_modules": DeepSpeeds("gathers of stage 3"),
    "data_types.grad_accum_dtype": Honoured("dtype of the accumulators"),
    "data_types": DeepSpeeds("the engine, when it casts the model"),
    # ZeRO
    "zero_optimization.stage": Honoured("0 to 3"),
    "zero_optimization.overlap_comm": Honoured("collectives beside backward"),
    "zero_optimization.reduce_bucket_size": Honoured("elements of a bucket over all ranks"),
    "zero_optimization.allgather_bucket_size": Honoured("elements gathered at once"),
    "zero_optimization.sub_group_size": Honoured("elements of updates alive at once at stage 3"),
    "zero_optimization.contiguous_gradients": Refused(
        (True,), "Gradients always go through contiguous buckets: remove the key."
    ),
    "zero_optimization.reduce_scatter": Refused(
        (True,), "Each rank is sent its rows only: remove the key."
    ),
    "zero_optimization.allgather_partitions": Refused(
        (True,), "Weights are never broadcast one by one: remove the key."
    ),
    "zero_optimization.use_multi_rank_bucket_allreduce": Refused(
        (True,), "A bucket holds the rows of every rank: remove the key."
    ),
    "zero_optimization.round_robin_gradients": Honoured(
        "always so: each gradient is divided over all ranks, which copy their parts at once"
    ),
    "zero_optimization.parameter_alignment": Honoured("always so: parameters are not flattened"),
    "zero_optimization.elastic_checkpoint": Honoured("always so: any number of ranks resumes"),
    "zero_optimization.ignore_unused_parameters": Honoured("the step, at every stage"),
    "zero_optimization.load_from_fp32_weights": Refused(
        (True,),
        "Weights are restored from their masters. To take masters from the model's weights call "
        "engine.load_checkpoint(..., load_optimizer_states=False).",
    ),
    "zero_optimization.pipeline_loading_checkpoint": Refused(
        _OFF, "Ranks read what they hold, at the same time: remove the key."
    ),
    "zero_optimization.compute_grad_norm": Refused(
        (True,), "Remove it: the norm falls out of the probe columns."
    ),
    "zero_optimization.legacy_stage1": Refused(_OFF, "DeepSpeed has removed it: use stage 1."),
    "zero_optimization.save_muon_momentum_buffer_in_memory": Refused(
        _OFF, "It is about Muon: remove the key."
    ),
    "zero_optimization.zenflow": Refused(
        (None, False), "Its updates are late by design: remove the section.", "unset"
    ),
    "zero_optimization.zero_quantized_weights": Refused(_OFF, _PLUS_PLUS),
    "zero_optimization.zero_quantized_nontrainable_weights": Refused(_OFF, _PLUS_PLUS),
    "zero_optimization.zero_quantized_gradients": Refused(_OFF, _PLUS_PLUS),
    "zero_optimization.zero_hpz_partition_size": Refused(
        (1,), "Partition over all ranks: remove the key."
    ),
    "zero_optimization.gather_16bit_weights_on_model_save": _ENGINE,
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": _ENGINE,
    "zero_optimization.prefetch_bucket_size": _COORDINATOR,
    "zero_optimization.param_persistence_threshold": _COORDINATOR,
    "zero_optimization.model_persistence_threshold": _COORDINATOR,
    "zero_optimization.max_live_parameters": _COORDINATOR,
    "zero_optimization.max_reuse_distance": _COORDINATOR,
    "zero_optimization.module_granularity_threshold": _COORDINATOR,
    "zero_optimization.log_trace_cache_warnings": _COORDINATOR,
    "zero_optimization.allgather_sequential": Honoured("gathers one by one, none ahead"),
    "zero_optimization.use_all_reduce_for_fetch_params": _GATHERS,
    "zero_optimization.enable_sanity_checks": _GATHERS,
    "zero_optimization.memory_efficient_linear": DeepSpeeds("deepspeed.zero.Init"),
    "zero_optimization.override_module_apply": DeepSpeeds("deepspeed.zero.Init"),
    "zero_optimization.leaf_module": Honoured("leaves, whose gradients go together"),
    "zero_optimization.offload_param": _COORDINATOR,
    "zero_optimization.offload_param.max_in_cpu": Honoured("partitions that stay in host memory"),
    "zero_optimization.offload_optimizer.device": Honoured("where masters and moments live"),
    "zero_optimization.offload_optimizer.nvme_path": Honoured("folder of the states' files"),
    "zero_optimization.offload_optimizer.buffer_count": Honoured("slots of states on an SSD"),
    "zero_optimization.offload_optimizer.pin_memory": Honoured("memory of the states"),
    "zero_optimization.offload_optimizer.pipeline_read": Honoured("reads ahead; unset is true"),
    "zero_optimization.offload_optimizer.pipeline_write": Honoured("writes behind; unset is true"),
    "zero_optimization.offload_optimizer.fast_init": Honoured(
        "always so: zero moments have no I/O"
    ),
    "zero_optimization.offload_optimizer.ratio": Refused(
        (1.0,), "What is offloaded is offloaded whole: remove the key."
    ),
    "zero_optimization.offload_optimizer.super_offload": Refused(_OFF, "Remove the key."),
    "zero_optimization.offload_optimizer.cpuadam_cores_perc": Refused(
        (0.8,), "Only super_offload reads it: remove the key."
    ),
    "zero_optimization.cpu_offload": DeepSpeeds("its config, as offload_optimizer"),
    "zero_optimization.cpu_offload_param": DeepSpeeds("its config, as offload_param"),
    "zero_optimization.cpu_offload_use_pin_memory": Refused(
        (None,), "Give pin_memory in offload_optimizer or offload_param.", "unset"
    ),
    "aio": Honoured("passed to DeepSpeed's async_io"),
    "aio.use_gds": Refused(_OFF, "States pass through host memory: remove the key."),
    # checkpoints
    "checkpoint.tag_validation": _ENGINE,
    "checkpoint.use_node_local_storage": Honoured(
        "each node saves alone; loading asks for all files"
    ),
    "checkpoint.load_universal": Refused(
        _OFF, "HMT checkpoints load under any world size and stage without conversion: remove it."
    ),
    "checkpoint.writer": Refused(
        (None,),
        "Files are written whole or not at all, by torch.save: remove the section.",
        "unset",
    ),
    "checkpoint.checkpoint_serialization": Refused((True,), _UNREAD),
    "checkpoint.parallel_write": Refused(
        (None,), "Only DeepSpeed's pipeline reads it: remove the section.", "unset"
    ),
    "datastates_ckpt": Refused(
        (None, False), "Files are written by torch.save: remove the section.", "unset"
    ),
    # activations
    "activation_checkpointing": Honoured("the activation backend and DeepSpeed's checkpoints"),
    # other engines, other parallelism
    "sequence_parallel_size": Refused(
        (1,),
        'HMT shares a sequence among ranks by "hmt": {"fpdt": {"sequence_parallel_size": N}}; '
        "or use data parallelism over all ranks.",
    ),
    "data_parallel_size": DeepSpeeds("initialize, for a mesh with sequence_parallel_size"),
    "tensor_parallel.autotp_size": Refused((0, 1), "Use ZeRO-3 to split weights over ranks."),
    "tensor_parallel": _OF_REFUSED,
    "expert_parallel.enabled": Refused(
        _OFF, "Use ZeRO-3's leaf modules (zero_optimization.leaf_module) for mixtures of experts."
    ),
    "expert_parallel": _OF_REFUSED,
    "use_data_before_expert_parallelism": DeepSpeeds("its MoE layers"),
    "pipeline": DeepSpeeds("its pipeline engine, which is refused"),
    "hybrid_engine.enabled": Refused(_OFF, "Train without the hybrid engine."),
    "hybrid_engine": _OF_REFUSED,
    "compile.deepcompile": Refused(_OFF, "Remove it: compiled graphs bypass gradient hooks."),
    "compile": _OF_REFUSED,
    "weight_quantization": Refused(
        (None,),
        'Frozen weights stay as they are: remove it; see "hmt.optimizer.weight_dtype".',
        "unset",
    ),
    "hmt": Honoured("this package"),
}

_SECTION_NAMES = {"bfloat16": "bf16"}  # DeepSpeed's older names


def row_of(key: str) -> Honoured | DeepSpeeds | Refused | None:
    """The row of a dotted key, or of the nearest section above it that has one."""
    while key not in KEYS and "." in key:
        key = key.rpartition(".")[0]
    return KEYS.get(key)


def refused_keys(config: Mapping[str, Any]) -> Iterator[Refusal]:
    """Keys of a JSON whose values are refused, whatever stands beside them; null counts as not given."""
    for key, row in KEYS.items():
        if isinstance(row, Refused):
            for given, value in _values(config, key):
                if value is not None and value not in row.neutral:
                    yield given, value, row.legal_text, row.remedy


def _values(config: Mapping[str, Any], key: str) -> Iterator[tuple[str, Any]]:
    """Values that a JSON gives for a dotted key, each with the name used."""
    section, _, rest = key.partition(".")
    for name in (section, *(old for old, new in _SECTION_NAMES.items() if new == section)):
        value: Any = config.get(name)
        for part in rest.split(".") if rest else ():
            value = value.get(part) if isinstance(value, Mapping) else None
        yield f"{name}.{rest}" if rest else name, value
