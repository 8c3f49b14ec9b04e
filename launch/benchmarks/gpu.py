"""Billion-parameter shapes on one GPU: HMT in its modes beside DeepSpeed's AdamW, ZeRO-Offload and GaLore.

Every contender is alone in a process, with at most --memory of the GPU, bf16, sequences of 2048 tokens and the
micro-batch, doubled from 1, that gives most tokens/s before memory runs out. A result is written as soon as it is
there, beside those of earlier runs. Ordinary and refreshing steps are timed apart, after the first round of bases and
without compiling; tokens/s are of a step that refreshes as many matrices as one of the default interval does.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.gpu_bytes import elements_of, least_bytes, why_not
from benchmarks.results import CaseResult, Measurement
from benchmarks.setting import DTYPES, LEARNING_RATE, TOY, Setting
from hmt_deepspeed.planner.hardware import MACHINES
from hmt_deepspeed.report.metrics import flops_utilization, model_flops_per_token
from hmt_deepspeed.train.models import PRESETS

SUITE = "gpu"
NEEDS_GPU = True
KEEPS_SAMPLES = True  # a case adds to what earlier runs of it found
USES_ENGINE: set[str] = set()  # each contender starts its own
GPU_MEMORY = 24.0  # GiB
SEQUENCE, RANK, VOCABULARY, LARGEST_MICRO_BATCH = 2048, 128, 32000, 16
STEPS = 28  # half of them refresh one matrix: each of a layer's seven twice
LONG = 128 * 1024  # tokens


def _zero(stage: int, **more: Any) -> dict[str, Any]:
    return {"stage": stage, "overlap_comm": True, "contiguous_gradients": True, **more}


def _hmt(optimizer: dict[str, Any], stage: int = 2, **more: Any) -> dict[str, Any]:
    offload = more.pop("offload_optimizer", None)
    zero = _zero(stage) if offload is None else _zero(stage, offload_optimizer=offload)
    block = {"optimizer": {"method": "lowrank_adamw", **optimizer}, "activations": {}, **more}
    return {
        "optimizer": {"type": "HMT", "params": {"lr": LEARNING_RATE}},
        "zero_optimization": zero,
        "hmt": block,
    }


def _adamw(stage: int) -> dict[str, Any]:
    """torch's fused AdamW: DeepSpeed's own is compiled with nvcc, which not every machine with a GPU has."""
    params = {"lr": LEARNING_RATE, "weight_decay": 0.01, "torch_adam": True, "fused": True}
    return {
        "optimizer": {"type": "AdamW", "params": params},
        "zero_optimization": _zero(stage),
    }


_CPU = {"device": "cpu", "pin_memory": True}
_NO_MASTERS = {"rank": RANK, "master_weights": "none"}
_RECOMPUTE = {"attention_output": "recompute", "mlp_intermediate": "recompute"}
_SWAP = dict.fromkeys(
    ("layer_input", "residual", "attention_output", "mlp_intermediate"), "swap_host"
)
CONTENDERS: dict[str, dict[str, Any] | None] = {
    "DeepSpeed AdamW, ZeRO-2": _adamw(2),
    "DeepSpeed AdamW, ZeRO-3": _adamw(3),
    "ZeRO-Offload": {"zero_optimization": _zero(2, offload_optimizer=_CPU)},
    "galore_torch": None,
    "HMT": _hmt({"rank": RANK}),
    "HMT, no masters": _hmt(_NO_MASTERS),
    "HMT, no masters, recompute": _hmt(_NO_MASTERS, activations={"policy": _RECOMPUTE}),
    "HMT, INT8 weights, bf16 moments": _hmt(
        {"rank": RANK, "weight_dtype": "int8", "state_dtype": "bf16"}
    ),
    "HMT, two-sided": _hmt({**_NO_MASTERS, "projection": "two_sided"}),
    "HMT, APOLLO-Mini": _hmt({"method": "apollo_mini", "master_weights": "none"}),
    "HMT, AdamW on the host": _hmt({"method": "adamw"}, stage=3, offload_optimizer=_CPU),
    "HMT, swapped activations": _hmt(_NO_MASTERS, activations={"policy": _SWAP}),
    "HMT, planned activations": _hmt(_NO_MASTERS, activations={"policy": "plan"}),
    "HMT, FPDT, 128K tokens": _hmt(
        _NO_MASTERS,
        stage=3,
        fpdt={"chunk_size": 16384},
        activations={"policy": {**_RECOMPUTE, "layer_input": "swap_host", "residual": "swap_host"}},
    ),
}
_SEQUENCES = {"HMT, FPDT, 128K tokens": LONG}  # tokens, where they are not SEQUENCE


def _positive(kind: Any, text: str) -> Any:
    value = kind(text)
    if value <= 0:
        raise ValueError(text)
    return value


OPTIONS: dict[str, dict[str, Any]] = {
    "contender": {
        "action": "append",
        "choices": list(CONTENDERS),
        "metavar": "NAME",
        "help": f"{'; '.join(CONTENDERS)}. Default: all; repeat for several",
    },
    "micro_batch": {
        "type": partial(_positive, int),
        "metavar": "N",
        "help": "this one alone; default: 1, 2, 4, ... while tokens/s grow",
    },
    "memory": {
        "type": partial(_positive, float),
        "metavar": "GIB",
        "help": f"of the GPU that a contender may take; default: {GPU_MEMORY:g}",
    },
    "trace": {
        "metavar": "FOLDER",
        "help": "where traces of two steps go (chrome://tracing); default: none",
    },
}


def peak_flops(device_name: str) -> float | None:
    """Datasheet bf16 FLOP/s of a GPU that the planner knows by name."""
    plain = device_name.lower().replace(" ", "")
    known = [machine for name, machine in MACHINES.items() if name.split("-")[0] in plain]
    return known[0].peak_flops if known else None


def _model(size: str, toy: bool) -> dict[str, int]:
    if toy:
        return {
            "vocab_size": TOY.vocabulary,
            "hidden_size": TOY.hidden,
            "intermediate_size": TOY.intermediate,
            "num_hidden_layers": TOY.layers,
            "num_attention_heads": TOY.heads,
        }
    preset = PRESETS[size]
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": preset.hidden,
        "intermediate_size": preset.intermediate,
        "num_hidden_layers": preset.layers,
        "num_attention_heads": preset.heads,
        "num_key_value_heads": preset.kv_heads,
    }


def run_alone(spec: dict[str, Any]) -> dict[str, Any]:
    """What :mod:`benchmarks.gpu_contender` measured; its last line, or how it ended."""
    script = Path(__file__).with_name("gpu_contender.py")
    command = [sys.executable, str(script), json.dumps(spec)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"failed": (done.stderr or done.stdout)[-2000:]}
    return dict(json.loads(done.stdout.strip().splitlines()[-1]))


def best_micro_batch(spec: dict[str, Any], sizes: list[int]) -> Iterator[dict[str, Any]]:
    """The fastest run so far, after each micro-batch, until one is slower or fails.

    A single micro-batch may run out of memory: that is the result then.
    """
    best: dict[str, Any] = {}
    for micro_batch in sizes:
        found = run_alone({**spec, "micro_batch": micro_batch})
        found |= {"micro_batch": micro_batch, "sequence": spec["sequence"]}
        if "seconds" not in found:
            if not best:
                yield found
            return
        found["tokens_per_second"] = (
            micro_batch * spec["sequence"] / (found["seconds"] + found["refresh_seconds"])
        )
        if best and found["tokens_per_second"] <= best["tokens_per_second"]:
            return
        best = found
        yield best


def compare(size: str, setting: Setting, earlier: Mapping[str, Any]) -> Iterator[CaseResult]:
    """All results so far, again after each that is new.

    Args:
        earlier: samples of the case's last runs, by contender.
    """
    own = setting.own
    memory = int(own.get("memory", GPU_MEMORY) * 2**30)
    spec = {
        "device": setting.device,
        "dtype": setting.dtype,
        "gpu_memory": memory,
        "steps": setting.rounds_or(STEPS),
        "rank": TOY.hidden // 4 if setting.toy else RANK,
        "model": _model(size, setting.toy),
    }
    name = torch.cuda.get_device_name() if setting.device == "cuda" else "cpu"
    samples = dict(earlier)
    settings = {**spec, "contenders": CONTENDERS}
    for contender in own.get("contender", CONTENDERS):
        sequence = _SEQUENCES.get(contender, SEQUENCE)
        spec |= {"contender": contender, "sequence": TOY.sequence if setting.toy else sequence}
        spec["json"] = json.loads(
            json.dumps(CONTENDERS[contender]).replace(f'"rank": {RANK}', f'"rank": {spec["rank"]}')
        )
        spec["trace"] = _trace_file(own.get("trace"), size, contender)
        reason = None if setting.toy else _why_not(spec)
        key = f"{contender}, at most {memory / 2**30:g} GiB"
        sizes = [2**i for i in range(LARGEST_MICRO_BATCH.bit_length())]
        if "micro_batch" in own:
            sizes = [own["micro_batch"]]
            key += f", micro-batch {sizes[0]}"
        runs = best_micro_batch(spec, sizes[:1] if setting.toy or sequence == LONG else sizes)
        for found in [{"skipped": reason}] if reason else runs:
            found |= {"measured_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
            samples[key] = {**found, "model": spec["model"], "gpu": name}
            print(f"{size}, {key}: {_said(samples[key])}", flush=True)
            yield CaseResult(settings, _all_measurements(size, samples), samples)


def _trace_file(folder: str | None, size: str, contender: str) -> str | None:
    if folder is None:
        return None
    plain = "".join(c if c.isalnum() else "-" for c in contender.lower())
    return str(Path(folder) / f"{size}-{plain}.json.gz")


def _why_not(spec: Mapping[str, Any]) -> str | None:
    dtype = DTYPES[spec["dtype"]]
    needs = least_bytes(spec["json"], elements_of(spec["model"]), dtype.itemsize, spec["rank"])
    total = spec["gpu_memory"]
    if spec["device"] == "cuda":
        total = min(total, torch.cuda.get_device_properties(0).total_memory)
    return why_not(needs, total, psutil.virtual_memory().total)


def _said(found: Mapping[str, Any]) -> str:
    """One line of what is new."""
    if "skipped" in found:
        return f"skipped: {found['skipped']}"
    if "seconds" not in found:
        return f"micro-batch {found['micro_batch']}: {_ending(found)}\n{found.get('failed', '')}".strip()
    where = "" if found["device_bytes"] is None else f", {found['device_bytes'] / 2**30:.1f} GiB"
    return f"micro-batch {found['micro_batch']}: {found['tokens_per_second']:.0f} tokens/s{where}"


def _ending(found: Mapping[str, Any]) -> str:
    return "out of memory" if "out_of_memory" in found else "failed"


def _all_measurements(size: str, samples: Mapping[str, Any]) -> list[Measurement]:
    lines: list[Measurement] = []
    for key, found in samples.items():
        label = f"{size}: {key}"
        if "skipped" in found:
            lines.append(Measurement(f"{label}: skipped", 0.0, "tokens/s", note=found["skipped"]))
        elif "seconds" not in found:
            lines.append(Measurement(f"{label}: {_ending(found)}", 0.0, "tokens/s"))
        else:
            lines += _measurements(label, found)
    return lines


def _measurements(label: str, found: Mapping[str, Any]) -> list[Measurement]:
    micro_batch, rate = found["micro_batch"], found["tokens_per_second"]
    if ", micro-batch" not in label:
        label = f"{label}, micro-batch {micro_batch}"
    lines = [Measurement(label, rate, "tokens/s")]
    lines.append(Measurement(f"{label}: ordinary step", found["seconds"], "s"))
    note = "mean over an interval of 200 steps; each matrix refreshes once in it"
    extra = Measurement(f"{label}: refreshes", found["refresh_seconds"], "s a step", note=note)
    lines += [extra] if found["refresh_seconds"] else []
    for text, key in (("GPU", "device_bytes"), ("host", "host_bytes")):
        if found[key] is not None:
            lines.append(Measurement(f"{label}: peak {text} memory", found[key], "bytes"))
    for text, key, unit in (
        ("launches of a step", "launches", "launches"),
        ("share of a step in which the GPU computes", "busy_share", "share"),
        ("predicted by the plan", "planned_seconds", "s"),
    ):
        if found.get(key) is not None:
            lines.append(Measurement(f"{label}: {text}", found[key], unit))
    return lines + _utilization(label, found)


def _utilization(label: str, found: Mapping[str, Any]) -> list[Measurement]:
    peak = peak_flops(found["gpu"])
    if peak is None:
        return []
    hardware = found["flops"] / (found["micro_batch"] * found["sequence"])
    hfu = flops_utilization(hardware, 1 / found["tokens_per_second"], peak)
    note = "FLOPs of ordinary training, 6 N + 12 L H Q T per token, whatever was computed"
    lines = [Measurement(f"{label}: MFU", utilization(found, peak), "share", note=note)]
    note = "FLOPs of torch's operations in one step; Triton kernels are not seen"
    return [*lines, Measurement(f"{label}: HFU", hfu, "share", note=note)]


def utilization(found: Mapping[str, Any], peak: float) -> float:
    """MFU of a result, on a GPU of ``peak`` FLOP/s."""
    model = found["model"]
    elements = elements_of(model)
    multiplied = elements.linears + elements.others - model["vocab_size"] * model["hidden_size"]
    per_token = model_flops_per_token(
        multiplied, model["num_hidden_layers"], model["hidden_size"], found["sequence"]
    )
    return flops_utilization(per_token, 1 / found["tokens_per_second"], peak)


def plot(report: dict[str, Any], path: Path) -> None:
    """Tokens/s and peak GPU memory of every contender, a row of bars per case."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    cases: dict[str, Any] = report["cases"]
    figure, axes = pyplot.subplots(
        len(cases), 2, figsize=(11, 3.2 * len(cases)), squeeze=False, sharey="row"
    )
    for row, (name, case) in zip(axes, cases.items(), strict=True):
        found = {key: value for key, value in case["samples"].items() if "seconds" in value}
        names = list(found)
        row[0].barh(names, [found[key]["tokens_per_second"] for key in names])
        row[1].barh(names, [(found[key]["device_bytes"] or 0) / 2**30 for key in names])
        row[0].set_title(f"{name}: tokens/s")
        row[1].set_title("peak GPU memory, GiB")
        row[0].invert_yaxis()
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


CASES = {size: partial(compare, size) for size in ("1b", "3b", "7b")}
