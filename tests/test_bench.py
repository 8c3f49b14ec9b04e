"""`launch/bench.py` at toy sizes: the code of the real cases, and what their JSON must hold."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import forked_bench
import pytest
from harness import Ranks

from benchmarks import gpu, gpu_bytes

CASE_FIELDS = {
    "command",
    "measured_at",
    "run_seconds",
    "threads",
    "load_average_before",
    "machine",
    "device",
    "dtype",
    "dtype_reason",
    "toy",
    "settings",
    "measurements",
    "samples",
}
MEASUREMENT_FIELDS = {
    "label",
    "value",
    "unit",
    "relation",
    "target",
    "reached",
    "spread",
    "note",
}


_zygote: list[Ranks] = []


@pytest.fixture(scope="module", autouse=True)
def _served(ranks: Ranks) -> Iterator[None]:
    """Who serves :func:`run_bench`."""
    ranks.preload("benchmarks.suites", "transformers.models.mixtral.modeling_mixtral")
    _zygote.append(ranks)
    yield
    _zygote.clear()


def run_bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    (zygote,) = _zygote
    return zygote.command(forked_bench.__file__, *arguments)


def run_alone(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command itself, with the imports that a fork finds there."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    env["CUDA_VISIBLE_DEVICES"] = ""
    command = [sys.executable, forked_bench.BENCH, *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


def toy_case(
    name: str, folder: Path, suite: str = "foundations", run: Any = run_bench
) -> dict[str, Any]:
    """The record that one toy case leaves in the report."""
    arguments = ("--toy", "--dtype", "fp32", "--case", name, "--output", str(folder))
    done = run(suite, *arguments)
    assert done.returncode == 0, done.stderr[-4000:]
    (path,) = folder.glob(f"*/{suite}.json")
    assert "| case |" in path.with_suffix(".md").read_text(encoding="utf-8")
    return json.loads(path.read_text(encoding="utf-8"))["cases"][name]


def value(case: dict[str, Any], words: str) -> float:
    (found,) = [m["value"] for m in case["measurements"] if words in m["label"]]
    return found


def check_fields(case: dict[str, Any]) -> None:
    assert set(case) >= CASE_FIELDS
    assert {"cpu", "cpu_cores", "torch", "deepspeed", "transformers"} <= set(case["machine"])
    assert case["toy"] is True
    assert case["measurements"]
    for measured in case["measurements"]:
        assert set(measured) == MEASUREMENT_FIELDS
        assert measured["reached"] is None  # a toy says nothing about a target
        assert isinstance(measured["value"], int | float)  # bytes are whole


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("results")


def test_projected_backward(folder: Path) -> None:
    case = toy_case("projected_backward", folder, run=run_alone)
    check_fields(case)
    assert value(case, "fp64") < 1e-12
    samples = case["samples"]["fp32, d=64 r=8, 128 tokens, 2 layers"]
    assert len(samples["ordinary"]) == len(samples["projected"]) == 3
    # Widths: the ordinary backward keeps d and 3 d of input per layer, the projected one r + k
    # columns for each of gate, up and down.
    (saved,) = samples["saved_input_bytes"]
    assert saved["ordinary"] == 2 * 128 * (64 + 192) * 4
    assert saved["projected"] == 2 * 128 * 3 * (8 + 8) * 4


def test_projected_experts(tmp_path: Path) -> None:
    case = toy_case("projected_experts", tmp_path, suite="experts")
    check_fields(case)
    assert value(case, "fp64") < 1e-12
    (samples,) = case["samples"].values()
    assert len(samples["ordinary"]) == len(samples["shared"]) == len(samples["own"]) == 3
    # Beside the gate's: ordinary rows' inputs, H wide, what the gate puts out, and outputs, H wide, which the routing
    # weights' gradients need; 128 tokens of two experts. Projected X [Q | P], 10 columns of each token.
    (saved,) = samples["saved_bytes"]
    assert saved["ordinary"] >= 256 * (64 + 32 + 64) * 4
    routing = 256 * (4 + 8) + 4 * 4
    assert saved["projected"] == 128 * 10 * 4 + routing


def test_memory(folder: Path) -> None:
    case = toy_case("memory", folder)
    check_fields(case)
    assert value(case, "state bytes of low-rank matrices / formula") == 1.0
    assert value(case, "AdamW's moments") <= 0.3
    assert value(case, "(r + k)·m") == 1.0
    assert value(case, "/ m·n") < 0.5


def test_range_finder_of_another_suite(tmp_path: Path) -> None:
    case = toy_case("range_finder", tmp_path, "optimizer")
    check_fields(case)
    assert value(case, "energy of torch.linalg.svd less subspace, warm") < 0.01
    assert value(case, "columns multiplied") < 0.5
    done = run_bench("table", "--output", str(tmp_path))
    assert "| range_finder |" in done.stdout


def test_rank_rules(tmp_path: Path) -> None:
    case = toy_case("rank_rules", tmp_path, "optimizer")
    check_fields(case)
    for threshold in ("0.7", "0.8", "0.9"):
        assert value(case, f"{threshold}: captured energy at equal bytes") > 0
        assert 0 < value(case, f"{threshold}: bytes for the same captured energy") <= 1
    for compared in case["samples"].values():
        assert all(0 < c["captured"] < c["captured by budget"] < 1 for c in compared)


def test_later_energy(tmp_path: Path) -> None:
    case = toy_case("later_energy", tmp_path, "optimizer")
    check_fields(case)
    assert len(case["samples"]) == 2
    for found in case["samples"].values():
        planned = found["planned"]  # the plan that knows later energies is the best there is
        assert 0 < max(planned["own"], planned["expected"]) <= planned["later"] < 1
        assert found["mean expected"] == sorted(found["mean expected"])
        pairs = zip(found["mean expected"], found["mean own"], strict=True)
        assert all(0 < e <= o for e, o in pairs)


def test_bytes_held_by_activations(tmp_path: Path) -> None:
    case = toy_case("held_bytes", tmp_path, "activations")
    check_fields(case)
    held = {name: found["device"] for name, found in case["samples"]["bytes"].items()}
    without = held["no checkpointing"]
    # 2 layers of 64 tokens, fp32: the stream and the input of each layer, codes of attention's output
    # and of the MLP's (192 wide); scales, log-sum-exps, what the final norm holds
    expected = 2 * 64 * (2 * 64 * 4 + 64 + 2 * 192)
    assert expected < held["the paper's table"] < 1.5 * expected < 0.3 * without
    assert held["the paper's table, projected backward"] == held["the paper's table"]
    assert held["swap_host"] == held["swap_ssd"] < held["full recompute"]
    assert held["full recompute"] < held["Hugging Face's gradient checkpointing"]
    assert case["samples"]["bytes"]["swap_host"]["host"] > 0


@pytest.mark.slow
def test_muon_step(tmp_path: Path) -> None:
    case = toy_case("muon_step", tmp_path)
    check_fields(case)
    assert value(case, "time of Muon / low-rank AdamW") > 0
    assert len(case["samples"]["muon"]) == len(case["samples"]["lowrank_adamw"]) == 28


@pytest.mark.slow
@pytest.mark.parametrize("name", ["step_time", "gradient_error", "main_job", "python_time"])
def test_other_cases_of_activations(name: str, tmp_path: Path) -> None:
    check_fields(toy_case(name, tmp_path, "activations"))


@pytest.mark.slow
def test_offload(tmp_path: Path) -> None:
    case = toy_case("host_step", tmp_path, "offload")
    check_fields(case)
    assert value(case, "steps/s, HMT / ZeRO-Offload") > 0
    samples = case["samples"]
    assert len(samples["hmt"]) == len(samples["deepspeed"]) == 5
    assert all(sample["peak_host_bytes"] > 2**27 for sample in samples["hmt"])


@pytest.mark.slow
def test_planning_in_a_run(tmp_path: Path) -> None:
    case = toy_case("in_a_run", tmp_path, "planner")
    check_fields(case)
    held = [m["value"] for m in case["measurements"] if "bytes held" in m["label"]]
    assert len(held) == 4
    assert max(held) < 0.05  # counted as storages, not by the backend


def test_fpdt(tmp_path: Path) -> None:
    case = toy_case("layer_memory", tmp_path, "fpdt")
    check_fields(case)
    assert value(case, "at 512 tokens") <= 1.2
    by_chunks = case["samples"]["bytes_by_chunks"]
    # An eighth, beside the gradients of gate and up, which are alive at once before they join the weights'.
    assert by_chunks["16"] <= by_chunks["2"] / 8 + 2 * 64 * 192 * 4
    assert by_chunks["16"] < by_chunks["4"] / 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["model_memory", "step_time", "alst", "reduction_peak"])
def test_other_cases_of_fpdt(name: str, tmp_path: Path) -> None:
    check_fields(toy_case(name, tmp_path, "fpdt"))


def test_table_prints_the_reports_of_a_folder(folder: Path) -> None:
    toy_case("projected_backward", folder)  # runs again: replaces its entry
    done = run_bench("table", "--output", str(folder))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("fp64: largest error") == 1
    assert (
        "gradient bytes of low-rank matrices / m·n" not in done.stdout
    )  # no target: in the file only
    assert "foundations.md)" in done.stdout
    assert "torch" in done.stdout


@pytest.mark.slow
def test_the_papers_figures() -> None:
    done = run_alone("papers")
    assert done.returncode == 0, done.stderr[-4000:]
    assert (
        "| LoHan, section III | 13B, batch 32, inter-block activations | 12.5 GiB |" in done.stdout
    )


def test_toy_results_are_kept_from_the_committed_ones() -> None:
    done = run_bench("foundations", "--toy", "--case", "memory")
    assert done.returncode == 2
    assert "--toy needs --output" in done.stderr


def test_table_of_an_empty_folder_says_what_to_run(tmp_path: Path) -> None:
    done = run_bench("table", "--output", str(tmp_path))
    assert done.returncode == 1
    assert "launch/bench.py foundations" in done.stderr


@pytest.mark.parametrize(("suite", "name"), [("gpu", "1b"), ("kernels", "low_rank_update")])
def test_suites_that_need_a_gpu_are_skipped_with_a_reason(
    suite: str, name: str, tmp_path: Path
) -> None:
    done = run_bench(suite, "--case", name, "--output", str(tmp_path))
    assert done.returncode == 0
    assert f"skipped {suite} {name}: no CUDA device here; " in done.stdout
    assert not list(tmp_path.iterdir())


def test_fused_update_beside_eager(tmp_path: Path) -> None:
    case = toy_case("low_rank_update", tmp_path, "kernels")
    check_fields(case)
    # bf16 and fp32 weights without and with decay, and an fp32 master with its copy
    shares = [m for m in case["measurements"] if "bandwidth" in m["label"]]
    assert len(shares) == len(case["samples"]) == 5
    assert all((m["relation"], m["target"]) == (">=", 0.7) for m in shares)
    for label, samples in case["samples"].items():
        assert len(samples["fused"]) == len(samples["eager"]) == len(samples["copy_"]) == 3
        bound = 2.0**-7 if "bf16 weight" in label else 2.0**-20
        assert all(error < bound for error in samples["errors"].values())


@pytest.mark.parametrize(
    ("name", "launches", "error"),
    [
        # On a CPU, operators: the twin's own. What 8 bits lose is part of the error of encoding.
        ("low_rank_projection", 2, 2.0**-20),
        ("moment_update", None, 2.0**-20),
        ("factored_moment_update", None, 2.0**-20),
        ("int8_state", None, 0.1),
        ("int8_update", None, 2.0**-6),
        ("activation_codecs", None, 0.1),
        ("dequant_matmul", None, 2.0**-20),
    ],
)
def test_other_kernels_beside_eager(
    name: str, launches: int | None, error: float, tmp_path: Path
) -> None:
    case = toy_case(name, tmp_path, "kernels")
    check_fields(case)
    for label, samples in case["samples"].items():
        counted = samples["launches"]
        assert counted["fused"] == counted["eager"] == (launches or counted["eager"])
        assert value(case, f"{label}: launches") == counted["fused"] > 0
        assert max(samples["errors"].values()) < error
    targets = {m["relation"] for m in case["measurements"] if "launches" in m["label"]}
    assert targets == {"<="}  # one fewer than eager's


def gpu_samples(folder: Path, *options: str, run: Any = run_bench) -> dict[str, Any]:
    """What the suite for a GPU has written after one more toy run."""
    arguments = ("gpu", "--toy", "--dtype", "bf16", "--case", "1b", "--output", str(folder))
    done = run(*arguments, *options)
    assert done.returncode == 0, done.stderr[-4000:]
    (path,) = folder.glob("*/gpu.json")
    assert path.with_suffix(".svg").is_file()
    return json.loads(path.read_text(encoding="utf-8"))["cases"]["1b"]["samples"]


@pytest.mark.slow
def test_every_contender_of_the_gpu_suite_runs(tmp_path: Path) -> None:
    found = gpu_samples(tmp_path, run=run_alone)
    assert not {name: run for name, run in found.items() if "seconds" not in run}


def test_a_contender_is_added_to_what_was_measured_and_refreshes_are_timed_apart(
    tmp_path: Path,
) -> None:
    assert list(gpu_samples(tmp_path, "--contender", "HMT, no masters", "--rounds", "4")) == [
        "HMT, no masters, at most 24 GiB"
    ]
    adamw = ("--contender", "DeepSpeed AdamW, ZeRO-2", "--memory", "8", "--micro_batch", "2")
    found = gpu_samples(tmp_path, *adamw, "--rounds", "2")
    hmt, stock = found.values()
    assert list(found)[1] == "DeepSpeed AdamW, ZeRO-2, at most 8 GiB, micro-batch 2"
    assert (hmt["micro_batch"], stock["micro_batch"]) == (1, 2)
    # after the first round of bases one matrix refreshes in every second step
    kinds = [sample["refreshing"] for sample in hmt["samples"]]
    assert sorted(kinds[:4]) == [0, 0, 1, 1]
    assert [sample["refreshing"] for sample in stock["samples"]] == [0, 0]
    assert stock["refresh_seconds"] == 0 <= hmt["refresh_seconds"]


@pytest.mark.parametrize(
    ("name", "gib"),
    [
        (
            "DeepSpeed AdamW, ZeRO-2",
            107,
        ),  # 16 bytes an element, the heads' and embedding's included
        ("ZeRO-Offload", 13),
        ("HMT", 43),
        ("HMT, no masters", 17),
        ("HMT, INT8 weights, bf16 moments", 11),
    ],
)
def test_what_a_contender_takes_at_least(name: str, gib: int) -> None:
    elements = gpu_bytes.elements_of(gpu._model("7b", False))
    needs = gpu_bytes.least_bytes(gpu.CONTENDERS[name], elements, 2, gpu.RANK)
    assert round(needs.device / 1e9) == pytest.approx(gib, abs=1)
    assert gpu_bytes.why_not(needs, needs.device, needs.host) is None
    assert "of GPU memory, there are" in gpu_bytes.why_not(needs, needs.device - 1, needs.host)


@pytest.mark.slow
def test_the_basis_cache(tmp_path: Path) -> None:
    case = toy_case("basis_cache", tmp_path, "offload")
    check_fields(case)
    assert value(case, "device bytes of bases") < 0.25
    assert value(case, "when they were asked for") > 0.95


@pytest.mark.slow
def test_snapshots(tmp_path: Path) -> None:
    check_fields(toy_case("snapshots", tmp_path, "offload"))
