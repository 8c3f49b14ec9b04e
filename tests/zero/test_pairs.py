"""Every pair of features in some run: it trains as its plain twin on one rank, or the pair is refused at start.

The rows were chosen so that together they hold every pair of values that is not refused; a test counts.
"""

from __future__ import annotations

import itertools
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
from harness import Ranks
from training import LOW_RANK, assert_same, ds_config, make_engine, result, tiny_llama, train

FEATURES: dict[str, tuple[Any, ...]] = {
    "world": (1, 2),
    "stage": (1, 2, 3),
    "accumulation": (1, 2),
    "precision": ("fp32", "bf16", "fp16"),
    "method": ("lowrank", "two_sided", "apollo", "adamw"),
    "activations": ("none", "paper", "swap_ssd", "plan"),
    "offload": ("none", "cpu", "nvme"),
    "fpdt": (False, True),
    "basis_cache": (False, True),
    "snapshot": (False, True),
}
# fmt: off
ROWS: list[tuple[Any, ...]] = [
    (2, 3, 1, "fp16", "adamw", "none", "none", True, False, False),
    (1, 2, 2, "bf16", "two_sided", "plan", "nvme", False, True, False),
    (2, 1, 1, "fp32", "lowrank", "swap_ssd", "none", False, True, True),
    (1, 1, 2, "fp32", "apollo", "swap_ssd", "cpu", True, False, False),
    (1, 2, 1, "bf16", "apollo", "plan", "none", False, False, True),
    (2, 3, 2, "fp16", "lowrank", "plan", "cpu", False, True, True),
    (1, 1, 2, "fp16", "two_sided", "none", "none", True, True, True),
    (2, 2, 1, "bf16", "lowrank", "none", "nvme", True, False, True),
    (2, 3, 1, "fp32", "two_sided", "paper", "none", False, False, True),
    (1, 3, 2, "bf16", "adamw", "swap_ssd", "nvme", False, False, False),
    (1, 2, 1, "fp32", "adamw", "none", "nvme", False, False, False),
    (2, 1, 2, "fp16", "apollo", "paper", "nvme", False, False, False),
    (2, 1, 1, "fp32", "adamw", "plan", "cpu", False, False, False),
    (1, 2, 1, "fp16", "two_sided", "swap_ssd", "cpu", False, True, False),
    (1, 1, 1, "bf16", "lowrank", "paper", "cpu", False, False, False),
    (2, 3, 2, "bf16", "apollo", "none", "cpu", False, False, False),
    (1, 1, 1, "fp16", "adamw", "paper", "none", False, False, True),
    (2, 2, 1, "fp32", "two_sided", "paper", "cpu", False, True, False),
]
# Whoever updates states in host memory, beside what moves or cuts activations; hmt.offload.overlap.
OVERLAPS: list[tuple[tuple[Any, ...], str]] = [
    ((2, 1, 1, "fp32", "lowrank", "swap_ssd", "cpu", True, False, False), "none"),
    ((2, 2, 1, "fp32", "lowrank", "swap_ssd", "cpu", False, False, False), "backward"),
    ((2, 2, 1, "fp32", "lowrank", "swap_ssd", "cpu", True, False, False), "backward"),
    ((2, 3, 1, "fp32", "lowrank", "swap_ssd", "cpu", False, False, False), "forward"),
    ((2, 3, 1, "fp32", "lowrank", "swap_ssd", "cpu", True, False, False), "forward"),
]
# fmt: on
REFUSED: dict[tuple[tuple[str, Any], tuple[str, Any]], str] = {
    (
        ("activations", "paper"),
        ("fpdt", True),
    ): "a layer in chunks computes all but its input again",
    (("activations", "plan"), ("fpdt", True)): "A layer in chunks .hmt.fpdt. holds its input only",
    (("method", "adamw"), ("basis_cache", True)): "hmt.basis_cache is given, but no parameter has",
    (("method", "apollo"), ("basis_cache", True)): "hmt.basis_cache is given, but no parameter has",
}
METHODS: dict[str, dict[str, Any]] = {
    "lowrank": LOW_RANK,
    "two_sided": LOW_RANK | {"projection": "two_sided"},
    "apollo": {"method": "apollo", "rank": 4},
    "adamw": {"method": "adamw"},
}
STEPS = 4  # with refreshes, and steps without
# One rounding of bf16 is 2^-8; a loss of about 4 that was computed in another order may differ by so much, and an
# 8-bit activation by a percent of it.
TOLERANCE = {"bf16": 2**-7, "fp16": 2**-7, "fp32": 2e-3}


