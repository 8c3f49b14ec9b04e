"""The HMT paper's experiment: optimizers on one model, data, order, token count.

examples:
  python launch/compare.py sweep               the variants' learning rates
  python launch/compare.py final               the best of them, seeds 0 1 2
  python launch/compare.py finetune            of a checkpoint that it pretrains
  python launch/compare.py speed               step times, in one process
  python launch/compare.py report              Markdown, CSV, JSON, pictures
  python launch/compare.py merge --cells FILE  add another machine's cells
  python launch/compare.py table               all of it against AdamW, frontier

Every run is a cell: one line of launch/results/compare/cells.jsonl.xz. A
finished cell is not run again and an interrupted one goes on where it stopped,
so the same command may be given until nothing is left, also on another machine:
each cell names its own. Step times are kept apart, one file a machine. The
report is report.md beside the cells; its CSV, JSON and pictures are in
runs/compare/report.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:  # a checkout that is not installed
    sys.path.insert(0, str(ROOT))

from benchmarks.results import RESULTS, machine, machine_slug  # noqa: E402
from comparison.cells import DTYPES, SHAPES, Setting, Store, choose_device  # noqa: E402
from comparison.corpus import pretraining_text  # noqa: E402
from comparison.frontier import frontier  # noqa: E402
from comparison.headline import headline  # noqa: E402
from comparison.report import newest_speed, summaries, write_report  # noqa: E402
from comparison.speed import measure_speed  # noqa: E402
from comparison.stages import Plan, run_one, run_queue  # noqa: E402
from comparison.variants import INTERVAL, VARIANTS, select  # noqa: E402
from hmt_deepspeed.train.data import DEFAULT_CACHE  # noqa: E402

TRAINS = ("sweep", "final", "finetune")
DEFAULT_TOKENS = {"sweep": 1_000_000, "final": 5_000_000, "finetune": 1_000_000}
DEFAULT_SEEDS = {"sweep": (0,), "final": (0, 1, 2), "finetune": (0,)}


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    stages = (*TRAINS, "speed", "report", "merge", "table")
    parser.add_argument("stage", choices=stages, metavar="STAGE", help="see the examples")

    add = parser.add_argument_group("what is compared").add_argument
    names = f"comma-separated (default: {', '.join(VARIANTS)})"
    add("--variants", type=_words, metavar="NAMES", help=names)
    add("--lrs", type=_rates, metavar="RATES", help="learning rates (default: each variant's own)")
    text = "on the learning rate of embeddings, head and vectors (default: each variant's own)"
    add("--embedding_lr_scales", type=_factors, metavar="FACTORS", help=text)
    text = f"of a weight that a step takes, lr x weight_decay (default: {Setting.decay:g})"
    add("--decays", type=_rates, metavar="SHARES", help=text)
    add("--seeds", type=_seeds, help="of weights and order (default: 0; final: 0,1,2)")
    tokens = ", ".join(f"{stage}: {count:,}" for stage, count in DEFAULT_TOKENS.items())
    add("--tokens", type=int, metavar="N", help=f"of one run (default: {tokens})")
    text = "that the fine-tuned model has seen (default: %(default)s)"
    add("--base_tokens", type=int, default=2_000_000, metavar="N", help=text)
    text = "timed steps of each variant, with speed (default: %(default)s)"
    add("--rounds", type=int, default=INTERVAL, metavar="N", help=text)

    add = parser.add_argument_group("model and data").add_argument
    text = "Llama or mixture, named after its linears (default: %(default)s)"
    add("--model", default="3m", choices=list(SHAPES), help=text)
    text = "stdlib, a file, a folder, a .jsonl, a hub dataset id (default: %(default)s)"
    add("--data", default="stdlib", help=text)
    text = "text to tune on (default: the other half of --data)"
    add("--finetune_data", metavar="DATA", help=text)
    for name, default, text in (
        ("vocab_size", 512, "tokens of the bpe tokeniser"),
        ("seq_length", 256, "tokens in a row"),
        ("batch_rows", 8, "rows in a step"),
        ("eval_rows", 256, "fixed held-out rows of the final evaluation"),
    ):
        text += " (default: %(default)s)"
        add(f"--{name}", type=int, default=default, metavar="N", help=text)
    text = "of the arithmetic (default: bf16 on CUDA, fp32 on a CPU)"
    add("--dtype", choices=DTYPES, help=text)

    add = parser.add_argument_group("how it runs").add_argument
    add("--threads", type=int, default=1, metavar="N", help="of the CPU (default: %(default)s)")
    text = "stop between two steps when they are over (default: never)"
    add("--budget_minutes", type=float, metavar="MINUTES", help=text)
    text = "steps between two checkpoints of a cell (default: %(default)s)"
    add("--save_steps", type=int, default=100, metavar="N", help=text)

    add = parser.add_argument_group("files").add_argument
    text = f"of the results (default: {os.path.relpath(RESULTS / 'compare')})"
    add("--output", type=Path, metavar="FOLDER", help=text)
    runs = ROOT / "runs" / "compare"
    text = f"of unfinished cells and the report's pictures (default: {os.path.relpath(runs)})"
    add("--runs", type=Path, default=runs, metavar="FOLDER", help=text)
    add("--cells", type=Path, metavar="FILE", help="with merge: another machine's cells.jsonl.xz")
    text = "tokenisers and tokens are kept here (default: %(default)s)"
    add("--cache_dir", default=DEFAULT_CACHE, metavar="FOLDER", help=text)
    add("--only", help=argparse.SUPPRESS)  # the cell of a child process
    return parser


def parse_arguments() -> argparse.Namespace:
    parser = make_parser()
    args = parser.parse_args()
    if args.model.startswith("toy") and args.output is None:
        parser.error(
            f"--model {args.model} needs --output: toy numbers do not belong among the results"
        )
    if (args.stage == "merge") != (args.cells is not None):
        parser.error("merge needs --cells FILE, and no other stage takes it")
    return args


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


def _rates(text: str) -> tuple[float, ...]:
    return tuple(float(word) for word in _words(text))


def _factors(text: str) -> tuple[float, ...]:
    factors = _rates(text)
    if not all(factor > 0 for factor in factors):
        raise argparse.ArgumentTypeError(f"got {text}; legal: numbers above 0")
    return factors


def _seeds(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in _words(text))


def make_setting(args: argparse.Namespace) -> Setting:
    device, dtype = choose_device(args.dtype)
    return Setting(
        model=args.model,
        data=args.data,
        finetune_data=args.finetune_data if args.stage == "finetune" else None,
        vocab_size=args.vocab_size,
        seq_length=args.seq_length,
        batch_rows=args.batch_rows,
        eval_rows=args.eval_rows,
        dtype=dtype,
        device=device,
    )


def make_plan(args: argparse.Namespace) -> Plan:
    minutes = args.budget_minutes
    return Plan(
        stage=args.stage,
        setting=make_setting(args),
        tokens=args.tokens or DEFAULT_TOKENS[args.stage],
        seeds=args.seeds or DEFAULT_SEEDS[args.stage],
        variants=args.variants,
        learning_rates=args.lrs,
        embedding_lr_scales=args.embedding_lr_scales,
        decays=args.decays,
        base_tokens=args.base_tokens,
        cache=args.cache_dir,
        budget_seconds=None if minutes is None else 60 * minutes,
        save_steps=args.save_steps,
    )


def main(args: argparse.Namespace) -> int:
    torch.set_num_threads(args.threads)
    folder = args.output or RESULTS / "compare"
    store = Store(folder, args.runs)
    if args.stage == "report":
        print(write_report(store))
        return 0
    if args.stage == "merge":
        print(*store.merge(args.cells), sep="\n")
        return 0
    if args.stage == "table":
        records, speed = store.records(), newest_speed(folder)
        print(headline(store), frontier(summaries(records, speed)), sep="\n\n")
        return 0
    if args.stage == "speed":
        speed = folder / f"speed-{machine_slug(machine())}.json"
        names = select(args.variants, "speed")
        setting = make_setting(args)
        data = pretraining_text(setting, args.cache_dir)
        report = measure_speed(names, setting, data, args.rounds, speed)
        for name in names:
            print(name, report[name].get("skipped") or report[name]["tokens_per_second"])
        return 0
    plan = make_plan(args)
    if args.only is not None:
        return run_one(plan, store, args.only)
    return run_queue(plan, store, [os.path.relpath(__file__), *sys.argv[1:]])


if __name__ == "__main__":
    try:
        sys.exit(main(parse_arguments()))
    except ValueError as error:
        print(f"compare.py: {error}", file=sys.stderr)
        sys.exit(2)
