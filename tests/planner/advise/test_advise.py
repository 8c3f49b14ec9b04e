"""The command: what it recommends, the JSON it writes, what it refuses."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from problems import MACHINE

from hmt_deepspeed.config import HMTConfig
from hmt_deepspeed.config.components import PAPER_POLICY
from hmt_deepspeed.planner.advise.advise import (
    advise,
    evaluate,
    largest_batch,
    longest_in_chunks,
    longest_sequence,
)
from hmt_deepspeed.planner.advise.deepspeed_json import deepspeed_json
from hmt_deepspeed.planner.advise.describe import describe
from hmt_deepspeed.planner.advise.setups import Request
from hmt_deepspeed.planner.command import main
from hmt_deepspeed.planner.hardware import named_machine
from hmt_deepspeed.planner.model.models import SIZES, model_shape
from hmt_deepspeed.planner.model.shapes import ModelShape
from hmt_deepspeed.planner.run.fpdt import fpdt_bytes
from hmt_deepspeed.planner.run.memory import OptimizerMode
from hmt_deepspeed.planner.run.problem import RunSetup
from hmt_deepspeed.planner.solve.plan import plan_from_json
from hmt_deepspeed.train.models import PRESETS

GIB = 2**30
SETUP, MODE = RunSetup(zero_stage=2), OptimizerMode(rank=32)
TINY = ["--model", "tiny", "--machine", "rtx4090", "--seq_length", "512"]


def request_for(gpu_gib: float = 24.0, **fields: object) -> Request:
    given = {"shape": model_shape("125m"), "machine": MACHINE, "seq_length": 512, "micro_batch": 4}
    return Request(**{**given, "gpu_memory": int(gpu_gib * 1e9), **fields})  # type: ignore[arg-type]


def run(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    main(arguments)
    return capsys.readouterr().out


# -- how far it goes ------------------------------------------------------------------------------------


def test_bisection_finds_the_last_that_fits() -> None:
    request = request_for(gpu_gib=4.0)
    batch = largest_batch(request, SETUP, MODE)
    length = longest_sequence(request, SETUP, MODE)
    assert batch > 1
    assert length > 512
    assert length % 8 == 0
    for changed, fits in (
        (replace(request, micro_batch=batch), True),
        (replace(request, micro_batch=batch + 1), False),
        (replace(request, seq_length=length), True),
        (replace(request, seq_length=length + 8), False),
    ):
        assert (evaluate(changed, SETUP, MODE).plan is not None) == fits
    assert largest_batch(request_for(gpu_gib=0.2), SETUP, MODE) == 0


def test_learned_positions_end_the_sequence() -> None:
    shape: ModelShape = replace(model_shape("125m"), positions=1024)
    assert longest_sequence(request_for(shape=shape), SETUP, MODE) == 1024


# -- what it recommends ---------------------------------------------------------------------------------


def test_the_fastest_that_fits_comes_first() -> None:
    advice = advise(request_for(cpu_adam=False))
    speeds = [answer.tokens_per_second for answer in advice.answers]
    assert speeds == sorted(speeds, reverse=True)
    assert advice.fits
    assert advice.best.problem.setup.offload_param == "none"  # nothing has to move
    assert advice.best.estimate.fits
    assert advice.best.simulation is not None
    assert advice.largest_batch >= 4
    assert advice.longest_sequence >= 512
    assert advice.longest_in_chunks > 4 * advice.longest_sequence


def test_what_chunks_may_use_is_what_states_leave() -> None:
    """FPDT's own formula, with the budget less what is there between two steps."""
    request = request_for(cpu_adam=False)
    best = advise(request).best
    at_rest = ("weights", "gathered weights", "gradients", "optimizer states", "probes")
    room = best.problem.budget.gpu - sum(best.estimate.memory["gpu"].get(k, 0) for k in at_rest)
    longest = longest_in_chunks(best)
    sizes = {"micro_batch": request.micro_batch}
    assert fpdt_bytes(request.shape, longest, 256, **sizes).device <= room
    assert fpdt_bytes(request.shape, longest + 256, 256, **sizes).device > room