def config_of(row: dict[str, Any], plain: bool) -> dict[str, Any]:
    """The JSON of a row, or of its twin without what moves, encodes or cuts anything."""
    config = ds_config(row["stage"], METHODS[row["method"]], gas=row["accumulation"])
    if row["precision"] != "fp32":
        config[row["precision"]] = {"enabled": True}
    if row["precision"] == "fp16":
        config["fp16"]["initial_scale_power"] = 8
    if plain:
        return config
    hmt, folder = config["hmt"], tempfile.mkdtemp()
    if row["activations"] != "none":
        hmt["activations"] = activations_of(row["activations"], row["fpdt"], folder)
    if row["activations"] == "plan":
        in_the_cache(folder)
    if row["offload"] != "none":
        path = {"nvme_path": folder} if row["offload"] == "nvme" else {}
        config["zero_optimization"]["offload_optimizer"] = {"device": row["offload"], **path}
        hmt["offload"] = {"overlap": row["overlap"]}
    if row["fpdt"]:
        hmt["fpdt"] = {"chunk_size": 5}
    if row["basis_cache"]:
        hmt["basis_cache"] = {}
    if row["snapshot"]:
        hmt["snapshot"] = {"path": f"{row['folder']}/snapshots", "interval": 2}
    return config


def in_the_cache(folder: str) -> None:
    """A profile for every run, so that the plan is made before the first step."""
    from hmt_deepspeed.planner.hardware import named_machine
    from hmt_deepspeed.zero.planning import plan_files, profile_files

    file = Path(folder) / "profile.json"
    profile_files.write_profile(named_machine("rtx4090", num_gpus=1), file)
    plan_files.cache_file = lambda _: file


def activations_of(choice: str, in_chunks: bool, folder: str) -> dict[str, Any]:
    if choice == "plan":
        return {"policy": "plan"}
    if choice == "paper":
        return {"policy": {"attention_output": "int8", "mlp_intermediate": "int8"}}
    held = {"attention_output": "swap_ssd", "mlp_intermediate": "recompute"}
    if in_chunks:
        held = {"layer_input": "swap_ssd"}
    return {"policy": held, "nvme_path": folder, "host_memory": 2**20}


def allow_fp16() -> None:
    from deepspeed.accelerator import get_accelerator

    get_accelerator().is_fp16_supported = lambda: True


def twins() -> dict[tuple[str, str], dict[str, Any]]:
    """Runs of all precisions and methods on one rank, with nothing else."""
    allow_fp16()
    found = {}
    for precision, method in itertools.product(FEATURES["precision"], FEATURES["method"]):
        row = {"stage": 1, "accumulation": 1, "precision": precision, "method": method}
        engine = make_engine(config_of(row, plain=True), tiny_llama(use_cache=False))
        found[precision, method] = result(engine, train(engine, STEPS))
        engine.destroy()
    return found


def together(row: dict[str, Any]) -> dict[str, Any]:
    allow_fp16()
    engine = make_engine(config_of(row, plain=False), tiny_llama(use_cache=False))
    found = result(engine, train(engine, STEPS))
    engine.destroy()  # a snapshot that is being written is whole then
    return found


def built(row: dict[str, Any]) -> str:
    """What building it is refused with."""
    allow_fp16()
    try:
        make_engine(config_of(row, plain=False), tiny_llama(use_cache=False))
    except ValueError as error:
        return str(error)
    return "built"


def pairs(row: dict[str, Any]) -> set[tuple[Any, ...]]:
    return set(itertools.combinations(row.items(), 2))


def test_every_pair_is_in_a_row_or_refused() -> None:
    wanted = {
        ((a, x), (b, y))
        for (a, xs), (b, ys) in itertools.combinations(FEATURES.items(), 2)
        for x in xs
        for y in ys
    }
    tried = set().union(*(pairs(dict(zip(FEATURES, row, strict=True))) for row in ROWS))
    assert wanted == tried | set(REFUSED)
    assert not tried & set(REFUSED)


@pytest.fixture(scope="module")
def plain(ranks: Ranks) -> dict[tuple[str, str], dict[str, Any]]:
    return ranks.run(twins, 1)[0]


@pytest.mark.parametrize(
    ("values", "overlap"),
    [*((row, "auto") for row in ROWS), *OVERLAPS],
    ids=lambda row: row if isinstance(row, str) else " ".join(map(str, row)),
)
def test_together_is_as_apart(
    ranks: Ranks, plain: Any, tmp_path: Any, values: tuple[Any, ...], overlap: str
) -> None:
    row = dict(zip(FEATURES, values, strict=True)) | {"folder": str(tmp_path), "overlap": overlap}
    exact = row["precision"] == "fp32" and row["activations"] != "paper"
    twin = plain[row["precision"], row["method"]]
    assert twin["losses"][3] < twin["losses"][0]  # on the same batch
    for found in ranks.run(together, row["world"], row):
        if exact:
            assert_same(twin, found)
        else:
            tolerance = TOLERANCE[row["precision"]]
            assert found["losses"] == pytest.approx(twin["losses"], rel=tolerance)
    assert (tmp_path / "snapshots" / "latest").exists() == row["snapshot"]


@pytest.mark.parametrize("pair", REFUSED, ids=lambda pair: " ".join(f"{k}={v}" for k, v in pair))
def test_a_refused_pair_says_why(ranks: Ranks, tmp_path: Any, pair: Any) -> None:
    row = {name: values[0] for name, values in FEATURES.items()}
    row |= {"folder": str(tmp_path), "overlap": "auto"}
    assert re.search(REFUSED[pair], ranks.run(built, 1, row | dict(pair))[0], re.DOTALL)
