"""Random JSONs: those that are valid train, the others are refused by one clear error, none hangs."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import nn

from benchmarks.setting import free_port
from reliability.engines import plan_of, small_model
from reliability.json_configs import PLAN, random_config
from reliability.processes import ROOT, environment, run
from reliability.results import CaseReport

__all__ = ["run_case"]

_LAUNCH_SECONDS = 300.0


def run_case(seed: int, small: bool) -> CaseReport:
    """500 are built and trained in-process, 40 of them launched; 40 and 1 in the small version."""
    number, launched = (40, 1) if small else (500, 40)
    report = CaseReport(f"{number} random JSONs built and trained, {launched} of them launched")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / PLAN).write_text(plan_of(small_model(layers=1)))
        found = dict(_built(seed, seed + number, folder))
        for at, (outcome, text) in found.items():
            if outcome == "failed":
                report.failures.append(f"seed {at}: {text[-2000:]}")
            report.count(f"{outcome} in-process")
        draw = random.Random(seed)
        for at in _some(draw, found, launched):
            _launch(at, found[at][0], Path(folder), report)
    return report


def _built(first: int, last: int, nvme_path: str) -> Iterator[tuple[int, tuple[str, str]]]:
    """(seed, (outcome, text)); a process that dies or hangs at one is replaced for the next."""
    while first < last:
        command = [sys.executable, "-m", "reliability.build_worker", str(first), str(last)]
        worker = subprocess.Popen(
            [*command, nvme_path],
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        answers, messages = worker.communicate()
        for line in answers.splitlines():
            answer = json.loads(line)
            yield answer["seed"], (answer["outcome"], answer["text"])
            first = answer["seed"] + 1
        if first < last:
            yield first, ("failed", f"the process ended with {worker.returncode}: {messages}")
            first += 1


def _some(draw: random.Random, found: dict[int, tuple[str, str]], number: int) -> list[int]:
    """Half of them trained in-process, half were refused; fp16 trains only where the device has it."""
    trained = [at for at, (outcome, _) in found.items() if outcome == "trained"]
    trained = [at for at in trained if "fp16" not in random_config(at, "-")]
    refused = [at for at, (outcome, _) in found.items() if outcome == "refused"]
    half = number - number // 2
    chosen = draw.sample(trained, min(half, len(trained)))
    return [*chosen, *draw.sample(refused, min(number - len(chosen), len(refused)))]


def _launch(at: int, expected: str, folder: Path, report: CaseReport) -> None:
    """``deepspeed launch/run.py`` on one of them, two steps of a small model on two files of text."""
    path, disk = folder / f"config{at}.json", folder / f"disk{at}"  # not where it ran before
    disk.mkdir()
    (disk / PLAN).write_text(plan_of(_launched_model()))
    path.write_text(json.dumps(random_config(at, str(disk))), encoding="utf-8")
    ended = run(_command(path, folder / f"run{at}", folder), _LAUNCH_SECONDS)
    problem = _problem(ended.code, ended.output, expected)
    if problem:
        report.failures.append(f"seed {at}, launched: {problem}\n{ended.output[-3000:]}")
    report.count(f"{'trained' if ended.code == 0 else 'refused'} when launched")


def _command(config: Path, output: Path, folder: Path) -> list[str]:
    model, text = _model_and_text(folder)
    command = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", "1"]
    command += ["--master_port", str(free_port()), str(ROOT / "launch" / "run.py")]
    options: dict[str, Any] = {
        "deepspeed_config": config,
        "model": model,
        "data": text,
        "tokenizer": "bytes",
        "seq_length": 16,
        "max_steps": 2,
        "eval_rows": 2,
        "save_interval": 2,
        "output_dir": output,
        "cache_dir": folder / "cache",
    }
    return command + [part for name, value in options.items() for part in (f"--{name}", str(value))]


def _model_and_text(folder: Path) -> tuple[Path, Path]:
    """A folder with the small model's config and weights, and a file of text."""
    model, text = folder / "model", folder / "text"
    if not text.exists():
        _launched_model().save_pretrained(model)
        text.mkdir()
        for number in range(40):
            (text / f"{number}.txt").write_text(f"The {number}. file of some text.\n" * 20)
    return model, text


def _launched_model() -> nn.Module:
    return small_model(layers=1, vocabulary=320)


def _problem(code: int | None, output: str, expected: str) -> str | None:
    """What is wrong with how a launched run ended."""
    if code is None:
        return "it hung"
    if expected == "trained" and code != 0:
        return f"it trained in-process, but ended with {code}"
    if expected == "refused" and code == 0:
        return "it was refused in-process, but ran"
    if code != 0 and "Traceback" in output.split("error:")[0]:
        return "a traceback instead of an error"
    if code != 0 and output.count("error:") != 1:
        return f"{output.count('error:')} errors instead of one"
    return None
