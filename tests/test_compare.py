"""launch/compare.py at toy sizes: what is trained, kept, resumed, refused and reported."""

from __future__ import annotations

import csv
import json
import math
import subprocess
import sys
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "launch"))

import compare  # noqa: E402

from comparison import variants as table  # noqa: E402
from comparison.cells import Cell, Setting, Store  # noqa: E402
from comparison.contenders import Unavailable, build  # noqa: E402
from comparison.corpus import documentation, finetuning_texts, pretraining_text  # noqa: E402
from comparison.fira import Fira  # noqa: E402
from comparison.headline import headline  # noqa: E402
from comparison.measures import state_bytes  # noqa: E402
from comparison.plots import draw  # noqa: E402
from comparison.report import markdown, summaries, weight_decay, write_report  # noqa: E402
from comparison.speed import measure_speed  # noqa: E402
from comparison.stages import (  # noqa: E402
    Plan,
    best_rate,
    check_variants,
    lowest_rate,
    make_queue,
)
from comparison.training import Run, activation_error, build_model, train_cell  # noqa: E402
from comparison.variants import VARIANTS, Variant, select  # noqa: E402

STEPS = 30
TRAINED = ("adamw", "galore", "fira", "apollo", "apollo_mini", "hmt_d4")


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("compare")


@pytest.fixture(scope="module")
def setting(folder: Path) -> Setting:
    """Forty small files: their words recur, so that a toy learns something in thirty steps."""
    data = folder / "text"
    data.mkdir()
    for number in range(40):
        lines = [
            f'def f{i}(x):\n    """Add {i}."""\n    return x + {i}\n' for i in range(number, 99)
        ]
        (data / f"{number:02}.py").write_text("\n".join(lines), encoding="utf-8")
    return Setting(
        model="toy",
        data=str(data),
        finetune_data=None,
        vocab_size=320,
        seq_length=32,
        batch_rows=4,
        eval_rows=16,
    )


@pytest.fixture(scope="module")
def data(setting: Setting, folder: Path) -> Any:
    return pretraining_text(setting, str(folder / "cache"))


@pytest.fixture(scope="module")
def store(folder: Path) -> Store:
    return Store(folder / "results", folder / "runs")


def cell(setting: Setting, data: Any, variant: str, lr: float | None = None) -> Cell:
    lr = lr or VARIANTS[variant].learning_rates[0]
    tokens = STEPS * setting.step_tokens
    return Cell("sweep", variant, lr, 0, tokens, setting, data.digest)


@pytest.fixture(scope="module")
def results(setting: Setting, data: Any, store: Store) -> dict[str, dict[str, Any]]:
    """One finished sweep cell of every kind of variant."""
    found = {}
    for name in TRAINED:
        result = train_cell(cell(setting, data, name), data, store)
        assert result is not None
        found[name] = result
    return found


# -- training ---------------------------------------------------------------------------------------


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


def two_steps(variant: str, setting: Setting, data: Any, store: Store) -> Run:
    run = Run(replace(cell(setting, data, variant), tokens=2 * setting.step_tokens), data, store)
    run.train_step()
    run.train_step()
    return run


