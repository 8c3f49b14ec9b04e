"""Muon of whole matrices: one run at every stage, world size, accumulation and place of the weights; resumed anywhere."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Ranks
from modes import mode_engine, trained, wide_llama
from training import assert_same_run, tiny_llama

from hmt_deepspeed.zero.optimizer.start_table import start_rows

FULL: dict[str, Any] = {"method": "muon", "rank": "full", "scale": 0.3, "state_dtype": "fp32"}
SAVED, AFTER = 2, 2  # steps before and after saving
HOST = {"offload_optimizer": {"device": "cpu"}}
ALL_ON_HOST = {**HOST, "offload_param": {"device": "cpu"}}
# World size, stage, accumulation, what is offloaded.
Layout = tuple[int, int, int, str]
OFFLOADED: dict[str, dict[str, Any]] = {"": {}, "states": HOST, "all": ALL_ON_HOST}
LAYOUTS: list[Layout] = [
    (1, 3, 4, ""),
    (2, 1, 1, ""),
    (2, 2, 2, ""),
    (2, 3, 1, "states"),
    (3, 2, 2, ""),
]
SLOW: list[Layout] = [
    (2, 0, 1, ""),
    (2, 1, 2, "states"),
    (2, 3, 2, "all"),
    (3, 3, 1, ""),
    (3, 1, 1, "states"),
]


def run(layout: Layout, folder: str = "", options: dict[str, Any] = FULL) -> dict[str, Any]:
    """All steps, saved on the way."""
    _, stage, gas, offload = layout
    zero = {"zero_optimization": OFFLOADED[offload]}
    engine = mode_engine(options, stage, gas, model=tiny_llama(layers=1, seed=7), **zero)
    held = trained(engine, SAVED)
    if folder:
        engine.save_checkpoint(folder)
    after = trained(engine, AFTER, first=SAVED)
    found = after | {key: held[key] + after[key] for key in ("losses", "norms")}
    found["after"] = after
    found["table"] = engine.optimizer.describe()
    found["treatments"] = [row.treatment for row in start_rows(engine.optimizer.zero)]
    matrices = [p.matrix for p in engine.optimizer.zero.low_rank]
    found["sides"] = [(matrix.rank, min(matrix.shape)) for matrix in matrices]
    found["states"] = sum(matrix.state_bytes() for matrix in matrices)
    engine.destroy()
    return found


def resumed(layout: Layout, folder: str) -> dict[str, Any]:
    _, stage, gas, offload = layout
    zero = {"zero_optimization": OFFLOADED[offload]}
    engine = mode_engine(FULL, stage, gas, model=tiny_llama(layers=1, seed=9), **zero)
    engine.load_checkpoint(folder)
    found = trained(engine, AFTER, first=SAVED)
    engine.destroy()
    return found


def refused(folder: str) -> str:
    engine = mode_engine({**FULL, "rank": 8}, 2)
    try:
        engine.load_checkpoint(folder)
    except ValueError as error:
        return str(error)
    finally:
        engine.destroy()
    return "accepted"


@pytest.fixture(scope="module")
def alone(ranks: Ranks) -> dict[str, Any]:
    return ranks.run(run, 1, (1, 0, 1, ""))[0]


@pytest.fixture(scope="module")
def saved(ranks: Ranks, tmp_path_factory: Any) -> tuple[str, dict[str, Any]]:
    """A run on two ranks at stage 3, and its checkpoint."""
    folder = str(tmp_path_factory.mktemp("full_muon"))
    return folder, ranks.run(run, 2, (2, 3, 1, ""), folder)[0]


def test_whole_matrices_train_without_bases(alone: dict[str, Any]) -> None:
    assert alone["losses"][-1] < alone["losses"][0] - 0.05
    assert min(alone["norms"]) > 0.5  # clipping is active
    assert not any(alone["refreshes"])
    assert not alone["bases"]
    assert all(rank == side for rank, side in alone["sides"])
    treated = next(row for row in alone["treatments"] if row[0] == "muon")
    assert "full gradient" in treated
    assert "fp32 states, full rank" in treated
    assert not re.search("projection|basis", "; ".join(treated))


@pytest.mark.parametrize(
    "layout",
    [*LAYOUTS, *(pytest.param(layout, marks=pytest.mark.slow) for layout in SLOW)],
    ids=str,
)
def test_every_layout_is_the_same_run(ranks: Ranks, alone: Any, layout: Layout) -> None:
    found = ranks.run(run, layout[0], layout)
    for part in found:
        assert_same_run(part, alone)
    held = [part["states"] for part in found]
    if layout[1]:  # a row that two ranks touch is held by both
        assert max(held) < alone["states"] / layout[0] * 1.1
    else:
        assert held == [alone["states"]] * layout[0]


def test_a_checkpoint_resumes_bit_for_bit(ranks: Ranks, saved: Any) -> None:
    folder, straight = saved
    again = ranks.run(resumed, 2, (2, 3, 1, ""), folder)[0]
    assert again["losses"] == straight["after"]["losses"]
    for name, weight in straight["weights"].items():
        assert torch.equal(again["weights"][name], weight), name


@pytest.mark.parametrize("layout", [(1, 1, 2, ""), (3, 2, 1, "states")], ids=str)
def test_another_layout_goes_on_the_same(ranks: Ranks, saved: Any, layout: Layout) -> None:
    folder, straight = saved
    assert_same_run(ranks.run(resumed, layout[0], layout, folder)[0], straight["after"])


def test_its_states_are_not_those_of_a_low_rank(ranks: Ranks, saved: Any) -> None:
    said = ranks.run(refused, 2, saved[0])[0]
    assert "muon, full rank, now muon right" in said


# -- stored in fewer bits -----------------------------------------------------------------------------

STORED: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"state_dtype": "bf16"},
    "int8": {"state_dtype": "int8"},
    "no masters": {"state_dtype": "int8", "master_weights": "none"},
}


def stored(kind: str) -> dict[str, Any]:
    options = {**FULL, **STORED[kind]}
    bf16 = {"bf16": {"enabled": kind == "no masters"}}
    engine = mode_engine(options, 2, 2, model=wide_llama(seed=7), **bf16)
    found = trained(engine, SAVED + AFTER)
    matrices = [p.matrix for p in engine.optimizer.zero.low_rank]
    elements = sum(matrix.num_rows * matrix.shape[1] for matrix in matrices)
    found["bytes"] = sum(matrix.state_bytes() for matrix in matrices) / elements
    found["rank"] = dist.get_rank()
    engine.destroy()
    return found


@pytest.mark.parametrize(("kind", "most"), [("bf16", 2.0), ("int8", 1.02), ("no masters", 1.02)])
def test_momenta_in_fewer_bits_train_alike(ranks: Ranks, kind: str, most: float) -> None:
    exact, found = (ranks.run(stored, 2, one) for one in ("fp32", kind))
    assert exact[0]["bytes"] == 4
    assert found[0]["bytes"] <= most
    assert found[0]["losses"] == pytest.approx(exact[0]["losses"], rel=5e-3)
    for name, weight in found[0]["weights"].items():
        assert torch.equal(weight, found[1]["weights"][name]), name
