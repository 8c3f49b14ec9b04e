"""``offload_param`` on NVMe: the same run as without, from partitions that really lie on the SSD."""

from __future__ import annotations

import glob
import os
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.op_builder import AsyncIOBuilder
from deepspeed.utils import safe_get_full_fp32_param, safe_set_full_fp32_param
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from harness import Ranks
from torch import Tensor, nn
from torch.utils import cpp_extension
from training import (
    LOW_RANK,
    VOCAB,
    ds_config,
    loss_of,
    make_engine,
    micro_batches,
    model_weights,
    train,
    train_step,
    weights,
)

HIDDEN, INTERMEDIATE, STEPS = 1024, 1101, 4
LOW = "model.layers.0.mlp.gate_proj.weight"  # at two ranks the parts start and end inside a row
DENSE = "model.layers.0.mlp.down_proj.weight"
SWAPPED = {LOW, DENSE, "model.layers.0.mlp.up_proj.weight"} | {
    f"model.layers.0.self_attn.{letter}_proj.weight" for letter in "qo"
}
OPTIONS = {
    **LOW_RANK,
    "exclude_modules": ["down_proj"],
    "update_interval": 2,
    "max_full_gradient_bytes": 10**7,
}


def _why_no_async_io() -> str:
    """Empty when DeepSpeed's async_io can be used at once; compiling it takes minutes."""
    if not AsyncIOBuilder().is_compatible(verbose=False):
        return "DeepSpeed's async_io does not build here: libaio's headers are missing"
    root = os.environ.get("TORCH_EXTENSIONS_DIR")
    folder = root or os.path.join(cpp_extension.get_default_build_root(), "*")
    if all(glob.glob(f"{folder}/{op}/{op}.so") for op in ("async_io", "pin_memory")):
        return ""
    return (
        "DeepSpeed's async_io is not compiled yet, which takes minutes; compile it with "
        "python -c 'from deepspeed.ops.op_builder import AsyncIOBuilder as b; b().load()'"
    )


WITHOUT_ASYNC_IO = _why_no_async_io()
needs_async_io = pytest.mark.skipif(bool(WITHOUT_ASYNC_IO), reason=WITHOUT_ASYNC_IO)


# -- cases --------------------------------------------------------------------------------------------


def large_llama(seed: int = 0) -> nn.Module:
    """One layer whose matrices reach the 1 MiB per rank from which DeepSpeed swaps, for two ranks too."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    torch.manual_seed(seed)
    return LlamaForCausalLM(config)


def nvme_config(folder: str | None, device: str = "nvme", **options: Any) -> dict[str, Any]:
    offload: dict[str, Any] = {"device": device, "buffer_count": 5, "buffer_size": 1_200_000}
    if device == "nvme":
        offload["nvme_path"] = folder
    zero = {"offload_param": {**offload, "pin_memory": False}, "stage3_max_reuse_distance": 0}
    return ds_config(3, {**OPTIONS, **options}, zero_optimization=zero, bf16={"enabled": True})


def stored(engine: Any, folder: str) -> dict[str, Tensor]:
    """This rank's partitions as the files under ``nvme_path`` hold them, by name."""
    found = {}
    for param, name in engine.param_names.items():
        path = f"{folder}/zero_stage_3/bfloat16params/rank{dist.get_rank()}/{param.ds_id}_param.tensor.swp"
        if os.path.exists(path):
            whole = torch.frombuffer(bytearray(Path(path).read_bytes()), dtype=torch.bfloat16)
            found[name] = whole[: param.ds_tensor.ds_numel]
    return found


def trained(folder: str, device: str, options: dict[str, Any]) -> dict[str, Any]:
    engine = make_engine(nvme_config(folder, device, **options), large_llama())
    losses = train(engine, STEPS)
    return {
        "losses": losses,
        "weights": model_weights(engine),
        "masters": weights(engine),
        "files": stored(engine, folder),
        "refreshes": engine.optimizer.schedule.num_refreshes,
        "in memory": [n for n in SWAPPED if engine.module.get_parameter(n).ds_tensor.numel() > 1],
    }
