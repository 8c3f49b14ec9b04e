"""Billion-parameter shapes on one GPU: HMT in its modes beside DeepSpeed's AdamW, ZeRO-Offload and GaLore.

Every contender is alone in a process, with at most 24 GiB of the GPU, bf16, sequences of 2048 tokens and the
micro-batch, doubled from 1, that gives most tokens/s before memory runs out.
"""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.results import CaseResult, Measurement
from benchmarks.setting import INTERVAL, TOY, Setting
from hmt_deepspeed.planner.hardware import MACHINES
from hmt_deepspeed.report.metrics import flops_utilization, model_flops_per_token
from hmt_deepspeed.train.models import PRESETS

SUITE = "gpu"
NEEDS_GPU = True
USES_ENGINE: set[str] = set()  # each contender starts its own
GPU_MEMORY = 24 * 2**30
SEQUENCE, RANK, VOCABULARY, STEPS, LARGEST_MICRO_BATCH = 2048, 128, 32000, 10, 16


def _zero(stage: int, **more: Any) -> dict[str, Any]:
    return {"stage": stage, "overlap_comm": True, "contiguous_gradients": True, **more}


def _hmt(optimizer: dict[str, Any], stage: int = 2, **more: Any) -> dict[str, Any]:
    offload = more.pop("offload_optimizer", None)
    zero = _zero(stage) if offload is None else _zero(stage, offload_optimizer=offload)
    block = {"optimizer": optimizer, "activations": {}, **more}
    return {
        "optimizer": {"type": "HMT", "params": {"lr": 1e-3}},
        "zero_optimization": zero,
        "hmt": block,
    }


_CPU = {"device": "cpu", "pin_memory": True}
_RECOMPUTE = {"attention_output": "recompute", "mlp_intermediate": "recompute"}
CONTENDERS: dict[str, dict[str, Any] | None] = {
    "DeepSpeed AdamW, ZeRO-2": {"zero_optimization": _zero(2)},
    "DeepSpeed AdamW, ZeRO-3": {"zero_optimization": _zero(3)},
    "ZeRO-Offload": {"zero_optimization": _zero(2, offload_optimizer=_CPU)},
    "galore_torch": None,
    "HMT": _hmt({"rank": RANK}),
    "HMT, no masters": _hmt({"rank": RANK, "master_weights": "none"}),
    "HMT, no masters, recompute": _hmt(
        {"rank": RANK, "master_weights": "none"}, activations={"policy": _RECOMPUTE}
    ),
    "HMT, INT8 weights, bf16 moments": _hmt(
        {"rank": RANK, "weight_dtype": "int8", "state_dtype": "bf16"}
    ),
    "HMT, two-sided": _hmt({"rank": RANK, "projection": "two_sided", "master_weights": "none"}),
    "HMT, APOLLO-Mini": _hmt({"method": "apollo_mini", "master_weights": "none"}),
    "HMT, AdamW on the host": _hmt({"method": "adamw"}, stage=3, offload_optimizer=_CPU),
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
        return {"error": (done.stderr or done.stdout)[-2000:]}
    return dict(json.loads(done.stdout.strip().splitlines()[-1]))


def best_micro_batch(spec: dict[str, Any], largest: int) -> dict[str, Any]:
    """The run with most tokens/s among micro-batches 1, 2, 4, ...; a single one may run out of memory."""
    best: dict[str, Any] = {}
    micro_batch = 1
    while micro_batch <= largest:
        found = run_alone({**spec, "micro_batch": micro_batch})
        if "seconds" not in found:
            return best or found
        refresh = (
            (found["first_seconds"] - found["seconds"]) / INTERVAL
            if spec["kind"] == "galore"
            else 0
        )
        tokens = micro_batch * spec["sequence"] / (found["seconds"] + max(refresh, 0.0))
        if best and tokens <= best["tokens_per_second"]:
            return best
        best = {**found, "micro_batch": micro_batch, "tokens_per_second": tokens}
        micro_batch *= 2
    return best


def compare(size: str, setting: Setting) -> CaseResult:
    model = _model(size, setting.toy)
    spec = {
        "device": setting.device,
        "dtype": setting.dtype,
        "gpu_memory": GPU_MEMORY,
        "sequence": TOY.sequence if setting.toy else SEQUENCE,
        "steps": setting.rounds_or(STEPS),
        "rank": TOY.hidden // 4 if setting.toy else RANK,
        "model": model,
    }
    result = CaseResult({**spec, "contenders": CONTENDERS})
    name = torch.cuda.get_device_name() if setting.device == "cuda" else "cpu"
    peak = peak_flops(name)
    for contender, config in CONTENDERS.items():
        kind = "galore" if config is None else "engine"
        own = json.loads(json.dumps(config).replace(f'"rank": {RANK}', f'"rank": {spec["rank"]}'))
        found = best_micro_batch(
            {**spec, "kind": kind, "json": own}, 1 if setting.toy else LARGEST_MICRO_BATCH
        )
        result.samples[contender] = found
        label = f"{size}: {contender}"
        if "seconds" not in found:
            why = "out of memory" if "out_of_memory" in found else "failed"
            result.measurements.append(Measurement(f"{label}: {why}", 0.0, "tokens/s"))
            continue
        rate = found["tokens_per_second"]
        result.measurements += _measurements(label, found, rate, peak, model, spec["sequence"])
    return result


def _measurements(
    label: str,
    found: dict[str, Any],
    rate: float,
    peak: float | None,
    model: dict[str, int],
    sequence: int,
) -> list[Measurement]:
    label = f"{label}, micro-batch {found['micro_batch']}"
    lines = [Measurement(label, rate, "tokens/s")]
    if found["device_bytes"] is not None:
        lines.append(Measurement(f"{label}: peak GPU memory", found["device_bytes"], "bytes"))
    lines.append(Measurement(f"{label}: peak host memory", found["host_bytes"], "bytes"))
    if peak is not None:
        per_token = model_flops_per_token(
            _num_multiplied(model), model["num_hidden_layers"], model["hidden_size"], sequence
        )
        hardware = found["flops"] / (found["micro_batch"] * sequence)
        mfu, hfu = (flops_utilization(flops, 1 / rate, peak) for flops in (per_token, hardware))
        note = "FLOPs of ordinary training, 6 N + 12 L H Q T per token, whatever was computed"
        lines.append(Measurement(f"{label}: MFU", mfu, "share", note=note))
        note = "FLOPs run in one step, counted by torch.utils.flop_counter; Triton kernels are not seen"
        lines.append(Measurement(f"{label}: HFU", hfu, "share", note=note))
    return lines


def _num_multiplied(model: dict[str, int]) -> int:
    """Elements of the weights that tokens are multiplied with: all but the embedding's."""
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        made = LlamaForCausalLM(LlamaConfig(**model))
    embedding = made.get_input_embeddings().weight.numel()
    return sum(p.numel() for p in made.parameters()) - embedding


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
