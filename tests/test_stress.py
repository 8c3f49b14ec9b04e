"""`launch/stress.py` with a few of everything, and what its cases found."""

from __future__ import annotations

import json
import re
import resource
import runpy
import signal
import subprocess
import sys
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Ranks
from training import ds_config, make_engine, train

import hmt_deepspeed
from hmt_deepspeed.config import HMTConfig
from reliability import order_worker
from reliability.json_configs import (
    _FIELDS,
    _STRUCTURED,
    _legal,
    _put,
    random_config,
)
from reliability.long_run import _MOST
from reliability.random_configs import _problem

STRESS = Path(__file__).resolve().parents[1] / "launch" / "stress.py"


def stress(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(STRESS), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


# -- random configs ---------------------------------------------------------------------------------


def test_random_jsons_are_repeatable_and_of_every_kind() -> None:
    drawn = [random_config(seed, "/ssd") for seed in range(300)]
    assert drawn == [random_config(seed, "/ssd") for seed in range(300)]
    json.dumps(drawn)
    assert {config["zero_optimization"]["stage"] for config in drawn} == {0, 1, 2, 3}
    blocks = [config["hmt"] for config in drawn if isinstance(config.get("hmt"), dict)]
    assert {name for block in blocks for name in block} >= set(HMTConfig.model_fields)
    given = {
        key
        for block in blocks
        if isinstance(block.get("optimizer"), dict)
        for key in block["optimizer"]
    }
    assert set(type(HMTConfig().optimizer).model_fields) <= given


def test_what_is_drawn_for_a_field_is_legal_for_it() -> None:
    refused = []
    for key, schema in _FIELDS.items():
        for seed in range(20):
            draw, block = Random(seed), {}
            value = _STRUCTURED[key](draw) if key in _STRUCTURED else _legal(draw, schema)
            _put(block, key.split(".")[1:], value)
            try:
                HMTConfig.from_block(block)
            except ValueError as error:
                refused.append((key, value, str(error)))
    # By itself it may ask for another field, or be of no use.
    assert [found for found in refused if "Legal:" in found[2]] == []


def test_every_random_block_is_taken_or_refused_with_its_keys() -> None:
    messages = []
    for seed in range(300):
        try:
            HMTConfig.from_block(random_config(seed, "/ssd").get("hmt", {}))
        except ValueError as error:
            messages.append(str(error))
    assert 30 < len(messages) < 200
    for message in messages:
        assert message.startswith('The "hmt" ')
        assert re.search(r"remove|[Cc]hange|set |[Ww]rite|Move|Rename|choose|Use ", message), (
            message
        )


def built(first: int, last: int, folder: str) -> dict[int, tuple[str, str]]:
    from deepspeed.accelerator import get_accelerator

    from reliability.build_worker import outcome

    get_accelerator().is_fp16_supported = lambda: True
    return {seed: outcome(random_config(seed, folder)) for seed in range(first, last)}


def test_random_configs_train_or_are_refused(ranks: Ranks, tmp_path: Path) -> None:
    found = ranks.run(built, 1, 0, 16, str(tmp_path))[0]
    assert {kind for kind, _ in found.values()} == {"trained", "refused"}, found


@pytest.mark.parametrize(
    ("code", "output", "expected", "problem"),
    [
        (0, "", "trained", None),
        (1, "error: a", "refused", None),
        (None, "", "trained", "hung"),
        (1, "error: a", "trained", "ended with 1"),
        (0, "", "refused", "but ran"),
        (1, "Traceback (most recent call last)\nerror: a", "refused", "traceback"),
        (1, "error: a\nerror: b", "refused", "2 errors"),
        (1, "", "refused", "0 errors"),
    ],
)
def test_how_a_launched_run_may_end(
    code: int | None, output: str, expected: str, problem: str | None
) -> None:
    found = _problem(code, output, expected)
    assert (found is None) if problem is None else problem in (found or "")


# -- a full disk ------------------------------------------------------------------------------------


def fill_disk(folder: str, stage: int, full_rank: int, limit: int) -> dict[str, Any]:
    """The second of three checkpoints cannot be written by one rank."""
    engine = make_engine(ds_config(stage))
    train(engine, 1)
    engine.save_checkpoint(folder)
    train(engine, 1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == full_rank:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limits[1]))
    error = ""
    try:
        engine.save_checkpoint(folder)
    except OSError as caught:
        error = str(caught)
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    dist.barrier()
    tags = sorted(path.name for path in Path(folder).iterdir() if path.is_dir())
    loaded, _ = engine.load_checkpoint(folder)
    engine.save_checkpoint(folder, tag="after")
    return {"error": error, "tags": tags, "loaded": loaded}


# Rank 1 fails at its own states; rank 0 also at the manifest and at DeepSpeed's script.
@pytest.mark.parametrize(("stage", "rank", "limit"), [(2, 1, 100), (3, 0, 0), (2, 0, 100_000)])
def test_a_full_disk_is_an_error_on_every_rank_and_costs_no_earlier_checkpoint(
    ranks: Ranks, tmp_path: Path, stage: int, rank: int, limit: int
) -> None:
    for found in ranks.run(fill_disk, 2, str(tmp_path), stage, rank, limit):
        assert "checkpoint 'global_step2' was not saved" in found["error"]
        assert f"rank {rank}: " in found["error"]
        assert "File too large" in found["error"]
        assert found["tags"] == ["global_step1"]
        assert found["loaded"].endswith("global_step1")
    assert (tmp_path / "after" / "manifest.json").is_file()


# -- many steps -----------------------------------------------------------------------------------------


class Talkative:
    """An engine whose steps print what DeepSpeed's timers print, and do nothing else."""

    skipped_steps = 0

    def __init__(self) -> None:
        self.steps = 0

    def train_micro_batch_size_per_gpu(self) -> int:
        return 1

    def __call__(self, **inputs: Any) -> SimpleNamespace:
        return SimpleNamespace(loss=torch.zeros(()))

    def backward(self, loss: torch.Tensor) -> None:
        pass

    def step(self) -> None:
        for kind in ("micro", "global"):
            print(f"time (ms) | {kind} step {self.steps}: {'0.00 | ' * 20}")
        self.steps += 1


def test_the_worker_of_a_long_run_keeps_nothing_of_what_steps_print(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hmt_deepspeed, "initialize", lambda **_: (Talkative(),))
    found = order_worker._carry_out({"config": {}, "steps": 2001, "memory_every": 500})
    blocks = [memory["python_blocks"] for memory in found["memory"]]
    assert blocks[-1] - blocks[1] < 1500 * _MOST["python_blocks"], blocks
    assert "global step 2000: " in found["said"]
    assert len(found["said"]) <= 2000


# -- the command ------------------------------------------------------------------------------------


def test_small_numbers_are_kept_from_the_results(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [str(STRESS), "kills", "--small"])
    with pytest.raises(SystemExit):
        runpy.run_path(str(STRESS), run_name="__main__")
    assert "--small needs --output" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        "random_configs",
        "dead_rank",
        "bad_batch",
        "full_disk",
        "corrupt_checkpoint",
        "kills",
        "kills_vertical",
        "long_run_fpdt",
        "long_run_vertical",
    ],
)
def test_a_small_version_of_every_case(case: str, tmp_path: Path) -> None:
    done = stress(case, "--small", "--seed", "1", "--output", str(tmp_path))
    assert done.returncode == 0, done.stderr[-3000:]
    (path,) = tmp_path.glob(f"*/stress/{case}.json")
    record = json.loads(path.read_text())
    assert sum(record["counts"].values()) > 0
    assert record["failures"] == []
