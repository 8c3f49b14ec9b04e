"""Every JSON under ds_configs/ is complete and trains."""

from __future__ import annotations

import os
import tempfile
from copy import deepcopy
from math import isfinite
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Ranks
from training import furthest, make_engine, model_weights, tiny_llama

from hmt_deepspeed.config import HMTConfig, read_json_config
from hmt_deepspeed.train.models import resolve_bf16

FOLDER = Path(__file__).resolve().parents[1] / "ds_configs"
BY_LIBRARIES = {
    "trainer",
    "accelerate",
    "trl",
}  # which fill in "auto": trained in tests/integration
NAMES = sorted({path.stem for path in FOLDER.glob("*.json")} - BY_LIBRARIES)
ONLY_SEVERAL_RANKS = {"fpdt_sequence_parallel": 3, "recipe_1m_tokens": 3}  # with its ZeRO stage
ALONE = [name for name in NAMES if name not in ONLY_SEVERAL_RANKS]
SEVERAL_RANKS = ["hmt_zero0", "hmt_zero1", "hmt_zero2", "hmt_zero3"]
SEVERAL_RANKS += ["apollo", "apollo_mini", "two_sided", "rank_budget", "small_states"]
SEVERAL_RANKS += ONLY_SEVERAL_RANKS
EXPECTED = {"hmt": 2, "hmt_adamw": 2, "hmt_fp16": 2, "hmt_no_masters": 2} | {
    "hmt_zero0": 0,
    "hmt_zero1": 1,
    "hmt_zero2": 2,
    "hmt_zero3": 3,
    "hmt_zero3_offload_param": 3,
    "vertical": 3,
    "int8_weights": 2,
    "apollo": 2,
    "apollo_mini": 3,
    "two_sided": 2,
    "lowrank_adamw": 2,
    "muon_full": 3,
    "rank_budget": 2,
    "small_states": 2,
    "activations": 2,
    "activations_swap": 2,
    "plan": 2,
    "fpdt": 3,
    "adamw_offload": 3,
    "adamw_offload_nvme": 3,
    "basis_cache": 2,
    "recipe_7b_24gb": 2,
    "recipe_13b_256gb_ram": 3,
    "recipe_4_cards_pcie": 2,
    "recipe_moe_80gb": 2,
    "recipe_70b_24gb": 3,
    "recipe_175b_24gb": 3,
}
MATRICES = {
    "hmt_adamw": 0,
    "adamw_offload": 0,
    "adamw_offload_nvme": 0,
    "recipe_13b_256gb_ram": 0,
    "small_states": 9,  # embedding and head too; the others: the linears
    "recipe_moe_80gb": 6,  # attention's, and experts
}
NO_MASTERS = ("hmt_no_masters", "recipe_7b_24gb", "recipe_4_cards_pcie", "recipe_moe_80gb")
NO_MASTERS += ("recipe_70b_24gb", "recipe_175b_24gb")


def tiny_mixtral() -> torch.nn.Module:
    """One layer of three experts, of the same sizes."""
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"vocab_size": 61, "hidden_size": 40, "intermediate_size": 77, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    torch.manual_seed(0)
    return MixtralForCausalLM(MixtralConfig(**sizes, **heads, num_local_experts=3))


