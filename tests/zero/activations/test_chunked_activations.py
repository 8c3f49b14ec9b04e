"""hmt.activations beside hmt.fpdt: what holds the inputs of layers in chunks, and of the head."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Ranks
from training import (
    GLOBAL_BATCH,
    HIDDEN,
    LENGTH,
    dist,
    ds_config,
    furthest,
    global_batch,
    make_engine,
    mean_over_ranks,
    result,
    tiny_llama,
    train,
)

from hmt_deepspeed.config import HMTConfig
from hmt_deepspeed.zero.activations.chunked import refused_beside_chunks

STEPS = 2
PARTS = ("layer_input", "lm_head")


def policy(choice: str, **section: Any) -> dict[str, Any]:
    return {"policy": dict.fromkeys(PARTS, choice), **section}


def config_with(
    stage: int, activations: dict[str, Any] | None, sharing: int = 1, **changes: Any
) -> dict[str, Any]:
    """16 tokens in two chunks of four pieces; shared in four, of the last of which rank 1 has no token."""
    config = ds_config(stage, **changes)
    config["hmt"]["fpdt"] = {"chunk_size": 8 if sharing == 1 else 5}
    config["hmt"]["fpdt"]["sequence_parallel_size"] = sharing
    if activations is not None:
        config["hmt"]["activations"] = activations
    return config


def runs(stage: int, gas: int, sections: dict[str, Any], sharing: int = 1) -> dict[str, Any]:
    """Steps with each section, in groups of ranks that share sequences."""
    found = {}
    for name, section in sections.items():
        config = config_with(stage, section, sharing, gas=gas)
        rows = GLOBAL_BATCH // gas
        if sharing > 1:
            config |= {
                "train_micro_batch_size_per_gpu": rows,
                "train_batch_size": rows * gas * dist.get_world_size(),
            }
        engine = make_engine(config, tiny_llama(use_cache=False))
        losses = shared_losses(engine, rows, gas) if sharing > 1 else train(engine, STEPS)
        found[name] = result(engine, losses) | {"metrics": engine.hmt_metrics.read()}
        engine.destroy()
    return found


def shared_losses(engine: Any, rows: int, gas: int) -> list[float]:
    losses = []
    for step in range(STEPS):
        total = 0.0
        for tokens in global_batch(step).split(rows):
            loss = engine(input_ids=tokens, labels=tokens).loss
            engine.backward(loss)
            engine.step()
            total += loss.item() / gas
        losses.append(mean_over_ranks(total))
    return losses


SECTIONS = {
    "without": None,
    "keep": {},
    "host": policy("swap_host"),
    "int8": policy("int8"),
    "one layer": {"overrides": {r"layers\.1": {"layer_input": "fp8"}}},
    "attention": {"policy": {"attention_output": "keep"}},
    "attention on host": {"policy": {"attention_output": "swap_host"}},
    "attention in 8 bits": {"policy": {"attention_output": "int8"}},
}


INPUTS = ("without", "keep", "host", "int8")
LOSSY = ("int8", "one layer", "attention in 8 bits")


@pytest.mark.parametrize(
    ("world", "stage", "gas", "sharing", "sections"),
    [
        (1, 2, 2, 1, tuple(SECTIONS)),
        (2, 3, 1, 1, (*INPUTS, "attention on host")),
        (2, 2, 1, 2, (*INPUTS, "attention in 8 bits")),
    ],
)
def test_training_is_the_same_however_inputs_are_held(
    ranks: Ranks, world: int, stage: int, gas: int, sharing: int, sections: tuple[str, ...]
) -> None:
    """Bit for bit where nothing is lost; in 8 bits gradients err by about 1 %."""
    asked = {name: SECTIONS[name] for name in sections}
    for found in ranks.run(runs, world, stage, gas, asked, sharing):
        assert tuple(found) == sections
        exact = found["without"]
        for name in set(sections) - {"without", *LOSSY}:
            assert found[name]["losses"] == exact["losses"]
            assert furthest(found[name]["weights"], exact["weights"]) == 0
        for name in set(sections) & set(LOSSY):
            assert found[name]["losses"][0] == exact["losses"][0], "forward reads the original"
            assert found[name]["losses"] == pytest.approx(exact["losses"], rel=2e-3)
            assert found[name]["losses"] != exact["losses"]
        check_metrics({name: run["metrics"] for name, run in found.items()}, gas, world, sharing)


def check_metrics(found: dict[str, Any], gas: int, world: int, sharing: int) -> None:
    """Bytes held at the fullest moment: with the loss computed, nothing of backward."""
    assert "activation_bytes" not in found["without"]
    rows = GLOBAL_BATCH // gas // (1 if sharing > 1 else world)
    tokens = found["keep"]["activation_bytes"] // 3 // HIDDEN // 4  # two layers and the head
    assert tokens in ([rows * LENGTH] if sharing == 1 else [rows * 10, rows * 6])
    each = tokens * HIDDEN * 4
    assert found["keep"]["activation_bytes_per_component"] == {
        "layer_input": 2 * each,
        "lm_head": each,
    }
    assert found["host"]["activation_bytes"] == 0
    # Out once in each forward; back for the projections, for the MLP, and for the projections' backward, of
    # the head's once.
    assert found["host"]["activation_bytes_to_host"] == 3 * gas * each
    assert found["host"]["activation_bytes_from_host"] == (2 * 3 + 1) * gas * each
    # A code for each element, a scale for each channel of a block: a piece is one block.
    piece, head_piece = (2 * rows, 2) if sharing == 1 else (rows, 1)
    layers = tokens * HIDDEN + tokens // piece * HIDDEN * 2
    head = tokens * HIDDEN + -(-tokens // head_piece) * HIDDEN * 2
    held = found["int8"]["activation_bytes_per_component"]
    assert held == {"layer_input": 2 * layers, "lm_head": head}
    if "attention" in found:  # of two layers: outputs, and fp32 log-sum-exps of four heads
        held = found["attention"]["activation_bytes_per_component"]["attention_output"]
        assert held == 2 * (each + tokens * 4 * 4)
    if "one layer" in found:
        held = found["one layer"]["activation_bytes_per_component"]
        assert held == {"layer_input": each + layers, "lm_head": each}


def to_files(folder: str) -> tuple[dict[str, Any], str]:
    """Host memory for less than half of what is swapped; both losses live on."""
    section = policy("swap_ssd", nvme_path=folder, host_memory=2**20)
    found = {}
    for name, activations in (("without", None), ("ssd", section)):
        config = config_with(2, activations)
        config["hmt"]["fpdt"]["chunk_size"] = 2 * LENGTH  # many rows, so few pieces
        engine = make_engine(config, tiny_llama(use_cache=False))
        losses = []
        for number in range(2):
            tokens = torch.cat([global_batch(number)] * 20)
            losses.append(engine(input_ids=tokens, labels=tokens).loss)
            engine.backward(losses[-1])
            engine.step()
        found[name] = result(engine, [loss.item() for loss in losses]) | {
            "metrics": engine.hmt_metrics.read()
        }
        table = "" if engine.hmt_activations is None else engine.hmt_activations.describe()
        engine.destroy()
    return found, table


def test_what_host_memory_cannot_hold_goes_to_files(ranks: Ranks, tmp_path: Path) -> None:
    found, table = ranks.run(to_files, 1, str(tmp_path))[0]
    assert found["ssd"]["losses"] == found["without"]["losses"]
    assert furthest(found["ssd"]["weights"], found["without"]["weights"]) == 0
    metrics = found["ssd"]["metrics"]
    assert metrics["activation_bytes_to_ssd"] > 0
    assert metrics["activation_bytes_to_host"] > 0
    assert "then files in" in table
    assert re.search(r"layer_input.*swap_ssd", table)
    assert not any(path.is_dir() for path in tmp_path.iterdir()), "destroy removes the files"


# -- what a model in chunks cannot honour -----------------------------------------------------------


def refusals(section: dict[str, Any], checkpointing: dict[str, Any] | None = None) -> list[str]:
    config = HMTConfig.from_block({"activations": section}).activations
    return list(refused_beside_chunks(config, checkpointing or {}))


@pytest.mark.parametrize(
    ("section", "match"),
    [
        ({"policy": {"mlp_intermediate": "int8"}}, "policy.mlp_intermediate is 'int8', legal is"),
        ({"policy": {"attention_qkv": "keep"}}, "policy.attention_qkv is 'keep'"),
        ({"overrides": {"layers": {"mlp_intermediate": "fp8"}}}, r"overrides\['layers'\].mlp"),
        ({"policy": {"projected_inputs": "project"}}, "policy.projected_inputs is 'project'"),
        ({"components": {"mlp": "residual"}}, "components is"),
    ],
)
def test_refused_with_what_to_do(section: dict[str, Any], match: str) -> None:
    (message,) = refusals(section)
    assert re.search(match, message)
    assert "emove it" in message


def test_what_says_the_same_is_not_refused() -> None:
    same = {"attention_qkv": "recompute", "mlp_intermediate": "recompute"}
    assert refusals({"policy": {**same, "residual": "recompute"}}) == []


def test_deepspeeds_keys_are_refused() -> None:
    (message,) = refusals({}, {"cpu_checkpointing": True, "profile": False})
    assert "cpu_checkpointing is True" in message
    assert "swap_host" in message


@pytest.mark.parametrize("other", [{"fpdt": {}}, {"offload": {"overlap": "none"}}])
def test_what_is_not_activations_is_refused_under_another_optimizer(other: dict[str, Any]) -> None:
    """Activations alone go with any."""
    from hmt_deepspeed.zero.engine.selection import hmt_options

    config: dict[str, Any] = {"optimizer": {"type": "AdamW"}, "hmt": {"activations": {}}}
    assert hmt_options(config, None) is None
    config["hmt"] |= other
    with pytest.raises(ValueError, match='leave only "activations" in it'):
        hmt_options(config, None)


def refused_by_the_engine() -> list[str]:
    said = []
    for section in (
        {"policy": {"mlp_intermediate": "int8"}},
        {"overrides": {"q_proj": {"layer_input": "keep"}}},
    ):
        try:
            make_engine(config_with(2, section), tiny_llama(use_cache=False))
        except ValueError as error:
            said.append(str(error))
    return said


def test_the_engine_refuses(ranks: Ranks) -> None:
    choice, pattern = ranks.run(refused_by_the_engine, 1)[0]
    assert 'legal is "recompute"' in choice
    assert "'q_proj' matches" in pattern
