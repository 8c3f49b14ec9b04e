"""What a run leaves behind: its identity, a sample of its text, the model, the summary."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hmt_deepspeed.report.metrics import (
    device_memory,
    machine_info,
    peak_host_bytes,
    write_summary,
)
from hmt_deepspeed.train.data import TrainingData
from hmt_deepspeed.train.loop import LoopOptions, Progress, TrainingLoop
from hmt_deepspeed.train.ranks import on_rank_zero, rank

SAMPLE_TOKENS = 64
PROMPT_TOKENS = 32
_ENGINE_FIELDS = (
    "optimizer_state_bytes",
    "gradient_buffer_bytes",
    "communication_bytes_per_step",
    "stock_zero_communication_bytes_per_step",
    "mean_rank",
    "mean_captured_energy",
    "activation_bytes",
    "average_device_bytes",
    "checkpoint_bytes",
)


def choose_output_dir(
    wanted: str | None, default: str, resume: bool, snapshots: str | None = None
) -> Path:
    """The run's folder, the same on every rank.

    Without `wanted` a new run gets `default`, or `default-2`, `default-3`, ... where a run is
    there already; a resumed one takes the newest of them. `snapshots` is the config's
    `hmt.snapshot.path`. Raises ValueError rather than write over a run that has checkpoints or
    among the snapshots of another, or resume one that has neither.
    """
    return Path(on_rank_zero(lambda: str(_choose_output_dir(wanted, default, resume, snapshots))))


def _choose_output_dir(
    wanted: str | None, default: str, resume: bool, snapshots: str | None
) -> Path:
    if wanted is not None:
        folder = Path(wanted)
    else:
        number = 1
        while (_numbered(default, number) / "metrics.jsonl").exists():
            number += 1
        folder = _numbered(default, max(number - 1, 1) if resume else number)
    checkpoints = folder / "checkpoints"
    taken = snapshots is not None and any(Path(snapshots).glob("step????????"))
    if resume and not (checkpoints / "latest").exists() and not taken:
        places = f"{checkpoints} or {snapshots}" if snapshots is not None else f"{checkpoints}"
        raise ValueError(
            f"--resume found no checkpoint in {places}; give the --output_dir of a run that "
            "saved one (--save_interval), or leave --resume out"
        )
    if not resume and checkpoints.exists():
        raise ValueError(
            f"--output_dir {str(folder)!r} holds a run with checkpoints; continue it with "
            "--resume or give another --output_dir"
        )
    if not resume and taken:
        raise ValueError(
            f"hmt.snapshot.path is {snapshots!r}, which holds snapshots of another run, and --resume "
            "would take them for this one's; continue that run with --resume, name another folder or "
            "remove this one"
        )
    return folder


def _numbered(default: str, number: int) -> Path:
    return Path(default if number == 1 else f"{default}-{number}")


def check_identity(output_dir: Path, identity: dict[str, Any], resume: bool) -> None:
    """Write `run.json`, or on resume compare with it: a run continues only what it was.

    `identity` maps what must not change (model, data, seq_length, seed) to its value.
    """
    path = output_dir / "run.json"

    def work() -> None:
        if not resume:
            write_summary(path, identity)
            return
        if not path.exists():
            raise ValueError(
                f"--resume: {path} is missing, so the run cannot be checked; restore it"
            )
        before = json.loads(path.read_text())
        for name, value in identity.items():
            if before.get(name) != value:
                raise ValueError(
                    f"--resume: this run has {name} {value!r}, its checkpoint was made with "
                    f"{before.get(name)!r}; give the same {name} or start another --output_dir"
                )

    on_rank_zero(work)


def generate_sample(loop: TrainingLoop, zero_stage: int) -> str:
    """Continue the beginning of a held-out document greedily; prints it and keeps sample.txt.

    Every rank takes part: under ZeRO-3 a forward gathers parameters from all of them.
    """
    model, tokenizer = loop.engine.module, loop.data.tokenizer
    prompt = _prompt(loop.data)
    config = model.config.get_text_config()
    limit = getattr(config, "max_position_embeddings", None) or len(prompt) + SAMPLE_TOKENS
    num_new = min(SAMPLE_TOKENS, limit - len(prompt))
    if num_new < 1:
        return ""
    inputs = torch.tensor([prompt], device=loop.engine.device)
    loop.engine.eval()
    with torch.no_grad():
        generated = model.generate(
            input_ids=inputs,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=num_new,
            do_sample=False,
            pad_token_id=tokenizer.eos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            synced_gpus=zero_stage == 3 and dist.get_world_size() > 1,
        )
    loop.engine.train()
    before = tokenizer.decode(prompt, skip_special_tokens=True)
    after = tokenizer.decode(generated[0, len(prompt) :].tolist(), skip_special_tokens=True)
    if rank() == 0:
        text = f"--- prompt ---\n{before}\n--- continuation ---\n{after}\n"
        (loop.options.output_dir / "sample.txt").write_text(text, encoding="utf-8")
        print(text)
    return after


def _prompt(data: TrainingData) -> list[int]:
    """The first tokens of the first held-out document."""
    starts = data.held_out.document_starts
    end = int(starts[1]) if len(starts) > 1 else len(data.held_out.tokens)
    return [int(token) for token in data.held_out.tokens[: min(PROMPT_TOKENS, end)]]


def save_model(loop: TrainingLoop, zero_stage: int) -> Path:
    """Weights (in the training dtype, safetensors), config and tokeniser as Hugging Face reads them."""
    engine, folder = loop.engine, loop.options.output_dir / "model"
    if zero_stage == 3:
        state = engine._zero3_consolidated_16bit_state_dict()
    else:
        state = engine.module.state_dict()
    if rank() == 0:
        engine.module.save_pretrained(folder, state_dict=state)
        loop.data.tokenizer.save_pretrained(folder)
    dist.barrier()
    return folder


def write_run_summary(
    loop: TrainingLoop, progress: Progress, zero_stage: int, extra: dict[str, Any]
) -> dict[str, Any]:
    """`summary.json`: sizes, losses, speed, memory (the largest rank's) and the machine.

    Fields of our optimizer and activations are None where those are stock; "plan" is predicted against
    measured, where the run planned its activations. Speeds leave out this
    process's first step. `final_train_loss` is the last step's.
    """
    memory = device_memory(loop.accelerator)
    peaks = torch.tensor([memory.peak, peak_host_bytes()], device=loop.engine.device)
    dist.all_reduce(peaks, op=dist.ReduceOp.MAX)
    ours = loop.engine.hmt_metrics.read()
    speed = progress.tokens_per_second(loop.tokens_per_step)
    summary = {
        "model_parameters": loop.num_parameters,
        "world_size": dist.get_world_size(),
        "zero_stage": zero_stage,
        "steps": progress.step,
        "tokens": progress.tokens,
        "final_train_loss": progress.loss,
        "eval_loss": progress.eval_loss,
        "tokens_per_second": speed,
        "step_seconds_median": progress.median_step_seconds(),
        **{name: ours.get(name) for name in _ENGINE_FIELDS},
        "device": memory.device,
        "peak_device_bytes": int(peaks[0]),
        "peak_host_bytes": int(peaks[1]),
        "skipped_steps": int(loop.engine.skipped_steps),
        "documents_kept_apart": loop.packed,
        "seed": loop.options.seed,
        "command": shlex.join(sys.argv),
        "machine": {**machine_info(), "accelerator": _accelerator_name(loop.accelerator)},
        **extra,
    }
    comparison = plan_comparison(loop.engine)
    if comparison is not None:
        summary["plan"] = comparison.as_json()
    if rank() == 0:
        write_summary(loop.options.output_dir / "summary.json", summary)
    return summary


def plan_comparison(engine: Any) -> Any | None:
    """What the plan of the run's activations predicted beside what was measured; None without one."""
    planner = getattr(engine, "hmt_planner", None)
    return None if planner is None else planner.comparison


def _accelerator_name(accelerator: Any) -> str:
    if accelerator.device_name().startswith("cuda"):
        return torch.cuda.get_device_name()
    return accelerator.device_name()


def check_loop_options(options: LoopOptions) -> None:
    """ValueError for numbers out of range, naming the command-line option."""
    legal = (
        ("--max_steps", options.max_steps, 1),
        ("--eval_interval", options.eval_interval, 0),
        ("--eval_rows", options.eval_rows, 1),
        ("--save_interval", options.save_interval, 0),
        ("--seed", options.seed, 0),
    )
    for name, value, lowest in legal:
        if value < lowest:
            hint = " (0 turns it off)" if name.endswith("interval") else ""
            raise ValueError(f"{name} is {value}; legal: {lowest} or more{hint}")
    if options.peak_flops is not None and not options.peak_flops > 0:
        raise ValueError(
            f"--peak_tflops is {options.peak_flops / 1e12}; legal: above 0, the peak of one "
            "device in 10^12 FLOP/s at the training dtype"
        )