def trained(names: list[str], steps: int) -> dict[str, Any]:
    """A few steps with every config, one engine after another."""
    from deepspeed.accelerator import get_accelerator

    from hmt_deepspeed.zero.planning import plan_files

    get_accelerator().is_fp16_supported = lambda: True
    plan_files.cache_file = lambda model: Path(tempfile.mkdtemp()) / "profile.json"
    os.chdir(tempfile.mkdtemp())  # paths in a config are relative to where it is run
    found = {}
    for name in names:
        config = resolve_bf16(read_json_config(FOLDER / f"{name}.json"), True)
        options = config["hmt"].get("optimizer", {})
        if options.get("rank", "auto") not in ("auto", "full"):
            options["rank"] = 8  # no matrix of the tiny model has 128 columns
        config["gradient_accumulation_steps"] = 1  # what is called a step below is a micro-batch
        states = config["zero_optimization"].get("offload_optimizer", {})
        if "nvme_path" in states:
            states["nvme_path"] = tempfile.mkdtemp()
        engine = make_engine(config, tiny_mixtral() if "moe" in name else tiny_llama(layers=1))
        start = model_weights(engine)
        tokens = torch.randint(0, 61, (8, 16), generator=torch.Generator().manual_seed(3))
        losses = []
        for _ in range(steps):
            losses.append(engine.train_batch([{"input_ids": tokens, "labels": tokens}]).item())
        found[name] = {
            "losses": losses,
            "stage": engine.optimizer.settings.stage,
            "moved": furthest(model_weights(engine), start),
            "matrices": len(engine.optimizer.zero.low_rank),
            "masters": engine.optimizer.metrics()["master_weight_bytes"],
            "int8": "int8 weights" in engine.optimizer.describe(),
            "dtype": engine.optimizer.settings.model_dtype,
            "clip": engine.gradient_clipping(),
            "lr": engine.get_lr()[0],
            "rules": {(e.assignment.layout, _storage(e)) for e in engine.optimizer.zero.low_rank},
            "share": state_share(engine),
            "activations": engine.hmt_activations and engine.hmt_activations.metrics(),
            "plan": engine.hmt_planner and engine.hmt_planner.plan,
        }
        engine.destroy()
    return found


def _storage(entry: Any) -> str:
    return str(entry.matrix.state_dtype)


def state_share(engine: Any) -> float:
    """State bytes of the matrices, as a share of AdamW's moments of the same weights."""
    optimizer = engine.optimizer
    dense = sum(8 * e.gradient.shards.m * e.gradient.shards.n for e in optimizer.zero.low_rank)
    return optimizer.metrics()["low_rank_state_bytes"] / max(dense, 1)


@pytest.fixture(scope="module")
def alone(ranks: Ranks) -> dict[str, Any]:
    return ranks.run(trained, 1, ALONE, 8)[0]


def test_every_config_is_listed() -> None:
    assert set(NAMES) == EXPECTED.keys() | ONLY_SEVERAL_RANKS.keys()


@pytest.mark.parametrize("name", ALONE)
def test_config_trains(alone: dict[str, Any], name: str) -> None:
    config, found = read_json_config(FOLDER / f"{name}.json"), alone[name]
    HMTConfig.from_block(config["hmt"])
    assert found["stage"] == EXPECTED[name]
    assert all(map(isfinite, found["losses"]))
    assert found["losses"][-1] < found["losses"][0]
    assert found["moved"] > 0
    assert found["clip"] == 1.0
    assert 0 < found["lr"] < config["optimizer"]["params"]["lr"]  # still warming up
    assert found["matrices"] == MATRICES.get(name, 7)
    assert found["dtype"] == (torch.float16 if name == "hmt_fp16" else torch.bfloat16)
    assert (found["masters"] == 0) == (name in NO_MASTERS)
    assert found["int8"] == (name == "int8_weights")


def test_the_configs_of_modes_run_their_mode(alone: dict[str, Any]) -> None:
    quarters = {(f"apollo, random of rank {rank}", "fp32") for rank in (5, 10)}
    assert alone["apollo"]["rules"] == quarters  # of the smaller side of k and v, and of the others
    assert alone["apollo_mini"]["rules"] == {("apollo_mini, random of rank 1", "fp32")}
    assert alone["two_sided"]["rules"] == {("lowrank_adamw two_sided", "fp32")}
    assert alone["lowrank_adamw"]["rules"] == {("lowrank_adamw right", "fp32")}
    assert alone["muon_full"]["rules"] == {("muon, full rank", "fp32")}  # too small for 8 bits
    assert alone["muon_full"]["share"] == 0.5
    assert alone["rank_budget"]["share"] <= 0.31  # of which the evidence, r numbers, is no part
    assert alone["small_states"]["rules"] == {
        ("lowrank_adamw auto, factored", "bf16"),
        ("lowrank_adamw right, factored", "bf16"),
        ("apollo, random of rank 16", "bf16"),
    }
    assert alone["apollo_mini"]["share"] < 0.06


