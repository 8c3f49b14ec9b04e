"""Random DeepSpeed JSONs with an "hmt" block, drawn from the block's own schema and DeepSpeed's standard keys."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

from hmt_deepspeed.config import HMTConfig
from hmt_deepspeed.config.components import POLICY_COMPONENTS, legal_choices
from hmt_deepspeed.config.problems import walk_fields

__all__ = ["PLAN", "random_config"]

Draw = random.Random

_FIELDS = dict(walk_fields(HMTConfig, "hmt"))  # full key -> JSON schema
_PATTERNS = ("q_proj", "mlp", r"layers\.0\.", "down_proj$", "embed", "o_proj", "up_proj")
_HELD_IN_8_BITS = tuple(c for c in POLICY_COMPONENTS if "int8" in legal_choices(c))
_DISK = "DISK"  # stands for the folder that the caller names
PLAN = "given_plan.json"  # that the caller has put there
_ILLEGAL = (-1, 0, 2, 1.5, "yes", "4", None, True, [], {}, [3, 2], "adamw", float("inf"))
_STRUCTURED: dict[str, Callable[[Draw], Any]] = {  # fields whose schema does not say what is inside
    "hmt.optimizer.rank_candidates": lambda draw: sorted(draw.sample((1, 2, 4, 8, 16, 64), 3)),
    "hmt.optimizer.target_modules": lambda draw: draw.choice([None, draw.sample(_PATTERNS, 2)]),
    "hmt.optimizer.module_rules": lambda draw: {
        draw.choice(_PATTERNS): draw.choice(
            [{"method": "adamw"}, {"method": "apollo"}, {"rank": 2}, {"projection": "left"}]
        )
    },
    "hmt.activations.overrides": lambda draw: {
        draw.choice(_PATTERNS): {
            c: draw.choice(legal_choices(c)) for c in draw.sample(POLICY_COMPONENTS, 2)
        }
    },
    "hmt.activations.components": lambda draw: {draw.choice(_PATTERNS): "mlp_intermediate"},
    "hmt.activations.nvme_path": lambda draw: _DISK,
    "hmt.activations.host_memory": lambda draw: draw.choice(["auto", 2**24, 2**20]),
    "hmt.planner.gpu_memory": lambda draw: draw.choice(["auto", 2**34, 2**20]),
    "hmt.planner.lossy": lambda draw: {
        c: draw.choice(("int8", "fp8")) for c in draw.sample(_HELD_IN_8_BITS, draw.randint(1, 2))
    },
    "hmt.planner.plan": lambda draw: draw.choice(
        [None, f"{_DISK}/{PLAN}", f"{_DISK}/plan{draw.randrange(10**6)}.json"]
    ),
    "hmt.snapshot.path": lambda draw: f"{_DISK}/snapshots{draw.randrange(10**6)}",
    "hmt.snapshot.interval": lambda draw: draw.choice([0, 1, 2]),
    "hmt.fpdt.chunk_size": lambda draw: draw.choice([1, 4, 7, 64]),
    "hmt.fpdt.sequence_parallel_size": lambda draw: draw.choice([1, 1, 2]),
}


def random_config(seed: int, nvme_path: str) -> dict[str, Any]:
    """A JSON for one rank and micro-batches of two rows, the same for the same seed.

    About a fifth hold something illegal: a misspelt key, a value out of range, a section in the wrong place.
    What is legal by itself may still not go together.

    Args:
        nvme_path: folder for what is drawn to lie on an SSD, with a plan of the model in the file ``PLAN``.
    """
    draw = random.Random(seed)
    config = _deepspeed_keys(draw, nvme_path)
    if draw.random() < 0.98:
        config["hmt"] = _block(draw, nvme_path)
    if draw.random() < 0.85:
        _make_consistent(draw, config, nvme_path)
    if draw.random() < 0.1:
        config["optimizer"]["type"] = "AdamW"
        config["optimizer"]["params"]["torch_adam"] = True  # DeepSpeed's would compile first
        config["zero_optimization"].pop(
            "zero_quantized_weights", None
        )  # stock has it on CUDA only,
        config.pop("prescale_gradients", None)  # and this without reduce_scatter only
        if "hmt" in config and draw.random() < 0.7:
            config["hmt"] = {
                name: config["hmt"][name] for name in config["hmt"] if name == "activations"
            }
    if draw.random() < 0.2:
        _spoil(draw, config)
    return config


# -- DeepSpeed's keys -------------------------------------------------------------------------------


def _deepspeed_keys(draw: Draw, nvme_path: str) -> dict[str, Any]:
    accumulation = draw.choice([1, 1, 2])
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "optimizer": {"type": "HMT", "params": {"lr": 1e-3}},
        "zero_optimization": _zero(draw, nvme_path),
        "steps_per_print": 10**9,
    }
    config |= draw.choice([{}, {"bf16": {"enabled": True}}, {"fp16": {"enabled": True}}])
    optional: dict[str, Callable[[], Any]] = {
        "train_batch_size": lambda: 2 * accumulation,
        "gradient_clipping": lambda: draw.choice([0.0, 0.5, 1.0]),
        "prescale_gradients": lambda: draw.random() < 0.5,
        "gradient_predivide_factor": lambda: draw.choice([1.0, 2.0]),
        "communication_data_type": lambda: draw.choice(["fp32", "bf16", None]),
        "data_types": lambda: {"grad_accum_dtype": draw.choice(["fp32", "bf16"])},
        "scheduler": lambda: {"type": "WarmupLR", "params": {"warmup_num_steps": 2}},
        "wall_clock_breakdown": lambda: True,
        "zero_allow_untested_optimizer": lambda: True,
        "zero_force_ds_cpu_optimizer": lambda: draw.random() < 0.5,
        "torch_autocast": lambda: {"enabled": True, "dtype": "bfloat16"},
        "flops_profiler": lambda: {"enabled": True, "profile_step": 1},
        "activation_checkpointing": lambda: _checkpointing(draw),
        "comms_logger": lambda: {"enabled": True},
        "dump_state": lambda: False,
        "memory_breakdown": lambda: False,
        "tensor_parallel": lambda: {"autotp_size": draw.choice([0, 2])},
    }
    for key in draw.sample(list(optional), draw.choice([0, 1, 1, 2, 3])):
        config[key] = optional[key]()
    if "betas" not in config["optimizer"]["params"] and draw.random() < 0.3:
        config["optimizer"]["params"] |= {"betas": [0.9, 0.95], "weight_decay": 0.1}
    return config


def _zero(draw: Draw, nvme_path: str) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": draw.choice([0, 1, 2, 2, 3, 3])}
    optional: dict[str, Callable[[], Any]] = {
        "offload_optimizer": lambda: _states(draw, nvme_path),
        "offload_param": lambda: {"device": draw.choice(["cpu", "none"])},
        "overlap_comm": lambda: draw.random() < 0.5,
        "contiguous_gradients": lambda: True,
        "reduce_bucket_size": lambda: draw.choice([100, 10**4, 5 * 10**8]),
        "allgather_bucket_size": lambda: draw.choice([100, 10**6]),
        "reduce_scatter": lambda: True,
        "round_robin_gradients": lambda: draw.random() < 0.5,
        "stage3_param_persistence_threshold": lambda: draw.choice([0, 100, 10**6]),
        "stage3_max_live_parameters": lambda: draw.choice([1, 10**9]),
        "stage3_prefetch_bucket_size": lambda: draw.choice([0, 10**4]),
        "sub_group_size": lambda: 10**4,
        "zero_hpz_partition_size": lambda: draw.choice([1, 2]),
        "zero_quantized_weights": lambda: draw.random() < 0.5,
        "ignore_unused_parameters": lambda: draw.random() < 0.5,
        "stage3_gather_16bit_weights_on_model_save": lambda: True,
    }
    for key in draw.sample(list(optional), draw.choice([0, 0, 1, 2, 3])):
        zero[key] = optional[key]()
    return zero


def _states(draw: Draw, nvme_path: str) -> dict[str, Any]:
    section = {
        "device": draw.choice(["cpu", "cpu", "nvme", "nvme", "none"]),
        "pin_memory": draw.random() < 0.5,
    }
    return section | ({"nvme_path": nvme_path} if section["device"] == "nvme" else {})


def _checkpointing(draw: Draw) -> dict[str, Any]:
    keys = ("partition_activations", "cpu_checkpointing", "contiguous_memory_optimization")
    section: dict[str, Any] = dict.fromkeys(draw.sample((*keys, "profile"), 2), True)
    if section.get("contiguous_memory_optimization"):
        section["number_checkpoints"] = draw.choice([1, 2, 8])
    return section


# -- the block --------------------------------------------------------------------------------------


def _block(draw: Draw, nvme_path: str) -> dict[str, Any]:
    sections = [s for s in HMTConfig.model_fields if draw.random() < 0.45]
    block: dict[str, Any] = {name: {} for name in sections}
    for section in sections:
        if f"hmt.{section}" in _FIELDS:  # a word
            block[section] = _legal(draw, _FIELDS[f"hmt.{section}"])
        own = [key for key in _FIELDS if key.startswith(f"hmt.{section}.")]
        for key in draw.sample(own, min(draw.choice([0, 1, 2, 3, 4]), len(own))):
            value = _STRUCTURED[key](draw) if key in _STRUCTURED else _legal(draw, _FIELDS[key])
            if isinstance(value, str):
                value = value.replace(_DISK, nvme_path)
            _put(block, key.split(".")[1:], value)
    return block


def _put(block: dict[str, Any], path: list[str], value: Any) -> None:
    for name in path[:-1]:
        block = block.setdefault(name, {})
        if not isinstance(block, dict):  # given as a word
            return
    block[path[-1]] = value


def _legal(draw: Draw, schema: dict[str, Any]) -> Any:
    """A value that the field's JSON schema allows; of choices with words only, one of the words."""
    words = [json.loads(word) for word in _quoted(schema.get("legal", ""))]
    if "anyOf" in schema:
        return _legal(draw, draw.choice(schema["anyOf"]))
    if "const" in schema:
        return schema["const"]
    if words:
        return draw.choice(words)
    if schema["type"] == "boolean":
        return draw.random() < 0.5
    if schema["type"] == "null":
        return None
    low = schema.get("minimum", schema.get("exclusiveMinimum", 0))
    high = min(schema.get("maximum", schema.get("exclusiveMaximum", low + 8)), low + 8)
    if schema["type"] == "integer":
        return draw.randint(int(low), int(high))
    return draw.uniform(low, high) or high


