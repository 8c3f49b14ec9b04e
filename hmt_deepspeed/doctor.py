"""``hmt-doctor``: what a DeepSpeed JSON will do on this machine, before anything is built.

``hmt-doctor ds.json --model 7b --ranks 4``, or ``python -m hmt_deepspeed --check ds.json``.
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn

from hmt_deepspeed.architectures import meta_model
from hmt_deepspeed.config import read_json_config
from hmt_deepspeed.report.metrics import format_bytes, format_table
from hmt_deepspeed.train import models

__all__ = ["Diagnosis", "examine", "main"]

# What Trainer and Accelerate fill in, as Trainer does by default; any other "auto" is left to DeepSpeed.
_FILLED_IN: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 8,
    "gradient_accumulation_steps": 1,
    "gradient_clipping": 1.0,
    "fp16.enabled": False,
}


@dataclass
class Diagnosis:
    """What the doctor found: ``errors`` are what a run would stop with."""

    lines: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        """Tables as they are, sentences in lines of 80 columns."""
        told = [*self.lines, *(f"warning: {text}" for text in self.warnings)]
        told += [f"error: {text}" for text in self.errors]
        return "\n".join(text if "\n" in text else _wrapped(text) for text in told)


def _wrapped(text: str) -> str:
    return textwrap.fill(
        text, 80, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """The command; ends with status 1 where the run could not start."""
    parser = argparse.ArgumentParser(
        prog="hmt-doctor",
        description="Print what a DeepSpeed JSON will do on this machine, and what is missing for it.",
        epilog="example:\n  hmt-doctor ds.json --model 7b --ranks 4",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add, default = parser.add_argument, " (default: %(default)s)"
    add("config", help="DeepSpeed JSON, with or without an hmt block")
    add("--model", default="tiny", help=f"one of: {models.LEGAL_MODELS}{default}")
    text = f"of a preset's vocabulary{default}"
    add("--vocab_size", type=int, default=4096, metavar="TOKENS", help=text)
    text = "GPUs of the run (default: those of this machine)"
    add("--ranks", type=int, metavar="N", help=text)
    args = parser.parse_args(arguments)
    logger = logging.getLogger("DeepSpeed")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        found = examine(args.config, args.model, args.vocab_size, args.ranks)
    finally:
        logger.setLevel(level)  # a caller's process logs on as before
    print(found)
    sys.exit(1 if found.errors else 0)


def examine(
    path: str | os.PathLike[str],
    model: str = "tiny",
    vocab_size: int = 4096,
    ranks: int | None = None,
) -> Diagnosis:
    """What the JSON will do: nothing is built, compiled or downloaded but a model's config.

    Args:
        model: a preset of ``launch/run.py``, a folder or a hub id; its weights are not read.
        ranks: None for the GPUs of this machine, or one.
    """
    from deepspeed.accelerator import get_accelerator

    found = Diagnosis()
    accelerator = get_accelerator()
    device = accelerator.device_name()
    present = 1 if device == "cpu" else accelerator.device_count()
    ranks = present if ranks is None else ranks
    found.lines.append(_machine(accelerator, device))
    try:
        if ranks < 1:
            raise ValueError(f"--ranks is {ranks}; legal: at least 1. Give that.")
        config = _without_autos(read_json_config(path), models.bf16_is_fast(device), found)
        build = _builder(model, vocab_size)
        held = _run(config, build, model, ranks, found)
    except (ValueError, AssertionError) as error:
        found.errors.append(str(error))
        return found
    _check_tools(config, found)
    if device == "cpu":
        found.warnings.append("no GPU was found: everything runs on the CPU.")
    else:
        _check_gpus(accelerator, held, ranks > present, found)
    if (config.get("bf16") or {}).get("enabled") and not models.bf16_is_fast(device):
        found.warnings.append("bf16 is emulated here, some twenty times slower than fp32.")
    return found


def _machine(accelerator: Any, device: str) -> str:
    memory = psutil.virtual_memory()
    parts = [f"torch {torch.__version__}", f"{psutil.cpu_count(logical=False)} cores"]
    parts += [f"{format_bytes(memory.available)} of {format_bytes(memory.total)} host memory free"]
    if device == "cpu":
        return "machine: no GPU; " + ", ".join(parts)
    name = torch.cuda.get_device_name(0) if device == "cuda" else accelerator.device_name(0)
    total = format_bytes(accelerator.total_memory(0))
    return f"machine: {accelerator.device_count()} x {name} of {total}; " + ", ".join(parts)


def _without_autos(config: dict[str, Any], bf16: bool, found: Diagnosis) -> dict[str, Any]:
    """``config`` as Trainer would fill it in by default; "auto" in the block is ours and stays."""
    values, told = {**_FILLED_IN, "bf16.enabled": bf16}, []

    def filled(section: dict[str, Any], prefix: str) -> dict[str, Any]:
        kept = {}
        for key, value in section.items():
            name = prefix + key
            if isinstance(value, dict) and name != "hmt":
                kept[key] = filled(value, f"{name}.")
            elif value != "auto":
                kept[key] = value
            elif name in values:
                kept[key] = values[name]
                told.append(f"{name}: {values[name]}")
        return kept

    result = filled(config, "")
    if told:
        found.lines.append('"auto", taken here as: ' + ", ".join(told))
    return result


def _builder(name: str, vocab_size: int) -> Callable[[torch.dtype], nn.Module]:
    config = models.model_config(name)
    if config is None:
        config = models.preset_config(models.PRESETS[name], vocab_size, 0)
    return partial(meta_model, config)


def _run(
    config: dict[str, Any],
    build: Callable[[torch.dtype], nn.Module],
    model: str,
    ranks: int,
    found: Diagnosis,
) -> int:
    """The tables of the start, and where the bytes lie; returns those on each device."""
    from hmt_deepspeed.zero.dry_run import dry_run

    run = dry_run(config, build, ranks)
    train, micro, accumulation = run.batches
    clip = f"clipped at {run.clip:g}" if run.clip else "not clipped"
    found.lines.append(
        f"run: model {model} in {str(run.dtype).removeprefix('torch.')}, {ranks} rank{'s' * (ranks > 1)}, ZeRO stage {run.stage}, "
        f"{train} sequences a step (micro-batch {micro}, accumulation {accumulation}), "
        f"gradients {clip}"
    )
    if not run.is_hmt:
        own = "DeepSpeed's own, without HMT"
        found.lines.append(f"optimizer: {'none' if run.infers else own}")
    found.lines += [*run.tables, *run.notes]
    found.warnings += run.warnings
    if run.held:
        rows = [[place, format_bytes(nbytes)] for place, nbytes in run.held.items()]
        found.lines.append(format_table(rows, ["weights, states, masters", "bytes per rank"]))
    on_host, available = ranks * run.held.get("host", 0), psutil.virtual_memory().available
    if on_host > available:
        found.warnings.append(
            f"{ranks} ranks hold {format_bytes(on_host)} in host memory, of which "
            f"{format_bytes(available)} are free here. Offload less, or use a machine with more."
        )
    found.lines.append(
        "activations and buffers come on top: hmt-plan predicts the peak and the speed."
    )
    return run.held.get("device", 0)


def _check_tools(config: dict[str, Any], found: Diagnosis) -> None:
    """What DeepSpeed's operators need, what they would wait for, and where they write."""
    from deepspeed.git_version_info import installed_ops

    from hmt_deepspeed.zero.operator_locks import abandoned_locks

    zero = config.get("zero_optimization")
    sections = {
        name: (zero.get(name) or {}) if isinstance(zero, dict) else {}
        for name in ("offload_optimizer", "offload_param")
    }
    needed = {"cpu_adam"} if sections["offload_optimizer"].get("device") == "cpu" else set()
    if any(section.get("device") == "nvme" for section in sections.values()):
        needed.add("async_io")
    needed = {name for name in needed if not installed_ops.get(name)}
    missing = [] if shutil.which(os.environ.get("CXX", "c++")) else ["a C++ compiler (install g++)"]
    missing += [] if find_spec("ninja") else ["ninja (pip install ninja)"]
    if missing and needed:
        found.errors.append(
            f"DeepSpeed builds {' and '.join(sorted(needed))} at first use, for which "
            f"{' and '.join(missing)} is missing."
        )
    elif missing:
        found.warnings.append(f"{' and '.join(missing)} is missing: DeepSpeed builds no operator.")
    found.warnings += abandoned_locks()
    for name, section in sections.items():
        folder = section.get("nvme_path")
        if folder and not os.access(_existing(Path(folder)), os.W_OK):
            found.errors.append(
                f"zero_optimization.{name}.nvme_path is {folder!r}, which cannot be written here."
            )


def _check_gpus(accelerator: Any, held: int, lacks: bool, found: Diagnosis) -> None:
    if lacks:
        found.warnings.append("the run has more ranks than this machine has GPUs.")
    if not find_spec("triton"):
        found.errors.append(
            "Triton is missing, which HMT's kernels are written in: pip install triton."
        )
    total = accelerator.total_memory(0)
    if held > total:
        found.errors.append(
            f"weights, states and masters take {format_bytes(held)} of each GPU, which has "
            f"{format_bytes(total)}. Offload, use a higher ZeRO stage or more ranks: see hmt-plan."
        )


def _existing(folder: Path) -> Path:
    """The folder, or the nearest one above that is there."""
    return next(path for path in (folder, *folder.absolute().parents) if path.exists())