def test_the_configs_of_activations_hold_them_as_they_say(alone: dict[str, Any]) -> None:
    paper, swap = alone["activations"]["activations"], alone["activations_swap"]["activations"]
    for found in (paper, swap):
        assert set(found["activation_rerun_flops_per_component"]) == {
            "attention_qkv",
            "projected_inputs",
        }
    held = paper["activation_bytes_per_component"]
    assert 0 < held["mlp_intermediate"] < 2 * 8 * 16 * 77 * 1.1  # gate and up in 8 bits, and scales
    assert "activation_bytes_to_host" not in paper
    # gate, up, attention's output, the stream after it and the layer's input, each in bf16 (and pages)
    assert swap["activation_bytes_to_host"] >= 2 * 8 * 16 * (2 * 77 + 3 * 40)
    assert "mlp_intermediate" not in swap["activation_bytes_per_component"]
    assert alone["hmt"]["activations"] is None


def test_the_config_that_plans_executes_its_plan(alone: dict[str, Any]) -> None:
    assert alone["plan"]["plan"].micro_batch == 8
    # there is room for everything, so nothing is computed again
    assert not alone["plan"]["activations"]["activation_rerun_flops_per_component"]
    assert alone["activations"]["plan"] is None


def test_configs_for_several_gpus_train_on_two_ranks(ranks: Ranks) -> None:
    for name, found in ranks.run(trained, 2, SEVERAL_RANKS, 4)[0].items():
        assert found["losses"][-1] < found["losses"][0], name


def tiny_opt() -> torch.nn.Module:
    """Two layers, of the same sizes."""
    from transformers import OPTConfig, OPTForCausalLM

    sizes = {"vocab_size": 61, "hidden_size": 40, "ffn_dim": 160, "num_hidden_layers": 2}
    torch.manual_seed(0)
    return OPTForCausalLM(
        OPTConfig(
            **sizes,
            num_attention_heads=4,
            max_position_embeddings=64,
            word_embed_proj_dim=40,
            dropout=0.0,
            use_cache=False,
        )
    )


def beside_a_plain_twin(name: str) -> dict[str, list[float]]:
    """Losses of steps in fp32: with a recipe's settings, sizes scaled, as it is and with layer inputs held exactly;
    by stage 2, micro-batch by micro-batch, nothing away or computed again; and by the latter at another learning rate.
    """
    os.chdir(tempfile.mkdtemp())
    recipe = read_json_config(FOLDER / f"{name}.json")
    recipe["bf16"] = {"enabled": False}
    recipe["gradient_accumulation_steps"] = 3
    recipe["zero_optimization"]["stage3_param_persistence_threshold"] = 100
    recipe["hmt"]["optimizer"]["rank"] = 8
    exact = deepcopy(recipe)
    exact["hmt"]["activations"]["policy"]["layer_input"] = "swap_host"
    plain = deepcopy(recipe)
    plain["zero_optimization"] = {"stage": 2}
    del plain["hmt"]["accumulation"], plain["hmt"]["activations"]
    faster = deepcopy(plain)
    faster["optimizer"]["params"]["lr"] *= 1.05
    configs = {"recipe": recipe, "exact": exact, "plain": plain, "faster": faster}
    rows = recipe["train_micro_batch_size_per_gpu"]
    tokens = torch.randint(0, 61, (4, 3, rows, 16), generator=torch.Generator().manual_seed(3))
    found = {}
    for kind, config in configs.items():
        model = tiny_opt() if "175b" in name else tiny_llama(2, use_cache=False)
        engine = make_engine(config, model)
        found[kind] = [
            engine.train_batch([{"input_ids": row, "labels": row} for row in step]).item()
            for _ in range(3)
            for step in tokens
        ]
        engine.destroy()
    return found


@pytest.mark.parametrize("name", ["recipe_70b_24gb", "recipe_175b_24gb"])
def test_a_recipe_is_its_plain_twin(ranks: Ranks, name: str) -> None:
    """To fp32's rounding, but for its layer inputs in INT8: these are a fraction of what a rate that is a twentieth
    higher does (a thirtieth or less here). In bf16, how far rounding takes it would be the processor's to say.
    """
    (losses,) = ranks.run(beside_a_plain_twin, 1, name)
    recipe, exact, faster = (
        max(abs(a - b) for a, b in zip(losses[kind], losses["plain"], strict=True))
        for kind in ("recipe", "exact", "faster")
    )
    assert losses["plain"][0] - losses["plain"][-1] > 0.04
    assert exact < faster / 300
    assert 0 < recipe < faster / 5
