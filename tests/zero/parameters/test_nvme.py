"""``offload_param`` on NVMe: the same run as without, from partitions that really lie on the SSD."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import safe_get_full_fp32_param, safe_set_full_fp32_param
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from harness import Ranks
from offloading import needs_async_io
from torch import Tensor, nn
from training import (
    LOW_RANK,
    VOCAB,
    ds_config,
    loss_of,
    make_engine,
    mean_over_ranks,
    micro_batches,
    model_weights,
    train,
    train_step,
    weights,
)

HIDDEN, INTERMEDIATE, STEPS = 1024, 1101, 3  # the third step refreshes again
LOW = "model.layers.0.mlp.gate_proj.weight"  # at two ranks the parts start and end inside a row
DENSE = "model.layers.0.mlp.down_proj.weight"
FROZEN = "model.layers.0.self_attn.q_proj.weight"
SWAPPED = {LOW, DENSE, "model.layers.0.mlp.up_proj.weight"} | {
    f"model.layers.0.self_attn.{letter}_proj.weight" for letter in "qo"
}
OPTIONS = {
    **LOW_RANK,
    "module_rules": {"down_proj": {"method": "adamw"}},
    "update_interval": 2,
    "max_full_gradient_bytes": 3 * 10**7,
}


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


def nvme_config(
    folder: str, device: str = "nvme", variant: str = "bf16", **offload: Any
) -> dict[str, Any]:
    """``offload`` goes to ``offload_param``."""
    section = {"device": device, "pin_memory": False}
    if device == "nvme":
        section |= {"nvme_path": folder, "buffer_size": 1_200_000, "max_in_cpu": 0}
    zero = {"offload_param": {**section, **offload}}
    options = {**OPTIONS, "master_weights": "none" if variant == "no masters" else "fp32"}
    bf16 = {} if variant == "fp32" else {"bf16": {"enabled": True}}
    return ds_config(3, options, zero_optimization=zero, **bf16)


def stored(engine: Any, folder: str) -> dict[str, Tensor]:
    """This rank's partitions as the files under ``nvme_path`` hold them, by name."""
    found = {}
    for param, name in engine.param_names.items():
        dtype = str(param.dtype).removeprefix("torch.")
        path = Path(f"{folder}/zero_stage_3/{dtype}params/rank{dist.get_rank()}")
        path /= f"{param.ds_id}_param.tensor.swp"
        if path.exists():
            whole = torch.frombuffer(bytearray(path.read_bytes()), dtype=param.dtype)
            found[name] = whole[: param.ds_tensor.ds_numel]
    return found


