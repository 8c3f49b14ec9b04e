"""Cells: what is trained, measured and kept, and that an interrupted one goes on."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch
from compare_runs import STEPS, TRAINED, cell, two_steps

from comparison import training
from comparison import variants as table
from comparison.cells import Setting, Store, read_cells
from comparison.measures import state_bytes
from comparison.training import Run, activation_error, train_cell
from comparison.variants import VARIANTS


def test_every_variant_lowers_its_loss(results: dict[str, dict[str, Any]]) -> None:
    for name, result in results.items():
        losses = result["curves"]["train_loss"]
        assert losses[-1] < losses[0] - 0.2, name
        assert result["val_loss"] < math.log(320), name
        assert result["steps"] == STEPS
        assert result["cpu_seconds"] > 0
        assert result["pcie_bytes"] is None
        assert "CPU" in result["pcie_reason"]
        assert result["device_memory"] == "cpu (process RSS)"
        assert result["peak_device_bytes"] >= result["average_device_bytes"] > 0
        assert result["checkpoint_bytes"] > 4 * result["parameters"]


def test_all_variants_see_the_same_batches(results: dict[str, dict[str, Any]]) -> None:
    assert len({result["batches"] for result in results.values()}) == 1


def test_state_bytes_are_those_of_the_formulas(results: dict[str, dict[str, Any]]) -> None:
    states = {name: result["state_bytes"] for name, result in results.items()}
    d, h, layers, r = 64, 192, 2, 16
    square, wide = 4 * layers, 3 * layers
    assert states["adamw"]["moments_share"] == 1.0
    assert states["adamw"]["matrices_moments"] == 8 * (square * d * d + wide * d * h)
    # The smaller side is projected: r of 64 everywhere.
    for name in ("galore", "fira", "apollo"):
        assert states[name]["moments_share"] == r / d
        assert states[name]["matrices_bases"] == 4 * (square + wide) * d * r
    assert states["apollo_mini"]["moments_share"] == 1 / d
    # HMT projects the right side: r columns of m rows each, and a basis of n x r.
    gate, down = 2 * layers, layers
    moments = 8 * r * (square * d + gate * h + down * d)
    assert states["hmt_d4"]["matrices_moments"] == moments
    assert states["hmt_d4"]["matrices_bases"] == 4 * r * ((square + gate) * d + down * h)
    assert len({own["dense"] for own in states.values()}) <= 2  # step counters: numbers or tensors


def test_ranks_and_energies_are_recorded(results: dict[str, dict[str, Any]]) -> None:
    for name in ("galore", "fira", "hmt_d4"):
        curves = results[name]["curves"]
        assert len(curves["ranks"]) == 14
        assert {value for values in curves["ranks"].values() for value in values} == {16}
        assert 0 < results[name]["captured_energy_mean"] <= 1
    hmt = results["hmt_d4"]
    assert hmt["activation_error"] == 1 - hmt["captured_energy_mean"]
    assert results["galore"]["activation_error"] is None
    assert results["apollo"]["captured_energy_mean"] is None  # its projection is not orthogonal


@pytest.mark.parametrize(
    ("variant", "reason"),
    [
        ("galore", "another optimizer"),
        ("hmt_full_residual_d4", "whole gradients"),
        ("hmt_apollo", "whole gradients"),
        ("hmt_apollo_mini", "whole gradients"),
        ("hmt_left_d4", "projected from the left"),
        ("hmt_two_sided_d2", "the core's"),
        ("hmt_unpatched", "no projected backward"),
    ],
)
def test_there_is_no_activation_error_where_inputs_are_not_saved_projected(
    variant: str, reason: str, setting: Setting, data: Any, store: Store
) -> None:
    run = two_steps(variant, setting, data, store)
    found = activation_error(run.contender, run.energy)
    assert found["activation_error"] is None
    assert found["activation_error_matrices"] == 0
    assert reason in found["activation_error_reason"]
    assert (found["captured_energy_mean"] is None) == ("apollo" in variant)


@pytest.mark.parametrize("variant", ["hmt_auto_side_d4", "hmt_apollo_head"])
def test_the_activation_error_is_of_the_matrices_projected_from_the_right(
    variant: str, setting: Setting, data: Any, store: Store
) -> None:
    run = two_steps(variant, setting, data, store)
    found = activation_error(run.contender, run.energy)
    # Of the 14 matrices the two down projections are wider than tall: 64 x 192, from the left.
    right = [share for name, share in run.energy.items() if "down_proj" not in name]
    assert len(run.energy) == 14
    assert found["activation_error"] == 1 - mean(right)
    assert found["activation_error"] != 1 - found["captured_energy_mean"]
    assert found["activation_error_matrices"] == 12


def test_an_unmeasured_energy_is_a_reason(setting: Setting, data: Any, store: Store) -> None:
    run = Run(cell(setting, data, "hmt_d4"), data, store)
    found = activation_error(run.contender, {})
    assert found["activation_error"] is None
    assert found["activation_error_reason"] == "no energy has been measured"


def test_the_heads_states_are_not_counted_as_the_matrices(
    setting: Setting, data: Any, store: Store
) -> None:
    runs = [two_steps(n, setting, data, store) for n in ("hmt_auto_side_d4", "hmt_apollo_head")]
    plain, head = (state_bytes(run.contender) for run in runs)
    assert head["matrices_moments"] == plain["matrices_moments"]
    # Embeddings and head, 320 x 64: two moments of 16 columns (and 17 fp32 of evidence) in place of 64.
    assert plain["dense"] - head["dense"] == 2 * (8 * 320 * (64 - 16) - 4 * 17)


def test_memory_is_sampled_after_each_part_of_a_step(results: dict[str, dict[str, Any]]) -> None:
    assert {result["device_samples"] for result in results.values()} == {3 * STEPS}


def test_a_finished_cell_is_kept_small(
    setting: Setting, data: Any, store: Store, results: Any
) -> None:
    for name in TRAINED:
        own = cell(setting, data, name)
        assert store.is_finished(own)
        assert not store.checkpoint(own).exists()
        record = read_cells(store.cells)[own.key]
        assert len(json.dumps(record)) < 20_000
        assert record["options"] == VARIANTS[name].options
        assert record["key"] == own.key


@pytest.mark.parametrize(
    "variant",
    [
        *("adamw", "galore", "fira", "apollo", "hmt_energy", "hmt_int8_weights_d4"),
        "hmt_energy_activations",
    ],
)
def test_resume_is_bit_equal(
    variant: str, setting: Setting, data: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped before a refresh, of which there is one every 6 steps."""
    steps, stop, save = 14, 5, 4
    options = json.loads(
        json.dumps(VARIANTS[variant].options)
        .replace('"update_interval": 50', '"update_interval": 6')
        .replace('"update_proj_gap": 50', '"update_proj_gap": 6')
    )
    assert (options != VARIANTS[variant].options) == (variant != "adamw")
    monkeypatch.setitem(table.VARIANTS, variant, replace(VARIANTS[variant], options=options))
    own = replace(cell(setting, data, variant), tokens=steps * setting.step_tokens)
    whole = train_cell(own, data, Store(tmp_path / "a", tmp_path / "a"))
    parts = Store(tmp_path / "b", tmp_path / "b")
    assert train_cell(own, data, parts, lambda step: step == stop) is None
    assert parts.checkpoint(own).is_file()
    resumed = train_cell(own, data, parts, save_steps=save)
    assert whole is not None
    assert resumed is not None
    for key in ("train_loss", "val_loss", "grad_norm", "ranks", "captured_energy"):
        assert resumed["curves"][key] == whole["curves"][key], key
    assert resumed["val_loss"] == whole["val_loss"]  # every bit of the weights counts in it
    assert resumed["batches"] == whole["batches"]
    for key in ("activation_bytes", "codec_error"):
        assert resumed.get(key) == whole.get(key), key
    assert ("codec_error" in whole) == ("activations" in VARIANTS[variant].options)


