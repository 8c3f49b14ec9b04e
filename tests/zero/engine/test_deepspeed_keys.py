"""Every key of DeepSpeed's JSON has a row, every refused value is refused, every honoured one does something."""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime import config as stock
from deepspeed.runtime.config_utils import DeepSpeedConfigModel
from harness import Ranks
from torch import nn
from training import ds_config, make_engine, tiny_llama

from hmt_deepspeed.config import HMTConfig
from hmt_deepspeed.zero.engine import resolve as engine_settings
from hmt_deepspeed.zero.engine.deepspeed_keys import KEYS, Honoured, Refused, refused_keys, row_of
from hmt_deepspeed.zero.saving import checkpoint

# Where the JSON has each of DeepSpeed's pydantic models.
MODELS = {
    "DeepSpeedZeroConfig": "zero_optimization",
    "DeepSpeedZeroOffloadParamConfig": "zero_optimization.offload_param",
    "DeepSpeedZeroOffloadOptimizerConfig": "zero_optimization.offload_optimizer",
    "ZenFlowConfig": "zero_optimization.zenflow",
    "DeepSpeedZeroLeafModuleConfig": "zero_optimization.leaf_module",
    "DeepSpeedBF16Config": "bf16",
    "DeepSpeedFP16Config": "fp16",
    "TPTrainingConfig": "tensor_parallel",
    "TPConfig": "tensor_parallel.tp",
    "TensorBoardConfig": "tensorboard",
    "WandbConfig": "wandb",
    "CSVConfig": "csv_monitor",
    "CometConfig": "comet",
    "DeepSpeedThroughputTimerConfig": "timers.throughput",
    "CompileConfig": "compile",
    "CommsLoggerConfig": "comms_logger",
    "HybridEngineConfig": "hybrid_engine",
}
NOT_IN_THE_JSON = {"DeepSpeedMonitorConfig"}  # gathers four sections under no key of its own


def model_classes() -> dict[str, type[DeepSpeedConfigModel]]:
    """Those that a training JSON can reach; those of DeepSpeed's inference engines are other JSONs'."""
    for package in ("runtime", "monitor", "comm", "compile", "utils"):
        path = [str(Path(deepspeed.__file__).parent / package)]
        for found in pkgutil.walk_packages(path, f"deepspeed.{package}."):
            if found.name.endswith("config"):
                importlib.import_module(found.name)
    pending, known = [DeepSpeedConfigModel], {}
    while pending:
        for cls in pending.pop().__subclasses__():
            pending.append(cls)
            if not cls.__module__.startswith("deepspeed.inference"):
                known[cls.__name__] = cls
    return known