def shards(named: dict[str, Tensor]) -> dict[str, Tensor]:
    """This rank's parts of whole weights, as far as they reach into its partition."""
    world, rank = dist.get_world_size(), dist.get_rank()
    return {n: w.flatten().split(-(-w.numel() // world))[rank] for n, w in named.items()}


def in_memory(engine: Any) -> set[str]:
    """Parameters whose partition occupies memory between uses."""
    return {n for p, n in engine.param_names.items() if p.ds_tensor.numel() == p.ds_tensor.ds_numel}


def trained(folder: str, device: str, variant: str = "bf16", **offload: Any) -> dict[str, Any]:
    if variant == "fp32":
        get_accelerator().is_fp16_supported = lambda: True  # else fp32 is refused
    engine = make_engine(nvme_config(folder, device, variant, **offload), large_llama())
    losses = train(engine, STEPS)
    found = {"losses": losses, "weights": model_weights(engine), "masters": weights(engine)}
    found["files"], found["shards"] = stored(engine, folder), shards(found["weights"])
    found["in memory"] = in_memory(engine)
    found["refreshes"] = min(engine.optimizer.zero.basis_groups.schedule.num_refreshes)
    found["master bytes"] = engine.optimizer.metrics()["master_weight_bytes"]
    return found


def evaluated(folder: str, device: str, threshold: int) -> dict[str, Any]:
    """Forwards that no backward follows, with and without gradients, between the steps."""
    config = nvme_config(folder, device)
    config["zero_optimization"]["stage3_param_persistence_threshold"] = threshold
    engine = make_engine(config, large_llama())
    losses = train(engine, 2)
    for step in range(2):
        with torch.set_grad_enabled(step == 1):
            losses.append(loss_of(engine, micro_batches(engine, step)[0]).item())
    losses += train(engine, 1, first=2)
    with torch.no_grad():
        losses.append(loss_of(engine, micro_batches(engine, 0)[0]).item())
    return {"losses": losses, "weights": model_weights(engine), "in memory": in_memory(engine)}


def resumed(folder: str) -> dict[str, Any]:
    """Two steps, save, two more; the last two again in a fresh engine on NVMe and in one without."""

    def fresh(device: str, seed: int) -> Any:
        model = large_llama(seed)
        model.get_parameter(FROZEN).requires_grad_(False)
        return make_engine(nvme_config(f"{folder}/{device}{seed}", device), model)

    def end(engine: Any) -> dict[str, Any]:
        return {"losses": train(engine, 2, first=2), "weights": model_weights(engine)}

    engine = fresh("nvme", 0)
    train(engine, 2)
    engine.save_checkpoint(folder, "half")
    saved = model_weights(engine)
    found = {"through": end(engine)}
    for device in ("nvme", "none"):
        engine = fresh(device, seed=7)
        engine.load_checkpoint(folder, "half")
        found[device] = {"loaded": model_weights(engine), **end(engine)}
        found[device]["in memory"] = in_memory(engine)
    if dist.get_rank() == 0:
        fp32 = get_fp32_state_dict_from_zero_checkpoint(folder, "half")
        found["consolidated"] = {name: fp32[name].bfloat16() for name in saved}
    return {**found, "saved": saved}


def tools(folder: str) -> dict[str, Any]:
    """Weights read and written by DeepSpeed's tools between steps, on an SSD and without."""
    found: dict[str, Any] = {}
    for device in ("nvme", "none"):
        engine = make_engine(nvme_config(folder, device), large_llama())
        train(engine, 2)
        low, dense = map(engine.module.get_parameter, (LOW, DENSE))
        read = [safe_get_full_fp32_param(p).clone() for p in (low, dense)]
        safe_set_full_fp32_param(low, torch.full_like(read[0], 0.0123))
        with deepspeed.zero.GatheredParameters([dense], modifier_rank=0):
            dense.data.mul_(0.5)
            while_gathered = safe_get_full_fp32_param(dense).clone()
            safe_set_full_fp32_param(dense, while_gathered)  # its partition stays in memory
        changed = model_weights(engine)
        engine.optimizer.refresh_fp32_params()
        found[device] = {
            "read": [*read, while_gathered],
            "changed": [changed[LOW], changed[DENSE]],
            "then": [train_step(engine, 2), *model_weights(engine).values()],
        }
    return found


def stepped_with_buffers_taken(folder: str) -> list[float]:
    """Every swap buffer read ahead for a use that does not come, before the step."""
    engine = make_engine(nvme_config(folder), large_llama())
    losses = train(engine, 1)
    for step in range(1, STEPS):
        (tokens,) = micro_batches(engine, step)
        loss = loss_of(engine, tokens)
        engine.backward(loss)
        params = [p for p, name in engine.param_names.items() if name in SWAPPED]
        swapper = params[0].nvme_swapper
        swapper.swap_in(params[: swapper.available_swap_in_buffers()], async_op=True)
        assert swapper.available_swap_in_buffers() == 0
        engine.step()
        assert swapper.available_swap_in_buffers() == 5
        losses.append(mean_over_ranks(loss.item()))
    return losses


# -- tests --------------------------------------------------------------------------------------------


def assert_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


@functools.cache
def plain_run(ranks: Ranks, variant: str, world: int) -> list[dict[str, Any]]:
    """Without offload, by rank: what several tests compare with."""
    return ranks.run(trained, world, "/nowhere", "none", variant)


@needs_async_io
@pytest.mark.parametrize(("variant", "world"), [("bf16", 2), ("no masters", 2), ("fp32", 1)])
def test_nvme_changes_nothing(ranks: Ranks, tmp_path: Path, variant: str, world: int) -> None:
    """Bit-equal, with the values of the last step in the files and nothing of them in memory."""
    on_ssd = ranks.run(trained, world, str(tmp_path), "nvme", variant)
    for plain, nvme in zip(plain_run(ranks, variant, world), on_ssd, strict=True):
        assert plain["losses"] == nvme["losses"]
        assert_equal(plain["weights"], nvme["weights"])
        assert_equal(plain["masters"], nvme["masters"])
        assert plain["refreshes"] >= 2
        assert (plain["master bytes"] > 0) == (variant == "bf16")
        assert not plain["files"]
        assert nvme["files"].keys() >= SWAPPED
        assert not SWAPPED & nvme["in memory"]
        for name, part in nvme["files"].items():
            own = nvme["shards"][name]
            assert torch.equal(part[: own.numel()], own), name


@needs_async_io
def test_a_checkpoint_resumes_equal(ranks: Ranks, tmp_path: Path) -> None:
    """Frozen weights on the SSD too; into NVMe and out of it."""
    found = ranks.run(resumed, 2, str(tmp_path))[0]
    assert found["nvme"]["loaded"].keys() == found["saved"].keys()
    for device in ("nvme", "none"):
        assert_equal(found[device]["loaded"], found["saved"])
        assert found[device]["losses"] == found["through"]["losses"]
        assert_equal(found[device]["weights"], found["through"]["weights"])
    assert_equal(found["consolidated"], found["saved"])
    assert not SWAPPED & found["nvme"]["in memory"]


@needs_async_io
def test_tools_see_the_weights_of_the_last_step(ranks: Ranks, tmp_path: Path) -> None:
    found = ranks.run(tools, 2, str(tmp_path))[0]
    for key, values in found["none"].items():
        for one, other in zip(values, found["nvme"][key], strict=True):
            assert torch.equal(torch.as_tensor(one), torch.as_tensor(other)), key
    assert torch.equal(
        found["nvme"]["changed"][0], torch.full((INTERMEDIATE, HIDDEN), 0.0123).bfloat16()
    )


@needs_async_io
def test_buffers_read_ahead_do_not_starve_the_step(ranks: Ranks, tmp_path: Path) -> None:
    taken = ranks.run(stepped_with_buffers_taken, 2, str(tmp_path))[0]
    assert plain_run(ranks, "bf16", 2)[0]["losses"] == taken


@needs_async_io
def test_max_in_cpu_keeps_the_first_partitions_in_memory(ranks: Ranks, tmp_path: Path) -> None:
    """Two attention matrices of 524,288 elements per rank fit into 1,100,000; the three larger do not."""
    plain = plain_run(ranks, "bf16", 2)[0]
    nvme = ranks.run(trained, 2, str(tmp_path), "nvme", max_in_cpu=1_100_000)[0]
    assert plain["losses"] == nvme["losses"]
    assert_equal(plain["weights"], nvme["weights"])
    attention = {name for name in SWAPPED if "self_attn" in name}
    assert SWAPPED & nvme["in memory"] == attention
    assert nvme["files"].keys() == SWAPPED - attention


@needs_async_io
def test_evaluation_leaves_buffers_for_training(ranks: Ranks, tmp_path: Path) -> None:
    """Five buffers for seven matrices: neither a forward alone nor a persistent parameter may keep them."""
    plain = ranks.run(evaluated, 1, str(tmp_path), "none", 100)[0]
    for threshold in (100, 10**8):
        nvme = ranks.run(evaluated, 1, str(tmp_path), "nvme", threshold)[0]
        assert plain["losses"] == nvme["losses"]
        assert_equal(plain["weights"], nvme["weights"])
        assert not SWAPPED & nvme["in memory"]