def test_lossy_setups_are_listed_and_recommended_where_nothing_exact_fits_or_they_may_be() -> None:
    small = OptimizerMode(rank=32, master_weights="none", state_dtype="int8")
    asked = {"modes": (MODE,), "lossy_modes": (small,), "cpu_adam": False, "offload_param": "none"}
    roomy, tight = advise(request_for(**asked)), advise(request_for(gpu_gib=1.6, **asked))
    either = advise(request_for(lossy={}, **asked))
    for advice in (roomy, tight, either):
        assert {(a.mode == small, a.is_lossy) for a in advice.answers} == {
            (True,) * 2,
            (False,) * 2,
        }
        assert advice.fits
    assert roomy.best.mode == MODE
    assert either.best == either.answers[0]
    assert roomy.faster == ((either.best,) if either.best.is_lossy else ())
    assert tight.best.mode == small


def test_a_lossy_policy_that_was_asked_for_is_no_reason_to_leave_it() -> None:
    """Where only what keeps masters on SSDs holds activations exactly, at a hundredth of the speed."""
    asked = {"modes": (MODE,), "fixed": PAPER_POLICY}
    advice = advise(request_for(**asked))
    assert any(answer.is_stock and not answer.is_lossy for answer in advice.answers)
    assert advice.best == advice.answers[0]
    assert advice.best.is_lossy
    told = " ".join(describe(advice).split())
    assert "the fastest with this policy whose states and weights are exact" in told


def test_70b_on_one_gpu_of_24_gb(capsys: pytest.CaptureFixture[str]) -> None:
    """What keeps no masters needs no SSD, and is faster than all that is exact."""
    size = [
        "--model",
        "70b",
        "--machine",
        "rtx4090",
        "--host_memory",
        "192",
        "--seq_length",
        "1024",
    ]
    told = run([*size, "--global_batch", "64", "--method", "lowrank_adamw"], capsys)
    groups = {part.split()[0]: listed(part) for part in told.split("\n\n") if "  setup" in part}
    assert set(groups) == {"Lossy", "Setups"}  # the latter do not fit
    no_masters = "ZeRO-3, weights on cpu, lowrank_adamw r=128, no masters"
    assert f"too much gpu: {no_masters}" in groups["Setups"]
    assert groups["Lossy"][f"{no_masters}, int8 states"] > 50
    speeds = list(groups["Lossy"].values())
    assert speeds == sorted(speeds, reverse=True)
    assert all(name.startswith("too much ") for name in groups["Setups"])
    assert "Recommended (lossy: no exact setup fits): " in told


def listed(table: str) -> dict[str, float | None]:
    """Tokens/s by setup of one of the answer's tables; names go on over lines that hold no number."""
    found: dict[str, float | None] = {}
    head, *lines = table[table.index("tokens/s") :].splitlines()
    column = head.index("setup")
    for line in lines:
        speed, name = line[:8].strip(), line[column:].strip()
        if speed and name:
            found[name] = None if speed == "-" else float(speed.replace(",", ""))
        elif name and found:
            last, value = found.popitem()
            found[f"{last} {name}"] = value
    return found


@pytest.mark.parametrize(
    "asked",
    [
        "--model 7b --machine rtx4090",
        "--model 13b --machine rtx4090 --num_gpus 4 --global_batch 64 --offload_param nvme",
        "--model 1b --machine h100 --policy paper --lossy --price_per_hour 3",
        "--model 7b --machine rtx4080 --host_memory 16 --num_ssds 0 --method adamw",
    ],
)
def test_an_answer_is_80_columns_wide_and_every_number_has_a_unit(
    asked: str, capsys: pytest.CaptureFixture[str]
) -> None:
    told = run(asked.split(), capsys)
    assert [line for line in told.splitlines() if len(line) > 80] == []
    assert "Memory is in GiB per rank" in told
    for table in (part for part in told.split("\n\n") if "  setup" in part):
        assert all(re.search(r"ZeRO-\d, ", name) for name in listed(table)), table
    if "It fits" in told:
        assert re.search(r"^seconds of each +[\d.]+", told, re.M)