def _quoted(legal: str) -> list[str]:
    return [f'"{part}"' for part in legal.split('"')[1::2]]


def _make_consistent(draw: Draw, config: dict[str, Any], nvme_path: str) -> None:
    """Mend what most draws get wrong, so that enough of them train."""
    block, zero = config.get("hmt", {}), config["zero_optimization"]
    states = zero.get("offload_optimizer", {}).get("device", "none")
    if states == "none":
        block.pop("offload", None)
    if zero["stage"] == 0:
        zero.pop("offload_optimizer", None)
        block.pop("offload", None)
    if zero["stage"] < 3:
        zero.pop("offload_param", None)
    for key in ("zero_hpz_partition_size", "zero_quantized_weights"):
        zero.pop(key, None)
    for key in ("torch_autocast", "tensor_parallel"):
        config.pop(key, None)
    if {"fpdt", "activations"} <= block.keys():
        block.pop(draw.choice(["fpdt", "activations"]))
    snapshot = block.get("snapshot", {})
    if ("path" in snapshot) != (snapshot.get("interval", 0) > 0):
        block.pop("snapshot")
    if block.get("optimizer", {}).get("full_rank_budget"):
        block["optimizer"]["rank_budget"] = None
    activations = block.get("activations", {})
    if activations.get("policy") == "plan":
        activations.pop("overrides", None)
    else:
        block.pop("planner", None)
    text = json.dumps([activations.get("policy", {}), activations.get("overrides", {})])
    if "swap_ssd" in text:
        activations["nvme_path"] = nvme_path
    else:
        activations.pop("nvme_path", None)
    if not any(choice in text for choice in ("plan", "swap_host", "swap_ssd")):
        activations.pop("host_memory", None)


# -- something illegal ------------------------------------------------------------------------------


def _spoil(draw: Draw, config: dict[str, Any]) -> None:
    """One mistake of the kinds that people make, in the block."""
    block = config.setdefault("hmt", {})
    path = draw.choice(list(_FIELDS)).split(".")[1:]
    mistake = draw.choice(["value", "misspelt", "misplaced", "section", "block"])
    if mistake == "value":
        _put(block, path, draw.choice(_ILLEGAL))
    elif mistake == "misspelt":
        _put(block, [*path[:-1], path[-1][:-1] + "x"], 1)
    elif mistake == "misplaced":
        block[path[-1]] = draw.choice(_ILLEGAL)
    elif mistake == "section":
        block[draw.choice(["optimiser", *HMTConfig.model_fields])] = draw.choice(_ILLEGAL)
    else:
        config["hmt"] = draw.choice(_ILLEGAL)
