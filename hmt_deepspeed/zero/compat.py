"""Every DeepSpeed symbol this package relies on, looked up once, with one clear error if one is gone."""

from __future__ import annotations

from importlib import import_module
from inspect import unwrap
from typing import Any

__all__ = ["PRIVATE", "SYMBOLS", "check_deepspeed", "symbol"]

SYMBOLS: dict[str, tuple[str, ...]] = {
    "deepspeed": ("DeepSpeedEngine", "initialize"),
    "deepspeed.accelerator": ("get_accelerator",),
    "deepspeed.checkpoint.autoep_zero3_metadata": ("AUTOEP_METADATA_REQUIRED_FIELDS",),
    "deepspeed.checkpoint.constants": (
        "AUTOEP_EXPERT_PLACEMENT",
        "AUTOEP_LAYERS_KEY",
        "AUTOEP_PLACEMENT_VERSION_KEY",
        "AUTOTP_UNSUPPORTED_PARAMETER_PATTERNS",
        "FROZEN_PARAM_FRAGMENTS",
        "UNIVERSAL_CHECKPOINT_INFO",
    ),
    "deepspeed.comm": (
        "ReduceOp",
        "all_gather_into_tensor",
        "all_reduce",
        "broadcast",
        "get_global_rank",
        "get_world_size",
        "is_initialized",
        "reduce",
        "reduce_scatter_tensor",
    ),
    "deepspeed.moe.layer": ("MoE",),
    "deepspeed.ops.adam": ("DeepSpeedCPUAdam",),
    "deepspeed.ops.op_builder": ("AsyncIOBuilder", "CPUAdamBuilder"),
    "deepspeed.runtime.activation_checkpointing.checkpointing": (
        "CONTIGUOUS_CHECKPOINTING",
        "CPU_CHECKPOINT",
        "CheckpointFunction",
        "PARTITION_ACTIVATIONS",
        "PROFILE_TIME",
        "SYNCHRONIZE",
        "_set_cuda_rng_state",
        "get_cuda_rng_tracker",
        "mp_group",
        "non_reentrant_checkpoint",
        "num_layers",
        "timers",
    ),
    "deepspeed.runtime.base_optimizer": ("ZeROOptimizer",),
    "deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine": ("TorchCheckpointEngine",),
    "deepspeed.runtime.dataloader": ("RepeatingLoader",),
    "deepspeed.runtime.engine": ("DeepSpeedEngine", "ZERO_OPTIMIZATION"),
    "deepspeed.runtime.fp16.loss_scaler": ("CreateLossScaler",),
    "deepspeed.runtime.swap_tensor.partitioned_param_swapper": ("PartitionedParamStatus",),
    "deepspeed.runtime.utils": ("count_used_parameters_in_backward", "is_optimized_parameter"),
    "deepspeed.runtime.zero.offload_config": ("OffloadDeviceEnum", "OffloadStateTypeEnum"),
    "deepspeed.runtime.zero.parameter_offload": ("DeepSpeedZeRoOffload", "FWD_MODULE_STACK"),
    "deepspeed.runtime.zero.partition_parameters": (
        "DS_Z3_GATHERED_PARAM_CONTEXT_DEPTH_ATTR",
        "ZeroParamStatus",
    ),
    "deepspeed.runtime.zero.utils": ("ZERO_SUPPORTED_OPTIMIZERS",),
    "deepspeed.utils": ("groups", "logger", "set_z3_leaf_modules", "z3_leaf_parameter"),
    "deepspeed.utils.groups": (
        "_TENSOR_MODEL_PARALLEL_GROUP",
        "_get_broadcast_src_rank",
        "_get_expert_data_parallel_group",
        "_get_expert_parallel_rank",
        "_get_sequence_data_parallel_group",
    ),
    "deepspeed.utils.timer": ("FORWARD_GLOBAL_TIMER", "SynchronizedWallClockTimer"),
    "deepspeed.utils.torch": ("register_grad_hook",),
    "deepspeed.utils.zero_to_fp32": ("get_fp32_state_dict_from_zero_checkpoint",),
}

# Methods of a class, and attributes that its __init__ sets, whose names begin with two underscores.
PRIVATE: dict[tuple[str, str], tuple[str, ...]] = {
    ("deepspeed.runtime.zero.parameter_offload", "DeepSpeedZeRoOffload"): ("allgather_stream",),
    ("deepspeed.runtime.zero.partitioned_param_coordinator", "PartitionedParameterCoordinator"): (
        "prefetch_bucket_sz",
        "release_param",
    ),
}


def symbol(module: str, name: str) -> Any:
    """``module.name`` of the installed DeepSpeed.

    Raises:
        ImportError: naming the symbol and the versions this package was checked with.
    """
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise _missing(f"{module}.{name}") from error


def check_deepspeed() -> None:
    """Look up every symbol of :data:`SYMBOLS` and :data:`PRIVATE`; raises ImportError for the first that is missing."""
    for module, names in SYMBOLS.items():
        for name in names:
            symbol(module, name)
    for (module, name), hidden in PRIVATE.items():
        owner = symbol(module, name)
        has = {*vars(owner), *unwrap(owner.__init__).__code__.co_names}
        for one in hidden:
            if f"_{name}__{one}" not in has:
                raise _missing(f"{module}.{name}.__{one}")


def _missing(name: str) -> ImportError:
    import deepspeed

    return ImportError(
        f"DeepSpeed {deepspeed.__version__} has no {name}, which hmt_deepspeed relies on. "
        "Install deepspeed>=0.19.8,<0.20."
    )
