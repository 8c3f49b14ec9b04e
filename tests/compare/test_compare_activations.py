"""Variants on the package's activation backend: what it holds and loses, and what it leaves alone."""

from __future__ import annotations

import csv
import json
import math
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from compare_runs import ROOT, cell, markdown_rows, two_steps, with_activations

from comparison import variants as table
from comparison.cells import Cell, Setting, Store
from comparison.report import write_report
from comparison.training import Run, train_cell
from comparison.variants import VARIANTS

_EVERYTHING_KEPT = {
    "attention_qkv": "keep",
    "attention_output": "keep",
    "mlp_intermediate": "keep",
    "projected_inputs": "project",
}


def keeping_everything(variant: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The variant under a backend that encodes nothing: its name in the table while the test runs."""
    kept = with_activations(VARIANTS[variant], {"policy": _EVERYTHING_KEPT})
    monkeypatch.setitem(table.VARIANTS, f"{variant}_kept", kept)
    return f"{variant}_kept"


@pytest.fixture(scope="module")
def proposed(setting: Setting, data: Any, folder: Path) -> dict[str, Any]:
    store = Store(folder / "proposed", folder / "proposed")
    result = train_cell(cell(setting, data, "hmt_energy_activations"), data, store)
    assert result is not None
    return result


def test_the_proposed_variant_trains_and_measures_its_codecs(proposed: dict[str, Any]) -> None:
    losses = proposed["curves"]["train_loss"]
    assert losses[-1] < losses[0] - 0.2
    assert set(proposed["codec_error"]) == {"attention_output", "mlp_intermediate"}
    assert all(1e-4 < error < 0.02 for error in proposed["codec_error"].values())
    held = proposed["activation_bytes_per_component"]
    assert sum(held.values()) == proposed["activation_bytes"]
    # 4 x 32 tokens, 2 layers: a byte an element of attention's output and of gate and up, scales beside
    assert held["mlp_intermediate"] == pytest.approx(2 * 2 * 128 * 192, rel=0.1)
    assert held["projected_inputs"] > 0
    assert proposed["activation_error_matrices"] == 12


def test_activations_in_eight_bits_take_less_than_kept_ones(
    setting: Setting,
    data: Any,
    store: Store,
    proposed: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = two_steps(keeping_everything("hmt_energy_activations", monkeypatch), setting, data, store)
    kept = run.held.record()
    run.contender.close()
    assert kept["codec_error"] == {}
    for component in ("attention_output", "mlp_intermediate"):
        own = proposed["activation_bytes_per_component"][component]
        assert own < 0.3 * kept["activation_bytes_per_component"][component]
    assert proposed["activation_bytes"] < 0.6 * kept["activation_bytes"]


def test_a_backend_that_keeps_everything_changes_no_bit(
    setting: Setting,
    data: Any,
    tmp_path: Path,
    results: dict[str, dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    variant = "hmt_d4"
    assert "activation_bytes" not in results[variant]
    own = cell(setting, data, keeping_everything(variant, monkeypatch))
    result = train_cell(own, data, Store(tmp_path, tmp_path))
    assert result is not None
    assert result["val_loss"] == results[variant]["val_loss"]
    assert result["curves"]["train_loss"] == results[variant]["curves"]["train_loss"]


def test_evaluation_encodes_nothing(setting: Setting, data: Any, store: Store) -> None:
    run = two_steps("hmt_activations", setting, data, store)
    assert run.contender.activations is not None
    backend = run.contender.activations.installed.backend
    calls = backend.calls
    loss = run.evaluate(run.validation)
    assert backend.calls == calls > 0
    run.contender.close()
    assert run.evaluate(run.validation) == loss


def test_the_report_shows_what_the_backend_held_and_lost(
    setting: Setting,
    data: Any,
    proposed: dict[str, Any],
    results: dict[str, dict[str, Any]],
    tmp_path: Path,
) -> None:
    store = Store(tmp_path, tmp_path / "runs")
    store.write(cell(setting, data, "hmt_energy_activations"), proposed)
    store.write(cell(setting, data, "hmt_d4"), results["hmt_d4"])
    diverged = {"val_loss": None, "codec_error": {"attention_output": math.nan}}
    store.write(cell(setting, data, "hmt_energy_activations", 1.0), {**proposed, **diverged})
    folder = write_report(store)
    with open(folder / "cells.csv", encoding="utf-8", newline="") as file:
        rows = {(row["variant"], row["lr"]): row for row in csv.DictReader(file)}
    (experiment,) = json.loads((folder / "report.json").read_text(encoding="utf-8")).values()
    shown = markdown_rows((store.results / "report.md").read_text(encoding="utf-8"))
    own, line = shown["hmt_energy_activations"], experiment["variants"]["hmt_energy_activations"]
    error = ", ".join(f"{name} {value:.4f}" for name, value in proposed["codec_error"].items())
    assert own["codec error"] == rows["hmt_energy_activations", "0.01"]["codec_error"] == error
    assert rows["hmt_energy_activations", "1.0"]["codec_error"] == ""
    assert line["codec_error"] == proposed["codec_error"]
    assert line["activation_bytes"] == proposed["activation_bytes"]
    assert own["activations held"] == f"{proposed['activation_bytes'] / 2**20:.0f} MiB"
    for key in ("codec error", "activations held"):
        assert shown["hmt_d4"][key] == ""
    assert rows["hmt_d4", "0.01"]["activation_bytes"] == ""
    counts = dict(map(int, pair.split(":")) for pair in line["rank_counts"].split())
    assert sum(counts.values()) == 14
    assert set(counts) <= {8, 16, 32}
    assert own["ranks"].startswith(line["rank_counts"])
    assert shown["hmt_d4"]["ranks"] == "16:14, mean 16"


def test_a_checkpoint_from_before_the_backend_is_read(
    setting: Setting, data: Any, tmp_path: Path
) -> None:
    store, own = Store(tmp_path, tmp_path), cell(setting, data, "hmt_d4")
    assert train_cell(own, data, store, lambda step: step == 3) is None
    state = torch.load(store.checkpoint(own), weights_only=False)
    del state["held"]
    torch.save(state, store.checkpoint(own))
    run = Run(own, data, store)
    assert run.load()
    assert run.step == 3


def test_committed_cells_keep_their_keys() -> None:
    """Those of today's settings and options; the others are of an earlier table."""
    same = set()
    for record in Store(ROOT / "launch" / "results" / "compare", ROOT).records():
        is_ours = set(record["setting"]) == {field.name for field in fields(Setting)}
        known = VARIANTS.get(record["variant"])
        if is_ours and known is not None and record["options"] == known.options:
            own = {f.name: record[f.name] for f in fields(Cell) if f.name in record}
            assert Cell(**{**own, "setting": Setting(**record["setting"])}).key == record["key"]
            same.add(record["variant"])
    assert {"adamw", "galore_interval_200"} <= same