ADAMW_ONLY = {"modes": (OptimizerMode(method="adamw"),)}


def test_states_in_host_memory_run_under_hmt() -> None:
    advice = advise(request_for(gpu_gib=1.9, nvme=False, **ADAMW_ONLY))
    assert advice.fits
    setup = advice.best.problem.setup
    assert setup.offload_optimizer == "cpu"
    assert setup.overlap == ("forward" if setup.zero_stage == 3 else "none")
    config = deepspeed_json(advice.request, advice.best)
    assert config["optimizer"]["type"] == "HMT"
    assert config["hmt"]["optimizer"] == {"method": "adamw"}
    zero = config["zero_optimization"]
    assert zero["offload_optimizer"] == {"device": "cpu", "pin_memory": False}
    assert zero["stage"] == setup.zero_stage
    HMTConfig.from_block(config["hmt"])


def test_masters_of_low_rank_matrices_in_host_memory_run_under_hmt() -> None:
    advice = advise(request_for(nvme=False, zero_stage=2, modes=(MODE,)))
    answers = {
        (answer.mode.method, answer.problem.setup.offload_optimizer): answer
        for answer in advice.answers
    }
    assert set(answers) == {("lowrank_adamw", "none"), ("lowrank_adamw", "cpu"), ("adamw", "cpu")}
    on_gpu, on_host = (answers["lowrank_adamw", place] for place in ("none", "cpu"))
    assert on_host.name == "ZeRO-2, masters on cpu, lowrank_adamw r=32"
    held, left = (a.estimate.memory["gpu"]["optimizer states"] for a in (on_gpu, on_host))
    assert held - left == on_host.estimate.memory["host"]["optimizer states"]
    assert 0 < left < 0.2 * held  # low-rank moments and bases stay
    config = deepspeed_json(advice.request, on_host)
    assert config["zero_optimization"]["offload_optimizer"]["device"] == "cpu"
    assert config["hmt"]["optimizer"] == {"method": "lowrank_adamw", "rank": 32}
    HMTConfig.from_block(config["hmt"])


def test_states_on_ssd_are_deepspeeds_own() -> None:
    request = request_for(zero_stage=3, offload_param="nvme", **ADAMW_ONLY)
    (answer,) = (answer for answer in advise(request).answers if answer.is_stock)
    config = deepspeed_json(request, answer, nvme_path="/ssd")
    assert config["optimizer"]["type"] == "AdamW"
    assert "hmt" not in config
    assert config["zero_optimization"]["offload_optimizer"]["device"] == "nvme"
    assert set(answer.plan.counts()["residual"]) == {"recompute"}  # type: ignore[union-attr]


def test_error_8_wear_of_ssds_and_cost() -> None:
    """Equations 4 and 5 count the seconds of writing, not the bytes that wear SSDs out."""
    machine = replace(MACHINE, price_per_hour=3.6, ssd_endurance=1e15)
    request = request_for(
        machine=machine, zero_stage=3, offload_param="nvme", cpu_adam=False, modes=(MODE,)
    )
    best = advise(request).best
    assert best.cost_per_million_tokens == pytest.approx(1e-3 / best.tokens_per_second * 1e6)
    written = best.estimate.ssd_written
    assert written >= 2 * best.problem.workload.parameters  # the weights come back from the update
    assert best.ssd_bytes_per_day == pytest.approx(written / best.plan.seconds * 86400)  # type: ignore[union-attr]