def test_a_result_names_every_version_of_the_code_that_it_comes_from(
    setting: Setting, data: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, store = cell(setting, data, "adamw"), Store(tmp_path, tmp_path)
    for version, stop in (("aaa", 10), ("aaa", 20), ("bbb-dirty", 100)):
        monkeypatch.setattr(training, "code_version", lambda found=version: found)
        result = train_cell(own, data, store, lambda step, last=stop: step == last)
    assert result is not None
    assert result["commit"] == "aaa bbb-dirty"


def test_the_validation_rows_are_fixed_and_held_out(
    setting: Setting, data: Any, store: Store
) -> None:
    runs = [Run(replace(cell(setting, data, "adamw"), seed=seed), data, store) for seed in (0, 1)]
    assert runs[0].validation.tolist() == runs[1].validation.tolist()
    model_a, model_b = (run.evaluate(run.validation) for run in (runs[0], runs[0]))
    assert model_a == model_b


def test_a_mixture_is_compared_by_its_experts(setting: Setting, data: Any, store: Store) -> None:
    """Moments of experts are counted with the linears' and alone; the routers' loss is no part of the validation's."""
    run = two_steps("adamw", replace(setting, model="toy_moe"), data, store)
    sizes, model = state_bytes(run.contender), run.contender.model
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    assert sizes["experts_moments"] == 8 * experts
    assert sizes["experts_moments_share"] == sizes["moments_share"] == 1.0
    rows = run.validation[:16]
    batch = data.held_out.batch(rows)
    with torch.no_grad():
        with_routers = float(model(**batch).loss)
        alone = float(model(**batch, output_router_logits=False).loss)
    assert with_routers > alone + 1e-4
    assert run.evaluate(rows) == pytest.approx(alone, rel=1e-6)


@pytest.mark.parametrize("variant", ["hmt", "hmt_lowrank_adamw"])
def test_a_mixture_in_low_rank_has_a_result(
    setting: Setting, data: Any, store: Store, variant: str
) -> None:
    """Inputs of experts and of linears are saved projected, but for what is projected from the left."""
    result = two_steps(variant, replace(setting, model="toy_moe"), data, store).result()
    assert result["state_bytes"]["experts_moments_share"] < 0.7
    assert result["activation_error_matrices"] > 0
    assert 0 < result["activation_error"] < 1
