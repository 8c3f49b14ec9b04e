"""DeepSpeed's state tools, the start table, metrics and refusals, for every mode."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
)
from harness import Ranks
from modes import MODES, SAME_LAYOUT, mode_engine, model_of
from training import PAPERS_RULE, loss_of, micro_batches, tiny_llama, train, weights

from hmt_deepspeed.zero.optimizer.start_table import StartRow, _wrapped, start_rows

NAME = "model.layers.0.mlp.gate_proj.weight"
FIXED = {"rank": 8, "update_interval": 100, "max_full_gradient_bytes": 10**9, "scale": 1.0}
TOOLS: dict[str, dict[str, Any]] = {
    "left": {**FIXED, "projection": "left"},
    "two_sided": {**FIXED, "projection": "two_sided"},
    "full residual": {**FIXED, "residual": "full"},
    "left, full residual": {**FIXED, "projection": "left", "residual": "full"},
    "apollo": {"method": "apollo", "rank": 8, "scale": 1.0},
    "bf16": {**FIXED, "state_dtype": "bf16"},
    "factored": {**FIXED, "second_moment": "factored"},
    "int8": SAME_LAYOUT["int8"],
}
STATES = {"factored": ("exp_avg", "exp_avg_sq_row", "exp_avg_sq_col", "exp_avg_sq_mean")}


# -- cases --------------------------------------------------------------------------------------------


def tools(stages: list[int]) -> dict[Any, dict[str, Any]]:
    return {(name, stage): _use_tools(name, stage) for name in TOOLS for stage in stages}


def _use_tools(name: str, stage: int) -> dict[str, Any]:
    engine = mode_engine(TOOLS[name], stage, model=model_of(name))
    train(engine, 3)
    param = dict(engine.module.named_parameters())[NAME]
    entry = next(e for e in engine.optimizer.zero.low_rank if e.name == NAME)
    moment = safe_get_full_optimizer_state(param, "exp_avg")
    engine.backward(loss_of(engine, micro_batches(engine, 3)[0]))
    found = {
        "shape": tuple(moment.shape),
        "weight shape": tuple(entry.assignment.shape),
        "moment": moment,
        "weight": safe_get_full_fp32_param(param),
        "gradient": safe_get_full_grad(param),
        "local": safe_get_local_optimizer_state(param, "exp_avg").shape if stage == 3 else None,
        "rows": entry.matrix.num_rows,
        "whole": entry.matrix.takes_whole,
        "rank": entry.matrix.rank,
    }
    engine.step()
    for key in STATES.get(name, ("exp_avg", "exp_avg_sq")):
        value = torch.full_like(safe_get_full_optimizer_state(param, key), 0.5)
        safe_set_full_optimizer_state(param, value, key)
        found["set " + key] = safe_get_full_optimizer_state(param, key)
    before = safe_get_full_fp32_param(param)
    safe_set_full_fp32_param(param, before + 1)
    found["set weight"] = (before + 1, safe_get_full_fp32_param(param))
    found["losses"] = train(engine, 2, first=4)
    try:
        safe_get_full_optimizer_state(param, "momentum")
    except ValueError as error:
        found["unknown"] = str(error)
    engine.destroy()
    return found


def ordinary_gradient(name: str) -> torch.Tensor:
    """The mean gradient that a plain backward gives at the same weights."""
    engine = mode_engine({**TOOLS[name], "projected_backward": False}, 0, model=model_of(name))
    train(engine, 3)
    param = dict(engine.module.named_parameters())[NAME]
    model = model_of(name)
    held = weights(engine)
    with torch.no_grad():
        for key, own in model.named_parameters():
            own.copy_(held[key])
    tokens = micro_batches(engine, 3)[0]
    model(input_ids=tokens, labels=tokens).loss.backward()
    assert param.shape == dict(model.named_parameters())[NAME].shape
    return dict(model.named_parameters())[NAME].grad


def tables() -> dict[str, tuple[list[StartRow], str, dict[str, Any]]]:
    """Start table and metrics of every mode."""
    found = {}
    for name in [*MODES, "int8", "bf16", "small"]:
        options = MODES.get(name) or TOOLS.get(name)
        if name == "small":
            options = {**MODES["apollo"], "state_dtype": "int8"}
        engine = mode_engine(options, 2, model=model_of(name))
        table = (start_rows(engine.optimizer.zero), engine.optimizer.describe())
        train(engine, 1)
        found[name] = (*table, engine.optimizer.metrics())
        engine.destroy()
    return found


WHOLE_SPECTRUM = {**FIXED, **PAPERS_RULE, "rank": "auto", "energy_threshold": 1.0}
WHOLE_SPECTRUM |= {"rank_candidates": [8, 32, 64]}  # 64 becomes 40
FULL: dict[str, dict[str, Any]] = {
    "core": {**WHOLE_SPECTRUM, "projection": "two_sided"},
    "budget": {**WHOLE_SPECTRUM, "rank_budget": 1.0},
    "energy": WHOLE_SPECTRUM,
}


def reach_all_columns() -> dict[str, tuple[list[float], list[int], int]]:
    """Losses, ranks and state bytes where the largest candidate spans every column."""
    found = {}
    for name, options in FULL.items():
        engine = mode_engine(options, 2)
        losses = train(engine, 3)
        ranks = [e.matrix.rank for e in engine.optimizer.zero.low_rank]
        found[name] = (losses, ranks, engine.optimizer.metrics()["low_rank_state_bytes"])
        engine.destroy()
    return found


def redrawn() -> dict[str, Any]:
    """Next refreshes after a step, by method; and the metrics of a run without probes."""
    found: dict[str, Any] = {}
    low_rank = {"rank": 8, "max_full_gradient_bytes": 10**7}
    for method, options in (("apollo", {"method": "apollo"}), ("low rank", low_rank)):
        engine = mode_engine({**options, "update_interval": 14}, 2)
        train(engine, 1)
        found[method] = engine.optimizer.zero.basis_groups.schedule.next_refresh
        engine.destroy()
    engine = mode_engine({**FIXED, "residual": "none", "probes": 0}, 2, gradient_clipping=0)
    train(engine, 2)
    found["no probes"] = engine.optimizer.metrics()
    engine.destroy()
    return found


REFUSED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "core with the full residual": (
        {"projection": "two_sided", "residual": "full"},
        ["residual", "'full'", '"probe" or "none"'],
    ),
    "apollo with a projected backward": (
        {"method": "apollo", "projected_backward": True},
        ["projected_backward", "whole gradients", '"auto"'],
    ),
    "full residual with a projected backward": (
        {"residual": "full", "projected_backward": True},
        ["projected_backward", "whole gradient", '"auto"'],
    ),
    "mini of rank 4": ({"method": "apollo_mini", "rank": 4}, ["rank", "rank 1", '"apollo"']),
    "random without a rank": ({"range_finder": "random"}, ["range_finder", "spectrum", "rank"]),
    "shared from the left": (
        {"share_basis": True, "projection": "left"},
        ["share_basis", '"projection": "right"'],
    ),
    "budget below the smallest ranks": (
        {"rank_candidates": [16, 32], "rank_budget": 0.01},
        ["hmt.optimizer.rank_budget is 0.01", "at least 0."],
    ),
    "full rank within the usual budget": (
        {"full_rank_budget": 0.2},
        ["full_rank_budget", '"rank_budget": null'],
    ),
    "rule that matches nothing": (
        {"module_rules": {"no_such": {"method": "adamw"}}},
        ["hmt.optimizer.module_rules", "'no_such'", "Correct or remove"],
    ),
    "rule against the whole": (
        {"projection": "two_sided", "module_rules": {"o_proj": {"residual": "full"}}},
        ["residual", "'full'", "two_sided"],
    ),
    "rule that takes the whole gradient where backward must project": (
        {"projected_backward": True, "module_rules": {"o_proj": {"method": "apollo"}}},
        [
            "hmt.optimizer.projected_backward is true",
            "hmt.optimizer.module_rules['o_proj'].method is 'apollo'",
            "whole gradient",
            '"auto"',
        ],
    ),
}


def refused() -> dict[str, str]:
    said = {}
    for name, (options, _) in REFUSED.items():
        try:
            mode_engine(options, 2, model=tiny_llama(layers=1))
            said[name] = "accepted"
        except ValueError as error:
            said[name] = str(error)
    return said


# -- tests --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def used(ranks: Ranks) -> list[dict[Any, dict[str, Any]]]:
    return ranks.run(tools, 2, [2, 3])


@pytest.mark.parametrize("name", TOOLS)
def test_states_are_read_and_written_whole(used: Any, name: str) -> None:
    for rank in used:
        for stage in (2, 3):
            found = rank[name, stage]
            m, n = found["weight shape"]
            r = found["rank"]
            shapes = {"left": (n, r), "left, full residual": (n, r), "two_sided": (r, r)}
            assert found["shape"] == shapes.get(name, (m, r))
            assert found["moment"].any()
            assert found["weight"].shape == (m, n)
            means = {"exp_avg_sq_row": (m, 1), "exp_avg_sq_col": (1, r), "exp_avg_sq_mean": ()}
            for key in STATES.get(name, ("exp_avg", "exp_avg_sq")):
                # 1/2 is exact in bf16; of int8 a block's largest
                wanted = torch.full(means.get(key, found["shape"]), 0.5)
                torch.testing.assert_close(found["set " + key], wanted, rtol=4e-3, atol=0)
            assert torch.equal(*found["set weight"])
            assert "exp_avg" in found["unknown"]
            if stage == 3 and name != "two_sided":
                assert found["local"] == (found["rows"], r)
                assert found["rows"] < m or "left" in name
    for stage in (2, 3):  # the same on every rank
        one, other = (rank[name, stage] for rank in used)
        for key in ("moment", "weight", "gradient"):
            assert torch.equal(one[key], other[key]), key


@pytest.mark.parametrize("name", ["left", "two_sided", "left, full residual", "apollo"])
def test_full_gradient_is_the_mean_or_its_part_inside_the_basis(
    ranks: Ranks, used: Any, name: str
) -> None:
    parts = ranks.run(ordinary_gradient, 2, name)
    mean = sum(parts) / 2
    for stage in (2, 3):
        found = used[0][name, stage]["gradient"]
        assert found.shape == mean.shape
        if used[0][name, stage]["whole"]:
            torch.testing.assert_close(found, mean, rtol=1e-3, atol=1e-5)
        else:  # a projection: orthogonal to what is missing
            missing = mean - found
            assert abs(float((missing * found).sum())) < 1e-3 * float(mean.square().sum())
            assert float(missing.norm()) < float(mean.norm())


@pytest.fixture(scope="module")
def described(ranks: Ranks) -> dict[str, tuple[list[StartRow], str, dict[str, Any]]]:
    return ranks.run(tables, 1)[0]


def test_the_start_table_names_rule_side_rank_and_states(described: Any) -> None:
    def words(name: str, shape: str | None = None, rule: str = "") -> list[StartRow]:
        rows = [row for row in described[name][0] if shape in (None, row.shape)]
        chosen = [row for row in rows if rule in row.treatment[0] and row.shape != "any"]
        assert chosen, (name, shape)
        return chosen

    def said(name: str, text: str, **having: str) -> bool:
        return all(text in row.treatment for row in words(name, **having))

    assert said("left", "projection left")
    assert said("auto", "projection left", shape="40x77")
    assert said("auto", "projection right", shape="77x40")
    assert said("two_sided", "projection two-sided")
    assert said("apollo", "projection left", shape="20x40")
    assert said("apollo", "random basis")
    assert said("random", "projection right")
    assert said("random", "random basis")
    assert not said("left", "random basis")
    assert {row.rank for row in words("left")} == {"4..16"}
    assert {row.rank for row in words("random")} == {"8"}
    assert {row.rank for row in words("apollo", shape="77x40")} == {"10"}
    assert {row.rank for row in words("apollo_mini")} == {"1"}
    assert said("apollo_mini", "apollo_mini")
    assert said("full residual", "full gradient")
    assert said("left", "projected backward")
    assert said("bf16", "bf16 states")
    assert said("factored", "fp32 states, factored")
    assert said("int8", "int8 states")
    assert said("small", "fp32 states (under 4096 elements)")
    assert said("defaults", "learning rate x 2.5")
    beside = [row for row in described["defaults"][0] if row.treatment[0].startswith("adamw")]
    assert beside
    assert all("learning rate x 5" in row.treatment for row in beside)
    for name in ("left", "apollo_mini"):  # with a scale that is given
        assert not any("learning rate" in w for row in words(name) for w in row.treatment)
    dense = [row for row in described["int8"][0] if row.shape == "any"]
    states = [{w for w in row.treatment if "states" in w} for row in dense]
    assert {"int8 states"} in states
    assert {"fp32 states (a vector)"} in states
    rules = described["module_rules"][0]
    first = {row.treatment[0] for row in rules}
    assert {"adamw: module_rules 'o_proj'", "apollo", "lowrank_adamw"} <= first
    told = {words for row in rules for words in row.treatment}
    assert {"learning rate x 0.5", "learning rate x 2"} <= told
    assert {"6", "4..16"} <= {row.rank for row in rules}


def test_the_start_table_fits_80_columns_and_says_of_all_what_is_true_of_all(
    described: Any,
) -> None:
    for name, (rows, table, metrics) in described.items():
        lines = table.splitlines()
        assert max(map(len, lines)) <= 80, name
        for row in rows:
            for words in row.treatment:
                assert words in table, (name, words)
        assert sum(row.weight_bytes for row in rows) == metrics["weight_bytes"], name
        has_budget = "\nrank_budget: moments and bases may take " in table
        assert has_budget == (name in ("rank_budget", "out_of_sample", "defaults")), name
    for length in range(20, 90):  # where a line ends makes no difference
        told = _wrapped(["a" * length, "b" * 30, "c" * 30]).splitlines()
        assert all(len(line) <= 80 for line in told if "a" * 80 not in line), length
    title = described["left"][1].splitlines()[0]
    assert title == "hmt: ZeRO stage 2, 1 rank, bytes per rank; fp32 weights; fp32 states; whole"


def test_metrics_have_the_same_keys_in_every_mode(described: Any) -> None:
    keys = {tuple(sorted(metrics)) for *_, metrics in described.values()}
    assert len(keys) == 1
    for name, (*_, metrics) in described.items():
        apollo = "apollo" in name or name == "small"
        assert (metrics["mean_captured_energy"] is None) == apollo, name
        assert len(metrics["rank_per_matrix"]) >= 7
        measured = metrics["captured_energy_per_matrix"]
        assert measured.keys() <= metrics["rank_per_matrix"].keys()
        assert all(0 <= energy <= 1.001 for energy in measured.values()), name
        assert metrics["low_rank_state_bytes"] <= metrics["optimizer_state_bytes"]
    assert len(described["module_rules"][2]["captured_energy_per_matrix"]) == 7


def test_state_bytes_shrink_with_the_state_dtype(described: Any) -> None:
    dense = [row for row in described["int8"][0] if row.shape == "any"]
    in_int8 = [row for row in dense if "int8 states" in row.treatment]
    assert in_int8
    for row in in_int8:
        assert row.state_bytes < 2.1 * row.weight_bytes / 4  # of fp32 weights


def test_refreshes_are_spread_and_no_energy_is_told_that_nobody_measured(ranks: Ranks) -> None:
    found = ranks.run(redrawn, 1)[0]
    for method in ("apollo", "low rank"):
        assert sorted(found[method]) == [2, 4, 6, 8, 10, 12, 14], method
    assert found["no probes"]["captured_energy_per_matrix"] == {}
    assert found["no probes"]["mean_captured_energy"] is None


def test_the_largest_candidate_may_span_every_column(ranks: Ranks) -> None:
    """One-sided that is AdamW without a basis; a core of 40 x 40 stays a core."""
    found = ranks.run(reach_all_columns, 1)[0]
    adamw = 8 * 14040  # elements of the seven linears of a layer
    for name, (losses, chosen, _) in found.items():
        assert losses[-1] < losses[0], name
        assert max(chosen) == 40, name
    assert found["budget"][2] <= adamw * 1.02  # evidence, a number per column, is not budgeted


@pytest.fixture(scope="module")
def said(ranks: Ranks) -> dict[str, str]:
    return ranks.run(refused, 1)[0]


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_work_is_refused_at_start(said: dict[str, str], name: str) -> None:
    for text in REFUSED[name][1]:
        assert text in said[name]
