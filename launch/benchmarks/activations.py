"""Activations by component: bytes held for backward, step time, gradient error, a run's loss, Python's time."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.gradient_error import gradient_error
from benchmarks.held_bytes import CountedSaveOnCpu, FreshStorages, held_for_backward
from benchmarks.python_time import python_time
from benchmarks.results import CaseResult, Measurement
from benchmarks.setting import (
    STEADY_AFTER,
    TOY,
    Batches,
    EngineStep,
    Setting,
    Shape,
    engine_config,
    free_port,
    llama,
)
from benchmarks.timing import column, interleave, median_of, paired_spread

SUITE = "activations"
SHAPE = Shape(512, 8, 8, sequence=1024, micro_batch=4)
RANK = 64
BASELINE = "no checkpointing"
PAPER, PROJECTED = "the paper's table", "the paper's table, projected backward"
HELD = "the paper's table, projected backward, X [Q | P] held"
HF, ON_CPU = "Hugging Face's gradient checkpointing", "torch's save_on_cpu"
FULL, TO_HOST, TO_SSD = "full recompute", "swap_host", "swap_ssd"

_ROOT = Path(__file__).resolve().parents[2]
_RECOMPUTED = ("attention_qkv", "attention_output", "mlp_intermediate", "residual")
_SWAPPED = ("layer_input", "attention_output", "mlp_intermediate", "residual")
_SSD_HOST_MEMORY = 2**26


@dataclass(frozen=True)
class Contender:
    """A way to hold activations: a section of the block, or what is done to the model or around forward."""

    section: dict[str, Any] | None = None
    projected: bool = False
    hugging_face: bool = False
    around: Callable[[FreshStorages], Any] = lambda _: nullcontext()


def contenders(folder: str) -> dict[str, Contender]:
    """All of them by name; ``folder`` is where ``swap_ssd`` may write."""
    swap_ssd = {"nvme_path": folder, "host_memory": _SSD_HOST_MEMORY}
    return {
        BASELINE: Contender(),
        PAPER: Contender({}),
        PROJECTED: Contender({}, projected=True),
        HELD: Contender({"policy": {"projected_inputs": "project"}}, projected=True),
        FULL: Contender({"policy": dict.fromkeys(_RECOMPUTED, "recompute")}),
        TO_HOST: Contender({"policy": dict.fromkeys(_SWAPPED, "swap_host")}),
        TO_SSD: Contender({"policy": dict.fromkeys(_SWAPPED, "swap_ssd"), **swap_ssd}),
        HF: Contender(hugging_face=True),
        ON_CPU: Contender(around=CountedSaveOnCpu),
    }


def _engine(shape: Shape, dtype: str, contender: Contender, matrices: int) -> Any:
    """HMT's optimizer for all of them, whose first step finds every basis and no later one does."""
    import hmt_deepspeed

    model: Any = llama(shape)
    if contender.hugging_face:
        model.activation_checkpointing_enable()
    config = engine_config(shape, dtype)
    config["optimizer"]["type"] = "HMT"
    options = {
        "method": "lowrank_adamw",
        "rank": min(RANK, shape.hidden // 2),
        "update_interval": 10**6,
        "projected_backward": "auto" if contender.projected else False,
        "max_full_gradient_bytes": matrices,
    }
    config["hmt"] = {"optimizer": options}
    if contender.section is not None:
        config["hmt"]["activations"] = contender.section
    engine, *_ = hmt_deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )
    return engine


def _full_gradient_bytes(shape: Shape) -> int:
    return 4 * shape.layers * (4 * shape.hidden**2 + 3 * shape.hidden * shape.intermediate)