def test_the_time_limit_holds_before_any_plan_is_known() -> None:
    """7B, weights and masters in scarce host memory: rounding finds nothing there, and a search to the end of its
    tree took minutes."""
    machine = named_machine("rtx4090", num_ssds=2, host_memory=64 * GIB)
    request = Request(model_shape("7b"), machine, 4096, 2, 16)
    setup = RunSetup(
        zero_stage=3,
        offload_param="cpu",
        offload_optimizer="cpu",
        accumulation=8,
        overlap="forward",
        holds_gradients=True,
    )
    start = time.process_time()
    answer = evaluate(request, setup, OptimizerMode(host_is_ours=True))
    assert answer.plan is not None
    assert answer.estimate.fits
    assert time.process_time() - start < 6  # four searches of half a second, and their simulations


# -- the JSON -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"zero_stage": 3, "offload_param": "cpu"},
        {"zero_stage": 3, "offload_param": "nvme", "global_batch": 16},
        {"modes": (OptimizerMode(method="apollo"),)},
        {"modes": (OptimizerMode(rank=32, master_weights="none", state_dtype="int8"),)},
        {"machine": replace(MACHINE, num_gpus=2)},
    ],
)
def test_the_json_says_what_was_planned_and_is_accepted(fields: dict) -> None:
    request = request_for(**{"cpu_adam": False, "modes": (MODE,), "gpu_gib": 3.5, **fields})
    advice = advise(request)
    best, plan = advice.best, advice.best.plan
    assert plan is not None
    config = deepspeed_json(request, best, nvme_path="/ssd")
    zero, setup = config["zero_optimization"], best.problem.setup
    assert zero["stage"] == setup.zero_stage
    assert zero.get("offload_param", {}).get("device", "none") == setup.offload_param
    assert config["gradient_accumulation_steps"] == request.accumulation
    block = json.loads(json.dumps(config["hmt"]))
    assert block["optimizer"]["method"] == best.mode.method
    for layer in range(12):
        for component, choice in plan.choices_of(layer).items():
            name = f"model.layers.{layer}"
            overrides = block["activations"].get("overrides", {}).items()
            found = [c[component] for p, c in overrides if re.search(p, name) and component in c]
            assert [*found, block["activations"]["policy"][component]][0] == choice
    if (
        "activations" not in HMTConfig.model_fields
    ):  # its config is another branch's until that is merged
        del block["activations"]
    HMTConfig.model_validate(block)


def test_the_json_needs_a_plan_and_a_folder_for_ssds() -> None:
    request = request_for(zero_stage=3, offload_param="nvme", cpu_adam=False, modes=(MODE,))
    with pytest.raises(ValueError, match="uses SSDs; legal: with --nvme_path"):
        deepspeed_json(request, advise(request).best)
    short = request_for(gpu_gib=0.2, cpu_adam=False)
    with pytest.raises(ValueError, match="does not fit: there is nothing to write"):
        deepspeed_json(short, advise(short).best)


# -- the command ----------------------------------------------------------------------------------------


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
    out = run(
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
    again = run(
        [*TINY, "--method", "lowrank_adamw", "--num_ssds", "0", "--plan", str(files["plan.json"])],
        capsys,
    )
    assert f"the plan in {files['plan.json']}" in again
    assert "simulated: " in again
    with pytest.raises(SystemExit, match="error: the plan is of model"):
        main([*TINY[2:], "--model", "125m", "--num_ssds", "0", "--plan", str(files["plan.json"])])


def test_what_to_change_where_nothing_fits(capsys: pytest.CaptureFixture[str]) -> None:
    size = ["--model", "7b", "--machine", "rtx4080", "--host_memory", "16", "--num_ssds", "0"]
    out = run([*size, "--seq_length", "4096", "--method", "adamw"], capsys)
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
    out = run([*size, "--method", "lowrank_adamw", "--write", str(written)], capsys)
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