class Recording(dict[str, Any]):
    """A section that notes the keys it is asked for."""

    def __init__(self, values: dict[str, Any], path: str, asked: set[str]) -> None:
        super().__init__()
        self.path, self.asked = path, asked
        for key, value in values.items():
            inner = isinstance(value, dict)
            self[key] = Recording(value, f"{path}{key}.", asked) if inner else value

    def __copy__(self) -> Recording:
        return self

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(self.path + key)
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self.asked.add(self.path + key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.asked.add(f"{self.path}{key}")
        return super().__contains__(key)

    def keys(self) -> Any:
        return self  # `key in section.keys()` asks too


# Sections that DeepSpeed reads by hand: there, so that it goes on to their keys.
SECTIONS: dict[str, Any] = {
    "train_batch_size": 1,
    "optimizer": {"type": "Adam", "params": {"lr": 1.0}},
    "scheduler": {"type": "WarmupLR", "params": {}},
    "torch_autocast": {"enabled": True, "dtype": "bf16", "lower_precision_safe_modules": []},
    "checkpoint": {"writer": {"type": "fast"}, "parallel_write": {}},
    "data_types": {},
    "aio": {},
    "activation_checkpointing": {},
    "flops_profiler": {},
    "autotuning": {},
    "expert_parallel": {"enabled": False},
    "data_efficiency": {"enabled": True, "data_sampling": {}, "data_routing": {}},
}


def keys_read_by_hand() -> set[str]:
    asked: set[str] = set()
    stock.DeepSpeedConfig(Recording(SECTIONS, "", asked))
    return asked


def test_every_key_of_the_schema_has_a_row() -> None:
    """Also of a DeepSpeed to come: a new model, field or key that its config reads fails here."""
    classes = model_classes()
    assert classes.keys() == MODELS.keys() | NOT_IN_THE_JSON
    keys = {
        f"{section}.{field}"
        for name, section in MODELS.items()
        for field in classes[name].model_fields
    }
    by_hand = keys_read_by_hand()
    assert {"gradient_clipping", "aio.queue_depth", "checkpoint.load_universal"} <= by_hand
    removed = {*stock._REMOVED_TOP_LEVEL_CONFIG_KEYS}  # DeepSpeed refuses them itself
    removed |= {f"zero_optimization.{key}" for key in stock._REMOVED_ZERO_CONFIG_KEYS}
    sections = {key.rpartition(".")[0] for key in KEYS if "." in key} | {"bfloat16"}
    assert not {key for key in keys | by_hand if row_of(key) is None} - removed - sections


def test_every_row_is_a_key_of_the_schema() -> None:
    classes = model_classes()
    known = {f"{s}.{f}" for name, s in MODELS.items() for f in classes[name].model_fields}
    known |= keys_read_by_hand() | set(MODELS.values()) | {"timers"}
    read_elsewhere = {"hmt", "sequence_parallel_size", "data_parallel_size"}
    assert not KEYS.keys() - known - read_elsewhere


def other_value(row: Refused) -> Any:
    first = row.neutral[-1]
    if isinstance(first, bool):
        return True if None in row.neutral else not first
    return {"x": 1} if first is None else "fp16" if isinstance(first, str) else first + 1


@pytest.mark.parametrize("key", [key for key, row in KEYS.items() if isinstance(row, Refused)])
def test_refused_values_are_refused(key: str) -> None:
    row = KEYS[key]
    assert isinstance(row, Refused)

    def config(value: Any) -> dict[str, Any]:
        for part in reversed(key.split(".")):
            value = {part: value}
        return value

    value = other_value(row)
    assert list(refused_keys(config(value))) == [(key, value, row.legal_text, row.remedy)]
    for neutral in (*row.neutral, None):
        assert not list(refused_keys(config(neutral)))
    section, _, field = key.rpartition(".")
    model = {path: name for name, path in MODELS.items()}.get(section)
    if model is not None:  # what it asks for unless the JSON says so must be legal
        default = model_classes()[model].model_fields[field].get_default(call_default_factory=True)
        assert default in row.neutral


def test_the_older_name_of_bf16_is_refused_alike() -> None:
    (refusal,) = refused_keys({"bfloat16": {"bf16_optimizer_states": True}})
    assert refusal[:2] == ("bfloat16.bf16_optimizer_states", True)


# -- honoured -----------------------------------------------------------------------------------------

# A value of each key that changes what the optimizer, the loss scaler or stage 3's coordinator is built with.
SETTINGS: dict[str, Any] = {
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.25,
    "communication_data_type": "bf16",
    "prescale_gradients": True,
    "gradient_predivide_factor": 2.0,
    "gradient_allreduce_op": "sum",
    "data_types.grad_accum_dtype": "bf16",
    "bf16.enabled": True,
    "fp16.enabled": True,
    "fp16.loss_scale": 64,
    "fp16.initial_scale_power": 5,
    "fp16.loss_scale_window": 7,
    "fp16.hysteresis": 3,
    "fp16.consecutive_hysteresis": True,
    "fp16.min_loss_scale": 2,
    "bf16.check_grad_overflow": False,
    "zero_optimization.overlap_comm": False,
    "zero_optimization.reduce_bucket_size": 123,
    "zero_optimization.allgather_bucket_size": 123,
    "zero_optimization.sub_group_size": 123,
    "zero_optimization.ignore_unused_parameters": False,
    "zero_optimization.prefetch_bucket_size": 123,
    "zero_optimization.param_persistence_threshold": 123,
    "zero_optimization.model_persistence_threshold": 123,
    "zero_optimization.max_live_parameters": 123,
    "zero_optimization.max_reuse_distance": 123,
    "zero_optimization.module_granularity_threshold": 123,
    "zero_optimization.log_trace_cache_warnings": True,
    "zero_optimization.allgather_sequential": True,
    "zero_optimization.offload_param": {"device": "cpu"},
    "zero_optimization.offload_optimizer.device": "cpu",
    "zero_optimization.offload_optimizer.nvme_path": "/elsewhere",
    "zero_optimization.offload_optimizer.buffer_count": 9,
    "zero_optimization.offload_optimizer.pin_memory": False,
    "zero_optimization.offload_optimizer.pipeline_read": False,
    "zero_optimization.offload_optimizer.pipeline_write": False,
    "wall_clock_breakdown": True,
    "checkpoint.use_node_local_storage": True,
    "aio": {"queue_depth": 99},
}
BESIDE: dict[str, dict[str, Any]] = {  # what a key needs to be read at all
    "gradient_allreduce_op": {"zero_optimization.stage": 2},
    "fp16.": {"fp16.enabled": True},
    "bf16.check_grad_overflow": {"bf16.enabled": True},
    "zero_optimization.offload_optimizer.": {
        "zero_optimization.offload_optimizer.device": "nvme",
        "zero_optimization.offload_optimizer.nvme_path": "/somewhere",
    },
    "aio": {
        "zero_optimization.offload_optimizer.device": "nvme",
        "zero_optimization.offload_optimizer.nvme_path": "/somewhere",
    },
}
# Tests that assert what other keys do; "always": what the key asks for is so with every value.
ELSEWHERE = {
    "optimizer.type": "test_refusals.py::no block",
    "optimizer.params": "test_published_configs.py::adam's own keys",
    "zero_allow_untested_optimizer": "test_published_configs.py::zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer": "test_accelerate.py::zero_force_ds_cpu_optimizer",
    "zero_optimization.stage": "test_modes.py::stage",
    "zero_optimization.leaf_module": "test_leaves.py::leaf",
    "zero_optimization.offload_param.max_in_cpu": "test_nvme.py::max_in_cpu",
    "activation_checkpointing": "test_activation_checkpointing.py::partition_activations",
    "bf16.immediate_grad_update": "always",
    "zero_optimization.round_robin_gradients": "always",
    "zero_optimization.parameter_alignment": "always",
    "zero_optimization.elastic_checkpoint": "always",
    "zero_optimization.offload_optimizer.fast_init": "always",
    "torch_autocast.dtype": "test_autocast.py::torch_autocast",
    "hmt": "always",
}


def test_every_honoured_row_is_tested() -> None:
    honoured = {key for key, row in KEYS.items() if isinstance(row, Honoured)}
    assert honoured == SETTINGS.keys() | ELSEWHERE.keys()
    tests = Path(__file__).parents[2]
    for key, where in ELSEWHERE.items():
        if where != "always":
            name, _, text = where.partition("::")
            (path,) = tests.rglob(name)
            assert (text or key) in path.read_text(), key


def nested(values: dict[str, Any]) -> dict[str, Any]:
    config: dict[str, Any] = {}
    for key, value in values.items():
        *path, last = key.split(".")
        inner = config
        for part in path:
            inner = inner.setdefault(part, {})
        inner[last] = value
    return config


def built(keys: list[str]) -> dict[str, tuple[Any, Any]]:
    """By key what is built without it and with it; the engine stays, its config is another."""
    get_accelerator().is_fp16_supported = lambda: True
    engine = make_engine(ds_config(3, {}), tiny_llama(layers=1))
    engine.seq_dp_world_size, engine.global_rank = 4, 1  # as on another node's first rank
    coordinator: dict[str, Any] = {}
    engine_settings.DeepSpeedZeRoOffload = lambda module, **given: coordinator.update(given)

    def parts(values: dict[str, Any]) -> list[str]:
        config = nested(
            {"train_micro_batch_size_per_gpu": 1, "zero_optimization.stage": 3} | values
        )
        engine.config, engine._config = config, stock.DeepSpeedConfig(config)
        engine.gradient_average = engine._config.gradient_allreduce_op == "mean"
        resolved = engine_settings.Resolved.of(HMTConfig(), {}, engine._config)
        engine_settings.parameter_offload(engine)
        for name in ("ds_config", "dp_process_group", "mpu"):
            coordinator.pop(name)
        coordinator["timers"] = type(coordinator["timers"])
        return [
            repr(engine_settings.zero_settings(engine, resolved)),
            repr(sorted(vars(engine_settings.loss_scaler(engine)).items())),
            repr(sorted(coordinator.items())),
            repr(checkpoint._is_writer(engine)),
        ]

    found = {}
    for key in keys:
        beside = [given for prefix, given in BESIDE.items() if key.startswith(prefix)]
        without = {name: value for given in beside for name, value in given.items() if name != key}
        found[key] = parts(without), parts({**without, key: SETTINGS[key]})
    return found


def test_honoured_values_reach_what_honours_them(ranks: Ranks) -> None:
    for key, (without, with_it) in ranks.run(built, 1, list(SETTINGS))[0].items():
        assert without != with_it, key


def steps_unused(stage: int, ignore: bool) -> str:
    """Two steps, the second with a layer that no loss reaches."""
    model = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
    model.forward = lambda x, both: model[1](model[0](x)) if both else model[0](x)
    zero = {"ignore_unused_parameters": ignore}
    engine = make_engine(ds_config(stage, {"rank": 2}, zero_optimization=zero), model)
    for both in (True, False):
        engine.backward(engine(torch.ones(2, 8), both).square().mean())
        try:
            engine.step()
        except RuntimeError as error:
            return f"{both}: {error}"
    return "trained"


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_ignore_unused_parameters(ranks: Ranks, stage: int) -> None:
    assert ranks.run(steps_unused, 2, stage, True) == ["trained"] * 2
    for said in ranks.run(steps_unused, 2, stage, False):
        assert "False: 1.weight, 1.bias got no gradient" in said
        assert "ignore_unused_parameters is false" in said
