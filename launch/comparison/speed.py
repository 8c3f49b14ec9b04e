"""Step times of all variants side by side: one process, one step each in turn."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.results import load_average, machine
from benchmarks.timing import Sample, column, interleave, now, percentile, spread
from comparison.cells import Setting, read_json, write_rows
from comparison.contenders import Contender, Unavailable, build
from comparison.measures import Pcie, arithmetic
from comparison.training import build_model
from comparison.variants import INTERVAL, VARIANTS
from hmt_deepspeed.train.data import TrainingData
from hmt_deepspeed.train.packing import GlobalOrder

WARMUP = 3


class TimedStep:
    """One whole training step of a contender: forward, backward, clip, step."""

    def __init__(self, contender: Contender, setting: Setting, data: TrainingData) -> None:
        self.contender, self.setting, self.data = contender, setting, data
        self.order = GlobalOrder(len(data.train), 0)
        self.step = 0

    def __call__(self) -> Sample:
        setting, contender = self.setting, self.contender
        rows = self.order.rows(self.step * setting.batch_rows, setting.batch_rows)
        batch = self.data.train.batch(rows)
        contender.begin_step(self.step)
        self.step += 1
        begin, begin_cpu = now(), time.process_time()
        with arithmetic(setting.device, setting.dtype):
            loss = contender.model(**Pcie(setting.device).to_device(batch)).loss
        forward = now()
        loss.backward()
        backward = now()
        contender.clip(setting.clip)
        contender.optimizer.step()
        contender.optimizer.zero_grad()
        end = now()
        return {
            "seconds": end - begin,
            "cpu_seconds": time.process_time() - begin_cpu,
            "forward": forward - begin,
            "backward": backward - forward,
            "optimizer": end - backward,
        }


def measure_speed(
    names: Sequence[str], setting: Setting, data: TrainingData, rounds: int, path: Path
) -> dict[str, Any]:
    """Time `rounds` steps of every variant, in alternation, and add them to `path`.

    With `rounds` a multiple of the interval every method refreshes each basis once per interval, as
    it would in a long run, so that the mean counts what the median leaves out.
    """
    contenders: dict[str, Callable[[], Sample]] = {}
    skipped: dict[str, str] = {}
    with contextlib.ExitStack() as built:
        for name in names:
            hyper = setting.hyper(VARIANTS[name].learning_rates[0], 0)
            try:
                made = build(name, build_model(setting, 0), setting.shape.hidden, hyper)
            except Unavailable as reason:
                skipped[name] = str(reason)
                continue
            built.callback(made.close)
            made.model.train()
            contenders[name] = TimedStep(made, setting, data)
        before = load_average()
        samples = interleave(contenders, rounds, WARMUP)
    about = {
        "setting": setting.__dict__,
        "rounds": rounds,
        "interval": INTERVAL,
        "threads": torch.get_num_threads(),
        "load_average_before": before,
        "measured_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": machine(),
        "together": list(contenders),
    }
    report = read_json(path) or {}
    for name, own in samples.items():
        report[name] = {**_summary(own, setting), **about}
    for name, text in skipped.items():
        report[name] = {"skipped": text}
    write_rows(path, report)
    return report


def _summary(samples: list[Sample], setting: Setting) -> dict[str, Any]:
    seconds = column(samples)
    own_cpu = column(samples, "cpu_seconds")  # blind to what else the machine did
    low, high = spread(seconds)
    return {
        "tokens_per_second": setting.step_tokens * len(seconds) / sum(seconds),
        "tokens_per_cpu_second": setting.step_tokens * len(seconds) / sum(own_cpu),
        "step_seconds_mean": sum(seconds) / len(seconds),
        "step_seconds_median": median(seconds),
        "step_seconds_quartiles": [low, high],
        "step_seconds_p95": percentile(seconds, 0.95),
        **{
            f"{phase}_seconds_median": median(column(samples, phase))
            for phase in ("forward", "backward", "optimizer")
        },
        "step_seconds": [round(value, 5) for value in seconds],
    }
