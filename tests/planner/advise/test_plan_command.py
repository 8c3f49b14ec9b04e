"""The command `hmt-plan`: what it answers and writes, and what it refuses."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from problems import MACHINE, answer_of

from hmt_deepspeed.planner.command import main
from hmt_deepspeed.planner.model.models import SIZES
from hmt_deepspeed.planner.solve.plan import plan_from_json
from hmt_deepspeed.train.models import PRESETS

TINY = ["--model", "tiny", "--machine", "rtx4090", "--seq_length", "512"]


def test_sizes_are_the_presets_of_the_main_job() -> None:
    for name, preset in PRESETS.items():
        shape = SIZES[name](4096)
        assert (
            shape.hidden,
            shape.intermediate,
            shape.layers,
            shape.heads,
            shape.kv_heads,
        ) == preset[:5]


def test_a_whole_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {name: tmp_path / name for name in ("ds.json", "plan.json", "picture.svg")}
    pytest.importorskip("matplotlib")
    out = answer_of(
        [
            *TINY,
            *(
                "--price_per_hour",
                "0.5",
                "--write",
                str(files["ds.json"]),
                "--save_plan",
                str(files["plan.json"]),
            ),
            *(
                "--picture",
                str(files["picture.svg"]),
                "--method",
                "lowrank_adamw",
                "--num_ssds",
                "0",
            ),
        ],
        capsys,
    )
    for expected in (
        "It fits. Recommended (the fastest exact one): ZeRO-2",
        "bottleneck",
        "tokens/s",
        "MFU",
        "HFU",
        "a million tokens cost",
    ):
        assert expected in out
    assert re.search(
        r"longest sequence at this micro-batch: [\d,]{5,} tokens\nlargest micro-batch.*: \d+", out
    )
    assert json.loads(files["ds.json"].read_text())["optimizer"]["type"] == "HMT"
    drawn = re.findall("<!-- (.*?) -->", files["picture.svg"].read_text())  # its texts
    assert {"GPU", "forward", "backward", "update", "held"} <= set(drawn)  # rows and colours
    assert {"seconds of an iteration", "GPU memory, GiB", "limit, 22.0 GiB"} <= set(drawn)
    assert any("B parameters" in text for text in drawn)
    saved = plan_from_json(files["plan.json"].read_text())
    assert saved.num_layers == 4
    again = answer_of(
        [*TINY, "--method", "lowrank_adamw", "--num_ssds", "0", "--plan", str(files["plan.json"])],
        capsys,
    )
    assert f"the plan in {files['plan.json']}" in again
    assert "simulated: " in again
    with pytest.raises(SystemExit, match="error: the plan is of model"):
        main([*TINY[2:], "--model", "125m", "--num_ssds", "0", "--plan", str(files["plan.json"])])


def test_what_to_change_where_nothing_fits(capsys: pytest.CaptureFixture[str]) -> None:
    size = ["--model", "7b", "--machine", "rtx4080", "--host_memory", "16", "--num_ssds", "0"]
    out = answer_of([*size, "--seq_length", "4096", "--method", "adamw"], capsys)
    assert "does not fit" in out
    assert "too much gpu" in out
    assert re.search(r"gpu: \d+\.\d+ GiB over 14.00", out)
    assert "a GPU of" in out
    assert "--lossy" in out


def test_a_config_folder_is_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import LlamaConfig

    LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=100,
    ).save_pretrained(tmp_path)
    size = ["--model", str(tmp_path), *TINY[2:], "--num_ssds", "0", "--zero_stage", "1"]
    written = tmp_path / "ds.json"
    out = answer_of([*size, "--method", "lowrank_adamw", "--write", str(written)], capsys)
    assert out.startswith("llama, ")
    assert (
        json.loads(written.read_text())["hmt"]["optimizer"]["rank"] == 128
    )  # narrower matrices lower it


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--model is missing; legal: tiny"),
        (["--model", "tiny"], "--machine is missing; legal: rtx4090"),
        (["--model", "9b", "--machine", "rtx4090"], "--model is '9b'; legal: tiny, 125m"),
        (["--model", "tiny", "--machine", "abacus"], "machine is 'abacus'; legal: rtx4090"),
        ([*TINY, "--host_memory", "-1"], "host_memory is -"),
        ([*TINY, "--gpu_memory", "99"], "gpu_memory is .*; legal: up to 25769803776 bytes"),
        ([*TINY, "--gpu_memory", "0"], "memory limit gpu is 0"),
        (
            [*TINY, "--micro_batch", "3", "--global_batch", "4"],
            "global_batch is 4; legal: a multiple of 3",
        ),
        ([*TINY, "--micro_batch", "0"], "micro_batch is 0"),
        ([*TINY, "--seq_length", "0"], "seq_length is 0"),
        (
            [*TINY, "--zero_stage", "2", "--offload_param", "cpu"],
            "offload_param is 'cpu' at zero_stage 2",
        ),
        ([*TINY, "--rank", "0"], "rank is 0"),
        ([*TINY, "--num_ssds", "0", "--plan", "nowhere.json"], "--plan nowhere.json: no such file"),
    ],
)
def test_bad_input_ends_with_one_clear_line(arguments: list[str], message: str) -> None:
    with pytest.raises(SystemExit, match=f"error: .*{message}"):
        main(arguments)


def test_zero_bandwidth_in_a_profile_is_refused(tmp_path: Path) -> None:
    profile = tmp_path / "machine.json"
    profile.write_text(
        re.sub(r'"device_to_host": [\d.]+', '"device_to_host": 0', MACHINE.to_json())
    )
    with pytest.raises(SystemExit, match="error: machine: device_to_host is 0"):
        main(["--model", "tiny", "--machine", str(profile)])


def test_no_picture_without_matplotlib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(
        SystemExit, match=r"needs matplotlib, which is not installed\. pip install matplotlib"
    ):
        main([*TINY, "--num_ssds", "0", "--picture", str(tmp_path / "p.png")])


def test_the_entry_point_answers() -> None:
    script = Path(__file__).resolve().parents[3] / "launch" / "plan.py"
    done = subprocess.run(
        [sys.executable, str(script), "--help"], capture_output=True, text=True, check=True
    )
    assert "--machine" in done.stdout


@pytest.mark.parametrize("batch", [[], ["--seq_length", "1024", "--global_batch", "64"]])
def test_a_70b_on_one_card_is_recommended_from_host_memory_alone(
    batch: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Lossy, of larger steps where none are asked for, and without the machine's SSDs."""
    written = tmp_path / "ds.json"
    asked = ["--model", "70b", "--machine", "rtx4090", "--host_memory", "192", *batch]
    told = " ".join(answer_of([*asked, "--write", str(written)], capsys).split())
    assert "Recommended (lossy: three times as fast as exact ones" in told
    assert "bottleneck: gpu" in told
    speed = re.search(r"([\d,]+) tokens/s, [\d.]+ TFLOPS", told)
    assert speed is not None
    assert int(speed[1].replace(",", "")) > 250
    assert "worn out" not in told
    config = json.loads(written.read_text())
    assert config["hmt"]["accumulation"] == "vertical"
    assert config["hmt"]["activations"]["policy"]["layer_input"] == "swap_host_int8"
    assert "nvme" not in written.read_text()