@contextmanager
def _engines(setting: Setting, shape: Shape) -> Iterator[Callable[[str], Any]]:
    """Builds the contenders' engines; all are destroyed in the end."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        known = contenders(folder)

        def build(name: str) -> Any:
            limit = _full_gradient_bytes(shape)
            engine = _engine(shape, setting.dtype, known[name], limit)
            stack.callback(engine.destroy)
            return engine

        yield build


def _settings(shape: Shape, **more: Any) -> dict[str, Any]:
    model = {**asdict(shape), "intermediate": shape.intermediate}
    return {"model": model, "zero_stage": 2, "world_size": 1, **more}


# -- bytes ------------------------------------------------------------------------------------------

_BYTES_NOTE = (
    "storages that a forward allocated and that still exist when it has ended, counted; parameters, "
    "gradients, logits and the loss's own tensors left out"
)
_BYTES_TARGETS = {PAPER: 0.30, PROJECTED: 0.25}


def held_bytes(setting: Setting) -> CaseResult:
    shape = TOY if setting.toy else SHAPE
    result = CaseResult(_settings(shape, rank=RANK, swap_ssd_host_memory=_SSD_HOST_MEMORY))
    found = {name: _held_bytes(setting, shape, name) for name in contenders("")}
    result.samples["bytes"] = found
    whole = found[BASELINE]["device"]
    result.measurements.append(
        Measurement(f"{shape.label}: {BASELINE}", float(whole), "bytes", note=_BYTES_NOTE)
    )
    for name, held in found.items():
        if name == BASELINE:
            continue
        target = _BYTES_TARGETS.get(name)
        result.measurements.append(
            Measurement(
                f"{shape.label}: bytes held for backward, {name} / {BASELINE}",
                held["device"] / whole,
                "share",
                "<=" if target else "",
                target,
                note=_BYTES_NOTE,
            )
        )
        moved = held["host"]
        if moved:
            label = f"{shape.label}: {name}, bytes in host memory or on the SSD"
            result.measurements.append(Measurement(label, float(moved), "bytes"))
    return result


def _held_bytes(setting: Setting, shape: Shape, name: str) -> dict[str, int]:
    """Of the second step: in the first one, bases are found and host memory is taken."""
    with _engines(setting, shape) as build:
        engine, batches = build(name), Batches(shape, setting.device)
        EngineStep(engine, batches)()
        rows = batches.draw()
        found = held_for_backward(
            engine.module,
            lambda: engine(input_ids=rows, labels=rows).loss,
            contenders("")[name].around,
            lambda: end_copies(engine.hmt_activations),
        )
        if engine.hmt_activations is not None:
            moved = engine.hmt_activations.metrics()
            found["host"] += moved.get("activation_bytes_to_host", 0)
    gc.collect()
    return found


def end_copies(activations: Any) -> None:
    """On a CPU the transfer engine copies as late as it may; a device has done it meanwhile."""
    if activations is not None and "engine" in vars(activations.memory):
        activations.memory.engine.streams.drain()


# -- time -------------------------------------------------------------------------------------------


def step_time(setting: Setting) -> CaseResult:
    shape = TOY if setting.toy else SHAPE
    with _engines(setting, shape) as build:
        steps = {}
        for name, contender in contenders("").items():
            step = EngineStep(build(name), Batches(shape, setting.device))
            steps[name] = _Around(step, contender.around)
        samples = interleave(steps, setting.rounds_or(7), warmup=STEADY_AFTER)
    result = CaseResult(_settings(shape, rank=RANK), samples={shape.label: samples})
    base = samples[BASELINE]
    note = "medians of interleaved rounds; quartiles of the ratio within a round"
    for name, mine in samples.items():
        label = f"{shape.label}: step time, {name}"
        if name == BASELINE:
            result.measurements.append(Measurement(label, median_of(mine), "s"))
            continue
        between = paired_spread(column(mine), column(base))
        ratio = median_of(mine) / median_of(base)
        result.measurements.append(
            Measurement(f"{label} / {BASELINE}", ratio, "x", spread=between, note=note)
        )
    ratio = median_of(samples[PAPER]) / median_of(samples[HF])
    between = paired_spread(column(samples[PAPER]), column(samples[HF]))
    label = f"{shape.label}: step time, {PAPER} / {HF}"
    result.measurements.append(Measurement(label, ratio, "x", spread=between, note=note))
    return result


class _Around:
    """A step within a contender's context, which is meant for the forward and harmless after it."""

    def __init__(self, step: EngineStep, around: Callable[[FreshStorages], Any]) -> None:
        self._step, self._around = step, around

    def __call__(self) -> dict[str, float]:
        with self._around(FreshStorages()):
            return self._step()


# -- the main job -----------------------------------------------------------------------------------


def main_job(setting: Setting) -> CaseResult:
    """300 steps with and without the paper's table."""
    steps = 3 if setting.toy else 300
    config = json.loads((_ROOT / "ds_configs" / "hmt.json").read_text(encoding="utf-8"))
    config["scheduler"]["params"]["total_num_steps"] = 300
    config["bf16"]["enabled"] = setting.dtype == "bf16"
    losses = {
        name: _train(config if section is None else _with_activations(config, section), steps)
        for name, section in {"without": None, "with": {}}.items()
    }
    final = {name: found["eval_loss"] for name, found in losses.items()}
    result = CaseResult({"steps": steps, "config": config}, samples=losses)
    result.measurements += [
        Measurement("main job, evaluation loss without activations", final["without"], "nats"),
        Measurement(
            f"main job, {steps} steps: evaluation loss, {PAPER} / without, less 1",
            final["with"] / final["without"] - 1,
            "share",
            "<=",
            0.005,
        ),
    ]
    return result


def _with_activations(config: dict[str, Any], section: dict[str, Any]) -> dict[str, Any]:
    return {**config, "hmt": {**config["hmt"], "activations": section}}


def _train(config: dict[str, Any], steps: int) -> dict[str, Any]:
    """Summary of one run of launch/run.py in a process of its own, and the loss of each step."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(config), encoding="utf-8")
        command = [sys.executable, str(_ROOT / "launch" / "run.py")]
        command += ["--deepspeed_config", str(path), "--max_steps", str(steps)]
        command += ["--save_interval", "0", "--eval_interval", "0", "--output_dir", folder + "/run"]
        place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        env = {**os.environ, **place, "MASTER_PORT": str(free_port())}
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=env)
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        summary = json.loads((Path(folder) / "run" / "summary.json").read_text(encoding="utf-8"))
    records = [json.loads(line) for line in lines]
    return {
        "eval_loss": summary["eval_loss"],
        "losses": [record["loss"] for record in records],
        "step_seconds": [record["step_seconds"] for record in records],
    }


CASES: dict[str, Callable[[Setting], CaseResult]] = {
    "held_bytes": held_bytes,
    "step_time": step_time,
    "gradient_error": gradient_error,
    "main_job": main_job,
    "python_time": python_time,
}
USES_ENGINE = {"held_bytes", "step_time", "gradient_error"}
