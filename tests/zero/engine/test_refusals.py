"""What cannot work fails at construction, with the key, its value, what is legal and what to do."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.op_builder import AsyncIOBuilder
from harness import Ranks
from torch import nn
from training import ds_config, make_engine, tiny_llama

import hmt_deepspeed
from hmt_deepspeed.zero.engine.support import has_other_rules

# (changes of the JSON by dotted key, what the error must say)
CASES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "other optimizer": (
        {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}},
        ['"hmt" block', "'AdamW'", '"type": "HMT"', "remove"],
    ),
    "no block": ({"hmt": None}, ['"HMT"', 'no "hmt" block', '"hmt": {}']),
    "misspelt key": (
        {"hmt": {"optimizer": {"rnak": 4}}},
        ["hmt.optimizer.rnak", "got 4", 'did you mean "hmt.optimizer.rank"'],
    ),
    "clipping without probes": (
        {"hmt": {"optimizer": {"rank": 4, "residual": "none", "probes": 0}}},
        ["hmt.optimizer.probes is 0", '"gradient_clipping": 0.5', 'set "auto"'],
    ),
    "too small a budget": (
        {"hmt": {"optimizer": {"max_full_gradient_bytes": 100}}},
        ["hmt.optimizer.max_full_gradient_bytes is 100", "12320", "at least that"],
    ),
    "pattern that matches nothing": (
        {"hmt": {"optimizer": {"target_modules": ["no_such"]}}},
        ["hmt.optimizer.target_modules", "'no_such'", "Correct or remove"],
    ),
    "a plan beside rules for single modules": (
        {
            "hmt": {
                "optimizer": {"module_rules": {"o_proj": {"rank": 4}}},
                "activations": {"policy": "plan"},
            }
        },
        ["hmt.optimizer.module_rules is {'o_proj'", "Remove the others"],
    ),
    "offload_optimizer to nvme without a path": (
        {"zero_optimization.offload_optimizer": {"device": "nvme"}},
        ["zero_optimization.offload_optimizer.nvme_path is None", "a folder", "Name one"],
    ),
    "offload_optimizer to nvme with too few buffers": (
        {
            "zero_optimization.offload_optimizer": {
                "device": "nvme",
                "nvme_path": "/tmp",
                "buffer_count": 2,
            }
        },
        ["zero_optimization.offload_optimizer.buffer_count is 2", "at least 3"],
    ),
    "no masters in fp16": (
        {"fp16": {"enabled": True}, "hmt": {"optimizer": {"master_weights": "none"}}},
        ["hmt.optimizer.master_weights is 'none'", "use bf16, or keep fp32 masters"],
    ),
    "fp16 where there is none": (
        {"fp16": {"enabled": True}},
        ["fp16.enabled is True", "legal is false on this device (cpu)", "Use bf16"],
    ),
    "offload_optimizer at stage 0": (
        {
            "zero_optimization.stage": 0,
            "zero_optimization.offload_optimizer": {"device": "cpu"},
        },
        ["zero_optimization.offload_optimizer.device is 'cpu'", "at stage 0", "use stage 1"],
    ),
    "offload_optimizer in part": (
        {
            "zero_optimization.stage": 3,
            "zero_optimization.offload_optimizer": {"device": "cpu", "ratio": 0.5},
        },
        ["zero_optimization.offload_optimizer.ratio is 0.5", "legal is 1.0", "remove the key"],
    ),
    "offload_optimizer with small states": (
        {
            "hmt": {"optimizer": {"state_dtype": "int8"}},
            "zero_optimization.offload_optimizer": {"device": "cpu"},
        },
        ["hmt.optimizer.state_dtype is 'int8'", '"fp32" with offload_optimizer', "remove"],
    ),
    "offload_param to nvme at stage 2": (
        {"zero_optimization.offload_param": {"device": "nvme", "nvme_path": "/tmp"}},
        ["zero_optimization.offload_param.device is 'nvme'", '"none" at stage 2', "use stage 3"],
    ),
    "offload_param to nvme without a path": (
        {"zero_optimization.stage": 3, "zero_optimization.offload_param": {"device": "nvme"}},
        ["zero_optimization.offload_param.nvme_path is None", "a folder", "Name one"],
    ),
    "tensor parallelism": (
        {"tensor_parallel": {"autotp_size": 2}},
        ["tensor_parallel.autotp_size is 2", "0 or 1", "ZeRO-3"],
    ),
    "hpZ": (
        {"zero_optimization.stage": 3, "zero_optimization.zero_hpz_partition_size": 2},
        ["zero_optimization.zero_hpz_partition_size is 2", "legal is 1", "remove"],
    ),
    "overlap of nothing": (
        {"hmt": {"offload": {"overlap": "none"}}},
        ["hmt.offload.overlap is 'none'", 'without "offload_optimizer"', "remove the key"],
    ),
    "offload_optimizer beside parameters on nvme": (
        {
            "zero_optimization.stage": 3,
            "zero_optimization.offload_param": {"device": "nvme", "nvme_path": "/tmp"},
            "zero_optimization.offload_optimizer": {"device": "cpu"},
        },
        [
            "zero_optimization.offload_param.device is 'nvme'",
            '"none" or "cpu" with offload_optimizer',
            'use "cpu"',
        ],
    ),
    "SuperOffload": (
        {
            "zero_optimization.stage": 3,
            "zero_optimization.offload_optimizer": {"device": "cpu", "super_offload": True},
        },
        ["zero_optimization.offload_optimizer.super_offload is True", "legal is false"],
    ),
    "ZenFlow": (
        {
            "zero_optimization.zenflow": {"topk_ratio": 0.1},
            "zero_optimization.offload_optimizer": {"device": "cpu"},
        },
        ["zero_optimization.zenflow", "legal is unset", "remove"],
    ),
    "quantized weights": (
        {"zero_optimization.stage": 3, "zero_optimization.zero_quantized_weights": True},
        ["zero_optimization.zero_quantized_weights is True", "legal is false"],
    ),
    "quantized gradients": (
        {"zero_optimization.stage": 3, "zero_optimization.zero_quantized_gradients": True},
        ["zero_optimization.zero_quantized_gradients is True", "legal is false"],
    ),
    "torch_autocast": (
        {"torch_autocast": {"enabled": True, "dtype": "float16"}},
        ["torch_autocast.dtype is torch.float16", 'legal is "bfloat16"', '"fp16"'],
    ),
    "load_universal": (
        {"checkpoint": {"load_universal": True}},
        ["checkpoint.load_universal is True", "legal is false", "remove"],
    ),
    "deepcompile": (
        {"compile": {"deepcompile": True}},
        ["compile.deepcompile is True", "legal is false", "Remove"],
    ),
    "16-bit masters": (
        {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}},
        ["bf16.bf16_master_weights_and_grads is True", "master_weights"],
    ),
    "two at once": (
        {"checkpoint": {"load_universal": True}, "compile": {"deepcompile": True}},
        ["checkpoint.load_universal", "compile.deepcompile"],
    ),
}


def _error(make: Any) -> str:
    try:
        make()
    except ValueError as error:
        return str(error)
    except Exception as error:
        return f"not a ValueError: {type(error).__name__}: {error}"
    return "accepted"


def refused_by_json(changes: list[dict[str, Any]]) -> list[str]:
    get_accelerator().is_fp16_supported = lambda: False  # some CPUs have it
    found = []
    for change in changes:
        config = copy.deepcopy(ds_config(2, {}))
        for key, value in change.items():
            *path, last = key.split(".")
            inner = config
            for part in path:
                inner = inner[part]
            if value is None:
                del inner[last]
            else:
                inner[last] = value
        found.append(_error(lambda config=config: make_engine(config, tiny_llama(layers=1))))
    return found


def refused_on_nvme(folder: str) -> dict[str, str]:
    """What depends on libaio and on the accelerator, wherever the test runs; compiles nothing."""
    offload = {"device": "nvme", "nvme_path": folder, "buffer_size": 1000}
    config = ds_config(3, {}, zero_optimization={"offload_param": offload})
    found = {}
    AsyncIOBuilder.is_compatible = lambda *_, **__: False
    found["libaio"] = _error(lambda: make_engine(config, tiny_llama(layers=1)))
    AsyncIOBuilder.is_compatible = lambda *_, **__: True
    get_accelerator().is_fp16_supported = lambda: False
    found["fp32"] = _error(lambda: make_engine(config, tiny_llama(layers=1)))
    get_accelerator().is_fp16_supported = lambda: True
    found["fp32 with fp16"] = _error(lambda: make_engine(config, tiny_llama(layers=1)))
    get_accelerator().is_fp16_supported = lambda: False
    config["bf16"] = {"enabled": True}
    found["buffer"] = _error(lambda: make_engine(config, tiny_llama(layers=1)))
    return {**found, "written": str(os.listdir(folder))}


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def refused_otherwise() -> dict[str, str]:
    from deepspeed.moe.layer import MoE
    from deepspeed.pipe import PipelineModule
    from transformers import GPT2Config, GPT2LMHeadModel

    found = {}
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=61, n_embd=40, n_layer=1, n_head=4))
    insist = ds_config(2, {"projected_backward": True})
    found["conv1d"] = _error(lambda: make_engine(insist, gpt2))
    pipeline = PipelineModule([nn.Linear(8, 8), nn.Linear(8, 8)], num_stages=1)
    config = ds_config(1, {})
    found["pipeline"] = _error(lambda: make_engine(config, pipeline))
    model = tiny_llama(layers=1)
    experts = nn.ModuleDict({"llama": model, "moe": MoE(8, Expert(), num_experts=2)})
    found["experts"] = _error(lambda: make_engine(ds_config(3, {}), experts))
    encoded = ds_config(1, {"weight_dtype": "int8"})
    found["int8 experts"] = _error(lambda: make_engine(encoded, experts))
    snapshots = ds_config(1, {})
    snapshots["hmt"]["snapshot"] = {"path": "/tmp", "interval": 1}
    found["experts in snapshots"] = _error(lambda: make_engine(snapshots, experts))
    client = torch.optim.AdamW(model.parameters())
    plain = ds_config(2, {})
    del plain["optimizer"]
    found["client adamw"] = _error(lambda: make_engine(plain, model, optimizer=client))
    ours = hmt_deepspeed.HMT(model.named_parameters(), rank=4)
    given_twice = {**plain, "hmt": {"optimizer": {"rank": 8}}}
    found["options twice"] = _error(lambda: make_engine(given_twice, model, optimizer=ours))
    accepted = {**plain}
    del accepted["hmt"]
    found["client hmt"] = _error(lambda: make_engine(accepted, model, optimizer=ours))
    groups = [{"params": list(model.parameters()), "rank": 16}]
    found["group"] = _error(lambda: make_engine(ds_config(2), model, model_parameters=groups))
    closure = make_engine(ds_config(2, {}), tiny_llama(layers=1))
    sparse = nn.Sequential(nn.Embedding(8, 8, sparse=True), nn.Linear(8, 8))
    found["sparse"] = _error(lambda: make_engine(ds_config(2, {}), sparse))
    found["closure"] = _error(lambda: closure.optimizer.step(lambda: 0))
    return found


@pytest.fixture(scope="module")
def errors(ranks: Ranks) -> dict[str, str]:
    """All refusals of the JSON, made by one process."""
    said = ranks.run(refused_by_json, 1, [changes for changes, _ in CASES.values()])[0]
    return dict(zip(CASES, said, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_json_is_refused(errors: dict[str, str], name: str) -> None:
    for text in CASES[name][1]:
        assert text in errors[name]


def test_what_nvme_needs_is_said(ranks: Ranks, tmp_path: Path) -> None:
    found = ranks.run(refused_on_nvme, 1, str(tmp_path))[0]
    assert "zero_optimization.offload_param.device is 'nvme'" in found["libaio"]
    assert '"none" or "cpu"' in found["libaio"]
    assert "install libaio-dev" in found["libaio"]
    assert 'zero_optimization.offload_param.device is "nvme"' in found["fp32"]
    assert "torch.float32, as torch.bfloat16" in found["fp32"]
    assert "Turn bf16 on" in found["fp32"]
    for refusal in (
        found["fp32 with fp16"],
        found["buffer"],
    ):  # the dtype is none of their problems
        assert "zero_optimization.offload_param.buffer_size is 1000" in refusal
        assert "model.embed_tokens.weight has 2440" in refusal
    assert found["written"] == "[]"


def test_sequence_parallelism_is_refused(ranks: Ranks) -> None:
    changes = {"sequence_parallel_size": 2, "train_batch_size": 6}
    for (said,) in ranks.run(refused_by_json, 2, [changes]):
        assert "sequence_parallel_size is 2" in said
        assert "legal is 1" in said
        assert '"fpdt": {"sequence_parallel_size": N}' in said


def test_what_the_json_cannot_tell_is_refused(ranks: Ranks) -> None:
    found = ranks.run(refused_otherwise, 1)[0]
    assert "hmt.optimizer.projected_backward is true" in found["conv1d"]
    assert "Conv1D" in found["conv1d"]
    assert "module_rules" in found["conv1d"]
    assert "PipelineEngine" in found["pipeline"]
    assert "ZeRO-3" in found["pipeline"]
    assert "zero_optimization.stage is 3, but moe is a DeepSpeed MoE layer" in found["experts"]
    assert "legal are 0, 1 and 2" in found["experts"]
    assert 'hmt.optimizer.weight_dtype is "int8", but moe' in found["int8 experts"]
    assert "hmt.snapshot is given, but moe" in found["experts in snapshots"]
    assert "'AdamW'" in found["client adamw"]
    assert "options of its own" in found["options twice"]
    assert found["client hmt"] == "accepted"
    assert "a parameter group has 'rank': 16" in found["group"]
    assert "sparse=True" in found["sparse"]
    assert "sparse=False" in found["sparse"]
    assert "closure" in found["closure"]


def test_importing_patches_nothing() -> None:
    """This process has imported every room of the package."""
    assert deepspeed.DeepSpeedEngine.__module__ == "deepspeed.runtime.engine"
    assert not hasattr(torch.optim, "HMT")


@pytest.mark.parametrize(
    ("rule", "is_other"),
    [
        ({"method": "adamw", "lr_scale": 2.0}, False),
        ({"lr_scale": 2.0, "rank": None}, False),
        ({"lr_scale": 2.0, "rank": 4}, True),
    ],
)
def test_a_rate_of_its_own_is_no_rule_that_a_plan_has_to_know(
    rule: dict[str, Any], is_other: bool
) -> None:
    assert has_other_rules({"module_rules": {"o_proj": rule}}) == is_other
