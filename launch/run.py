"""Train a causal language model on text: the main job.

    deepspeed --num_gpus 1 launch/run.py --deepspeed_config ds_configs/hmt.json

Without more options: a small Llama on the source of Python's standard library, no download.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from pathlib import Path
from typing import Any

# Before torch is loaded: where other processes want a core, threads that spin at every barrier as long as libgomp's
# default has it, 300,000 turns, make a step several times as long.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")

import deepspeed
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.config import DeepSpeedConfigError

import hmt_deepspeed
from hmt_deepspeed.config import HMTConfig, read_json_config
from hmt_deepspeed.report.metrics import format_bytes, format_table
from hmt_deepspeed.train import finish, models
from hmt_deepspeed.train.data import DEFAULT_CACHE, prepare_data
from hmt_deepspeed.train.loop import LoopOptions, TrainingLoop
from hmt_deepspeed.train.ranks import rank
from hmt_deepspeed.zero.operator_locks import telling_waits


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a causal language model with DeepSpeed and HMT.",
        epilog="example:\n  deepspeed --num_gpus 1 launch/run.py --deepspeed_config ds_configs/hmt.json",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    default = " (default: %(default)s)"
    add = parser.add_argument
    text = "DeepSpeed JSON, with or without an hmt block; required"
    add("--deepspeed_config", required=True, metavar="JSON", help=text)
    add("--local_rank", type=int, default=-1, help="set by the deepspeed launcher")

    add = parser.add_argument_group("model and data").add_argument
    add("--model", default="tiny", help=f"one of: {models.LEGAL_MODELS}{default}")
    text = f"stdlib, a file, a folder, a .jsonl, a hub dataset id{default}"
    add("--data", default="stdlib", help=text)
    text = f"field that holds the text, for JSONL and datasets{default}"
    add("--text_field", default="text", metavar="FIELD", help=text)
    text = "bpe, bytes, a folder or a hub id (default: bpe for presets, else the model's)"
    add("--tokenizer", help=text)
    text = f"tokens of the bpe tokeniser{default}"
    add("--vocab_size", type=int, default=4096, metavar="N", help=text)
    add("--seq_length", type=int, default=256, metavar="N", help=f"tokens in a row{default}")
    text = f"tokenisers and tokens are kept here{default}"
    add("--cache_dir", default=DEFAULT_CACHE, metavar="FOLDER", help=text)

    add = parser.add_argument_group("the run").add_argument
    text = f"optimizer steps of the whole run{default}"
    add("--max_steps", type=int, default=200, metavar="N", help=text)
    text = f"steps between evaluations, 0: at the end{default}"
    add("--eval_interval", type=int, default=100, metavar="N", help=text)
    text = f"held-out rows that an evaluation reads{default}"
    add("--eval_rows", type=int, default=64, metavar="N", help=text)
    text = f"steps between checkpoints, 0: none{default}"
    add("--save_interval", type=int, default=100, metavar="N", help=text)
    text = "of the run (default: runs/CONFIG-MODEL, numbered if it exists)"
    add("--output_dir", metavar="FOLDER", help=text)
    add("--resume", action="store_true", help="continue from the run's latest checkpoint")
    text = f"of weights, order of the data, dropout{default}"
    add("--seed", type=int, default=0, help=text)

    add = parser.add_argument_group("what is measured").add_argument
    add("--trace", action="store_true", help="profile steps 3 to 5 into trace.json")
    text = "one device's peak, to show MFU and HFU"
    add("--peak_tflops", type=float, metavar="TFLOPS", help=text)
    return parser.parse_args()


def loop_options(args: argparse.Namespace, output_dir: Path) -> LoopOptions:
    return LoopOptions(
        output_dir=output_dir,
        max_steps=args.max_steps,
        eval_interval=args.eval_interval,
        eval_rows=args.eval_rows,
        save_interval=args.save_interval,
        resume=args.resume,
        trace=args.trace,
        seed=args.seed,
        peak_flops=None if args.peak_tflops is None else args.peak_tflops * 1e12,
    )


def main() -> None:
    args = parse_arguments()
    finish.check_loop_options(loop_options(args, Path()))
    accelerator = get_accelerator()
    local_rank = (
        args.local_rank if args.local_rank >= 0 else int(os.environ.get("LOCAL_RANK", "-1"))
    )
    if local_rank >= 0:  # torchrun and srun tell it by the environment alone
        accelerator.set_device(local_rank)
    config = models.resolve_bf16(
        read_json_config(args.deepspeed_config), models.bf16_is_fast(accelerator.device_name())
    )
    models.model_config(args.model)
    with telling_waits():
        deepspeed.init_distributed()
    default = f"runs/{Path(args.deepspeed_config).stem}-{Path(args.model).name}"
    snapshots = HMTConfig.from_block(config.get("hmt") or {}).snapshot.path
    output_dir = finish.choose_output_dir(args.output_dir, default, args.resume, snapshots)

    data = prepare_data(
        args.data,
        args.tokenizer or ("bpe" if args.model in models.PRESETS else args.model),
        args.seq_length,
        args.vocab_size,
        args.text_field,
        args.cache_dir,
    )
    model = models.build_model(args.model, data.tokenizer, args.seq_length, args.seed, config)
    identity = {
        "model": args.model,
        "model_signature": models.model_signature(model),
        "data_digest": data.digest,
        "seq_length": args.seq_length,
        "seed": args.seed,
    }
    finish.check_identity(output_dir, identity, args.resume)
    engine, *_ = hmt_deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )
    loop = TrainingLoop(engine, data, loop_options(args, output_dir), accelerator)
    if rank() == 0:
        print(
            f"model {args.model}: {loop.num_parameters:,} parameters; data: "
            f"{data.num_documents:,} documents, {data.train.num_rows:,} rows of "
            f"{args.seq_length} tokens, {data.held_out.num_rows:,} held out; folder {output_dir}"
        )
    finish_run(loop, engine.zero_optimization_stage(), config)


def finish_run(loop: TrainingLoop, zero_stage: int, config: dict[str, Any]) -> None:
    progress = loop.run()
    finish.generate_sample(loop, zero_stage)
    folder = finish.save_model(loop, zero_stage)
    extra = {"model_folder": str(folder), "config": config}
    summary = finish.write_run_summary(loop, progress, zero_stage, extra)
    if rank() == 0:
        print(format_table(summary_rows(summary), ("result", "value")))
        comparison = finish.plan_comparison(loop.engine)
        if comparison is not None:
            print(comparison.describe())


def summary_rows(summary: dict[str, Any]) -> list[tuple[str, str]]:
    rows = []
    for name, value in summary.items():
        if isinstance(value, (int, float)) and name.endswith(("_bytes", "_bytes_per_step")):
            rows.append((name, format_bytes(value)))
        elif isinstance(value, float):
            rows.append((name, f"{value:.5g}"))
        elif isinstance(value, int) and not isinstance(value, bool):
            rows.append((name, f"{value:,}"))
        elif isinstance(value, (bool, str)) and name != "command":
            rows.append((name, str(value)))
    return rows


def raised_by_us(error: BaseException) -> bool:
    """Whether our own code refused something, and not a library under it."""
    frames = traceback.extract_tb(error.__traceback__)
    package = Path(hmt_deepspeed.__file__).resolve().parent
    return bool(frames) and package in Path(frames[-1].filename).resolve().parents


if __name__ == "__main__":
    try:
        main()
        dist.barrier()
    except (ValueError, DeepSpeedConfigError) as error:
        if not (raised_by_us(error) or isinstance(error, DeepSpeedConfigError)):
            raise
        sys.exit(f"error: {error}" if rank() == 0 else 1)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
