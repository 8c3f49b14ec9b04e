"""Speed, CSV, JSON, Markdown plots and tables of what there is."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from compare_runs import TRAINED, cell, markdown_rows

from benchmarks import presets
from comparison.cells import Setting, Store, add_cells
from comparison.frontier import frontier
from comparison.headline import headline
from comparison.plots import draw, pictured
from comparison.report import markdown, summaries, weight_decay, write_report
from comparison.speed import measure_speed
from comparison.stages import best_point, lowest_point
from comparison.variants import VARIANTS


def test_speed_alternates_and_skips_with_a_reason(
    setting: Setting, data: Any, tmp_path: Path
) -> None:
    path = tmp_path / "speed.json"
    names = ["adamw", "hmt_d4", "hmt_activations"]
    report = measure_speed([*names, "qlora"], setting, data, 3, path)
    assert json.loads(path.read_text(encoding="utf-8")).keys() == report.keys()
    assert report["adamw"]["together"] == names
    assert len(report["adamw"]["step_seconds"]) == 3
    assert report["hmt_d4"]["tokens_per_second"] > 0
    for name in names:
        assert report[name]["step_seconds_median"] == pytest.approx(
            sorted(report[name]["step_seconds"])[1], abs=1e-5
        )
    assert report["hmt_d4"]["tokens_per_cpu_second"] > 0
    assert "CUDA" in report["qlora"]["skipped"]


def test_the_report_writes_csv_json_markdown_and_plots(
    setting: Setting, store: Store, data: Any, results: Any
) -> None:
    measure_speed(["adamw"], setting, data, 2, store.results / "speed-toy.json")
    folder = write_report(store)
    with open(folder / "cells.csv", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["variant"] for row in rows} == set(TRAINED)
    report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    (experiment,) = report.values()
    own = experiment["variants"]["adamw"]
    assert own["val_loss"] == pytest.approx(results["adamw"]["val_loss"])
    assert own["speed_measured_alone"] is True
    assert own["lr_at_the_edge"] is True
    text = (store.results / "report.md").read_text(encoding="utf-8")
    assert all(f"| {name} |" in text for name in TRAINED)
    assert folder == store.runs / "report"  # what is committed is the text alone
    assert {path.name for path in store.results.iterdir() if path.name[0] != "."} == {
        *("cells.jsonl.xz", "report.md", "speed-toy.json")
    }
    for picture in ("loss", "memory"):
        name = f"{experiment['name']}-{picture}.png"
        assert (folder / name).stat().st_size > 5000


def test_ranks_are_drawn_where_there_are_several(
    store: Store, results: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    records = [r for r in store.records() if r["variant"] in ("galore", "hmt_d4")]
    (experiment,) = summaries(records, {})
    assert [path.name for path in draw(experiment, records, tmp_path)] == [
        f"{experiment['name']}-loss.png",
        f"{experiment['name']}-memory.png",
    ]
    moved = next(iter(records[1]["curves"]["ranks"].values()))
    moved[-1] += 8
    *_, drawn = draw(experiment, records, tmp_path)
    assert drawn.name == f"{experiment['name']}-ranks.png"
    assert drawn.stat().st_size > 5000


def test_pictures_compare_one_seed_where_all_have_it() -> None:
    def run(name: str, seed: int, lr: float = 1e-3) -> dict[str, Any]:
        return {"variant": name, "seed": seed, "lr": lr, "val_loss": 1.0}

    experiment = {"variants": {name: {"lr": 1e-3} for name in "abc"}}
    records = [run("a", 0), run("a", 1), run("a", 1, 2e-3), run("b", 1), run("c", 2)]
    records.append({"variant": "b", "seed": 0, "lr": 1e-3, "skipped": "no CUDA"})
    shown = pictured(experiment, records)
    assert [(r["seed"], r["lr"]) for r in shown.values()] == [(1, 1e-3), (1, 1e-3), (2, 1e-3)]


def test_pictures_of_many_variants_show_those_of_the_table() -> None:
    def shown(names: list[str]) -> list[str]:
        experiment = {"variants": {name: {"lr": 1e-3} for name in names}}
        records = [{"variant": name, "seed": 0, "lr": 1e-3, "val_loss": 1.0} for name in names]
        return list(pictured(experiment, records))

    names = [*list(VARIANTS)[:3], *(f"ablation_{number}" for number in range(len(VARIANTS) - 3))]
    assert shown(names) == names
    assert shown([*names, "one_more"]) == list(VARIANTS)[:3]


# What the paper compares: columns of cells.csv, which are keys of report.json; headers of report.md.
METRICS = {
    "peak device memory": (["peak_device_bytes"], ["peak memory"]),
    "average device memory": (["average_device_bytes"], ["average memory"]),
    "throughput": (["tokens_per_second"], ["tokens/s"]),
    "step time": (["step_seconds_median", "step_seconds_p95"], ["step, median / p95"]),
    "validation loss": (["val_loss"], ["validation loss"]),
    "host RAM": (["peak_host_bytes"], ["host RAM"]),
    "bytes over PCIe": (["pcie_bytes"], ["PCIe"]),
    "checkpoint size": (["checkpoint_bytes"], ["checkpoint"]),
    "rank distribution": (
        ["rank_smallest", "rank_mean", "rank_largest", "rank_counts"],
        ["ranks"],
    ),
    "activation error": (["activation_error"], ["activation error"]),
}


def test_the_report_has_every_metric_of_the_paper(
    store: Store, results: dict[str, dict[str, Any]]
) -> None:
    folder = write_report(store)
    with open(folder / "cells.csv", encoding="utf-8", newline="") as file:
        row = next(own for own in csv.DictReader(file) if own["variant"] == "hmt_d4")
    (experiment,) = json.loads((folder / "report.json").read_text(encoding="utf-8")).values()
    line = experiment["variants"]["hmt_d4"]
    shown = markdown_rows((store.results / "report.md").read_text(encoding="utf-8"))["hmt_d4"]
    for metric, (columns, headers) in METRICS.items():
        for where, keys in ((row, columns), (line, columns), (shown, headers)):
            assert set(keys) <= set(where), metric
            filled = {where[key] not in ("", None) for key in keys}
            assert filled == {metric != "bytes over PCIe"}, metric  # on a CPU nothing crosses it
    assert line["peak_host_bytes"] == results["hmt_d4"]["peak_host_bytes"]
    assert (row["rank_smallest"], row["rank_mean"], row["rank_largest"]) == ("16", "16", "16")
    assert row["rank_counts"] == "16:14"


def test_bytes_over_pcie_are_shown_where_there_are_any(
    setting: Setting, data: Any, results: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    store = Store(tmp_path, tmp_path / "runs")
    store.write(cell(setting, data, "adamw"), {**results["adamw"], "pcie_bytes": 3 * 2**20})
    (experiment,) = summaries(store.records(), {})
    assert markdown_rows(markdown(experiment))["adamw"]["PCIe"] == "3 MiB"


def test_older_cells_are_read_and_marked(
    setting: Setting, data: Any, results: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    """Their activation error is a mean over all matrices, their memory was sampled once a step."""
    store = Store(tmp_path, tmp_path / "runs")
    newer = ("device_samples", "activation_error_matrices")
    older = {key: value for key, value in results["hmt_d4"].items() if key not in newer}
    flat = {
        "hmt_d4": {},
        "hmt_auto_side_d4": {"projection": "auto"},
        "hmt_full_residual_d4": {"residual": "full"},
    }
    for variant, options in flat.items():
        store.write(cell(setting, data, variant), {**older, "options": options})
    store.write(cell(setting, data, "adamw"), results["adamw"])
    (experiment,) = summaries(store.records(), {})
    rows = markdown_rows(markdown(experiment))
    assert rows["hmt_d4"]["activation error"] == f"{older['activation_error']:.3f}"
    assert rows["hmt_auto_side_d4"]["activation error"] == ""
    assert rows["hmt_full_residual_d4"]["activation error"] == ""
    assert rows["hmt_d4"]["average memory"].startswith("^")
    assert not rows["adamw"]["average memory"].startswith("^")


def test_cells_with_one_weight_decay_at_every_rate_are_an_experiment_of_their_own(
    setting: Setting, data: Any, results: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    store = Store(tmp_path, tmp_path / "runs")
    newer = cell(setting, data, "adamw")
    store.write(newer, results["adamw"])
    record = store.records()[0]
    older = {key: value for key, value in record["setting"].items() if key != "decay"}
    record |= {"setting": {**older, "weight_decay": 0.1}, "key": "older"}
    record |= {"lr": 2 * newer.lr, "val_loss": 0.0}
    add_cells(store.cells, [record])
    found = [weight_decay(experiment["setting"]) for experiment in summaries(store.records(), {})]
    assert sorted(found) == ["0.0001 / lr", "0.1"]
    assert best_point(store, "adamw", setting, data.digest).lr == newer.lr


def test_a_report_of_nothing_says_what_to_run(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"compare\.py sweep"):
        write_report(Store(tmp_path, tmp_path))


def test_finals_are_compared_with_adamw_at_the_same_seeds(
    results: dict[str, dict[str, Any]],
    setting: Setting,
    data: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = Store(tmp_path, tmp_path / "runs")
    finals = (("adamw", 0, 2.0), ("adamw", 1, 4.0), ("hmt_d4", 1, 3.0))
    for variant, seed, loss in (*finals, ("galore", 0, 3.0), ("galore", 1, 5.0)):
        final = replace(cell(setting, data, variant), stage="final", seed=seed)
        store.write(final, {**results[variant], "val_loss": loss})
    longer = replace(final, tokens=2 * final.tokens)  # an experiment of its own, and a smaller one
    store.write(longer, results["hmt_d4"])
    head, _, *rows = (line.split(" | ") for line in headline(store).splitlines())
    # one seed is not a lower mean: it comes after those that ran at all of AdamW's
    assert [row[1] for row in rows] == ["adamw", "galore", "hmt_d4"]
    found = {row[1]: dict(zip(head, row, strict=True)) for row in rows}
    assert found["hmt_d4"]["by seed"] == "- / 3.000"
    assert found["hmt_d4"]["against AdamW, by seed"] == "- / -25.0%"
    assert found["galore"]["against AdamW, by seed"] == "+50.0% / +25.0%"
    assert found["adamw"]["against AdamW, by seed"] == ""
    assert (found["adamw"]["validation loss"], found["adamw"]["by seed"]) == (
        "3.000",
        "2.000 / 4.000",
    )
    states = results["hmt_d4"]["state_bytes"]
    assert found["hmt_d4"]["with bases"] == f"{states['moments_and_bases_share']:.3f}"
    # a variant that is no longer in the table of variants is in the report alone
    monkeypatch.delitem(VARIANTS, "galore")
    assert [line.split(" | ")[1] for line in headline(store).splitlines()[2:]] == [
        "adamw",
        "hmt_d4",
    ]
    with pytest.raises(ValueError, match=r"compare\.py final"):
        headline(Store(tmp_path / "empty", tmp_path))


def test_rates_are_compared_at_the_seeds_that_they_share(
    results: dict[str, dict[str, Any]], setting: Setting, data: Any, tmp_path: Path
) -> None:
    store = Store(tmp_path, tmp_path / "runs")
    losses = {(1e-3, 0): 3.0, (1e-3, 1): 2.0, (2e-3, 0): 2.9, (4e-3, 0): 3.1}
    for stage in ("sweep", "final"):
        for (lr, seed), loss in losses.items():
            own = replace(cell(setting, data, "adamw"), stage=stage, lr=lr, seed=seed)
            store.write(own, {**results["adamw"], "val_loss": loss})
    assert (
        best_point(store, "adamw", setting, data.digest).lr == 2e-3
    )  # 1e-3 by the mean of its seeds
    final = next(e for e in summaries(store.records(), {}) if e["stage"] == "final")
    assert final["variants"]["adamw"]["lr"] == 2e-3
    shorter = replace(cell(setting, data, "adamw"), lr=8e-3, tokens=1)
    store.write(shorter, {**results["adamw"], "val_loss": 1.0})
    assert best_point(store, "adamw", setting, data.digest).lr == 2e-3
    apart = [{"lr": lr, "seed": seed, "val_loss": 1.0} for seed, lr in enumerate((1e-3, 2e-3))]
    assert lowest_point([*apart, {**apart[1], "seed": 2, "val_loss": 0.5}]).lr == 2e-3


def test_points_are_compared_two_by_two_though_a_third_ran_at_one_seed_alone() -> None:
    losses = {(1e-3, 0): 2.0, (1e-3, 1): 3.0, (2e-3, 0): 2.1, (2e-3, 1): 2.2, (4e-3, 0): 2.5}
    records = [{"lr": lr, "seed": seed, "val_loss": v} for (lr, seed), v in losses.items()]
    assert lowest_point(records).lr == 2e-3  # 1e-3 at the seed that all three have
    assert lowest_point(records[::-1]).lr == 2e-3


def test_a_finals_rate_is_at_the_edge_of_what_its_sweep_tried(
    results: dict[str, dict[str, Any]], setting: Setting, data: Any, tmp_path: Path
) -> None:
    store = Store(tmp_path, tmp_path / "runs")
    middle = cell(setting, data, "adamw")
    other_text = replace(middle, text="another")
    store.write(replace(middle, stage="final"), results["adamw"])
    for swept in (middle, replace(middle, lr=middle.lr * 2), replace(other_text, lr=middle.lr / 2)):
        store.write(swept, results["adamw"])
    final = next(e for e in summaries(store.records(), {}) if e["stage"] == "final")
    assert final["variants"]["adamw"]["lr_at_the_edge"]
    store.write(replace(middle, lr=middle.lr / 2), results["adamw"])
    final = next(e for e in summaries(store.records(), {}) if e["stage"] == "final")
    assert not final["variants"]["adamw"]["lr_at_the_edge"]


def test_the_frontier_is_of_runs_whose_adamw_had_its_embeddings_rate_swept(
    results: dict[str, dict[str, Any]], setting: Setting, data: Any, tmp_path: Path
) -> None:
    store = Store(tmp_path, tmp_path / "runs")

    def add(variant: str, stage: str, loss: float, seed: int = 0, **swept: float) -> None:
        own = replace(
            cell(setting, data, "adamw"), variant=variant, stage=stage, seed=seed, **swept
        )
        like = "galore" if variant.startswith("galore") else "adamw"
        store.write(own, {**results[like], "val_loss": loss})

    def tables() -> str:
        return frontier(summaries(store.records(), {}))

    add("adamw", "sweep", 3.0)
    add("adamw", "final", 2.0)
    add("adamw", "final", 2.0, seed=1)
    add("galore_interval_200", "final", 1.8)
    add("galore_interval_200", "final", 2.2, seed=1)
    assert tables() == ""  # one rate for embeddings and matrices
    add("adamw", "sweep", 2.5, embedding_lr_scale=10.0)
    assert tables().count("### ") == 1  # the sweep; the finals' AdamW is not at its best
    add("adamw", "final", 1.9, embedding_lr_scale=10.0)
    add("adamw", "final", 1.9, seed=1, embedding_lr_scale=10.0, decay=3e-4)
    add("adamw", "final", 1.7, seed=1, embedding_lr_scale=10.0)
    assert best_point(store, "adamw", setting, data.digest) == (1e-3, 10.0, None)
    text = tables()
    assert text.count("### ") == 2
    add("adamw", "sweep", 2.4, embedding_lr_scale=10.0, decay=0.0)
    assert tables().count("### ") == 2  # the finals' AdamW has these rates at another decay
    rows = markdown_rows(text.partition("### sweep")[0].partition("### ")[2])
    adamw, galore = rows["adamw"], rows["galore_interval_200"]
    assert (adamw["embeddings"], adamw["decay"], adamw["tried"]) == ("10", "0.0001", "1 / 2 / 2")
    assert (galore["embeddings"], galore["tried"]) == ("1", "1 / 1 / 1")
    assert galore["against AdamW, by seed"] == "-5.3% / +29.4%"
    assert (adamw["lowest"], galore["lowest"]) == ("yes", "yes")
    assert "frontier" in write_report(store).parent.parent.joinpath("report.md").read_text("utf-8")
    line = markdown_rows(headline(store))["pretraining, 0.00384M tokens"]
    assert line["lr"] in ("0.001, embeddings x 10", "0.001")


def test_another_size_and_another_batch_are_tables_apart(
    results: dict[str, dict[str, Any]], setting: Setting, data: Any, tmp_path: Path
) -> None:
    store, own = Store(tmp_path, tmp_path / "runs"), cell(setting, data, "adamw")
    settings = (setting, replace(setting, model="10m"), replace(setting, batch_rows=64))
    for other in settings:
        store.write(replace(own, setting=other), results["adamw"])
    assert len({record["key"] for record in store.records()}) == 3
    texts = [markdown(experiment) for experiment in summaries(store.records(), {})]
    assert sum("; 10m on" in text for text in texts) == 1
    assert sum("64 x 32 a step" in text for text in texts) == 1


def test_presets_are_compared_at_the_rate_that_is_adamws_best(
    results: dict[str, dict[str, Any]],
    setting: Setting,
    data: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = Store(tmp_path / "compare", tmp_path / "runs")
    adamw = cell(setting, data, "adamw")
    monkeypatch.setattr(presets, "TOKENS", adamw.tokens)
    losses = {1e-3: {"adamw": 2.0, "hmt": 1.9}, 2e-3: {"adamw": 2.2, "hmt": 1.5}}
    for lr, of_variants in losses.items():
        for variant, loss in of_variants.items():
            like = {**results["adamw"], "val_loss": loss}
            store.write(replace(adamw, variant=variant, lr=lr), like)
    peaks = [{"label": f"{name}: GPU memory", "value": 2.0**30} for name in presets.ROWS]
    planner = {"cases": {"presets": {"measured_at": "", "measurements": peaks}}}
    (tmp_path / "machine").mkdir()
    (tmp_path / "machine" / "planner.json").write_text(json.dumps(planner), encoding="utf-8")
    rows = markdown_rows(presets.preset_table(tmp_path))
    assert rows["balanced"]["loss against AdamW, by seed"] == "-5.0%"