@pytest.mark.parametrize(
    ("variant", "reason"),
    [
        ("galore", "another optimizer"),
        ("hmt_full_residual_d4", "whole gradients"),
        ("hmt_apollo", "whole gradients"),
        ("hmt_apollo_mini", "whole gradients"),
        ("hmt_left_d4", "projected from the left"),
        ("hmt_two_sided_d2", "the core's"),
        ("unpatched", "no projected backward"),
    ],
)
def test_there_is_no_activation_error_where_inputs_are_not_saved_projected(
    variant: str,
    reason: str,
    setting: Setting,
    data: Any,
    store: Store,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = {**VARIANTS["hmt_d4"].options, "projected_backward": False}
    monkeypatch.setitem(table.VARIANTS, "unpatched", Variant("hmt", options, (1e-3,)))
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
    # Embeddings and head, 320 x 64: two moments of 16 columns (and 16 fp32 of evidence) in place of 64.
    assert plain["dense"] - head["dense"] == 2 * (8 * 320 * (64 - 16) - 4 * 16)


def test_memory_is_sampled_after_each_part_of_a_step(results: dict[str, dict[str, Any]]) -> None:
    assert {result["device_samples"] for result in results.values()} == {3 * STEPS}


def test_a_finished_cell_is_kept_small(
    setting: Setting, data: Any, store: Store, results: Any
) -> None:
    for name in TRAINED:
        own = cell(setting, data, name)
        assert store.is_finished(own)
        assert not store.checkpoint(own).exists()
        assert store.path(own).stat().st_size < 20_000
        record = json.loads(store.path(own).read_text(encoding="utf-8"))
        assert record["options"] == VARIANTS[name].options
        assert record["key"] == own.key


@pytest.mark.parametrize(
    "variant",
    [
        *("adamw", "galore", "fira", "apollo", "hmt_energy", "hmt_int8_weights_d4"),
        *("hmt_proposed", "adamw_activations"),
    ],
)
def test_resume_is_bit_equal(variant: str, setting: Setting, data: Any, tmp_path: Path) -> None:
    own = replace(cell(setting, data, variant), tokens=60 * setting.step_tokens)  # over a refresh
    whole = train_cell(own, data, Store(tmp_path / "a", tmp_path / "a"))
    parts = Store(tmp_path / "b", tmp_path / "b")
    assert train_cell(own, data, parts, lambda step: step == 23) is None
    assert parts.checkpoint(own).is_file()
    resumed = train_cell(own, data, parts, save_steps=20)
    assert whole is not None
    assert resumed is not None
    for key in ("train_loss", "val_loss", "grad_norm", "ranks", "captured_energy"):
        assert resumed["curves"][key] == whole["curves"][key], key
    assert resumed["val_loss"] == whole["val_loss"]  # every bit of the weights counts in it
    assert resumed["batches"] == whole["batches"]
    for key in ("activation_bytes", "codec_error"):
        assert resumed.get(key) == whole.get(key), key
    assert ("codec_error" in whole) == ("activations" in VARIANTS[variant].options)


def test_the_validation_rows_are_fixed_and_held_out(
    setting: Setting, data: Any, store: Store
) -> None:
    runs = [Run(replace(cell(setting, data, "adamw"), seed=seed), data, store) for seed in (0, 1)]
    assert runs[0].validation.tolist() == runs[1].validation.tolist()
    model_a, model_b = (run.evaluate(run.validation) for run in (runs[0], runs[0]))
    assert model_a == model_b


# -- the activation backend -------------------------------------------------------------------------

_EVERYTHING_KEPT = {
    **dict.fromkeys(table.ACTIVATIONS["policy"], "keep"),
    "projected_inputs": "project",
}


def keeping_everything(variant: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The variant under a backend that encodes nothing: its name in the table while the test runs."""
    own, block = VARIANTS[variant], {"policy": _EVERYTHING_KEPT}
    kept = replace(own, options={**own.options, "activations": block})
    monkeypatch.setitem(table.VARIANTS, f"{variant}_kept", kept)
    return f"{variant}_kept"


@pytest.fixture(scope="module")
def proposed(setting: Setting, data: Any, folder: Path) -> dict[str, Any]:
    store = Store(folder / "proposed", folder / "proposed")
    result = train_cell(cell(setting, data, "hmt_proposed"), data, store)
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
    run = two_steps(keeping_everything("hmt_proposed", monkeypatch), setting, data, store)
    kept = run.held.record()
    run.contender.close()
    assert kept["codec_error"] == {}
    for component in ("attention_output", "mlp_intermediate"):
        own = proposed["activation_bytes_per_component"][component]
        assert own < 0.3 * kept["activation_bytes_per_component"][component]
    assert proposed["activation_bytes"] < 0.6 * kept["activation_bytes"]


@pytest.mark.parametrize("variant", ["adamw", "hmt_d4"])
def test_a_backend_that_keeps_everything_changes_no_bit(
    variant: str,
    setting: Setting,
    data: Any,
    tmp_path: Path,
    results: dict[str, dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert "activation_bytes" not in results[variant]
    own = cell(setting, data, keeping_everything(variant, monkeypatch))
    result = train_cell(own, data, Store(tmp_path, tmp_path))
    assert result is not None
    assert result["val_loss"] == results[variant]["val_loss"]
    assert result["curves"]["train_loss"] == results[variant]["curves"]["train_loss"]


def test_evaluation_encodes_nothing(setting: Setting, data: Any, store: Store) -> None:
    run = two_steps("hmt_auto_side_d4_activations", setting, data, store)
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
    store.write(cell(setting, data, "hmt_proposed"), proposed)
    store.write(cell(setting, data, "hmt_d4"), results["hmt_d4"])
    diverged = {"val_loss": None, "codec_error": {"attention_output": math.nan}}
    store.write(cell(setting, data, "hmt_proposed", 1.0), {**proposed, **diverged})
    folder = write_report(store, tmp_path / "speed.json")
    with open(folder / "cells.csv", encoding="utf-8", newline="") as file:
        rows = {(row["variant"], row["lr"]): row for row in csv.DictReader(file)}
    (experiment,) = json.loads((folder / "report.json").read_text(encoding="utf-8")).values()
    shown = markdown_rows((folder / "report.md").read_text(encoding="utf-8"))
    own, line = shown["hmt_proposed"], experiment["variants"]["hmt_proposed"]
    error = ", ".join(f"{name} {value:.4f}" for name, value in proposed["codec_error"].items())
    assert own["codec error"] == rows["hmt_proposed", "0.01"]["codec_error"] == error
    assert rows["hmt_proposed", "1.0"]["codec_error"] == ""
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
        if is_ours and record["options"] == VARIANTS[record["variant"]].options:
            own = {field.name: record[field.name] for field in fields(Cell)}
            assert Cell(**{**own, "setting": Setting(**record["setting"])}).key == record["key"]
            same.add(record["variant"])
    assert {"adamw", "hmt_auto_side_d4"} <= same


# -- the queue --------------------------------------------------------------------------------------


def plan(setting: Setting, folder: Path, stage: str, **more: Any) -> Plan:
    return Plan(stage, setting, 1000, (0,), cache=str(folder / "cache"), base_tokens=500, **more)


def test_the_baseline_comes_first_and_every_variant_before_any_again(
    setting: Setting, folder: Path, store: Store
) -> None:
    chosen = ("galore", "adamw", "fira")
    queue = make_queue(plan(setting, folder, "sweep", variants=chosen), store)
    names = [own.variant for own in queue.cells]
    rates = len(VARIANTS["adamw"].learning_rates)
    assert names[:rates] == ["adamw"] * rates
    assert names[rates : rates + 4] == ["galore", "fira", "galore", "fira"]
    assert len({own.key for own in queue.cells}) == len(queue.cells)


def test_final_takes_the_best_rate_of_the_sweep(
    setting: Setting, data: Any, folder: Path, store: Store, results: Any
) -> None:
    rate = VARIANTS["galore"].learning_rates[0]
    assert best_rate(store, "galore", setting, data.digest) == rate
    queue = make_queue(plan(setting, folder, "final", variants=("galore",)), store)
    assert [own.lr for own in queue.cells] == [rate]
    with pytest.raises(ValueError, match=r"compare\.py sweep --variants hmt_d2"):
        make_queue(plan(setting, folder, "final", variants=("hmt_d2",)), store)


def test_finetuning_starts_from_a_base_model_of_other_text(
    setting: Setting, folder: Path, tmp_path: Path
) -> None:
    store = Store(tmp_path, tmp_path / "runs")
    queue = make_queue(
        plan(setting, folder, "finetune", variants=("adamw", "lora", "qlora")), store
    )
    base, own = queue.cells[0], queue.cells[1]
    assert base.stage == "base"
    assert {c.start for c in queue.cells[1:]} == {base.key}
    assert own.text != base.text
    assert train_cell(base, queue.texts[base.key], store) is not None
    assert store.is_finished(base)
    base_loss = torch.load(store.weights(base.key), weights_only=True)
    started = Run(own, queue.texts[own.key], store).contender.model.state_dict()
    assert all(torch.equal(started[name], base_loss[name]) for name in base_loss)
    lora = next(c for c in queue.cells if c.variant == "lora")
    check_adapters(lora, queue.texts[lora.key], tmp_path)


def check_adapters(own: Cell, text: Any, folder: Path) -> None:
    """Only adapters are trained and checkpointed; an interrupted run ends as a whole one does."""
    whole, parts = (Store(folder / part, folder / "runs") for part in ("whole", "parts"))
    model = Run(own, text, whole).contender.model
    trained = [n for n, p in model.named_parameters() if p.requires_grad]
    assert trained
    assert all("lora_" in name for name in trained)
    first = train_cell(own, text, whole)
    assert train_cell(own, text, parts, lambda step: step == 3) is None
    second = train_cell(own, text, parts)
    assert first is not None
    assert second is not None
    assert first["val_loss"] == second["val_loss"]
    assert first["checkpoint_bytes"] < 2 * first["parameters"]


def test_the_halves_are_disjoint_and_share_a_vocabulary(setting: Setting, folder: Path) -> None:
    base, tuning = finetuning_texts(setting, str(folder / "cache"))
    assert base.digest != tuning.digest
    assert base.num_documents == tuning.num_documents == 20
    assert base.tokenizer.get_vocab() == tuning.tokenizer.get_vocab()


def test_documentation_is_the_strings_alone() -> None:
    source = '"""Top."""\n\ndef f():\n    """Inner."""\n    return 1\n'
    assert documentation(source) == "Top.\n\nInner."
    assert documentation("def broken(") == ""


# -- refusals ---------------------------------------------------------------------------------------


def test_an_unknown_variant_is_refused_with_the_table() -> None:
    with pytest.raises(ValueError, match="legal: adamw, adamw_quarter, galore, fira, apollo"):
        select(["adamw", "adamm"], "sweep")
    with pytest.raises(ValueError, match="legal for it: the finetune stage"):
        select(["lora"], "sweep")


def test_adamw_with_a_factor_moves_the_matrices_by_that_share(setting: Setting) -> None:
    moved = {}
    for name in ("adamw", "adamw_quarter"):
        model = build_model(setting, 0)
        before = {key: p.detach().clone() for key, p in model.named_parameters()}
        contender = build(name, model, setting.shape.hidden, setting.hyper(1e-2, 0))
        contender.set_learning_rate(1e-2)
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        contender.optimizer.step()
        # The first step of AdamW is lr * sign(gradient) and lr * decay * weight.
        decay = {key: setting.decay * value for key, value in before.items()}
        moved[name] = {k: before[k] - decay[k] - p.detach() for k, p in model.named_parameters()}
        matrices = set(contender.matrices)
    for key, whole in moved["adamw"].items():
        share = 0.25 if key in matrices else 1.0
        torch.testing.assert_close(moved["adamw_quarter"][key], share * whole, atol=1e-6, rtol=1e-3)


@pytest.mark.parametrize(
    ("name", "lr"), [("adamw", 1e-3), ("adamw", 4e-3), ("galore", 1e-2), ("hmt_d4", 1e-2)]
)
def test_decay_takes_the_same_of_a_weight_at_every_rate(
    name: str, lr: float, setting: Setting
) -> None:
    model = build_model(setting, 0)
    before = {key: p.detach().clone() for key, p in model.named_parameters()}
    contender = build(name, model, setting.shape.hidden, setting.hyper(lr, 0))
    contender.set_learning_rate(lr)
    tokens = torch.zeros(1, 8, dtype=torch.long)
    (0 * model(input_ids=tokens, labels=tokens).loss).backward()
    contender.optimizer.step()
    for key, p in model.named_parameters():
        torch.testing.assert_close(p.detach(), (1 - 1e-4) * before[key], atol=1e-7, rtol=1e-6)
    contender.close()


@pytest.mark.parametrize(
    ("kind", "options", "text"),
    [
        ("hmt", {"rnak": 16}, "unknown option rnak; legal for hmt: method, projection, rank"),
        ("hmt", {"residual": "some"}, "hmt.optimizer.residual is 'some'"),
        ("galore", {"rank": 4, "gap": 200}, "unknown option gap; legal for galore: rank"),
        ("adamw", {"rank": 4}, "legal for adamw: scale"),
        ("galore", {"activations": {}}, "unknown option activations"),
        (
            "hmt",
            {"activations": {"policy": {"lm_head": "project"}}},
            r"policy\.lm_head: got 'project'",
        ),
        ("adamw", {"activations": {"policy": "plan"}}, "write the policy out"),
    ],
)
def test_a_wrong_option_stops_the_command(
    kind: str,
    options: dict[str, Any],
    text: str,
    setting: Setting,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(table.VARIANTS, "wrong", Variant(kind, options, (1e-3,)))
    with pytest.raises(ValueError, match="(?s)wrong.*" + text):
        check_variants(["wrong"], setting)


def test_every_variant_of_the_table_can_be_constructed(setting: Setting) -> None:
    check_variants(VARIANTS, replace(setting, model="3m"))


def test_what_a_machine_lacks_is_a_reason_to_skip(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, hyper = build_model(setting, 0), setting.hyper(1e-3, 0)
    with pytest.raises(Unavailable, match="NF4 on CUDA only"):
        build("qlora", model, 64, hyper)
    monkeypatch.setitem(sys.modules, "galore_torch.adamw", None)
    with pytest.raises(Unavailable, match=r"galore_torch.* is not installed: pip install"):
        build("galore", model, 64, hyper)


def test_the_command_refuses_in_one_line(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "launch" / "compare.py"), "sweep", "--model", "toy"]
    command += ["--variants", "sgd", "--output", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert (
        done.stderr.strip().splitlines()[-1].startswith("compare.py: --variants 'sgd' is unknown")
    )


def test_toy_results_are_kept_from_the_committed_ones(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["compare.py", "sweep", "--model", "toy"])
    with pytest.raises(SystemExit):
        compare.parse_arguments()
    assert "--model toy needs --output" in capsys.readouterr().err


# -- Fira, speed, report ----------------------------------------------------------------------------


def test_fira_at_full_rank_has_no_residual_and_is_adam_in_its_basis() -> None:
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.zeros(6, 4, dtype=torch.float64))
    group = {"params": [weight], "rank": 4, "update_proj_gap": 9, "scale": 1.0}
    fira = Fira([{**group, "norm_growth_limit": 1.01}], 0.1, (0.9, 0.95), 0.0, 0.0)
    weight.grad = torch.randn(6, 4, dtype=torch.float64)
    fira.step()
    basis = fira.state[weight]["basis"]
    expected = -0.1 * (weight.grad @ basis).sign() @ basis.t()  # Adam's first step is the sign
    torch.testing.assert_close(weight.detach(), expected, atol=1e-6, rtol=0)


def test_fira_transposes_and_limits_the_growth() -> None:
    torch.manual_seed(0)
    tall = torch.nn.Parameter(torch.zeros(6, 4))
    wide = torch.nn.Parameter(torch.zeros(4, 6))
    group = {"rank": 2, "update_proj_gap": 1, "scale": 1.0, "norm_growth_limit": 1.01}
    fira = Fira([{"params": [tall, wide], **group}], 0.1, (0.9, 0.95), 1e-8, 0.1)
    norms = []
    for growth in (1.0, 50.0, 50.0):
        tall.grad = growth * torch.randn(6, 4)
        wide.grad = tall.grad.t().clone()
        fira.step()
        norms.append(float(fira.state[tall]["residual_norm"]))
    torch.testing.assert_close(tall.detach(), wide.detach().t())
    assert all(b <= 1.0101 * a for a, b in pairwise(norms))


def test_speed_alternates_and_skips_with_a_reason(
    setting: Setting, data: Any, tmp_path: Path
) -> None:
    path = tmp_path / "speed.json"
    names = ["adamw", "hmt_d4", "hmt_proposed", "adamw_activations"]
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
    measure_speed(["adamw"], setting, data, 2, store.results / "speed.json")
    folder = write_report(store, store.results / "speed.json")
    with open(folder / "cells.csv", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["variant"] for row in rows} == set(TRAINED)
    report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    (experiment,) = report.values()
    own = experiment["variants"]["adamw"]
    assert own["val_loss"] == pytest.approx(results["adamw"]["val_loss"])
    assert own["speed_measured_alone"] is True
    assert own["lr_at_the_edge"] is True
    text = (folder / "report.md").read_text(encoding="utf-8")
    assert all(f"| {name} |" in text for name in TRAINED)
    for picture in ("loss", "memory"):
        name = f"{experiment['name']}-{picture}.png"
        assert (folder / name).stat().st_size > 5000
        assert f"({name})" in text


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


def markdown_rows(text: str) -> dict[str, dict[str, str]]:
    """Rows of a Markdown table by their first cell; each must have as many cells as the headers."""
    lines = [line.split("|")[1:-1] for line in text.splitlines() if line.startswith("|")]
    head, _, *rows = ([word.strip() for word in line] for line in lines)
    return {row[0]: dict(zip(head, row, strict=True)) for row in rows}


def test_the_report_has_every_metric_of_the_paper(
    store: Store, results: dict[str, dict[str, Any]]
) -> None:
    folder = write_report(store, store.results / "speed.json")
    with open(folder / "cells.csv", encoding="utf-8", newline="") as file:
        row = next(own for own in csv.DictReader(file) if own["variant"] == "hmt_d4")
    (experiment,) = json.loads((folder / "report.json").read_text(encoding="utf-8")).values()
    line = experiment["variants"]["hmt_d4"]
    shown = markdown_rows((folder / "report.md").read_text(encoding="utf-8"))["hmt_d4"]
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
    for variant in ("hmt_d4", "hmt_auto_side_d4", "hmt_full_residual_d4"):
        store.write(cell(setting, data, variant), older)
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
    (store.results / "cells" / "older.json").write_text(json.dumps(record))
    found = [weight_decay(experiment["setting"]) for experiment in summaries(store.records(), {})]
    assert sorted(found) == ["0.0001 / lr", "0.1"]
    assert best_rate(store, "adamw", setting, data.digest) == newer.lr


def test_a_report_of_nothing_says_what_to_run(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"compare\.py sweep"):
        write_report(Store(tmp_path, tmp_path), tmp_path / "speed.json")


def test_finals_are_compared_with_adamw_at_the_same_seeds(
    results: dict[str, dict[str, Any]], setting: Setting, data: Any, tmp_path: Path
) -> None:
    store = Store(tmp_path, tmp_path / "runs")
    for variant, seed, loss in (("adamw", 0, 2.0), ("adamw", 1, 4.0), ("hmt_d4", 1, 3.0)):
        final = replace(cell(setting, data, variant), stage="final", seed=seed)
        store.write(final, {**results[variant], "val_loss": loss})
    head, _, *rows = (line.split(" | ") for line in headline(store).splitlines())
    found = {row[1]: dict(zip(head, row, strict=True)) for row in rows}
    assert found["hmt_d4"]["against AdamW"] == "-25.0%"
    assert (found["adamw"]["against AdamW"], found["adamw"]["seeds"]) == ("", "2")
    assert found["adamw"]["validation loss"].startswith("3.000 ±")
    with pytest.raises(ValueError, match=r"compare\.py final"):
        headline(Store(tmp_path / "empty", tmp_path))


def test_rates_are_compared_at_the_seeds_that_all_of_them_have(
    results: dict[str, dict[str, Any]], setting: Setting, data: Any, tmp_path: Path
) -> None:
    store = Store(tmp_path, tmp_path / "runs")
    losses = {(1e-3, 0): 3.0, (1e-3, 1): 2.0, (2e-3, 0): 2.9, (4e-3, 0): 3.1}
    for stage in ("sweep", "final"):
        for (lr, seed), loss in losses.items():
            own = replace(cell(setting, data, "adamw"), stage=stage, lr=lr, seed=seed)
            store.write(own, {**results["adamw"], "val_loss": loss})
    assert best_rate(store, "adamw", setting, data.digest) == 2e-3  # 1e-3 by the mean of its seeds
    final = next(e for e in summaries(store.records(), {}) if e["stage"] == "final")
    assert final["variants"]["adamw"]["lr"] == 2e-3
    shorter = replace(cell(setting, data, "adamw"), lr=8e-3, tokens=1)
    store.write(shorter, {**results["adamw"], "val_loss": 1.0})
    assert best_rate(store, "adamw", setting, data.digest) == 2e-3
    apart = [{"lr": lr, "seed": seed, "val_loss": 1.0} for seed, lr in enumerate((1e-3, 2e-3))]
    assert lowest_rate([*apart, {**apart[1], "seed": 2, "val_loss": 0.5}]) == 2e-3


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
